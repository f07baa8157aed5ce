//! One connection for each pair of ranks, or two: the second is for messages of relays, which begin
//! when bytes have come and keep no order with the calls' other messages. A rank connects to those
//! before it, and accepts those behind it. Both ends of a connection say which group they mean, and
//! which of the two connections it is.

use std::{
    collections::HashMap,
    task::Poll,
    thread::sleep,
    time::{Duration, Instant},
};

use uccl_p2p::{ConnId, ConnectHandle, ConnectRequest, Endpoint, Interrupt};
use uccl_wire::group::{GroupHello, OF_RELAYS, RankCard};

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
    /// Whether each pair has a second connection.
    pub(crate) has_relays: bool,
    /// Zero is no limit.
    pub(crate) timeout: Duration,
}

/// The connections to each rank; none to the own.
#[derive(Debug)]
pub(crate) struct Conns {
    pub(crate) direct: Vec<Option<ConnId>>,
    /// Those of relays; empty in a group without.
    pub(crate) relays: Vec<Option<ConnId>>,
}

/// A mesh that is being made. A place is a rank's connection: the first ones are direct, and those
/// of relays follow.
struct Mesh<'a> {
    meeting: &'a Meeting<'a>,
    /// By place.
    connects: Vec<Option<ConnectHandle>>,
    conns: Vec<Option<ConnId>>,
    /// Whether the rank's hello has come.
    has_come: Vec<bool>,
    /// Accepted connections, by the rank of their instance.
    accepted: HashMap<ConnId, usize>,
    started: Instant,
}

/// Makes the connections to all ranks.
///
/// # Errors
/// Ranks have not come in time, or mean another group. Then no connection is left.
pub(crate) fn meet(meeting: &Meeting<'_>, interrupt: &mut dyn Interrupt) -> Result<Conns> {
    let ranks = meeting.place.ranks;
    let places = if meeting.has_relays { 2 * ranks } else { ranks };
    let mut mesh = Mesh {
        meeting,
        connects: Vec::with_capacity(places),
        conns: vec![None; places],
        has_come: vec![false; places],
        accepted: HashMap::new(),
        started: Instant::now(),
    };
    for place in (meeting.place.rank..places).step_by(ranks) {
        mesh.has_come[place] = true;
    }
    let made = mesh.begin().and_then(|()| mesh.complete(interrupt));
    if made.is_err() {
        mesh.take_down();
    }
    made.map(|()| {
        let relays = mesh.conns.split_off(ranks);
        Conns { direct: mesh.conns, relays }
    })
}

impl Mesh<'_> {
    fn begin(&mut self) -> Result<()> {
        let Meeting { endpoint, place, cards, timeout, .. } = *self.meeting;
        for at in 0..self.conns.len() {
            let rank = at % place.ranks;
            if rank >= place.rank {
                self.connects.push(None);
                continue;
            }
            let card = &cards[rank];
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
        for at in 0..self.connects.len() {
            let Some(connect) = &self.connects[at] else { continue };
            let Poll::Ready(connected) = connect.poll() else { continue };
            self.connects[at] = None;
            match connected {
                Ok(conn) => {
                    self.conns[at] = Some(conn);
                    self.say_hello(at, conn)?;
                }
                // The rank's endpoint was there when it told its card.
                Err(e) => {
                    let rank = at % self.meeting.place.ranks;
                    return Err(self.not_joined(format!("rank {rank}: {e}")));
                }
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
        let (mut later, ranks) = (Vec::new(), self.meeting.place.ranks);
        for (conn, hello) in self.meeting.inbox.hellos(self.meeting.endpoint)? {
            let connected = self.conns.iter().position(|known| *known == Some(conn));
            let rank = connected.map(|at| at % ranks);
            let Some(rank) = rank.or_else(|| self.accepted.get(&conn).copied()) else {
                // Its connection has not been accepted yet, or it is of another time.
                if self.meeting.endpoint.check_connection(conn).is_ok() {
                    later.push((conn, hello));
                }
                continue;
            };
            let meant = self.place_of(rank, hello.epoch);
            let Some(at) = meant.filter(|at| connected.is_none_or(|ours| ours == *at)) else {
                if connected.is_none() {
                    self.accepted.remove(&conn);
                    leave(self.meeting.endpoint, conn);
                }
                continue;
            };
            if hello.members != self.meeting.hello.members {
                let ours = self.meeting.hello.members.clone();
                return Err(Error::Disagreement { rank, theirs: hello.members, ours });
            }
            if connected.is_none() {
                self.accepted.remove(&conn);
                if let Some(earlier) = self.conns[at].replace(conn) {
                    leave(self.meeting.endpoint, earlier);
                }
                self.say_hello(at, conn)?;
            }
            self.has_come[at] = true;
        }
        self.meeting.inbox.keep(later);
        Ok(())
    }

    /// The place of a rank's connection with a hello of this epoch; `None`: it means another group.
    fn place_of(&self, rank: usize, epoch: u32) -> Option<usize> {
        let own = self.meeting.hello.epoch;
        if epoch == own {
            return Some(rank);
        }
        let is_of_relays = self.meeting.has_relays && epoch == own | OF_RELAYS;
        is_of_relays.then_some(self.meeting.place.ranks + rank)
    }

    fn say_hello(&self, at: usize, conn: ConnId) -> Result<()> {
        let GroupHello { epoch, members } = self.meeting.hello.clone();
        let epoch = if at < self.meeting.place.ranks { epoch } else { epoch | OF_RELAYS };
        let hello = GroupHello { epoch, members }.encode();
        Ok(self.meeting.endpoint.send_notif(conn, &hello, None).map(drop)?)
    }

    fn not_joined(&self, reason: String) -> Error {
        let ranks = self.meeting.place.ranks;
        let is_missing =
            |rank: &usize| self.has_come.iter().skip(*rank).step_by(ranks).any(|come| !come);
        let missing = (0..ranks).filter(is_missing).collect();
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
