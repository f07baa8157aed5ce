//! A rank's end of a group.

mod calls;
mod post;

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use uccl_p2p::{ConnId, Endpoint, Interrupt, MrId};
use uccl_wire::group::{GroupHello, RANK_CARD_LEN, RankCard};

use crate::{
    error::{Error, Result},
    inbox::Inbox,
    ledger::Ledger,
    memory::{Buffer, Registry},
    mesh::{self, Meeting},
    plan::{Hosts, Place},
    relayer::Relayer,
    shared::GroupCore,
    work::Work,
};

/// A group that a rank joins.
pub struct GroupRequest<'a> {
    /// The endpoint of this rank. While ranks join, the group takes all connections that come.
    pub endpoint: &'a Endpoint,
    /// The number of this rank.
    pub rank: usize,
    /// The [card](Group::card) of each rank.
    pub cards: &'a [Vec<u8>],
    /// How long ranks may take to come; zero is no limit.
    pub timeout: Duration,
    /// Whether single messages to ranks of other hosts need memory that was
    /// [registered](Group::register), as in UCCL.
    pub needs_registration: bool,
}

/// A rank's end of a group. All ranks call its collectives in the same order.
pub struct Group {
    shared: Arc<GroupCore>,
    cards: Vec<RankCard>,
    /// None in a group without relays.
    hosts: Option<Hosts>,
    /// The ranks, by their numbers in the first group.
    members: Vec<u32>,
    needs_registration: bool,
    registry: Registry,
    ledger: Ledger,
    relayer: Relayer,
    /// Held while the messages of a call are posted: two calls of two threads do not mix.
    posting: Mutex<()>,
    /// A byte to send and a byte from each rank, for barriers.
    tokens: Buffer,
    is_closed: AtomicBool,
}

impl Group {
    /// The card with which other ranks find an endpoint.
    #[must_use]
    pub fn card(endpoint: &Endpoint) -> [u8; RANK_CARD_LEN] {
        RankCard { addr: endpoint.addr(), instance: endpoint.instance() }.encode()
    }

    /// Joins a group, and waits until all ranks have.
    ///
    /// # Errors
    /// A card is none, ranks have not come in time, or the wait was interrupted.
    pub fn join(request: &GroupRequest<'_>, interrupt: &mut dyn Interrupt) -> Result<Self> {
        let cards = request.cards.iter().enumerate().map(|(rank, card)| {
            RankCard::decode(card).map_err(|reason| Error::Card { rank, reason })
        });
        let cards: Vec<_> = cards.collect::<Result<_>>()?;
        let place = Place { rank: request.rank, ranks: cards.len() };
        if place.rank >= place.ranks {
            return Err(Error::NoSuchRank { rank: place.rank, ranks: place.ranks });
        }
        let hello = GroupHello { epoch: 0, members: (0..place.ranks as u32).collect() };
        let meeting = Meeting {
            endpoint: request.endpoint,
            inbox: &Inbox::default(),
            place,
            cards: &cards,
            hello,
            has_relays: has_relays(&cards, request.needs_registration),
            timeout: request.timeout,
        };
        Self::meet(meeting, request.needs_registration, interrupt)
    }

    fn meet(
        meeting: Meeting<'_>,
        needs_registration: bool,
        interrupt: &mut dyn Interrupt,
    ) -> Result<Self> {
        let conns = mesh::meet(&meeting, interrupt)?;
        let Meeting { endpoint, inbox, place, cards, hello, has_relays, .. } = meeting;
        let ends = (endpoint.clone(), inbox.clone());
        let shared = GroupCore::new(ends, place, hello.epoch, conns);
        let registry = Registry::default();
        let tokens = tokens(place.ranks);
        registry.register(endpoint, &tokens)?;
        Ok(Self {
            shared: Arc::new(shared),
            cards: cards.to_vec(),
            hosts: has_relays.then(|| hosts(cards)),
            members: hello.members,
            needs_registration,
            registry,
            ledger: Ledger::default(),
            relayer: Relayer::default(),
            posting: Mutex::default(),
            tokens,
            is_closed: AtomicBool::new(false),
        })
    }

