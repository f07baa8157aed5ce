//! One rank's end of a group of ranks.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use smallvec::SmallVec;
use uccl_local::cma::Process;
use uccl_wire::ep_card::EpCard;

use crate::{
    blocks::{Block, Blocks},
    error::{Error, Phase, Result},
    placing::{Place, Places, SLOTS},
    protocol::{Call, Step, Words},
    window::Window,
};

/// How a rank takes part in a group.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Which rank this is.
    pub rank: usize,
    /// How many ranks there are.
    pub ranks: usize,
    /// Bytes of the pool in which calls are placed; all ranks have the same.
    pub pool: usize,
    /// How long a call waits for its peers.
    pub timeout: Duration,
    /// Whether a peer that is late is masked, and the call goes on without it, instead of failing.
    pub masks_late: bool,
}

/// Gives every rank what every rank gives, in order of rank; `None` for a rank that is not there.
pub type Exchange<'a> = dyn FnMut(Vec<u8>) -> Result<Vec<Option<Vec<u8>>>> + 'a;

/// Asked now and then by a call that waits: true ends it.
pub type Interrupted<'a> = dyn FnMut() -> bool + 'a;

/// One rank's end of a group. Dropping it says nothing to the others.
pub struct Group {
    config: Config,
    window: Window,
    places: Mutex<Places>,
    masked: Vec<AtomicBool>,
    /// Processes of the peers; none of this process.
    processes: Vec<Option<Process>>,
    blocks: Blocks,
}

impl Group {
    /// Joins the ranks of a group: each calls this, and each maps the windows of all others.
    ///
    /// # Errors
    /// A rank's window cannot be reached, or ranks do not agree on the group. All ranks fail then.
    pub fn join(config: Config, exchange: &mut Exchange<'_>) -> Result<Arc<Self>> {
        let Config { rank: me, ranks, pool, .. } = config;
        if me >= ranks {
            return Err(Error::invalid(format!("there is no rank {me} of {ranks}")));
        }
        let mut window = Window::new(me, ranks, pool)?;
        let cards = exchange(window.card(1).encode().to_vec())?;
        let opened = open_all(config, &mut window, &cards);
        // A rank that failed tells the others why, so that none waits for it in vain.
        let verdict = opened.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let verdicts = exchange(verdict.into_bytes())?;
        let processes = opened?;
        let failed = |(_, text): &(usize, &Option<Vec<u8>>)| {
            text.as_ref().is_some_and(|text| !text.is_empty())
        };
        if let Some((peer, text)) = verdicts.iter().enumerate().find(failed) {
            let text = String::from_utf8_lossy(text.as_deref().unwrap_or_default());
            let why = format!("could not join: {text}");
            return Err(Error::PeerLost { phase: Phase::Join, rank: me, peer, why });
        }
        let masked = cards.iter().map(|card| AtomicBool::new(card.is_none())).collect();
        let known = |card: &Option<Vec<u8>>| EpCard::decode(card.as_deref()?).ok();
        let blocks = Blocks::new(&cards.iter().map(known).collect::<Vec<_>>(), me);
        Ok(Arc::new(Self { config, window, places: Mutex::default(), masked, processes, blocks }))
    }

