//! Facts about particular providers, all in one place.
//!
//! A provider's demands are read from its `fi_info` and honoured. Here are only the facts that its
//! `fi_info` leaves out.

use std::ffi::c_int;

use super::raw;

/// All memory registration modes that we support.
const ALL_MODES: i32 = raw::FI_MR_LOCAL
    | raw::FI_MR_RAW
    | raw::FI_MR_VIRT_ADDR
    | raw::FI_MR_ALLOCATED
    | raw::FI_MR_PROV_KEY
    | raw::FI_MR_ENDPOINT
    | raw::FI_MR_HMEM;

/// Providers from best to worst, used when the settings name none. Providers in neither list, such
/// as `psm3` and `opx`, which belong to particular NICs, come between the two.
const PREFERENCE: &[&str] = &["cxi", "efa"];
const SOCKETS: &[&str] = &["tcp", "net", "tcp;ofi_rxm", "sockets"];

/// The rank of a provider; less is better. `None`: it is used only if the settings name it.
///
/// `shm` and similar providers stay within a host, for which this library has a link of its own;
/// and as their peers access a process's memory themselves, ending a channel does not keep them
/// out. `udp;ofi_rxd` is a demonstration. `verbs;ofi_rxm` makes demands (see [`demand`]), and there
/// is a separate link for verbs.
pub(super) fn rank(provider: &str) -> Option<usize> {
    let place = |list: &[&str]| list.iter().position(|name| *name == provider);
    let layers: Vec<&str> = provider.split(';').collect();
    if ["shm", "sm2", "lnx", "udp", "verbs"].contains(&layers[0]) || layers[0].starts_with("off_") {
        return None;
    }
    let last = PREFERENCE.len() + 1;
    place(PREFERENCE).or_else(|| place(SOCKETS).map(|at| last + at)).or(Some(PREFERENCE.len()))
}

/// The registration modes that we tell a provider we support.
///
/// With `FI_MR_VIRT_ADDR` allowed, `shm` lets the initiator copy without a check of the key;
/// without it, the owner of the memory copies and checks the key. With `FI_MR_PROV_KEY` allowed,
/// `cxi` keeps regions reachable after they were closed (`FI_CXI_PROV_KEY_CACHE`); without it, keys
/// are ours, random, and end with the region.
pub(super) fn modes(provider: &str) -> i32 {
    match provider {
        "shm" | "sm2" => ALL_MODES & !raw::FI_MR_VIRT_ADDR,
        "cxi" => ALL_MODES & !raw::FI_MR_PROV_KEY & !raw::FI_MR_VIRT_ADDR,
        _ => ALL_MODES,
    }
}