    /// The number of this rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.shared.place.rank
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.shared.place.ranks
    }

    /// The numbers that the ranks had in the first group.
    #[must_use]
    pub fn members(&self) -> &[u32] {
        &self.members
    }

    /// Whether a rank has this one's address.
    #[must_use]
    pub fn is_local(&self, rank: usize) -> bool {
        let ip = |rank: usize| -> Option<IpAddr> { Some(self.cards.get(rank)?.addr.ip()) };
        ip(rank) == ip(self.rank())
    }

    /// The connection to another rank.
    ///
    /// # Errors
    /// There is no such rank, or it is this one.
    pub fn connection(&self, rank: usize) -> Result<ConnId> {
        self.shared.conn(rank)
    }

    /// Registers memory for later calls, unless earlier registered memory holds it.
    ///
    /// # Errors
    /// The engine refuses the memory.
    pub fn register(&self, buffer: &Buffer) -> Result<MrId> {
        self.registry.register(&self.shared.endpoint, buffer)
    }

    /// Ends the registration of exactly this memory; `false` if there is none.
    ///
    /// # Errors
    /// The memory is in use, or may still be touched.
    pub fn deregister(&self, ptr: usize, len: usize) -> Result<bool> {
        self.registry.deregister(&self.shared.endpoint, ptr, len)
    }

    /// The registration that holds this memory.
    #[must_use]
    pub fn registered(&self, ptr: usize, len: usize) -> Option<MrId> {
        self.registry.holding(ptr, len)
    }

    /// The call of a number, which [`Work::id`] told.
    ///
    /// # Errors
    /// There was none, or too many calls have ended since.
    pub fn work(&self, id: u64) -> Result<Arc<Work>> {
        self.ledger.find(id)
    }

    /// The ranks that are lost, as far as this rank can tell now.
    ///
    /// # Errors
    /// The look was interrupted, or the endpoint is closed.
    pub fn lost(&self, interrupt: &mut dyn Interrupt) -> Result<Vec<usize>> {
        self.shared.lost(interrupt)
    }

    /// The group of those ranks that are not lost, on connections of its own: every one of them
    /// calls this. Their order stays. The collectives of this group end.
    ///
    /// # Errors
    /// Ranks have not come in time, as where one of them is lost meanwhile, or they disagree about
    /// the lost ones: the caller may try again.
    pub fn shrink(&self, timeout: Duration, interrupt: &mut dyn Interrupt) -> Result<Self> {
        self.check_open()?;
        let lost = self.lost(interrupt)?;
        self.shared.break_off(&Error::GivenUp { rank: self.rank() });
        let left: Vec<_> = (0..self.ranks()).filter(|rank| !lost.contains(rank)).collect();
        let place = Place {
            rank: left.iter().position(|rank| *rank == self.rank()).unwrap_or_default(),
            ranks: left.len(),
        };
        let cards: Vec<_> = left.iter().map(|rank| self.cards[*rank]).collect();
        let members = left.iter().map(|rank| self.members[*rank]).collect();
        let meeting = Meeting {
            endpoint: &self.shared.endpoint,
            inbox: &self.shared.inbox,
            place,
            cards: &cards,
            hello: GroupHello { epoch: self.shared.epoch + 1, members },
            has_relays: has_relays(&cards, self.needs_registration),
            timeout,
        };
        Self::meet(meeting, self.needs_registration, interrupt)
    }

    /// Ends all calls and registrations, and leaves the ranks. The endpoint stays open.
    pub fn close(&self) {
        if self.is_closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.relayer.close();
        self.ledger.clear();
        for (_, conn) in self.shared.all_conns() {
            mesh::leave(&self.shared.endpoint, conn);
        }
        self.registry.clear(&self.shared.endpoint);
    }

    fn check_open(&self) -> Result<()> {
        match self.is_closed.load(Ordering::SeqCst) {
            true => Err(Error::Closed),
            false => Ok(()),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.close();
    }
}

fn hosts(cards: &[RankCard]) -> Hosts {
    Hosts::of(cards.iter().map(|card| card.addr.ip()))
}

/// Whether pairs of ranks have a connection for relays. Programs that must register their memory
/// are written for UCCL, which has messages and no broadcast.
fn has_relays(cards: &[RankCard], needs_registration: bool) -> bool {
    !needs_registration && hosts(cards).need_relays()
}

/// A byte for each rank, and one more. Barriers send and receive them; nobody reads them.
fn tokens(ranks: usize) -> Buffer {
    let bytes: Box<[AtomicU8]> = (0..=ranks).map(|_| AtomicU8::new(0)).collect();
    let (ptr, len) = (bytes.as_ptr() as usize, bytes.len());
    // SAFETY: the bytes live as long as the box, and only the engine touches them.
    unsafe { Buffer::new(ptr, len, Arc::new(bytes)) }
}
