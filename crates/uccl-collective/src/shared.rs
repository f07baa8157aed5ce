//! The parts of a group that its calls share: connections, lost ranks, and the notices of ranks
//! that have given a collective up.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use uccl_p2p::{ConnId, Endpoint, Interrupt};
use uccl_wire::group::GroupNotice;

use crate::{
    error::{Error, Result},
    inbox::Inbox,
    mesh::Conns,
    plan::Place,
};

pub(crate) struct GroupCore {
    pub(crate) endpoint: Endpoint,
    pub(crate) inbox: Inbox,
    pub(crate) place: Place,
    pub(crate) epoch: u32,
    conns: Conns,
    turns: Turns,
    health: Mutex<Health>,
}

/// The order of calls with relays under way: those of one call are posted before those of the next
/// one, so that each rank expects them in the order in which they come.
#[derive(Default)]
struct Turns {
    next: AtomicU64,
    now: AtomicU64,
}

#[derive(Default)]
struct Health {
    lost: BTreeMap<usize, Arc<str>>,
    /// Why no collective can begin any more.
    broken: Option<Error>,
    has_told: bool,
}

impl GroupCore {
    pub(crate) fn new(
        (endpoint, inbox): (Endpoint, Inbox),
        place: Place,
        epoch: u32,
        conns: Conns,
    ) -> Self {
        let (turns, health) = (Turns::default(), Mutex::default());
        Self { endpoint, inbox, place, epoch, conns, turns, health }
    }

    /// The connection to a rank.
    pub(crate) fn conn(&self, rank: usize) -> Result<ConnId> {
        self.known(&self.conns.direct, rank)
    }

    /// The connection to a rank for relays.
    pub(crate) fn conn_of_relays(&self, rank: usize) -> Result<ConnId> {
        self.known(&self.conns.relays, rank)
    }

    fn known(&self, conns: &[Option<ConnId>], rank: usize) -> Result<ConnId> {
        let conn = conns.get(rank).copied().flatten();
        conn.ok_or(Error::NoSuchRank { rank, ranks: self.place.ranks })
    }

    /// The other ranks and their connections.
    pub(crate) fn others(&self) -> impl Iterator<Item = (usize, ConnId)> {
        self.conns.direct.iter().enumerate().filter_map(|(rank, conn)| Some((rank, (*conn)?)))
    }

    /// The other ranks and all their connections: those for relays follow the others.
    pub(crate) fn all_conns(&self) -> impl Iterator<Item = (usize, ConnId)> {
        let relays = self.conns.relays.iter().enumerate();
        self.others().chain(relays.filter_map(|(rank, conn)| Some((rank, (*conn)?))))
    }

    /// The turn of a call that has relays; calls take theirs in their order.
    pub(crate) fn take_turn(&self) -> u64 {
        self.turns.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether all relays of earlier calls have been posted.
    pub(crate) fn is_turn(&self, turn: u64) -> bool {
        self.turns.now.load(Ordering::Acquire) == turn
    }

    /// All relays of the call of this turn have been posted.
    pub(crate) fn pass_turn(&self, turn: u64) {
        self.turns.now.store(turn + 1, Ordering::Release);
    }

    /// The failure of a message, as the caller sees it. A lost connection is remembered.
    pub(crate) fn failure(&self, rank: usize, error: uccl_p2p::Error) -> Error {
        match error {
            uccl_p2p::Error::ConnectionLost { .. } => self.lose(rank, error.to_string().into()),
            reason => Error::Failed { rank, reason },
        }
    }

    /// Remembers a rank as lost.
    fn lose(&self, rank: usize, reason: Arc<str>) -> Error {
        let mut health = self.health.lock();
        let reason = Arc::clone(health.lost.entry(rank).or_insert(reason));
        Error::Lost { rank, reason }
    }

    /// Why no collective can begin any more, if that is so.
    pub(crate) fn broken(&self) -> Option<Error> {
        self.health.lock().broken.clone()
    }

    /// Takes in the notices of other ranks.
    pub(crate) fn hear(&self) -> Result<()> {
        for (conn, notice) in self.inbox.notices(&self.endpoint)? {
            let teller = self.all_conns().find(|(_, to)| *to == conn).map(|(rank, _)| rank);
            let Some(teller) = teller.filter(|_| notice.epoch == self.epoch) else { continue };
            let lost = notice.lost.iter().filter_map(|rank| usize::try_from(*rank).ok());
            let mut why = Error::GivenUp { rank: teller };
            for rank in lost.filter(|rank| *rank < self.place.ranks && *rank != self.place.rank) {
                why = self.lose(rank, format!("rank {teller} has lost it").into());
            }
            self.health.lock().broken.get_or_insert(why);
        }
        Ok(())
    }

    /// Ends the group's collectives, and tells the other ranks.
    pub(crate) fn break_off(&self, why: &Error) {
        let lost = {
            let mut health = self.health.lock();
            health.broken.get_or_insert_with(|| why.clone());
            if std::mem::replace(&mut health.has_told, true) {
                return;
            }
            health.lost.keys().map(|rank| *rank as u32).collect()
        };
        let notice = GroupNotice { epoch: self.epoch, lost }.encode();
        // Over each connection it is ahead of the end of that connection's messages.
        for (rank, conn) in self.all_conns() {
            // A rank that cannot be told is lost, and sees the end of the connection.
            if let Err(e) = self.endpoint.send_notif(conn, &notice, None) {
                self.failure(rank, e);
            }
        }
    }

    /// The ranks that are lost, after a look at every connection.
    pub(crate) fn lost(&self, interrupt: &mut dyn Interrupt) -> Result<Vec<usize>> {
        self.hear()?;
        for (rank, conn) in self.others() {
            match self.endpoint.check_peer(conn, interrupt) {
                Err(uccl_p2p::Error::Interrupted) => {
                    return Err(uccl_p2p::Error::Interrupted.into());
                }
                Err(e) => drop(self.failure(rank, e)),
                Ok(()) => {}
            }
        }
        Ok(self.health.lock().lost.keys().copied().collect())
    }
}
