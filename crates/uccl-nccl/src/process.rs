//! The contexts of this process, and the flows that they share.

use std::sync::Arc;

use parking_lot::Mutex;
use uccl_flow::Flows;
use uccl_nccl_abi::flags;

use crate::{
    devices::{self, NetDevice},
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
    }
}

/// The core of an `init` before.
pub(crate) fn core(call: &'static str) -> Result<Arc<Core>, Fault> {
    PROCESS.lock().core.clone().ok_or(Fault::Misuse(call, "init was not called"))
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
            limit: settings.timeout,
            psk: settings.psk.clone(),
            ..default
        })?;
        for device in &devices {
            let addrs: Vec<_> = device.flow.addrs.iter().map(ToString::to_string).collect();
            let (name, addrs, speed) = (&device.flow.name, addrs.join(", "), device.speed_mbps);
            let port = flows.port();
            let line = format!("device {name}: {addrs}, port {port}, {speed} Mbit/s");
            log::info(flags::INIT | flags::NET, &line);
        }
        Ok(Self { flows, devices, pending: PendingConnects::default() })
    }
}
