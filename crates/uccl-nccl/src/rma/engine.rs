//! The endpoint that all groups of a process share.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use uccl_nccl_abi::flags;
use uccl_p2p::{Config, ConnId, Endpoint, Error};

use super::note::{Body, Note, Token};
use crate::{
    devices::{self, NetDevice},
    fault::Fault,
    log,
    rma_error::RmaError,
    settings::Settings,
};

/// The endpoint of this process, and the groups that use it.
pub(crate) struct Engine {
    pub(crate) endpoint: Endpoint,
    pub(crate) devices: Vec<NetDevice>,
    /// The longest time for which a peer may be out of reach.
    pub(crate) limit: Duration,
    groups: Mutex<HashMap<Token, Weak<dyn Recipient>>>,
    /// Held by the thread that takes messages, so that each connection's stay in order.
    taking: Mutex<()>,
}

/// A group that takes messages.
pub(crate) trait Recipient: Send + Sync {
    /// Takes a message that has come over a connection.
    fn take(&self, conn: ConnId, note: &Note);
}

/// A context of `init`.
pub(crate) struct RmaHandle {
    _engine: Arc<Engine>,
}

/// The engine, while some context lives.
struct Process {
    engine: Option<Arc<Engine>>,
    contexts: usize,
}

static PROCESS: Mutex<Process> = Mutex::new(Process { engine: None, contexts: 0 });

/// Begins a context. The first one starts the endpoint.
pub(crate) fn begin() -> Result<RmaHandle, Fault> {
    let settings = Settings::from_env()?;
    if !settings.has_rma {
        return Err(RmaError::Off.into());
    }
    let mut process = PROCESS.lock();
    let engine = match &process.engine {
        Some(engine) => Arc::clone(engine),
        None => Arc::new(Engine::new(&settings)?),
    };
    process.engine = Some(Arc::clone(&engine));
    process.contexts += 1;
    Ok(RmaHandle { _engine: engine })
}

/// Ends a context. The last one closes the endpoint and has its threads joined.
pub(crate) fn end(handle: RmaHandle) -> Result<(), Fault> {
    let mut process = PROCESS.lock();
    drop(handle);
    process.contexts = process.contexts.saturating_sub(1);
    if process.contexts > 0 {
        return Ok(());
    }
    match process.engine.take() {
        None => Ok(()),
        Some(engine) => Ok(engine.endpoint.close().map_err(RmaError::of_engine("close"))?),
    }
}

/// The engine of an `init` before.
pub(crate) fn engine(call: &'static str) -> Result<Arc<Engine>, Fault> {
    PROCESS.lock().engine.clone().ok_or(Fault::Misuse(call, "init was not called"))
}

impl Engine {
    pub(crate) fn new(settings: &Settings) -> Result<Self, Fault> {
        let devices = devices::find(settings)?;
        let endpoint = endpoint(settings)?;
        endpoint.start_passive_accept().map_err(RmaError::of_engine("listening"))?;
        let (port, link) = (endpoint.addr().port(), endpoint.config().transport);
        log::info(
            flags::INIT | flags::NET,
            &format!("one-sided calls: port {port}, transport {link}"),
        );
        let (groups, taking) = (Mutex::default(), Mutex::default());
        Ok(Self { endpoint, devices, limit: settings.timeout, groups, taking })
    }

    /// Makes a group known, so that messages reach it.
    pub(crate) fn add(&self, token: Token, group: Weak<dyn Recipient>) {
        self.groups.lock().insert(token, group);
    }

    pub(crate) fn remove(&self, token: &Token) {
        self.groups.lock().remove(token);
    }

    /// Takes the messages that have come, unless another thread does so; makes progress.
    pub(crate) fn take_notes(&self) -> Result<(), RmaError> {
        let Some(_taking) = self.taking.try_lock() else { return Ok(()) };
        let notes = self.endpoint.take_notifs().map_err(RmaError::of_engine("messages"))?;
        for note in notes {
            self.take(note.conn, &note.payload);
        }
        Ok(())
    }

    fn take(&self, conn: ConnId, bytes: &[u8]) {
        let note = match Note::decode(bytes) {
            Ok(note) => note,
            Err(reason) => return tracing::warn!("a message is not taken: {reason}"),
        };
        let group = self.groups.lock().get(&note.to).and_then(Weak::upgrade);
        match (group, &note.body) {
            (Some(group), _) => group.take(conn, &note),
            // The group is closed already, or the sender has no handle of this process. It sees
            // the end of the connection.
            (None, Body::Hello) => drop(self.endpoint.disconnect(conn)),
            (None, Body::Region { .. } | Body::Goodbye) => {}
        }
    }
}

/// An endpoint on a port of those that are allowed.
fn endpoint(settings: &Settings) -> Result<Endpoint, RmaError> {
    let action = "listening";
    let of = |port| {
        let config = Config::from_env()?;
        Endpoint::new(Config {
            bind: None,
            port: Some(port),
            timeout: settings.timeout,
            num_cpus: settings.threads.unwrap_or(config.num_cpus),
            // A GPU's copy kernel would wait for NCCL's kernels, which may wait for it.
            ipc: false,
            // A peer that is stopped in the middle of a copy to this process's memory would keep
            // that from being given back; what comes by rings this process copies itself.
            cma: false,
            ..config
        })
    };
    for port in settings.ports.clone() {
        match of(port) {
            Err(Error::Os { source, .. }) if source.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(RmaError::Engine { action, error }),
            Ok(endpoint) => return Ok(endpoint),
        }
    }
    let error = Error::os("bind", io::Error::from(io::ErrorKind::AddrInUse));
    Err(RmaError::Engine { action, error })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Peers that open a GPU's copy by kernels while something long is under way.
    #[test]
    fn peers_do_not_open_memory() {
        let settings = Settings::from_env().expect("settings");
        let endpoint = endpoint(&settings).expect("an endpoint");
        assert!(!endpoint.config().ipc && !endpoint.config().cma);
        endpoint.close().expect("closed");
    }
}
