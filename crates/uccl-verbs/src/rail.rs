//! A port of an RDMA device as a rail.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, RwLock};

use uccl_device::{MemoryKind, RdmaGid};
use uccl_fabric::{
    mem::Span,
    rail::{Channel, Limits, Rail, RailError, RailInfo, Registration},
    region::Rights,
};
use uccl_wire::verbs::LinkLayer;

use super::{
    channel::{COMPLETIONS_OF_UC, Shape, UcSupport, VerbsChannel},
    context::{Context, DeviceList},
    devices::{Device, OpenDevice, Port, is_active, pkey_index, port},
    ffi::{Verbs, abi::DeviceAttr},
    gid,
    mr::Reach,
    pd::Pd,
    qp::Path,
    registration::VerbsRegistration,
    settings::{DeviceName, RelaxedOrdering, VerbsSettings},
};

/// A port of an RDMA device: InfiniBand or RoCE.
pub struct VerbsRail {
    info: RailInfo,
    /// The domain of the device as it was opened last.
    pd: RwLock<Arc<Pd>>,
    verbs: &'static Verbs,
    /// The time of the last search for a lost device.
    looked_for: Mutex<Option<Instant>>,
    /// The port's parameters at the time when it was opened.
    shape: Shape,
    device: Device,
    gid_index: Option<u8>,
    pkey_index: u16,
    max_region: u64,
    relaxed_ordering: bool,
    trust: Arc<UcSupport>,
}

/// Opens the devices that the settings name, or all that have an active port.
///
/// # Errors
/// [`RailError::Unavailable`] with the missing part if no device can be used, or with the setting
/// that is outside its range. If only some of the named devices cannot be used, that is logged.
pub fn open(settings: &VerbsSettings) -> Result<Vec<VerbsRail>, RailError> {
    settings.validate().map_err(|error| RailError::Unavailable(error.to_string()))?;
    let verbs = Verbs::load(settings.library.as_deref())?;
    if settings.relaxed_ordering == RelaxedOrdering::Always && verbs.reg_mr_iova2.is_none() {
        return Err(RailError::Unavailable(
            "libibverbs is older than 1.8, and cannot ask for relaxed ordering on the PCI bus"
                .into(),
        ));
    }
    let list = DeviceList::get(verbs)?;
    let mut search = Search { settings, rails: Vec::new(), passed_over: Vec::new() };
    let mut names = Vec::new();
    for listed in list.iter() {
        names.push(listed.name());
        if search.may_want(&listed.name()) {
            search.look_at(OpenDevice::open(&listed));
        }
    }
    search.finish(&names)
}

struct Search<'a> {
    settings: &'a VerbsSettings,
    rails: Vec<VerbsRail>,
    /// Why other ports and devices are not used.
    passed_over: Vec<String>,
}

