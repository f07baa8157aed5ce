//! Finding and naming peers: connect, accept, metadata.

use std::{
    collections::{HashMap, VecDeque},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use parking_lot::Mutex;
use pyo3::{exceptions::PyTypeError, prelude::*};
use uccl_p2p::{Accepted, Config, ConnId, Endpoint, Error};
use uccl_wire::metadata::Metadata;

use crate::{
    args::{Named, Positional, Signature},
    call::TIMEOUT,
    endpoint::PyEndpoint,
    error::Stop,
    signals::waiting,
};

const GPU: &[&str] = &["remote_gpu_idx", "remote_gpu_bdf", "remote_gpu"];

static CONNECT: Signature<4> = Signature {
    function: "connect",
    params: [&["remote_ip_addr", "ip_addr", "ip"], GPU, &["remote_port", "port"], TIMEOUT],
    positional: 3,
};
static CONNECT_LOCAL: Signature<2> =
    Signature { function: "connect_local", params: [GPU, TIMEOUT], positional: 1 };

/// What this module remembers of peers.
#[derive(Default)]
pub(crate) struct Peers {
    /// Held by the one thread that is adding a peer, so that two do not connect to the same.
    adding: Mutex<()>,
    /// Connections by the metadata they were made from.
    added: Mutex<HashMap<Vec<u8>, ConnId>>,
    /// Connections that accept_local met and that are not local.
    remote: Mutex<VecDeque<Accepted>>,
}

/// `connect(ip, gpu, port)`.
pub(crate) fn connect(
    ep: &PyEndpoint,
    py: Python<'_>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> Result<u64, Stop> {
    let a = CONNECT.bind(args, kwargs)?;
    let host: String = a.req(0)?;
    let gpu = a.get(1).map(gpu_index).transpose()?;
    let port = a.opt::<i64>(2)?.filter(|port| *port != -1);
    // Who was told a port was told by somebody who listens there; at a well-known one the peer may be yet to come.
    let awaited = port.is_none();
    let port = match (port, gpu) {
        (None, None) => {
            return Err(PyTypeError::new_err(
                "connect() needs remote_gpu_idx (or remote_gpu_bdf) or remote_port",
            )
            .into());
        }
        (None, Some(gpu)) => ep.core.config().well_known_port(gpu)?,
        (Some(port), _) => u16::try_from(port)
            .ok()
            .filter(|&p| p != 0)
            .ok_or_else(|| Stop::refuse(format!("{port} is no port")))?,
    };
    let addr = py.detach(|| uccl_p2p::resolve(&host, port))?;
    connect_to(ep, py, addr, awaited, a.seconds(3)?)
}

/// `connect_local(gpu)`.
pub(crate) fn connect_local(
    ep: &PyEndpoint,
    py: Python<'_>,
    args: Positional<'_, '_>,
    kwargs: Named<'_, '_>,
) -> Result<u64, Stop> {
    let a = CONNECT_LOCAL.bind(args, kwargs)?;
    let config = ep.core.config();
    let port = config.well_known_port(gpu_index(a.need(0)?)?)?;
    // An endpoint that listens on one address is not to be met on another.
    let ip = config.bind.filter(|ip| !ip.is_unspecified()).unwrap_or(Ipv4Addr::LOCALHOST.into());
    connect_to(ep, py, SocketAddr::new(ip, port), true, a.seconds(1)?)
}

fn connect_to(
    ep: &PyEndpoint,
    py: Python<'_>,
    addr: SocketAddr,
    awaited: bool,
    timeout: Option<Duration>,
) -> Result<u64, Stop> {
    let connected = waiting(py, &ep.core, |core, interrupt| {
        if awaited {
            core.connect_when_up(addr, timeout, interrupt)
        } else {
            core.connect(addr, timeout, interrupt)
        }
    });
    Ok(connected??.0)
}

/// `accept()`.
pub(crate) fn accept(
    ep: &PyEndpoint,
    py: Python<'_>,
    timeout: Option<Duration>,
) -> Result<Accepted, Stop> {
    if let Some(accepted) = ep.peers.remote.lock().pop_front() {
        return Ok(accepted);
    }
    Ok(waiting(py, &ep.core, |core, interrupt| core.accept(timeout, interrupt))??)
}

/// `accept_local()`: the next connection from this host; others stay for accept.
pub(crate) fn accept_local(
    ep: &PyEndpoint,
    py: Python<'_>,
    timeout: Option<Duration>,
) -> Result<Accepted, Stop> {
    loop {
        let accepted = waiting(py, &ep.core, |core, interrupt| core.accept(timeout, interrupt))??;
        if ep.core.connection(accepted.conn)?.same_host {
            return Ok(accepted);
        }
        ep.peers.remote.lock().push_back(accepted);
    }
}

/// `add_remote_endpoint(metadata)`: connects once per metadata, until the connection is removed or lost.
pub(crate) fn add(ep: &PyEndpoint, py: Python<'_>, metadata: &[u8]) -> Result<u64, Stop> {
    let peer = Metadata::decode(metadata).map_err(Stop::refuse)?;
    let addr = SocketAddr::new(peer.ip, peer.port);
    let peers = &ep.peers;
    let added = waiting(py, &ep.core, |core, interrupt| {
        let _adding = loop {
            match peers.adding.try_lock_for(Duration::from_millis(20)) {
                Some(guard) => break guard,
                None if interrupt.interrupted() => return Err(Error::Interrupted),
                None => {}
            }
        };
        if let Some(conn) = known(peers, core, metadata) {
            return Ok(conn);
        }
        let conn = core.connect(addr, None, interrupt)?;
        peers.added.lock().insert(metadata.to_vec(), conn);
        Ok(conn)
    })?;
    Ok(added?.0)
}

fn known(peers: &Peers, core: &Endpoint, metadata: &[u8]) -> Option<ConnId> {
    let mut added = peers.added.lock();
    let conn = *added.get(metadata)?;
    if core.connection(conn).is_ok() {
        return Some(conn);
    }
    added.remove(metadata);
    None
}

/// `remove_remote_endpoint(conn_id)`.
pub(crate) fn remove(ep: &PyEndpoint, py: Python<'_>, conn: ConnId) -> Result<(), Error> {
    ep.peers.added.lock().retain(|_, known| *known != conn);
    ep.peers.remote.lock().retain(|accepted| accepted.conn != conn);
    let core = &ep.core;
    py.detach(|| core.disconnect(conn))
}

/// A GPU's index; a PCI address, which says nothing about ports, counts as GPU 0.
fn gpu_index(gpu: &Bound<'_, PyAny>) -> PyResult<i64> {
    match gpu.extract::<String>() {
        Ok(name) => Ok(uccl_p2p::gpu_index(&name)),
        Err(_) => gpu.extract(),
    }
}

/// The address that an endpoint for this GPU, made now, would tell its peers.
pub(crate) fn oob_ip(py: Python<'_>, gpu_index: Option<u32>) -> Result<IpAddr, Error> {
    py.detach(|| {
        let config = Config::from_env()?;
        let gpu_index = gpu_index.unwrap_or(config.gpu_index);
        uccl_p2p::told_ip(&Config { gpu_index, ..config })
    })
}
