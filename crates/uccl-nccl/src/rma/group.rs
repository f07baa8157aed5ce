//! A group: the ranks of one collective communicator, and the regions that they have registered.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Mutex, RwLock};
use uccl_p2p::{ConnId, MrId, NoInterrupt, wire::advert::Advert};

use super::{
    engine::{Engine, Recipient},
    note::{Body, MAX_REGIONS, Note, Token},
};
use crate::{log, rma_error::RmaError};

/// The longest time in which goodbyes are to arrive.
const FAREWELL: Duration = Duration::from_secs(1);

/// The chunks of locked memory that a connection's copies to and from a GPU use, and the most that
/// are locked ahead for all.
const CHUNKS: usize = 10;
const MOST_CHUNKS: usize = 128;

/// A group of ranks, from the call of `listen` on.
pub(crate) struct Group {
    pub(crate) token: Token,
    pub(crate) engine: Arc<Engine>,
    members: RwLock<Vec<Member>>,
    /// The own rank and the tokens of all, once they are known.
    place: RwLock<Option<Place>>,
    next_region: Mutex<usize>,
    next_context: AtomicU32,
    failure: Mutex<Option<String>>,
}

/// The own place in a group.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) tokens: Arc<[Token]>,
}

/// A rank of a group.
#[derive(Clone, Default)]
struct Member {
    conn: Option<ConnId>,
    /// The other end of the own rank's connection to itself.
    far_end: Option<ConnId>,
    /// By the numbers that the ranks count alike.
    regions: Vec<Option<Advert>>,
    /// It has said goodbye, or this side has given it up.
    has_left: bool,
}

/// A registered region: symmetric, so that its number names it on every rank.
pub(crate) struct Region {
    pub(crate) number: usize,
    pub(crate) mr: MrId,
    pub(crate) base: usize,
}

impl Group {
    pub(crate) fn new(engine: &Arc<Engine>, token: Token) -> Arc<Self> {
        let group = Arc::new(Self {
            token,
            engine: Arc::clone(engine),
            members: RwLock::default(),
            place: RwLock::default(),
            next_region: Mutex::default(),
            next_context: AtomicU32::default(),
            failure: Mutex::default(),
        });
        let weak = Arc::downgrade(&group);
        engine.add(token, weak);
        group
    }

    pub(crate) fn set_place(&self, place: Place) {
        let mut members = self.members.write();
        members.resize(place.tokens.len(), Member::default());
        *self.place.write() = Some(place);
    }

    /// Numbers of contexts that nobody else in this group uses.
    pub(crate) fn take_contexts(&self, count: u32) -> u32 {
        self.next_context.fetch_add(count, Ordering::Relaxed)
    }

    pub(crate) fn set_conn(&self, rank: usize, conn: ConnId) {
        if let Some(member) = self.members.write().get_mut(rank) {
            member.conn = Some(conn);
        }
    }

    /// The ranks without a connection.
    pub(crate) fn missing(&self) -> Vec<usize> {
        let members = self.members.read();
        (0..members.len()).filter(|rank| members[*rank].conn.is_none()).collect()
    }

    /// Registers memory and tells the others its advert. The number of the region is the same on
    /// all ranks, since they register in the same order.
    ///
    /// # Safety
    ///
    /// The memory stays allocated until the region is deregistered, or the group closed.
    pub(crate) unsafe fn register(&self, ptr: usize, len: usize) -> Result<Region, RmaError> {
        let endpoint = &self.engine.endpoint;
        let failed = RmaError::of_engine("registration");
        // SAFETY: the caller's.
        let mr = unsafe { endpoint.register(ptr, len) }.map_err(failed)?;
        let chunks = MOST_CHUNKS.min(CHUNKS * (self.len() + 1));
        // An error shows when a put needs the memory.
        let _of_puts = endpoint.prepare_staging(mr, chunks);
        let mut next = self.next_region.lock();
        let told = match endpoint.advertise(mr, ptr, len) {
            Ok(_) if *next >= MAX_REGIONS => {
                Err(RmaError::Failed("it has too many regions".into()))
            }
            Ok(advert) => self.tell_region(*next, advert),
            Err(error) => Err(RmaError::Engine { action: "registration", error }),
        };
        if let Err(error) = told {
            // The error of the registration counts.
            let _unknown_to_peers = endpoint.deregister(mr);
            return Err(error);
        }
        let number = *next;
        *next += 1;
        Ok(Region { number, mr, base: ptr })
    }

    fn tell_region(&self, number: usize, advert: Advert) -> Result<(), RmaError> {
        let Some(place) = self.place.read().clone() else { return Ok(()) };
        if let Some(own) = self.members.write().get_mut(place.rank) {
            own.set_region(number, advert);
        }
        for (rank, to) in place.tokens.iter().enumerate().filter(|(rank, _)| *rank != place.rank) {
            let Some(conn) = self.conn(rank) else { continue };
            let body = Body::Region { number, advert };
            let note = Note { to: *to, from: place.rank, body }.encode();
            let sent = self.engine.endpoint.send_notif(conn, note, None);
            sent.map_err(RmaError::of_peer("registration", rank))?;
        }
        Ok(())
    }

    /// The connection to a rank that has not left.
    pub(crate) fn conn(&self, rank: usize) -> Option<ConnId> {
        self.members.read().get(rank).filter(|member| !member.has_left)?.conn
    }

    /// A rank's region; `None` while its advert has not come.
    pub(crate) fn region_of(&self, rank: usize, number: usize) -> Option<Advert> {
        *self.members.read().get(rank)?.regions.get(number)?
    }