impl Search<'_> {
    fn may_want(&self, device: &str) -> bool {
        let named = &self.settings.devices;
        named.is_empty() || named.iter().any(|name| name.device == device)
    }

    fn look_at(&mut self, opened: OpenDevice) {
        let OpenDevice { device, usable } = opened;
        let Some((context, attr)) = usable else {
            let why = device.unusable.unwrap_or_default();
            return self.passed_over.push(format!("{}: {why}", device.name));
        };
        let pd = match Pd::new(context) {
            Ok(pd) => pd,
            Err(why) => return self.passed_over.push(format!("{}: {why}", device.name)),
        };
        for port in &device.ports {
            if self.wants(&device.name, port) {
                match VerbsRail::new(self.settings, &pd, &attr, &device, port) {
                    Ok(rail) => self.rails.push(rail),
                    Err(why) => {
                        self.passed_over.push(format!("{}:{}: {why}", device.name, port.number))
                    }
                }
            }
        }
    }

    fn wants(&mut self, device: &str, port: &Port) -> bool {
        if !self.settings.devices.is_empty() {
            return self.settings.devices.iter().any(|name| name.matches(device, port.number));
        }
        if !port.is_active {
            self.passed_over.push(format!("{device}:{}: its port is {}", port.number, port.state));
        }
        port.is_active
    }

    fn finish(self, names: &[String]) -> Result<Vec<VerbsRail>, RailError> {
        let is_missing = |name: &&DeviceName| {
            let is_it = |rail: &VerbsRail| name.matches(&rail.device.name, rail.shape.path.port);
            !self.rails.iter().any(is_it)
        };
        for name in self.settings.devices.iter().filter(is_missing) {
            let missing = self.missing(name, names);
            if self.rails.is_empty() {
                return Err(missing);
            }
            tracing::warn!("the others that are named are used without it: {missing}");
        }
        if self.rails.is_empty() {
            return Err(RailError::Unavailable(match self.passed_over.as_slice() {
                [] => none_listed(std::path::Path::new("/sys/class/infiniband")),
                why => format!("no RDMA device can be used: {}", why.join("; ")),
            }));
        }
        for why in &self.passed_over {
            tracing::info!("RDMA port not used: {why}");
        }
        Ok(self.rails)
    }

    fn missing(&self, name: &DeviceName, names: &[String]) -> RailError {
        let device = format!("{}:", name.device);
        let is_of_it = |why: &&String| why.starts_with(&device);
        let why: Vec<_> = self.passed_over.iter().filter(is_of_it).map(String::as_str).collect();
        let why = why.join("; ");
        RailError::Unavailable(if why.is_empty() {
            let there = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            format!("there is no RDMA device {name}; devices here: {there}")
        } else {
            format!("RDMA device {name} cannot be used: {why}")
        })
    }
}

/// Why libibverbs lists no device, though the kernel may have some in this folder.
fn none_listed(folder: &std::path::Path) -> String {
    let devices = folder.read_dir().into_iter().flatten().flatten();
    let names: Vec<_> =
        devices.map(|device| device.file_name().to_string_lossy().into_owned()).collect();
    if names.is_empty() {
        return "this machine has no RDMA device".to_owned();
    }
    format!(
        "libibverbs has no driver for the RDMA devices of this machine ({}): install ibverbs-providers (Debian) or \
         rdma-core (others); in a container, pass /dev/infiniband along",
        names.join(", ")
    )
}

impl VerbsRail {
    fn new(
        settings: &VerbsSettings,
        pd: &Arc<Pd>,
        attr: &DeviceAttr,
        device: &Device,
        port: &Port,
    ) -> Result<Self, String> {
        let gids = usable_gids(port, settings.gid_index)?;
        let [gid, ..] = gids[..] else { return Err("the port has no GID".to_owned()) };
        let (gid_index, gid_address) = gid::place_of(gid);
        let path = Path {
            port: port.number,
            pkey_index: pkey_index(settings.pkey_index, &port.pkeys),
            gid_index,
            gid: gid_address,
            link_layer: port.link_layer,
            lid: port.lid,
            needs_global: port.needs_global,
            mtu: port.mtu,
            service_level: settings.service_level,
            traffic_class: settings.traffic_class,
            reads_asked: at_most(settings.max_rd_atomic, attr.max_qp_init_rd_atom),
            reads_answered: at_most(settings.max_dest_rd_atomic, attr.max_qp_rd_atom),
            timeout: settings.timeout,
            retries: settings.retries,
        };
        let info = RailInfo {
            name: format!("{}:{}", device.name, port.number),
            link: "verbs".to_owned(),
            network: port.network(gid),
            pci: device.pci,
            speed_mbps: port.speed_mbps,
            is_software: device.is_software,
        };
        let queue_pairs = settings.queue_pairs.unwrap_or(if device.is_software { 1 } else { 4 });
        let writes_over_uc = !settings.rc_mode;
        let of_uc = if writes_over_uc { COMPLETIONS_OF_UC } else { 0 };
        let room = ChannelDemand { queue_pairs: queue_pairs.into(), of_uc };
        let depth = depth_of_each(settings.depth, &room, attr);
        let chunk_bytes = u64::from(settings.chunk_kib) << 10;
        let limits = Limits {
            max_bytes: port.max_message.clamp(1, MAX_REQUEST),
            chunk_bytes: chunk_bytes.min(port.max_message.max(1)),
            depth: (depth * u32::from(queue_pairs)) as usize,
            window_bytes: window(chunk_bytes, port.speed_mbps),
        };
        let shape = Shape { path, limits, queue_pairs, depth, writes_over_uc };
        let (verbs, max_region) = (pd.context().verbs(), attr.max_mr_size);
        let (pd, looked_for) = (RwLock::new(Arc::clone(pd)), Mutex::default());
        let relaxed_ordering = settings.relaxed_ordering != RelaxedOrdering::Never;
        let trust = Arc::new(UcSupport::new(&info.name));
        let (device, gid_index) = (device.clone(), settings.gid_index);
        let pkey_index = settings.pkey_index;
        Ok(Self {
            info,
            pd,
            verbs,
            looked_for,
            shape,
            device,
            gid_index,
            pkey_index,
            max_region,
            relaxed_ordering,
            trust,
        })
    }

