//! A connection whose handshake is finished: its first stream, to which its further lanes come,
//! until the peer's word makes a connection of them.

use std::{
    collections::HashMap,
    io::{self, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
};

use uccl_local::LocalLane;
use uccl_rma::Role;
use uccl_wire::handshake::Hello;

use crate::{
    drive::{
        core::{Core, connection::Connection, workers::Workers},
        greeting::{self, Greeting, MAX_LANES},
        lanes,
        links::Links,
        seats::Seat,
        socket::Socket,
    },
    error::{Error, Result},
    types::Acceptance,
};

/// The first stream of a connection, and all that has joined it.
pub(super) struct First {
    pub(super) socket: Socket,
    pub(super) addr: SocketAddr,
    pub(super) peer: Hello,
    pub(super) token: u128,
    pub(super) word: Vec<u8>,
    pub(super) lanes: HashMap<u16, Socket>,
    pub(super) local: Option<LocalLane>,
    /// One for each of its streams.
    pub(super) seats: Vec<Seat>,
}

impl First {
    /// Whether this is the connection that a further lane of the peer's names, and has no such lane
    /// yet.
    pub(super) fn takes(&self, token: u128, lane: u16, peer: &Hello) -> bool {
        let is_meant = self.token == token && self.peer.instance == peer.instance;
        is_meant && (1..MAX_LANES).contains(&lane) && !self.lanes.contains_key(&lane)
    }
}

/// Makes a connection of the lanes, and tells the peer.
pub(super) fn establish(
    core: &Arc<Core>,
    greeting: &Greeting,
    mut first: First,
    lanes: u16,
) -> Result<()> {
    let (same_host, local) = (greeting.same_host(&first.peer), lanes == 0);
    let secret = first.socket.secret(first.token);
    let mut tcp = first.socket.tcp.try_clone().map_err(|e| Error::os("sharing a socket", e))?;
    // Sealed before the lane is made, because the lane seals all later bytes.
    let answer = first.socket.word(if local { 1 } else { lanes.into() });
    let links = if local {
        let lane = first.local.take();
        let lane =
            lane.ok_or_else(|| Error::Invalid("a local connection without its lane".into()))?;
        Links::within_host(Arc::new(lane))
    } else {
        let mut streams = vec![first.socket];
        for index in 1..lanes {
            let stream = first.lanes.remove(&index);
            streams.push(stream.ok_or_else(|| Error::Invalid("a lane is missing".into()))?);
        }
        let agreed = greeting.agreed(core, &first.peer, Role::Acceptor, secret)?;
        lanes::make(core, streams, &agreed)?
    };
    let peer = greeting::peer_of(&first.peer, first.addr, same_host);
    let gpu_index = peer.gpu_index;
    let conn = core.add_conn(|id| {
        let conn = Connection::new(id, Arc::clone(core), peer, links);
        Arc::new(conn.sitting_on(first.seats))
    })?;
    if let Err(e) = say(&mut tcp, &answer) {
        conn.fail(Error::os("answering a peer", e));
        return Err(Error::Invalid("the peer left during the handshake".into()));
    }
    let ip = first.addr.ip().to_canonical();
    begin(core, &conn, Acceptance { conn: conn.id, ip, gpu_index })
}

/// Gives an established connection to workers and to `accept`. A connection without a worker would
/// stay unread for ever, so it ends.
pub(in crate::drive) fn begin(
    core: &Arc<Core>,
    conn: &Arc<Connection>,
    accepted: Acceptance,
) -> Result<()> {
    if let Err(e) = Workers::attach(core, conn) {
        conn.close(e.clone());
        core.forget_conn(conn.id);
        return Err(e);
    }
    core.offer_memory_to(conn);
    conn.accept_when_settled(accepted);
    Ok(())
}

/// Sends the few bytes of a handshake, which fit into every socket's buffer.
pub(super) fn say(tcp: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    tcp.write_all(bytes)
}