/// The change that is needed before the provider can be trusted, and the reason. `setting` returns
/// the value that the library has read in the process's environment. `None`: the provider can be
/// trusted as it is.
///
/// `net` before 1.18 crashes the process as `tcp` does (see [`ends_reads_twice`]). Its channels
/// share one progress engine: another channel would drive one that was left open, and bytes would
/// land in memory that was given back. So nothing makes it safe.
///
/// `verbs` caches registrations, up to `FI_MR_CACHE_MAX_COUNT` of them, in a way that neither hints
/// nor calls prevent: it leaves memory registered with the device after a registration was closed,
/// and gives two registrations the same key. (`efa` does not where it asks for `FI_MR_LOCAL`.)
///
/// `ofi_rxm`, in the versions up to 2.4 at least, takes in arrived messages once more after it has
/// closed a connection. Over `verbs` it then posts the buffer of such a message to the connection
/// that it has freed (libfabric's issue 11828), and messages arrive without anybody sending any:
/// each end says how many it can take. With buffers that connections share, it posts to those,
/// which live longer, and the ends say nothing of that kind. Over `tcp` connections share buffers
/// unless the environment says otherwise.
pub(super) fn demand(
    provider: &str,
    version: (u32, u32),
    setting: impl Fn(&str) -> Option<String>,
) -> Option<&'static str> {
    let layers: Vec<&str> = provider.split(';').collect();
    if layers[0] == "net" && version < SOUND_READS {
        return Some(
            "crashes processes whose connections end while a read is answered. Use libfabric 1.18 or later \
             (UCCL_LIBFABRIC_SO), or ask for tcp;ofi_rxm",
        );
    }
    let set = |name| setting(name).unwrap_or_default();
    let has_cache = layers[0] == "verbs";
    if has_cache && set("FI_MR_CACHE_MAX_COUNT") != "0" && set("FI_MR_CACHE_MONITOR") != "disabled"
    {
        return Some(
            "keeps memory reachable for peers after it was deregistered. Set FI_MR_CACHE_MAX_COUNT=0 before the \
             process starts, or use the link for RDMA verbs itself (UCCL_P2P_TRANSPORT=ib)",
        );
    }
    // As libfabric reads a bool; it ignores other words.
    let shares = match &*set("FI_OFI_RXM_USE_SRX").to_ascii_lowercase() {
        "1" | "yes" | "true" | "on" => true,
        "0" | "no" | "false" | "off" => false,
        _ => layers[0] == "tcp",
    };
    if layers.contains(&"ofi_rxm") && !shares {
        return Some(
            "touches freed memory when connections end. Set FI_OFI_RXM_USE_SRX=1 and, to keep it small, \
             FI_OFI_RXM_MSG_RX_SIZE=128 before the process starts, or use another link (UCCL_P2P_TRANSPORT=ib or tcp)",
        );
    }
    None
}

/// The first version in which closing an endpoint ends each read once.
const SOUND_READS: (u32, u32) = (1, 18);

/// Whether closing an endpoint ends a read twice if its answer is arriving. The second time the
/// provider names no request; `ofi_rxm` above it follows the null pointer, and the process crashes
/// (libfabric's pull request 8660).
pub(super) fn ends_reads_twice(provider: &str, version: (u32, u32)) -> bool {
    provider.split(';').next() == Some("tcp") && version < SOUND_READS
}

/// Whether the peer itself carries out our requests on our memory, so that the requests must have
/// ended before a channel does.
pub(super) fn peer_does_the_work(provider: &str) -> bool {
    matches!(provider, "shm" | "sm2" | "lnx")
}

/// Options of an endpoint that we switch off, each with a description. Between processes of one
/// host, `efa` moves data through shared memory: the peer then accesses our memory by itself,
/// without a check of keys. It also calls CUDA while it does that, and CUDA may wait for a thread
/// that waits for us.
pub(super) fn not_permitted(provider: &str) -> &'static [(c_int, &'static str)] {
    match provider {
        "efa" => &[
            (raw::FI_OPT_CUDA_API_PERMITTED, "its use of CUDA"),
            (raw::FI_OPT_SHARED_MEMORY_PERMITTED, "its shared memory"),
        ],
        _ => &[],
    }
}