    pub(crate) fn len(&self) -> usize {
        self.members.read().len()
    }

    /// Notes the group's first failure, and has it logged.
    pub(crate) fn fail(&self, error: &RmaError) {
        let mut failure = self.failure.lock();
        if failure.is_none() {
            let text = error.to_string();
            log::warn(&text);
            *failure = Some(text);
        }
    }

    pub(crate) fn check(&self) -> Result<(), RmaError> {
        self.failure.lock().clone().map_or(Ok(()), |text| Err(RmaError::Failed(text)))
    }

    /// Fails the group if a rank is lost that has not said goodbye.
    pub(crate) fn look_at_members(&self) -> Result<(), RmaError> {
        for rank in 0..self.len() {
            let Some(conn) = self.conn(rank) else { continue };
            let Err(error) = self.engine.endpoint.check_connection(conn) else { continue };
            // Its goodbye may be among the messages that nobody has taken.
            self.engine.take_notes()?;
            if self.conn(rank).is_some() {
                self.fail(&RmaError::Peer { action: "connection", rank, error });
            }
        }
        self.check()
    }

    /// Gives a rank up: nothing that is under way to or from it goes on.
    pub(crate) fn give_up(&self, rank: usize) {
        let conn = self.conn(rank);
        if let Some(member) = self.members.write().get_mut(rank) {
            member.has_left = true;
        }
        if let Some(conn) = conn {
            // It may have been lost already.
            let _ended = self.engine.endpoint.disconnect(conn);
        }
    }

    /// Says goodbye to all ranks, waits a moment for that, and ends their connections.
    pub(crate) fn close(&self) {
        if let Some(place) = self.place.read().clone() {
            self.say_goodbye(&place);
        }
        self.abandon();
    }

    fn say_goodbye(&self, place: &Place) {
        let endpoint = &self.engine.endpoint;
        let goodbye = |(rank, to): (usize, &Token)| {
            let note = Note { to: *to, from: place.rank, body: Body::Goodbye }.encode();
            endpoint.send_notif_held(self.conn(rank)?, note, Some(FAREWELL)).ok()
        };
        let others = place.tokens.iter().enumerate().filter(|(rank, _)| *rank != place.rank);
        let sent: Vec<_> = others.filter_map(goodbye).collect();
        let end = Instant::now() + FAREWELL;
        for note in sent {
            let left = end.saturating_duration_since(Instant::now());
            // A rank that does not take it sees the end of the connection.
            let _taken = note.wait(Some(left), &mut NoInterrupt);
        }
    }

    /// Ends all connections. The ranks see that they are lost, unless there was a goodbye.
    pub(crate) fn abandon(&self) {
        self.engine.remove(&self.token);
        let members = std::mem::take(&mut *self.members.write());
        for conn in members.iter().flat_map(|member| [member.conn, member.far_end]).flatten() {
            // It may have been lost already.
            let _ended = self.engine.endpoint.disconnect(conn);
        }
    }
}

impl Recipient for Group {
    fn take(&self, conn: ConnId, note: &Note) {
        let place = self.place.read().clone();
        let mut members = self.members.write();
        if place.is_some() && note.from >= members.len() {
            return tracing::warn!("a message of rank {}, which is not in the group", note.from);
        }
        if members.len() <= note.from {
            members.resize(note.from + 1, Member::default());
        }
        let member = &mut members[note.from];
        match &note.body {
            Body::Hello if place.is_some_and(|place| place.rank == note.from) => {
                member.far_end = Some(conn);
            }
            // The first one counts: another process has no reason to take its place.
            Body::Hello => member.conn = member.conn.or(Some(conn)),
            _ if member.conn != Some(conn) => {
                tracing::warn!("a message of rank {} over another's connection", note.from);
            }
            Body::Region { number, advert } => member.set_region(*number, *advert),
            Body::Goodbye => member.has_left = true,
        }
    }
}

impl Member {
    fn set_region(&mut self, number: usize, advert: Advert) {
        if self.regions.len() <= number {
            self.regions.resize(number + 1, None);
        }
        self.regions[number] = Some(advert);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.engine.remove(&self.token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings;

    #[test]
    fn a_message_counts_over_its_senders_connection_alone() {
        let settings = Settings::from_env().expect("settings");
        let engine = Arc::new(Engine::new(&settings).expect("an endpoint"));
        let group = Group::new(&engine, [3; 16]);
        group.set_place(Place { rank: 0, tokens: [[3; 16], [4; 16]].into() });
        let (its, strangers) = (ConnId(1), ConnId(2));
        let note = |from, body| Note { to: [3; 16], from, body };
        let advert = Advert { addr: 0x1000, len: 64, key: 7, slot: 3, instance: 9 };
        let region = |number| note(1, Body::Region { number, advert });
        group.take(its, &region(0));
        assert_eq!(group.region_of(1, 0), None, "it has not said who it is");
        group.take(its, &note(1, Body::Hello));
        group.take(strangers, &note(1, Body::Hello));
        assert_eq!(group.conn(1), Some(its), "the first one counts");
        group.take(strangers, &region(0));
        group.take(strangers, &note(1, Body::Goodbye));
        group.take(its, &region(1));
        assert_eq!((group.region_of(1, 0), group.region_of(1, 1)), (None, Some(advert)));
        assert_eq!(group.conn(1), Some(its), "it has not left");
        group.take(its, &note(2, Body::Hello));
        assert_eq!(group.len(), 2, "there is no such rank");
        group.take(its, &note(1, Body::Goodbye));
        assert_eq!(group.conn(1), None);
        drop(group);
        engine.endpoint.close().expect("closed");
    }
}