    /// The port as it is now: the subnet manager may have given it another LID, and its interfaces
    /// other addresses.
    fn port_now(&self) -> Option<Port> {
        let attr = self.context().query_port(self.shape.path.port).ok()?;
        Some(port(&self.device, self.shape.path.port, &attr))
    }

    /// Makes a channel with the best GID after `failed` others. If `answers`, the peer's address is
    /// known when it is connected, and may call for another GID.
    fn channel(&self, failed: u32, answers: bool) -> Result<Box<dyn Channel>, RailError> {
        self.context().take_events();
        self.context().check_gone()?;
        let (mut shape, mut others) = (self.shape, Vec::new());
        if let Some(now) = self.port_now() {
            let Shape { path, .. } = &mut shape;
            (path.lid, path.mtu, path.needs_global) = (now.lid, now.mtu, now.needs_global);
            path.pkey_index = pkey_index(self.pkey_index, &now.pkeys);
            let gids = usable_gids(&now, self.gid_index).unwrap_or_default();
            if let Some(gid) = gids.get(failed as usize % gids.len().max(1)) {
                (path.gid_index, path.gid) = gid::place_of(gid);
            }
            if answers && now.link_layer == LinkLayer::Ethernet {
                let best = gids.first().copied().map(link_of);
                let alike = gids.into_iter().filter(|gid| Some(link_of(gid)) == best);
                others = alike.cloned().collect();
            }
        }
        Ok(Box::new(VerbsChannel::new(&self.pd(), &shape, others, &self.trust)?))
    }

    fn pd(&self) -> Arc<Pd> {
        Arc::clone(&self.pd.read())
    }

    fn context(&self) -> Arc<Context> {
        Arc::clone(self.pd().context())
    }

    /// Opens the device of this name once more, if there is one with the port.
    fn open_again(&self) -> Result<Arc<Pd>, RailError> {
        let list = DeviceList::get(self.verbs)?;
        let listed = list.iter().find(|listed| listed.name() == self.device.name);
        let gone = || RailError::Gone(format!("there is no {}", self.device.name));
        let context = listed.ok_or_else(gone)?.open()?;
        context.query_port(self.shape.path.port)?;
        Pd::new(context)
    }
}

/// The GIDs of a port that may reach a peer, the best first.
fn usable_gids(port: &Port, asked: Option<u8>) -> Result<Vec<&RdmaGid>, String> {
    gid::candidates(&port.gids, port.link_layer, asked, link_of)
}

fn link_of(gid: &RdmaGid) -> gid::Link {
    gid::Link::of(gid, std::path::Path::new("/sys/class/net"))
}

/// The time between two searches for a lost device.
const LOOK_FOR_LOST: Duration = Duration::from_secs(1);

/// Most bytes of a request. Its length has 32 bits, and devices take up to 1 or 2 GiB.
const MAX_REQUEST: u64 = 1 << 30;

/// A number of reads, limited to the device's maximum. If that is 0, the result is 1, and the
/// device refuses it.
fn at_most(wanted: u8, device: i32) -> u8 {
    wanted.min(device.clamp(1, 255) as u8)
}

/// The queue pairs of a channel and the completions that they need.
struct ChannelDemand {
    queue_pairs: u32,
    /// Completions of the unreliable queue pair beside each of them; 0 if there is none.
    of_uc: u32,
}

