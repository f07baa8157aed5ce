//! A process's flows: settings, names and threads.

use std::{
    io,
    net::{IpAddr, Ipv4Addr},
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use parking_lot::{Mutex, RwLock};
use uccl_device::HostIdentity;

use crate::{
    bell::Waker,
    counters::{PeerCounters, Totals},
    error::FlowError,
    io::{greeter::Greeter, keeper::Keeper, worker::Worker},
    keep::KeeperPort,
    port::Port,
    settings::{Device, Settings},
    shared::FlowsState,
    socket,
};

/// The state that all flows of a process share. Clones are the same. The last clone, listener,
/// connection or flow that is dropped ends its threads and waits for them.
#[derive(Clone)]
pub struct Flows {
    owner: Arc<Owner>,
}

/// Ends the threads when it is dropped. Threads do not hold it.
struct Owner {
    shared: Arc<FlowsState>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Flows {
    /// Begins to listen and starts the threads.
    ///
    /// # Errors
    /// When the settings cannot be, no port is free, or the system has no more descriptors or
    /// threads.
    pub fn new(mut settings: Settings) -> Result<Self, FlowError> {
        if let Some(reason) = settings.refusal() {
            return Err(FlowError::Settings(reason));
        }
        if settings.devices.is_empty() {
            let addrs = vec![IpAddr::V4(Ipv4Addr::LOCALHOST)];
            settings.devices.push(Device { name: "lo".into(), addrs });
        }
        let addrs: Vec<_> =
            settings.devices.iter().flat_map(|device| &device.addrs).copied().collect();
        let listener = socket::listen(&addrs, &settings.ports)
            .map_err(FlowError::system("listening on the port of flows"))?;
        let port = listener.local_addr().map_err(FlowError::system("getsockname"))?.port();
        let workers = (0..settings.threads).map(|_| Port::new().map(Arc::new));
        let workers =
            workers.collect::<Result<Vec<_>, _>>().map_err(FlowError::system("eventfd"))?;
        let shared = Arc::new(FlowsState {
            workers,
            bundles: Mutex::default(),
            sinks: RwLock::default(),
            totals: Mutex::default(),
            greatest_rate: Arc::default(),
            visitors: Mutex::default(),
            instance: u64::from_le_bytes(random()?),
            key: random()?,
            network: network(),
            port,
            listeners: Mutex::default(),
            is_stopped: AtomicBool::new(false),
            greeter: Waker::new().map_err(FlowError::system("eventfd"))?,
            keeping: KeeperPort::new().map_err(FlowError::system("eventfd"))?,
            settings,
        });
        let greeter = Greeter::new(Arc::clone(&shared), listener)
            .map_err(FlowError::system("epoll of the thread that accepts"))?;
        let workers = (0..shared.workers.len()).map(|at| Worker::new(Arc::clone(&shared), at));
        let workers = workers
            .collect::<Result<Vec<_>, _>>()
            .map_err(FlowError::system("epoll of a thread for streams"))?;
        let keeper = Keeper::new(Arc::clone(&shared))
            .map_err(FlowError::system("epoll of the thread that keeps streams alive"))?;
        let owner = Owner { shared, threads: Mutex::default() };
        owner.start("uccl-flow-keep", move || keeper.run())?;
        owner.start("uccl-flow-greet", move || greeter.run())?;
        for (at, worker) in workers.into_iter().enumerate() {
            owner.start(&format!("uccl-flow-{at}"), move || worker.run())?;
        }
        Ok(Self { owner: Arc::new(owner) })
    }

    /// The port that the process listens on.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.owner.shared.port
    }

    /// The settings, with the devices that are used.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.owner.shared.settings
    }

    /// Counters of the streams to each process that this one sends to.
    #[must_use]
    pub fn counters(&self) -> Vec<PeerCounters> {
        let bundles: Vec<_> = self.owner.shared.bundles.lock().values().cloned().collect();
        bundles.iter().map(|bundle| bundle.counters()).collect()
    }

    /// Messages of all flows that have been closed.
    #[must_use]
    pub fn totals(&self) -> Totals {
        *self.owner.shared.totals.lock()
    }

    /// The greatest rate in bytes per second at which large messages went to one process, while
    /// there were always some; none before 16 MiB have gone so.
    #[must_use]
    pub fn greatest_rate(&self) -> Option<u64> {
        let rate = self.owner.shared.greatest_rate.load(Ordering::Relaxed);
        (rate > 0).then_some(rate)
    }

    pub(crate) fn shared(&self) -> &Arc<FlowsState> {
        &self.owner.shared
    }

    pub(crate) fn device(&self, device: usize) -> Result<&Device, FlowError> {
        let devices = &self.settings().devices;
        devices.get(device).ok_or(FlowError::Device { device, count: devices.len() })
    }
}

impl Owner {
    /// Starts a thread. All flows fail when it ends by an error or a panic.
    fn start(
        &self,
        name: &str,
        body: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> Result<(), FlowError> {
        let shared = Arc::clone(&self.shared);
        let guarded = move || {
            let cause = match std::panic::catch_unwind(AssertUnwindSafe(body)) {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "it has panicked".into(),
            };
            shared.fail(&FlowError::Thread(cause));
        };
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(guarded)
            .map_err(FlowError::system("starting a thread"))?;
        self.threads.lock().push(thread);
        Ok(())
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Messages of closed flows are on their way, and need the others.
        self.shared.keeping.stop();
        let mut threads = std::mem::take(self.threads.get_mut()).into_iter();
        join(threads.next());
        self.shared.is_stopped.store(true, Ordering::Release);
        self.shared.greeter.wake();
        self.shared.workers.iter().for_each(|worker| worker.bell().ring());
        join(threads);
    }
}

fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    for thread in threads {
        if thread.join().is_err() {
            tracing::error!("a thread of the flows has panicked");
        }
    }
}

/// Random bytes.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], FlowError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| FlowError::system("getrandom")(io::Error::other(error)))?;
    Ok(bytes)
}

/// The kernel's boot id and the network namespace in one number; zero if unknown.
fn network() -> [u8; 16] {
    let host = HostIdentity::of_this_process();
    let hex: String = host.boot_id.unwrap_or_default().chars().filter(|c| *c != '-').collect();
    match (u128::from_str_radix(&hex, 16), host.net_namespace) {
        (Ok(boot), Some(inode)) => (boot ^ u128::from(inode)).to_le_bytes(),
        _ => [0; 16],
    }
}