    /// Which rank this is.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.config.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.config.ranks
    }

    /// Bytes of the pool.
    #[must_use]
    pub fn pool_len(&self) -> usize {
        self.window.own().pool_len()
    }

    /// This rank's own pool.
    #[must_use]
    pub fn pool(&self) -> *mut u8 {
        self.window.own().pool(0, self.pool_len())
    }

    /// Leaves a rank out of the calls that follow, or lets it take part again.
    ///
    /// # Errors
    /// There is no such rank, or it has no window here.
    pub fn mask(&self, rank: usize, is_masked: bool) -> Result<()> {
        let masked = self.masked.get(rank);
        let masked =
            masked.ok_or_else(|| Error::invalid(format!("no rank {rank} of {}", self.ranks())))?;
        if !is_masked && self.window.of(rank).is_none() {
            return Err(Error::invalid(format!("rank {rank} has not joined")));
        }
        masked.store(is_masked, Ordering::Relaxed);
        Ok(())
    }

    /// Whether a rank is left out.
    #[must_use]
    pub fn is_masked(&self, rank: usize) -> bool {
        self.masked[rank].load(Ordering::Relaxed)
    }

    /// Makes memory that peers can read where it is: a combine of rows in it copies none.
    ///
    /// # Errors
    /// There is not enough.
    pub fn block(&self, len: usize) -> Result<Arc<Block>> {
        self.blocks.make(len)
    }

    /// Whether memory is in a block of this rank.
    #[must_use]
    pub fn has_block(&self, memory: &Range<usize>) -> bool {
        self.blocks.find(memory).is_some()
    }

    /// Whether nobody reads from a block any more, so that it may be written to.
    #[must_use]
    pub fn is_read(&self, block: &Block) -> bool {
        let mut calls = block.calls.lock();
        self.forget_ended(&mut calls);
        calls.is_empty()
    }

    /// A call reads from a block.
    pub(crate) fn note_reading(&self, block: &Block, call: u64) {
        let mut calls = block.calls.lock();
        self.forget_ended(&mut calls);
        calls.push(call);
    }

    /// Forgets calls that all ranks have ended.
    fn forget_ended(&self, calls: &mut SmallVec<[u64; SLOTS]>) {
        calls.retain(|call| {
            let has_ended = |rank: usize| {
                let mark = self.window.taken(rank, *call as usize % SLOTS);
                mark.call > *call || mark.call == *call && mark.is_last
            };
            !(0..self.ranks()).all(|rank| self.is_masked(rank) || has_ended(rank))
        });
    }

    pub(crate) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    pub(crate) fn window(&self) -> &Window {
        &self.window
    }

    /// The next call's place.
    pub(crate) fn place(&self, len: usize) -> Result<Place> {
        let pool = self.pool_len();
        self.places.lock().take(len, pool).ok_or_else(|| {
            let why = format!(
                "the call needs {len} bytes of the buffer, which has {pool}; make it with more"
            );
            Error::invalid(why)
        })
    }

    /// Rounds for the ranks that are there.
    pub(crate) fn rounds(&self, of: impl Fn(usize) -> u16) -> Vec<Option<u16>> {
        (0..self.ranks()).map(|rank| (!self.is_masked(rank)).then(|| of(rank))).collect()
    }

    /// Does the steps of a call until `until`. `act` copies what is sent or taken.
    pub(crate) fn drive(
        &self,
        call: &mut Call,
        until: Until,
        wait: &mut Wait<'_, '_>,
        mut act: impl FnMut(&Call, Step) -> Result<()>,
    ) -> Result<()> {
        let window = &self.window;
        let mut patience = Patience::new();
        let driven = loop {
            let step = match until {
                Until::SentAll => call.next_send(window),
                Until::HeardAll => call.next(window, false),
                Until::Over => call.next(window, true),
            };
            let done = match step {
                Some(Step::Tell { to, mark }) => {
                    window.set_taken(to, mark);
                    Ok(())
                }
                Some(step @ Step::Send { to, mark }) => act(call, step).map(|()| {
                    window.set_arrived(to, mark);
                    call.sent(to);
                }),
                Some(step @ Step::Take { from, .. }) => {
                    act(call, step).map(|()| call.took(from, window))
                }
                None if until.is_reached(call, window) => return Ok(()),
                None => self.wait(call, wait, &mut patience),
            };
            if step.is_some() {
                patience = Patience::new();
            }
            if let Err(e) = done {
                break e;
            }
        };
        window.set_fault(call.number());
        Err(driven)
    }

    /// Waits a moment; an error when that has no end in sight.
    fn wait(
        &self,
        call: &mut Call,
        wait: &mut Wait<'_, '_>,
        patience: &mut Patience,
    ) -> Result<()> {
        if !patience.pause() {
            return Ok(());
        }
        if (wait.is_interrupted)() {
            return Err(Error::Interrupted);
        }
        let (phase, rank) = (wait.phase, self.rank());
        let awaited = call.awaited(&self.window);
        for late in &awaited {
            let peer = late.peer;
            let why = match self.window.fault(peer) {
                Some(other) => format!("gave up on call {other}"),
                None if self.processes[peer].as_ref().is_some_and(Process::has_ended) => {
                    "has ended".to_owned()
                }
                None => continue,
            };
            match self.config.masks_late {
                true => self.go_on_without(peer, call),
                false => return Err(Error::PeerLost { phase, rank, peer, why }),
            }
        }
        let waited = patience.since.elapsed();
        if waited < self.config.timeout {
            return Ok(());
        }
        if !self.config.masks_late {
            return Err(Error::Overdue { phase, rank, awaited, waited });
        }
        awaited.iter().for_each(|late| self.go_on_without(late.peer, call));
        Ok(())
    }

    fn go_on_without(&self, peer: usize, call: &mut Call) {
        self.masked[peer].store(true, Ordering::Relaxed);
        call.drop_rank(peer);
    }
}