/// How many requests each queue pair has room for. All of them may end at once, so the completion
/// queue needs room for all.
fn depth_of_each(wanted: u32, room: &ChannelDemand, attr: &DeviceAttr) -> u32 {
    let device = |limit: i32| u32::try_from(limit).unwrap_or(0);
    let completions = (device(attr.max_cqe) / room.queue_pairs).saturating_sub(room.of_uc);
    let places = device(attr.max_qp_wr).min(completions);
    (wanted / room.queue_pairs).min(places).max(1)
}

/// Most bytes in flight: as many as the link carries in 100 us, a long round trip, but at least 8
/// chunks and at least 4 MiB.
fn window(chunk_bytes: u64, speed_mbps: Option<u64>) -> u64 {
    (chunk_bytes * 8).max(4 << 20).max(speed_mbps.unwrap_or(0) * 100 / 8)
}

impl Rail for VerbsRail {
    fn info(&self) -> &RailInfo {
        &self.info
    }

    fn is_up(&self) -> bool {
        self.context().take_events();
        let up = |attr| is_active(&attr);
        !self.context().is_gone() && self.context().query_port(self.shape.path.port).is_ok_and(up)
    }

    fn register(
        &self,
        span: Span,
        kind: MemoryKind,
        rights: Rights,
    ) -> Result<Box<dyn Registration>, RailError> {
        if span.len as u64 > self.max_region {
            return Err(RailError::Provider {
                what: format!("registering {} bytes with {}", span.len, self.info.name),
                why: format!("the device takes at most {} bytes at a time", self.max_region),
            });
        }
        let reach = Reach { rights, relaxed: self.relaxed_ordering };
        Ok(Box::new(VerbsRegistration::new(&self.pd(), span, kind, reach)?))
    }

    fn open(&self) -> Result<Box<dyn Channel>, RailError> {
        self.channel(0, true)
    }

    fn reopen(&self) -> bool {
        if !self.context().is_gone() {
            return false;
        }
        let mut looked_for = self.looked_for.lock();
        if looked_for.is_some_and(|at| at.elapsed() < LOOK_FOR_LOST) {
            return false;
        }
        *looked_for = Some(Instant::now());
        match self.open_again() {
            Ok(pd) => {
                *self.pd.write() = pd;
                true
            }
            Err(why) => {
                tracing::debug!("{} is still lost: {why}", self.info.name);
                false
            }
        }
    }

    fn open_first(&self, failed: u32) -> Result<Box<dyn Channel>, RailError> {
        self.channel(failed, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_the_library_does_not_know_lacks_its_driver() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(none_listed(folder.path()), "this machine has no RDMA device");
        assert_eq!(none_listed(&folder.path().join("none")), "this machine has no RDMA device");
        std::fs::create_dir(folder.path().join("mlx5_0")).expect("a device");
        let said = none_listed(folder.path());
        assert!(said.contains("(mlx5_0)") && said.contains("ibverbs-providers"), "{said}");
    }

    #[test]
    fn queues_fit_the_limits_of_the_device() {
        // SAFETY: all its fields are numbers, for which zero is a value.
        let mut attr: DeviceAttr = unsafe { std::mem::zeroed() };
        (attr.max_cqe, attr.max_qp_wr) = (32767, 1 << 20);
        let depth = |wanted, queue_pairs, of_uc, attr: &DeviceAttr| {
            depth_of_each(wanted, &ChannelDemand { queue_pairs, of_uc }, attr)
        };
        assert_eq!(depth(1024, 4, 0, &attr), 256);
        assert_eq!(depth(16384, 1, 0, &attr), 16384);
        assert_eq!(depth(16384, 4, 1024, &attr), 4096);
        assert_eq!(depth(16384, 2, 10_000, &attr), 6383);
        attr.max_qp_wr = 100;
        assert_eq!(depth(1024, 4, 0, &attr), 100);
        attr.max_cqe = 40;
        assert_eq!(depth(1024, 4, 0, &attr), 10);
        attr.max_cqe = -1;
        assert_eq!(depth(1024, 4, 0, &attr), 1);
        assert_eq!((at_most(16, 4), at_most(16, 1000), at_most(16, 0)), (4, 16, 1));
    }
}
