//! A path: a pair of rails, and the channel over it, which is made, used, lost and made again.

use std::time::{Duration, Instant};

use slab::Slab;
use uccl_wire::rails::PathId;

use super::{
    aside::{Ending, Joining},
    bell::Bell,
    flight::Part,
    rail::{Channel, Ended, Limits, RailError, Request, RequestError},
};

/// After a loss the next attempt comes this soon; later ones take twice as long each.
const FIRST_RETRY: Duration = Duration::from_millis(20);
const LAST_RETRY: Duration = Duration::from_millis(500);
/// How long an attempt may take, on a device that does not say itself that it is hopeless.
const PROBE_TIMEOUT: Duration = Duration::from_secs(4);
/// How soon a device that was full is tried again, at the latest.
const FULL_RETRY: Duration = Duration::from_millis(1);
/// How soon it is looked again at what is done aside, as the joining and the end of a channel.
pub(super) const ASIDE_LOOK: Duration = Duration::from_millis(1);
/// What has been silent for so long is looked into: its port may be down, and the device in no hurry to say so.
const SILENCE: Duration = Duration::from_millis(200);
/// Looks that find nothing for each at the clock.
const LOOKS_A_CLOCK: u32 = 1024;
/// Names a probe among the requests of a channel.
const PROBE: u64 = u64::MAX;

/// Where the channel of a path stands.
enum State {
    /// There is none. The end that connects tries at this time; the other waits.
    Idle { retry_at: Option<Instant> },
    /// Our end is made: the connecting end waits for the other, the other for the word that it works.
    Opening(Box<dyn Channel>),
    /// Our end is being joined with the other.
    Joining(Joining),
    /// Both ends are made, and the connecting end finds out whether the way between them works.
    Probing(Box<dyn Channel>, Instant),
    /// It works.
    Up(Box<dyn Channel>),
    /// Our end goes.
    Ending(Ending),
    /// Our end is gone, the peer's not as far as is known: what was under way may still land.
    Dying,
}

/// A pair of rails.
pub(super) struct Path {
    pub(super) id: PathId,
    /// Which of our rails.
    pub(super) ours: usize,
    /// Which of the peer's, where this end connects.
    pub(super) theirs: u16,
    state: State,
    /// Whether an attempt has come to its end, well or not.
    pub(super) tried: bool,
    backoff: Duration,
    /// Why the last attempt failed, or the channel was lost.
    pub(super) why: Option<String>,
    limits: Limits,
    /// What is under way, by tag.
    posted: Slab<Part>,
    bytes: u64,
    /// Requests to be posted as soon as there is room.
    batch: Vec<Request>,
    /// Parts that wait for both ends to be gone.
    orphans: Vec<Part>,
    /// The peer's end has gone, before ours has.
    pub(super) peer_gone: bool,
    /// Why the peer is to be told that there is no end of ours, once it has gone.
    pub(super) refusal: Option<String>,
    /// Looks since something ended last; and since when nothing has, as far as anybody has read a clock.
    quiet_looks: u32,
    quiet_since: Option<Instant>,
    ended: Vec<Ended>,
}

/// How a request names our memory.
#[derive(Clone, Copy)]
pub(super) struct Local {
    pub(super) key: u64,
    /// The number of the registration that the key is of.
    pub(super) registration: u64,
}

/// What became of looking at a channel.
pub(super) enum Looked {
    /// It did or did not move anything.
    Fine(bool),
    /// Our end is joined with the peer's.
    Joined,
    /// It cannot be.
    NotJoined(String),
    /// It works now.
    CameUp,
    /// Nothing has ended for a while.
    Silent,
    /// It is lost.
    Lost(String),
    /// What was lost is gone, at our end.
    Gone,
}

impl Path {
    /// A path that the end that connects tries at once.
    pub(super) fn new(path: u16, ours: usize, theirs: u16, retry_at: Option<Instant>) -> Self {
        Self {
            id: PathId { path, attempt: 0 },
            ours,
            theirs,
            state: State::Idle { retry_at },
            tried: false,
            backoff: FIRST_RETRY,
            why: None,
            limits: Limits { max_bytes: 0, chunk_bytes: 0, depth: 0, window_bytes: 0 },
            posted: Slab::new(),
            bytes: 0,
            batch: Vec::new(),
            orphans: Vec::new(),
            peer_gone: false,
            refusal: None,
            quiet_looks: 0,
            quiet_since: None,
            ended: Vec::new(),
        }
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(self.state, State::Up(_))
    }

