//! Variables of UCCL that have no effect here. Each one that is set is reported once, so that
//! nobody waits for its effect.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A variable, its values that cause no notice, and the second half of its notice.
struct IgnoredVariable {
    name: &'static str,
    harmless: &'static [&'static str],
    instead: &'static str,
}

const fn ignored(name: &'static str, instead: &'static str) -> IgnoredVariable {
    IgnoredVariable { name, harmless: &[], instead }
}

const IGNORED: &[IgnoredVariable] = &[
    ignored("UCCL_BYPASS_PACING", "nothing is paced"),
    ignored("UCCL_CONF_FILE", "settings are read from the environment alone"),
    ignored("UCCL_DEBUG", "UCCL_LOG sets what the command and NIXL's backend log"),
    ignored("UCCL_DEBUG_SUBSYS", "UCCL_LOG sets what the command and NIXL's backend log"),
    ignored("UCCL_DEBUG_VLOG_LEVEL", "UCCL_LOG sets what the command and NIXL's backend log"),
    ignored("UCCL_EFA_SO", "EFA is used through libfabric"),
    ignored("UCCL_NCCL_SO", "NCCL is not used"),
    ignored("UCCL_NUM_ENGINES", "UCCL_P2P_NUM_CPUS limits the worker threads"),
    ignored("UCCL_NUM_GPU_RT_STREAMS", "streams of a GPU are chosen by what is copied"),
    ignored("UCCL_P2P_COMPRESS_BUFFER_BYTES", "data is not compressed"),
    IgnoredVariable {
        name: "UCCL_P2P_COMPRESS_STRATEGY",
        harmless: &["none"],
        instead: "data is not compressed",
    },
    ignored("UCCL_P2P_LOG_LEVEL", "UCCL_LOG sets what the command and NIXL's backend log"),
    ignored("UCCL_P2P_MIN_COMPRESS_BYTES", "data is not compressed"),
    ignored("UCCL_P2P_RDMA_CC", "RDMA devices control congestion themselves"),
    ignored("UCCL_P2P_RDMA_LINK_GBPS", "the speed of a link is read from its device"),
    ignored("UCCL_PORT_ENTROPY", "UCCL_P2P_RDMA_QPS sets the queue pairs of a device"),
    IgnoredVariable {
        name: "UCCL_RDMA_ADAPTIVE_SLEEP",
        harmless: &["1"],
        instead: "threads always sleep when idle, after UCCL_P2P_SPIN_US",
    },
    ignored("UCCL_TCPX_OOB_PORT", "UCCL_P2P_BASE_PORT sets the well-known ports"),
    ignored("UCCL_TCP_OOB_PORT", "UCCL_P2P_BASE_PORT sets the well-known ports"),
];

/// A sentence for each variable in the environment that has no effect here. Each is returned once
/// in a process, to the first caller.
#[must_use]
pub fn take_notices() -> Vec<String> {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if TOLD.swap(true, Relaxed) {
        return Vec::new();
    }
    notices(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
}

fn notices(get: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let asks = |ignored: &&IgnoredVariable| {
        let value = get(ignored.name).unwrap_or_default();
        !value.is_empty() && !ignored.harmless.contains(&value.as_str())
    };
    let say =
        |ignored: &IgnoredVariable| format!("{} has no effect: {}", ignored.name, ignored.instead);
    IGNORED.iter().filter(asks).map(say).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn a_variable_without_effect_is_named_with_its_substitute() {
        let set = [
            ("UCCL_PORT_ENTROPY", "32"),
            ("UCCL_P2P_COMPRESS_STRATEGY", "none"),
            ("UCCL_NUM_ENGINES", ""),
            ("UCCL_RDMA_ADAPTIVE_SLEEP", "0"),
        ];
        let get = |asked: &str| {
            set.iter().find(|(name, _)| *name == asked).map(|(_, value)| (*value).to_owned())
        };
        let said = notices(get);
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].starts_with("UCCL_PORT_ENTROPY has no effect: UCCL_P2P_RDMA_QPS"));
        assert!(said[1].contains("UCCL_P2P_SPIN_US"), "{said:?}");
    }

    #[test]
    fn an_ignored_variable_is_no_setting() {
        for ignored in IGNORED {
            let all = Config::settings().iter();
            let names = all.flat_map(|setting| setting.twins().iter().chain([&setting.name]));
            assert!(names.into_iter().all(|name| *name != ignored.name), "{}", ignored.name);
        }
    }
}
