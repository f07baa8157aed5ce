//! Joining a group: each rank connects to itself and to the ranks behind it, and waits for those
//! before it.

use std::{
    net::SocketAddr,
    sync::Arc,
    task::Poll,
    thread,
    time::{Duration, Instant},
};

use uccl_nccl_abi::HANDLE_BYTES;
use uccl_p2p::{
    ConnId, ConnectHandle, ConnectRequest, Error,
    wire::flow::{FlowWireError, HANDLE_LEN, Handle},
};

use super::{
    engine::Engine,
    group::{Group, Place},
    note::{Body, Note, Token},
};
use crate::{fault::Fault, rma_error::RmaError};

/// The pause between two looks.
const PAUSE: Duration = Duration::from_micros(100);

/// A rank that this one connects to.
struct Attempt {
    rank: usize,
    connect: ConnectHandle,
}

/// Listens: a group that others may join, and its handle.
pub(crate) fn listen(
    engine: &Arc<Engine>,
    device: usize,
) -> Result<(Arc<Group>, [u8; HANDLE_BYTES]), Fault> {
    let own = engine.devices.get(device);
    let own = own.ok_or(Fault::Misuse("listen", "there is no such device"))?;
    let others = engine.devices.iter().filter(|other| other.name != own.name);
    let addrs: Vec<_> =
        own.flow.addrs.iter().chain(others.flat_map(|other| &other.flow.addrs)).copied().collect();
    let mut token = Token::default();
    let random = |error| Error::os("getrandom", std::io::Error::other(error));
    getrandom::fill(&mut token)
        .map_err(|error| RmaError::Engine { action: "listen", error: random(error) })?;
    let handle = Handle {
        device: device as u16,
        instance: engine.endpoint.instance(),
        nonce: token,
        network: [0; 16],
        addrs: Handle::fitting(&addrs),
        port: engine.endpoint.addr().port(),
    };
    let own = handle.encode().map_err(uccl_flow::FlowError::from)?;
    let mut bytes = [0; HANDLE_BYTES];
    bytes[..HANDLE_LEN].copy_from_slice(&own);
    Ok((Group::new(engine, token), bytes))
}

/// Joins the ranks of these handles, within the limit.
pub(crate) fn join(
    group: &Group,
    handles: &[[u8; HANDLE_BYTES]],
    rank: usize,
) -> Result<(), RmaError> {
    let handles: Vec<Handle> = handles.iter().enumerate().map(decode).collect::<Result<_, _>>()?;
    let tokens: Arc<[Token]> = handles.iter().map(|handle| handle.nonce).collect();
    if tokens.get(rank) != Some(&group.token) {
        let reason = "it is not the handle of the listener".into();
        return Err(RmaError::Handle { rank, reason });
    }
    let (engine, until) = (&group.engine, Instant::now() + group.engine.limit);
    group.set_place(Place { rank, tokens: Arc::clone(&tokens) });
    let mut attempts = Vec::new();
    for (to, handle) in handles.iter().enumerate().skip(rank) {
        let addrs: Vec<SocketAddr> = handle.sockets().collect();
        let instance = Some(handle.instance);
        let request = ConnectRequest { instance, ..ConnectRequest::new(&addrs) };
        let begun = engine.endpoint.begin_connect(&request);
        let connect = begun.map_err(RmaError::of_peer("connect", to))?;
        attempts.push(Attempt { rank: to, connect });
    }
    loop {
        for at in (0..attempts.len()).rev() {
            let Poll::Ready(result) = attempts[at].connect.poll() else { continue };
            let to = attempts.swap_remove(at).rank;
            let conn = result.map_err(RmaError::of_peer("connect", to))?;
            group.set_conn(to, conn);
            greet(engine, conn, tokens[to], rank).map_err(RmaError::of_peer("connect", to))?;
        }
        engine.take_notes()?;
        let missing = group.missing();
        if missing.is_empty() {
            return Ok(());
        }
        if Instant::now() > until {
            let (of, seconds) = (handles.len(), engine.limit.as_secs());
            return Err(RmaError::Missing { ranks: missing, of, seconds });
        }
        // All ranks wait here, and the peers' connects need this one's workers.
        thread::sleep(PAUSE);
    }
}

fn greet(engine: &Engine, conn: ConnId, to: Token, rank: usize) -> uccl_p2p::Result<()> {
    let note = Note { to, from: rank, body: Body::Hello }.encode();
    engine.endpoint.send_notif(conn, note, None).map(drop)
}

fn decode((rank, bytes): (usize, &[u8; HANDLE_BYTES])) -> Result<Handle, RmaError> {
    let refused = |error: FlowWireError| RmaError::Handle { rank, reason: error.to_string() };
    Handle::decode(&bytes[..HANDLE_LEN]).map_err(refused)
}