    pub(super) fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle { .. })
    }

    /// Whether its first attempt is over.
    pub(super) fn is_settled(&self) -> bool {
        self.is_up() || self.tried
    }

    /// When the next attempt is due.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        match self.state {
            State::Idle { retry_at } => retry_at,
            _ => None,
        }
    }

    /// Looks again a little later.
    pub(super) fn postpone(&mut self, why: &str) {
        self.tried = true;
        self.why = Some(why.to_owned());
        self.state = State::Idle { retry_at: Some(Instant::now() + FIRST_RETRY * 2) };
    }

    fn channel(&mut self) -> Option<&mut Box<dyn Channel>> {
        match &mut self.state {
            State::Opening(channel) | State::Probing(channel, _) | State::Up(channel) => {
                Some(channel)
            }
            State::Idle { .. } | State::Joining(_) | State::Ending(_) | State::Dying => None,
        }
    }

    /// Where our end is, while the peer's is awaited.
    pub(super) fn address(&self) -> Option<&[u8]> {
        if let State::Opening(channel) = &self.state { Some(channel.address()) } else { None }
    }

    /// The channel, if it is that of this attempt and not lost.
    pub(super) fn channel_of(&mut self, id: PathId) -> Option<&mut Box<dyn Channel>> {
        if self.id == id { self.channel() } else { None }
    }

    /// Our end of a channel is made, for this attempt.
    pub(super) fn opening(&mut self, attempt: u32, mut channel: Box<dyn Channel>, bell: &Bell) {
        // Whoever sleeps already knows of the bell only. What fails here fails again at the next look.
        let _ = channel.arm();
        if let Some(fd) = channel.fd()
            && let Err(e) = bell.watch(fd)
        {
            tracing::warn!("a channel is looked at only when its peers are awake: {e}");
        }
        self.id.attempt = attempt;
        self.state = State::Opening(channel);
    }

    /// The peer's end is made, and ours is joined with it, which [`Self::look`] tells of.
    pub(super) fn join(&mut self, address: &[u8]) {
        self.state = match std::mem::replace(&mut self.state, State::Dying) {
            State::Opening(channel) => State::Joining(Joining::of(channel, address.to_vec())),
            other => other,
        };
    }

    fn joined(&mut self) -> Looked {
        let State::Joining(joining) = std::mem::replace(&mut self.state, State::Dying) else {
            return Looked::Fine(false);
        };
        let Some((channel, joined)) = joining.end() else {
            self.state = State::Ending(Ending::past());
            return Looked::NotJoined("the system has no thread left".into());
        };
        self.state = State::Opening(channel);
        joined.map_or_else(|e| Looked::NotJoined(e.to_string()), |()| Looked::Joined)
    }

    /// Finds out whether the way to the peer works.
    pub(super) fn probe(&mut self) -> Result<(), RailError> {
        match std::mem::replace(&mut self.state, State::Dying) {
            State::Opening(mut channel) => {
                let probed = channel.probe(PROBE);
                self.state = State::Probing(channel, Instant::now());
                probed
            }
            other => {
                self.state = other;
                Ok(())
            }
        }
    }

    /// It works.
    pub(super) fn come_up(&mut self) -> bool {
        match std::mem::replace(&mut self.state, State::Dying) {
            State::Opening(channel) | State::Probing(channel, _) => {
                self.limits = channel.limits();
                self.state = State::Up(channel);
                (self.tried, self.why) = (true, None);
                true
            }
            other => {
                self.state = other;
                false
            }
        }
    }

    /// Our end goes. Until it has gone, and the peer's as well, the path is dying.
    pub(super) fn lose(&mut self, why: &str, bell: &Bell) {
        self.state = match std::mem::replace(&mut self.state, State::Dying) {
            State::Opening(channel) | State::Probing(channel, _) | State::Up(channel) => {
                if let Some(fd) = channel.fd() {
                    bell.unwatch(fd);
                }
                self.peer_gone = false;
                State::Ending(Ending::of(channel))
            }
            State::Joining(joining) => {
                self.peer_gone = false;
                State::Ending(Ending::of_joining(joining))
            }
            other => other,
        };
        (self.tried, self.why) = (true, Some(why.to_owned()));
        self.orphans.extend(self.posted.drain());
        self.batch.clear();
        self.bytes = 0;
    }

    pub(super) fn is_dying(&self) -> bool {
        matches!(self.state, State::Ending(_) | State::Dying)
    }

    /// Whether our end is on its way out.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.state, State::Ending(_))
    }

    /// The peer's end has gone too, or never was: the parts that may be requested anew. Waits for ours to be gone.
    pub(super) fn settle(&mut self, connects: bool) -> Vec<Part> {
        let retry_at = connects.then(|| Instant::now() + self.backoff);
        self.backoff = (self.backoff * 2).min(LAST_RETRY);
        (self.state, self.peer_gone) = (State::Idle { retry_at }, false);
        std::mem::take(&mut self.orphans)
    }

    /// Whether the device has something of it.
    pub(super) fn is_busy(&self) -> bool {
        !self.posted.is_empty()
    }

    /// Bytes on their way.
    pub(super) fn load(&self) -> u64 {
        self.bytes
    }

    /// How much of a part it takes now; none if it is full.
    pub(super) fn room_for(&self, len: usize) -> Option<usize> {
        if self.posted.len() >= self.limits.depth || self.bytes >= self.limits.window_bytes {
            return None;
        }
        Some((len as u64).min(self.limits.chunk_bytes).min(self.limits.max_bytes) as usize)
    }

    /// Adds a part to the next batch.
    pub(super) fn add(&mut self, part: Part, ours: Local, remote_addr: u64, remote_key: u64) {
        let Local { key: local_key, registration } = ours;
        let part = Part { registration, ..part };
        if self.posted.is_empty() {
            self.quiet_since = None;
        }
        let tag = self.posted.insert(part) as u64;
        self.bytes += part.local.len as u64;
        let (kind, local) = (part.kind, part.local);
        self.batch.push(Request { kind, local, local_key, remote_addr, remote_key, tag });
    }

    /// Posts what was added.
    ///
    /// # Safety
    /// The memory of all parts must stay valid until they have ended, or the path is lost.
    pub(super) unsafe fn flush(&mut self) -> Result<(), RailError> {
        if self.batch.is_empty() {
            return Ok(());
        }
        let State::Up(channel) = &mut self.state else { return Ok(()) };
        // SAFETY: the caller's promise.
        let posted = unsafe { channel.post(&self.batch)? };
        self.batch.drain(..posted.min(self.batch.len()));
        self.limits = channel.limits();
        Ok(())
    }

    /// Looks at the channel, and appends the parts that have ended.
    pub(super) fn look(
        &mut self,
        stall: Option<Duration>,
        parts: &mut Vec<(Part, Result<(), RequestError>)>,
    ) -> Looked {
        let (channel, probing) = match &mut self.state {
            State::Up(channel) => (channel, None),
            State::Joining(joining) if joining.is_over() => return self.joined(),
            State::Opening(channel) => (channel, None),
            State::Probing(channel, since) => (channel, Some(*since)),
            State::Ending(ending) if ending.is_over() => {
                self.state = State::Dying;
                return Looked::Gone;
            }
            State::Idle { .. } | State::Joining(_) | State::Ending(_) | State::Dying => {
                return Looked::Fine(false);
            }
        };
        let polled = channel.poll(&mut self.ended);
        let (mut moved, mut works) = (false, false);
        for Ended { tag, result } in self.ended.drain(..) {
            moved = true;
            if tag == PROBE {
                works |= result.is_ok();
            } else if let Some(part) = self.posted.try_remove(tag as usize) {
                self.bytes -= part.local.len as u64;
                if result.is_ok() {
                    self.backoff = FIRST_RETRY;
                }
                parts.push((part, result));
            }
        }
        if let Err(e) = polled {
            return Looked::Lost(e.to_string());
        }
        if works && probing.is_some() {
            return Looked::CameUp;
        }
        if probing.is_some_and(|since| since.elapsed() > PROBE_TIMEOUT) {
            return Looked::Lost("nothing gets through".into());
        }
        if moved {
            (self.quiet_looks, self.quiet_since) = (0, None);
        } else if !self.posted.is_empty() {
            self.quiet_looks = self.quiet_looks.wrapping_add(1);
            // A clock is not free everywhere.
            if self.quiet_looks.is_multiple_of(LOOKS_A_CLOCK) {
                return self.listen(stall);
            }
        }
        Looked::Fine(moved)
    }

    /// Nothing has ended of what is under way: for how long?
    fn listen(&mut self, stall: Option<Duration>) -> Looked {
        let quiet = self.quiet_for(Instant::now());
        match stall.filter(|stall| quiet > *stall) {
            Some(stall) => Looked::Lost(format!("nothing has ended for {stall:?}")),
            None if quiet >= SILENCE => Looked::Silent,
            None => Looked::Fine(false),
        }
    }

    /// How long nothing has ended of what is under way, counted from the first time that it is asked.
    fn quiet_for(&mut self, now: Instant) -> Duration {
        now.saturating_duration_since(*self.quiet_since.get_or_insert(now))
    }

    /// Prepares for sleep: false if there is something to do; else after how long it must be looked at.
    pub(super) fn arm(
        &mut self,
        now: Instant,
        stall: Option<Duration>,
    ) -> (bool, Option<Duration>) {
        // A channel that is lost is looked at once more, which tells.
        let armed = self.channel().is_none_or(|channel| channel.arm().unwrap_or(false));
        let patience = (!self.posted.is_empty()).then(|| {
            // The look that follows this sleep reads the clock.
            self.quiet_looks = LOOKS_A_CLOCK - 1;
            let rest = stall.map_or(SILENCE, |stall| stall.saturating_sub(self.quiet_for(now)));
            rest.clamp(FULL_RETRY, SILENCE)
        });
        (armed, [self.wake_in(now), patience].into_iter().flatten().min())
    }

    /// After how long it must be looked at, whatever shows.
    pub(super) fn wake_in(&self, now: Instant) -> Option<Duration> {
        let (channel, own) = match &self.state {
            State::Idle { retry_at } => {
                return retry_at.map(|at| at.saturating_duration_since(now));
            }
            State::Joining(_) | State::Ending(_) => return Some(ASIDE_LOOK),
            State::Dying => return None,
            State::Probing(channel, _) => (channel, Some(PROBE_TIMEOUT)),
            // Nothing tells when there is room again for what was not taken.
            State::Up(channel) if !self.batch.is_empty() => (channel, Some(FULL_RETRY)),
            State::Opening(channel) | State::Up(channel) => (channel, None),
        };
        [channel.wake_in(now), own].into_iter().flatten().min()
    }

    /// Whether a part of this operation is under way on our channel.
    pub(super) fn carries(&self, flight: usize) -> bool {
        self.posted.iter().any(|(_, part)| part.flight == flight)
    }

    /// Whether our device may be reaching our memory by the registration of this number.
    pub(super) fn is_at_work_with(&self, registration: u64) -> bool {
        let ending = if self.is_ending() { &self.orphans[..] } else { &[] };
        let parts = self.posted.iter().map(|(_, part)| part).chain(ending);
        parts.into_iter().any(|part| part.registration == registration)
    }

    /// Whether a part of the peer's region of this slot and key is under way.
    pub(super) fn uses(&self, slot: u32, key: u64) -> bool {
        let parts = self.posted.iter().map(|(_, part)| part).chain(&self.orphans);
        parts.into_iter().any(|part| (part.remote.slot, part.remote.key) == (slot, key))
    }

    /// Every part that it has, for a lane that ends.
    pub(super) fn end(&mut self, bell: &Bell) {
        self.lose("shut down", bell);
        self.orphans.clear();
        // Waits for a channel that ends.
        self.state = State::Idle { retry_at: None };
    }
}
