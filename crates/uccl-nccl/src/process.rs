//! The contexts of this process, and the flows that they share.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering::Relaxed},
};

use parking_lot::Mutex;
use uccl_flow::Flows;
use uccl_nccl_abi::{flags, plan::Generation};

use crate::{
    devices::{self, Bandwidth, NetDevice},
    fault::Fault,
    log,
    pending::PendingConnects,
    settings::Settings,
};

/// The parts that all communicators of this process share.
pub(crate) struct Core {
    pub(crate) flows: Flows,
    pub(crate) devices: Vec<NetDevice>,
    /// Connects that NCCL has begun.
    pub(crate) pending: PendingConnects,
    /// The greatest rate of flows in Mbit/s, as of the last `init`; 0 before any. It stays the same
    /// while a communicator is made.
    seen_mbps: AtomicU32,
}

/// A context of `init` from v11 on.
pub(crate) struct Context {
    pub(crate) core: Arc<Core>,
}

/// The core, while some context lives.
struct Process {
    core: Option<Arc<Core>>,
    contexts: usize,
    /// An `init` of v8 to v10, which have no end.
    is_endless: bool,
}

static PROCESS: Mutex<Process> = Mutex::new(Process { core: None, contexts: 0, is_endless: false });

/// Begins a context.
pub(crate) fn begin() -> Result<Context, Fault> {
    let mut process = PROCESS.lock();
    let core = process.core()?;
    core.look_at_rates();
    process.contexts += 1;
    Ok(Context { core })
}

/// Begins the process's core without a context, as before v11.
pub(crate) fn begin_endless() -> Result<(), Fault> {
    let mut process = PROCESS.lock();
    process.core()?;
    process.is_endless = true;
    Ok(())
}

/// Ends a context. The last one has every thread joined.
pub(crate) fn end(context: Context) {
    let mut process = PROCESS.lock();
    drop(context);
    process.contexts = process.contexts.saturating_sub(1);
    if process.contexts > 0 || process.is_endless {
        return;
    }
    if let Some(core) = process.core.take() {
        // Connects that an abort has left.
        core.pending.clear();
        let totals = core.flows.totals();
        let line = format!("sent {}; received {}", totals.sent, totals.received);
        log::info(flags::INIT | flags::NET, &line);
    }
}

/// The core of an `init` before.
pub(crate) fn core(call: &'static str) -> Result<Arc<Core>, Fault> {
    PROCESS.lock().core.clone().ok_or(Fault::Misuse(call, "init was not called"))
}

/// Whether NCCL has begun this network.
pub(crate) fn has_begun() -> bool {
    PROCESS.lock().core.is_some()
}

impl Process {
    fn core(&mut self) -> Result<Arc<Core>, Fault> {
        if let Some(core) = &self.core {
            return Ok(Arc::clone(core));
        }
        let core = Arc::new(Core::new(&Settings::from_env()?)?);
        self.core = Some(Arc::clone(&core));
        Ok(core)
    }
}

impl Core {
    fn new(settings: &Settings) -> Result<Self, Fault> {
        let devices = devices::find(settings)?;
        let default = uccl_flow::Settings::default();
        let flows = Flows::new(uccl_flow::Settings {
            devices: devices.iter().map(|device| device.flow.clone()).collect(),
            ports: settings.ports.clone(),
            threads: settings.threads.unwrap_or(default.threads),
            streams: settings.streams.unwrap_or(default.streams),
            small_max: settings.small_kib.map_or(default.small_max, |kib| kib << 10),
            chunk_len: settings.chunk_kib.map_or(default.chunk_len, |kib| kib << 10),
            local: settings.is_local,
            limit: settings.timeout,
            psk: settings.psk.clone(),
            ..default
        })?;
        let core = Self {
            flows,
            devices,
            pending: PendingConnects::default(),
            seen_mbps: AtomicU32::new(0),
        };
        core.devices.iter().for_each(|device| core.log(device));
        Ok(core)
    }

    /// The speed of a device that NCCL gets, in Mbit/s.
    pub(crate) fn offered_mbps(&self, device: &NetDevice) -> u32 {
        let seen = self.seen_mbps.load(Relaxed);
        device.speed.offered_mbps((seen > 0).then_some(seen))
    }

    /// Has devices of unknown speed offer the greatest rate until now to the next communicator.
    fn look_at_rates(&self) {
        let Some(rate) = self.flows.greatest_rate() else { return };
        let mbps = u32::try_from(rate / 125_000).unwrap_or(u32::MAX);
        let before = self.seen_mbps.fetch_max(mbps, Relaxed);
        let unknown = self.devices.iter().find(|device| device.speed == Bandwidth::Unknown);
        if mbps > before
            && let Some(device) = unknown
        {
            self.log(device);
        }
    }

    fn log(&self, device: &NetDevice) {
        let addrs: Vec<_> = device.flow.addrs.iter().map(ToString::to_string).collect();
        let (name, addrs, port) = (&device.flow.name, addrs.join(", "), self.flows.port());
        let speed = self.offered_mbps(device);
        let channels = Generation::Hopper.plan(speed).channels;
        let line = format!(
            "device {name}: {addrs}, port {port}, {speed} Mbit/s (for which NCCL takes {channels} channels)"
        );
        log::info(flags::INIT | flags::NET, &line);
    }
}