/// The remedy if a provider is missing.
pub(super) fn remedy(provider: &str) -> &'static str {
    match provider {
        "cxi" => {
            "It needs a Slingshot NIC (cxi0, ... in /sys/class/cxi), its driver, and the libfabric that comes \
             with them: see whether UCCL_LIBFABRIC_SO must name it"
        }
        "efa" => {
            "It needs an Elastic Fabric Adapter (rdmap*, efa_* in /sys/class/infiniband), its driver, and the \
             libfabric of AWS's installer, in /opt/amazon/efa: see whether UCCL_LIBFABRIC_SO must name it"
        }
        "tcp" => {
            "Before libfabric 1.18 it has no reliable datagrams by itself: ask for tcp;ofi_rxm there"
        }
        "verbs;ofi_rxm" => "It needs an RDMA NIC with an IP address (`ibv_devices`, `rdma link`)",
        _ => "`fi_info -l` says what the library has, FI_PROVIDER_PATH where it looks for more",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nics_come_before_sockets_and_the_own_host_not_at_all() {
        let mut names =
            ["sockets", "tcp;ofi_rxm", "psm3", "shm", "efa", "tcp", "cxi", "verbs;ofi_rxm"]
                .to_vec();
        names.retain(|name| rank(name).is_some());
        names.sort_by_key(|name| rank(name));
        assert_eq!(names, ["cxi", "efa", "psm3", "tcp", "tcp;ofi_rxm", "sockets"]);
    }

    #[test]
    fn verbs_is_trusted_once_it_caches_nothing_and_shares_its_receive_context() {
        let asks_for = |set: &[(&str, &str)]| {
            let setting = |name: &str| {
                set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            };
            demand("verbs;ofi_rxm", (1, 22), setting).unwrap_or_default()
        };
        let cache = ("FI_MR_CACHE_MAX_COUNT", "0");
        assert!(asks_for(&[]).contains("FI_MR_CACHE_MAX_COUNT=0"));
        assert!(asks_for(&[("FI_MR_CACHE_MAX_COUNT", "1")]).contains("FI_MR_CACHE_MAX_COUNT=0"));
        let otherwise = ("FI_MR_CACHE_MONITOR", "Disabled");
        assert!(asks_for(&[otherwise]).contains("FI_MR_CACHE_MAX_COUNT=0"), "it means nothing");
        assert!(asks_for(&[cache]).contains("FI_OFI_RXM_USE_SRX=1"));
        assert!(asks_for(&[cache, ("FI_OFI_RXM_USE_SRX", "0")]).contains("FI_OFI_RXM_USE_SRX=1"));
        assert_eq!(asks_for(&[cache, ("FI_OFI_RXM_USE_SRX", "1")]), "");
        let otherwise = [("FI_MR_CACHE_MONITOR", "disabled"), ("FI_OFI_RXM_USE_SRX", "Yes")];
        assert_eq!(asks_for(&otherwise), "");
    }

    #[test]
    fn tcp_is_trusted_as_long_as_it_shares_its_receive_context() {
        let with = |srx: Option<&str>| {
            demand("tcp;ofi_rxm", (1, 17), |name| {
                srx.filter(|_| name == "FI_OFI_RXM_USE_SRX").map(str::to_owned)
            })
        };
        assert_eq!((with(None), with(Some("1")), with(Some("what"))), (None, None, None));
        for off in ["0", "No", "false", "OFF"] {
            assert!(
                with(Some(off)).is_some_and(|why| why.contains("FI_OFI_RXM_USE_SRX=1")),
                "{off}"
            );
        }
        assert_eq!(demand("tcp", (1, 21), |_| Some("0".into())), None, "ofi_rxm is not there");
    }

    #[test]
    fn a_provider_that_ends_reads_twice_is_refused_or_drained() {
        let net = |version| demand("net", version, |_| None);
        assert!(net((1, 17)).is_some_and(|why| why.contains("1.18")));
        assert_eq!(net((1, 18)), None);
        assert!(ends_reads_twice("tcp;ofi_rxm", (1, 17)) && ends_reads_twice("tcp", (1, 13)));
        assert!(!ends_reads_twice("tcp;ofi_rxm", (1, 18)) && !ends_reads_twice("tcp", (2, 1)));
        assert!(!ends_reads_twice("verbs;ofi_rxm", (1, 17)));
    }

    #[test]
    fn efa_is_permitted_neither_shared_memory_nor_cuda() {
        let options = |provider| not_permitted(provider).iter().map(|(option, _)| *option);
        let of_efa: Vec<_> = options("efa").collect();
        assert!(of_efa.contains(&raw::FI_OPT_SHARED_MEMORY_PERMITTED));
        assert!(of_efa.contains(&raw::FI_OPT_CUDA_API_PERMITTED));
        assert_eq!(options("cxi").count(), 0, "it has no such options");
    }
}
