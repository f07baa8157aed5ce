//! One connection for each pair of ranks. A rank connects to those before it, and accepts those
//! behind it. Both ends of a connection say which group they mean.

use std::{
    collections::HashMap,
    task::Poll,
    thread::sleep,
    time::{Duration, Instant},
};

use uccl_p2p::{ConnId, ConnectHandle, ConnectRequest, Endpoint, Interrupt};
use uccl_wire::group::{GroupHello, RankCard};

use crate::{
    error::{Error, Result},
    inbox::Inbox,
    plan::Place,
};

const FIRST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(2);

/// The ranks that meet.
pub(crate) struct Meeting<'a> {
    pub(crate) endpoint: &'a Endpoint,
    pub(crate) inbox: &'a Inbox,
    pub(crate) place: Place,
    pub(crate) cards: &'a [RankCard],
    pub(crate) hello: GroupHello,
    /// Zero is no limit.
    pub(crate) timeout: Duration,
}

/// A mesh that is being made.
struct Mesh<'a> {
    meeting: &'a Meeting<'a>,
    connects: Vec<Option<ConnectHandle>>,
    conns: Vec<Option<ConnId>>,
    /// Whether the rank's hello has come.
    has_come: Vec<bool>,
    /// Accepted connections, by the rank of their instance.
    accepted: HashMap<ConnId, usize>,
    started: Instant,
}

/// The connection to each rank; none to the own.
///
/// # Errors
/// Ranks have not come in time, or mean another group. Then no connection is left.
pub(crate) fn meet(
    meeting: &Meeting<'_>,
    interrupt: &mut dyn Interrupt,
) -> Result<Vec<Option<ConnId>>> {
    let ranks = meeting.place.ranks;
    let mut mesh = Mesh {
        meeting,
        connects: Vec::with_capacity(ranks),
        conns: vec![None; ranks],
        has_come: vec![false; ranks],
        accepted: HashMap::new(),
        started: Instant::now(),
    };
    mesh.has_come[meeting.place.rank] = true;
    let made = mesh.begin().and_then(|()| mesh.complete(interrupt));
    if made.is_err() {
        mesh.take_down();
    }
    made.map(|()| mesh.conns)
}

impl Mesh<'_> {
    fn begin(&mut self) -> Result<()> {
        let Meeting { endpoint, place, cards, timeout, .. } = *self.meeting;
        for card in &cards[..place.rank] {
            let request = ConnectRequest {
                timeout: Some(timeout),
                instance: Some(card.instance),
                ..ConnectRequest::new(std::slice::from_ref(&card.addr))
            };
            self.connects.push(Some(endpoint.begin_connect(&request)?));
        }
        Ok(())
    }

    fn complete(&mut self, interrupt: &mut dyn Interrupt) -> Result<()> {
        let time = self.meeting.timeout;
        let mut pause = FIRST_PAUSE;
        while !self.has_come.iter().all(|come| *come) {
            self.connect()?;
            self.accept()?;
            self.read_hellos()?;
            if interrupt.interrupted() {
                return Err(uccl_p2p::Error::Interrupted.into());
            }
            if !time.is_zero() && self.started.elapsed() >= time {
                return Err(self.not_joined("no answer".into()));
            }
            sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        Ok(())
    }

    /// Goes on with the connects to the ranks before this one.
    fn connect(&mut self) -> Result<()> {
        for rank in 0..self.connects.len() {
            let Some(connect) = &self.connects[rank] else { continue };
            let Poll::Ready(connected) = connect.poll() else { continue };
            self.connects[rank] = None;
            match connected {
                Ok(conn) => {
                    self.conns[rank] = Some(conn);
                    self.say_hello(conn)?;
                }
                // The rank's endpoint was there when it told its card.
                Err(e) => return Err(self.not_joined(format!("rank {rank}: {e}"))),
            }
        }
        Ok(())
    }

    /// Takes the connections of the ranks behind this one. Another's is ended.
    fn accept(&mut self) -> Result<()> {
        let Meeting { endpoint, place, cards, .. } = *self.meeting;
        while let Some(accepted) = endpoint.try_accept()? {
            let Ok(info) = endpoint.connection(accepted.conn) else { continue };
            let behind = cards.iter().enumerate().skip(place.rank + 1);
            let rank = behind.into_iter().find(|(_, card)| card.instance == info.instance);
            match rank {
                Some((rank, _)) => drop(self.accepted.insert(accepted.conn, rank)),
                None => leave(endpoint, accepted.conn),
            }
        }
        Ok(())
    }

    fn read_hellos(&mut self) -> Result<()> {
        let mut later = Vec::new();
        for (conn, hello) in self.meeting.inbox.hellos(self.meeting.endpoint)? {
            let connected = self.conns.iter().position(|known| *known == Some(conn));
            let Some(rank) = connected.or_else(|| self.accepted.get(&conn).copied()) else {
                // Its connection has not been accepted yet, or it is of another time.
                if self.meeting.endpoint.check_connection(conn).is_ok() {
                    later.push((conn, hello));
                }
                continue;
            };
            if hello.epoch != self.meeting.hello.epoch {
                if connected.is_none() {
                    self.accepted.remove(&conn);
                    leave(self.meeting.endpoint, conn);
                }
                continue;
            }
            if hello.members != self.meeting.hello.members {
                let ours = self.meeting.hello.members.clone();
                return Err(Error::Disagreement { rank, theirs: hello.members, ours });
            }
            if connected.is_none() {
                self.accepted.remove(&conn);
                if let Some(earlier) = self.conns[rank].replace(conn) {
                    leave(self.meeting.endpoint, earlier);
                }
                self.say_hello(conn)?;
            }
            self.has_come[rank] = true;
        }
        self.meeting.inbox.keep(later);
        Ok(())
    }

    fn say_hello(&self, conn: ConnId) -> Result<()> {
        let hello = self.meeting.hello.encode();
        Ok(self.meeting.endpoint.send_notif(conn, &hello, None).map(drop)?)
    }

    fn not_joined(&self, reason: String) -> Error {
        let come = self.has_come.iter().enumerate();
        let missing = come.filter(|(_, come)| !**come).map(|(rank, _)| rank).collect();
        Error::NotJoined { missing, waited: self.started.elapsed(), reason }
    }

    /// Ends all connections.
    fn take_down(&mut self) {
        let accepted = self.accepted.keys().copied();
        for conn in self.conns.iter().flatten().copied().chain(accepted) {
            leave(self.meeting.endpoint, conn);
        }
    }
}

/// Ends a connection; one that is unknown has ended.
pub(crate) fn leave(endpoint: &Endpoint, conn: ConnId) {
    let _ = endpoint.disconnect(conn);
}
