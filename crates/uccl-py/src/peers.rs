//! Finding and naming peers: connect, accept, metadata.

use std::{
    collections::{HashMap, VecDeque},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use pyo3::{exceptions::PyTypeError, prelude::*};
use uccl_p2p::{Acceptance, Config, ConnId, Endpoint, Error};
use uccl_wire::metadata::Metadata;

use crate::{
    args::{Keywords, Positional},
    error::CallError,
    interrupt::waiting,
    params::Param,
    signatures,
};

/// The state of this module about peers.
#[derive(Default)]
pub(crate) struct Peers {
    /// Peers by the metadata that they were added with.
    added: Mutex<HashMap<Vec<u8>, Arc<ConnSlot>>>,
    /// Connections from other hosts that accept_local has accepted.
    remote: Mutex<VecDeque<Acceptance>>,
}

/// The connection to one peer. The lock is held while a thread connects, so that two threads do not
/// connect to the same peer.
type ConnSlot = Mutex<Option<ConnId>>;

/// `connect(ip, gpu, port)`.
pub(crate) fn connect(
    core: &Endpoint,
    py: Python<'_>,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> Result<u64, CallError> {
    let a = signatures::CONNECT.bind(args, kwargs)?;
    let host: String = a.req(Param::RemoteIp)?;
    let gpu = a.get(Param::RemoteGpu).map(gpu_index).transpose()?;
    let port = a.opt::<i64>(Param::RemotePort)?.filter(|port| *port != -1);
    // A peer that gave its port to the caller listens already; at a well-known port the peer may
    // not listen yet.
    let awaited = port.is_none();
    let port = match (port, gpu) {
        (None, None) => {
            return Err(PyTypeError::new_err(
                "connect() needs remote_gpu_idx (or remote_gpu_bdf) or remote_port",
            )
            .into());
        }
        (None, Some(gpu)) => core.config().well_known_port(gpu)?,
        (Some(port), _) => u16::try_from(port)
            .ok()
            .filter(|&p| p != 0)
            .ok_or_else(|| CallError::refuse(format!("{port} is no port")))?,
    };
    let addrs = py.detach(|| uccl_p2p::resolve(&host, port))?;
    connect_to(core, py, &addrs, awaited, a.seconds(Param::Timeout)?)
}

/// `connect_local(gpu)`.
pub(crate) fn connect_local(
    core: &Endpoint,
    py: Python<'_>,
    args: Positional<'_, '_>,
    kwargs: Keywords<'_, '_>,
) -> Result<u64, CallError> {
    let a = signatures::CONNECT_LOCAL.bind(args, kwargs)?;
    let config = core.config();
    let port = config.well_known_port(gpu_index(a.need(Param::RemoteGpu)?)?)?;
    // An endpoint that listens on one address cannot be reached on another.
    let ip = config.bind.filter(|ip| !ip.is_unspecified()).unwrap_or(Ipv4Addr::LOCALHOST.into());
    connect_to(core, py, &[SocketAddr::new(ip, port)], true, a.seconds(Param::Timeout)?)
}

fn connect_to(
    core: &Endpoint,
    py: Python<'_>,
    addrs: &[SocketAddr],
    awaited: bool,
    timeout: Option<Duration>,
) -> Result<u64, CallError> {
    let connected = waiting(py, core, |core, interrupt| {
        if awaited {
            core.connect_any_when_up(addrs, timeout, interrupt)
        } else {
            core.connect_any(addrs, timeout, interrupt)
        }
    });
    Ok(connected??.0)
}

impl Peers {
    /// `accept()`.
    pub(crate) fn accept(
        &self,
        core: &Endpoint,
        py: Python<'_>,
        timeout: Option<Duration>,
    ) -> Result<Acceptance, CallError> {
        let mut remote = self.remote.lock();
        while let Some(accepted) = remote.pop_front() {
            if core.check_connection(accepted.conn).is_ok() {
                return Ok(accepted);
            }
        }
        drop(remote);
        Ok(waiting(py, core, |core, interrupt| core.accept(timeout, interrupt))??)
    }

    /// `accept_local()`: the next connection from this host; connections from others are left for
    /// accept.
    pub(crate) fn accept_local(
        &self,
        core: &Endpoint,
        py: Python<'_>,
        timeout: Option<Duration>,
    ) -> Result<Acceptance, CallError> {
        loop {
            let accepted = waiting(py, core, |core, interrupt| core.accept(timeout, interrupt))??;
            if core.connection(accepted.conn)?.same_host {
                return Ok(accepted);
            }
            let mut remote = self.remote.lock();
            remote.retain(|other| core.check_connection(other.conn).is_ok());
            remote.push_back(accepted);
        }
    }

    /// `add_remote_endpoint(metadata)`: connects once for each metadata, until the connection is
    /// removed or lost.
    pub(crate) fn add(
        &self,
        core: &Endpoint,
        py: Python<'_>,
        metadata: &[u8],
    ) -> Result<u64, CallError> {
        let peer = Metadata::decode(metadata).map_err(CallError::refuse)?;
        let addr = SocketAddr::new(peer.ip, peer.port);
        let added = waiting(py, core, |core, interrupt| {
            let place = Arc::clone(self.added.lock().entry(metadata.to_vec()).or_default());
            let mut known = loop {
                match place.try_lock_for(Duration::from_millis(20)) {
                    Some(known) => break known,
                    None if interrupt.interrupted() => return Err(Error::Interrupted),
                    None => {}
                }
            };
            if let Some(conn) = *known {
                match core.check_peer(conn, interrupt) {
                    Ok(()) => return Ok(conn),
                    Err(Error::Interrupted) => return Err(Error::Interrupted),
                    // The peer may have died, and another may be in its place.
                    Err(_) => *known = None,
                }
            }
            self.forget_lost(core);
            *known = Some(core.connect(addr, None, interrupt)?);
            known.ok_or(Error::Closed)
        })?;
        Ok(added?.0)
    }

    /// Forgets peers with lost connections, unless a thread is adding them.
    fn forget_lost(&self, core: &Endpoint) {
        self.keep_added(|conn| core.check_connection(conn).is_ok());
    }

    /// Forgets peers without a connection for which `keep` is true, except peers that a thread is
    /// adding.
    fn keep_added(&self, keep: impl Fn(ConnId) -> bool) {
        // No other thread reaches a peer that this map alone holds.
        self.added
            .lock()
            .retain(|_, added| Arc::strong_count(added) > 1 || added.lock().is_some_and(&keep));
    }

    /// `remove_remote_endpoint(conn_id)`.
    pub(crate) fn remove(
        &self,
        core: &Endpoint,
        py: Python<'_>,
        conn: ConnId,
    ) -> Result<(), Error> {
        self.keep_added(|known| known != conn);
        self.remote.lock().retain(|accepted| accepted.conn != conn);
        py.detach(|| core.disconnect(conn))
    }
}

/// A GPU's index; a PCI address, which determines no port, counts as GPU 0.
fn gpu_index(gpu: &Bound<'_, PyAny>) -> PyResult<i64> {
    match gpu.extract::<String>() {
        Ok(name) => Ok(uccl_p2p::gpu_index(&name)),
        Err(_) => gpu.extract(),
    }
}

/// The address that an endpoint for this GPU, made now, would advertise to its peers.
pub(crate) fn oob_ip(py: Python<'_>, gpu_index: Option<u32>) -> Result<IpAddr, Error> {
    py.detach(|| {
        let config = Config::from_env()?;
        let gpu_index = gpu_index.unwrap_or(config.gpu_index);
        uccl_p2p::told_ip(&Config { gpu_index, ..config })
    })
}