/// Maps the windows of all ranks that are there, and watches their processes.
fn open_all(
    config: Config,
    window: &mut Window,
    cards: &[Option<Vec<u8>>],
) -> Result<Vec<Option<Process>>> {
    let Config { rank: me, ranks, .. } = config;
    if cards.len() != ranks {
        return Err(Error::invalid(format!("{} cards for {ranks} ranks", cards.len())));
    }
    let open = |(rank, card): (usize, &Option<Vec<u8>>)| {
        let Some(card) = card else { return Ok(None) };
        let card = EpCard::decode(card).map_err(|e| Error::invalid(format!("rank {rank}: {e}")))?;
        let agree = [
            ("its rank", u64::from(card.rank), rank as u64),
            ("as the number of ranks", u64::from(card.ranks), ranks as u64),
            ("as bytes of the pool", card.pool, window.own().pool_len() as u64),
        ];
        for (what, theirs, ours) in agree {
            if theirs != ours {
                let phase = Phase::Join;
                return Err(Error::Disagree { phase, rank: me, peer: rank, what, theirs, ours });
            }
        }
        window.open(&card)?;
        if card.pid == std::process::id() {
            return Ok(None);
        }
        let os = |source| Error::Os { what: format!("watching rank {rank}"), source };
        Process::open(card.pid.cast_signed()).map(Some).map_err(os)
    };
    cards.iter().enumerate().map(open).collect()
}

/// How far a call is driven.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    /// All has been sent.
    SentAll,
    /// The first round of every rank is there.
    HeardAll,
    /// Nothing is left to do.
    Over,
}

impl Until {
    fn is_reached(self, call: &Call, window: &Window) -> bool {
        match self {
            Self::SentAll => call.has_sent_all(),
            Self::HeardAll => call.has_heard_all(window),
            Self::Over => call.is_over(window),
        }
    }
}

/// What a call that waits needs to know.
pub(crate) struct Wait<'a, 'b> {
    pub(crate) phase: Phase,
    pub(crate) is_interrupted: &'a mut Interrupted<'b>,
}

/// Looks without a pause, then yields, then naps.
struct Patience {
    since: Instant,
    looks: u32,
}

/// Looks before the processor is offered to others: a peer may be waiting for it.
const SPINS: u32 = 64;
const YIELDS: u32 = 4096;
const NAP: Duration = Duration::from_micros(50);

impl Patience {
    fn new() -> Self {
        Self { since: Instant::now(), looks: 0 }
    }

    /// Whether it is time to look whether the wait makes sense.
    fn pause(&mut self) -> bool {
        self.looks = self.looks.saturating_add(1);
        match self.looks {
            ..SPINS => std::hint::spin_loop(),
            SPINS..YIELDS => thread::yield_now(),
            _ => thread::sleep(NAP),
        }
        self.looks >= YIELDS && self.looks.is_multiple_of(16)
    }
}
