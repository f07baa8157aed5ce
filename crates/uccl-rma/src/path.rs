//! A path is a pair of rails and the channel over it. The channel is made, used, lost, and made
//! again.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use slab::Slab;
use uccl_fabric::{
    rail::{
        Channel, Export, Limits, Rail, RailError, RemoteKey, Request, RequestEnd, RequestError,
    },
    region::Rights,
};
use uccl_wire::rails::PathId;

use super::{
    aside::{ChannelResult, ChannelSetup, ChannelTeardown, PortLook},
    bell::Bell,
    exports::{Exports, KeyPurpose},
    flight::Part,
    pinned::PinnedRegion,
    rails::Rails,
};

/// How soon after a loss the next attempt comes. Each later attempt waits twice as long, up to
/// [`LAST_RETRY`].
const FIRST_RETRY: Duration = Duration::from_millis(20);
const LAST_RETRY: Duration = Duration::from_secs(60);
/// How soon to look again at a port that is down.
const DOWN_LOOK: Duration = Duration::from_millis(100);
/// A device that was full is tried again after this time at the latest.
const FULL_RETRY: Duration = Duration::from_millis(1);
/// How soon to check again on work that other threads do, such as joining a channel or ending it.
pub(super) const ASIDE_LOOK: Duration = Duration::from_millis(1);
/// After this long without a completion, the port is checked: it may be down, and the device slow
/// to report it.
const SILENCE: Duration = Duration::from_millis(200);
/// The clock is read once in this many looks that find nothing.
const LOOKS_A_CLOCK: u32 = 1024;
/// The reason why nothing goes over a rail with an unplugged cable.
pub(super) const PORT_IS_DOWN: &str = "its port is down";
/// The tag of a probe among a channel's requests.
const PROBE: u64 = u64::MAX;

/// Where the channel of a path stands.
enum State {
    /// There is none. The connecting end makes one at this time; the accepting end waits.
    Idle { retry_at: Option<Instant> },
    /// Our end is made. The connecting end waits for the address of the peer's end; the accepting
    /// end waits for `Ready`.
    Opening(Box<dyn Channel>),
    /// Our end is being made.
    Making(ChannelSetup),
    /// Our end is being joined with the other. That of the accepting end is made first.
    Joining(ChannelSetup),
    /// Both ends are made. The connecting end has sent a probe to find out whether the channel
    /// works. It is given up at this time, if the device itself does not report a failure earlier.
    Probing(Box<dyn Channel>, Option<Instant>),
    /// It works.
    Up(Box<dyn Channel>),
    /// Our end is being dropped, on a thread of its own.
    Ending(ChannelTeardown),
    /// Our end is gone. The peer's may not be: requests that were under way may still land.
    Dying,
}

/// A pair of rails.
pub(super) struct Path {
    pub(super) id: PathId,
    /// The index of our rail.
    pub(super) ours: usize,
    /// The index of the peer's rail. Used only by the connecting end.
    pub(super) theirs: u16,
    state: State,
    /// The name of the peer's rail, where it is known.
    pub(super) their_name: String,
    /// Whether an attempt has ended, with or without success.
    pub(super) tried: bool,
    has_worked: bool,
    /// How many attempts have failed since the last that did not; and whether the present one has
    /// not.
    failed: u32,
    works: bool,
    /// It has been logged that it does not work.
    is_told: bool,
    backoff: Duration,
    /// Why the last attempt failed, or the channel was lost.
    pub(super) why: Option<String>,
    limits: Limits,
    /// The keys that are being made for our end of the channel.
    exports: Exports,
    /// The parts under way, by the tag of their request.
    posted: Slab<Part>,
    bytes: u64,
    /// Requests that the device has not taken yet.
    batch: Vec<Request>,
    /// The parts of a lost channel. They are requested again when both of its ends are gone.
    orphans: Vec<Part>,
    /// The peer's end is gone, and ours is not yet.
    pub(super) peer_gone: bool,
    /// If set: once our end is gone, the peer is sent `Refused` with this reason.
    pub(super) refusal: Option<String>,
    /// How many looks have found nothing since a request last ended; and the first time after that
    /// at which the clock was read.
    quiet_looks: u32,
    quiet_since: Option<Instant>,
    /// Whether the port is up, while that is being found out.
    port: Option<PortLook>,
    /// When that was last begun.
    looked_at_port: Option<Instant>,
    ended: Vec<RequestEnd>,
}

/// How a request names our memory.
#[derive(Clone, Copy)]
pub(super) struct Local {
    pub(super) key: u64,
    /// The number of the registration that the key is of.
    pub(super) registration: u64,
}

/// The result of a look at a path.
pub(super) enum LookResult {
    /// Nothing has changed for the path as a whole. True if requests have ended.
    Fine(bool),
    /// Our end is made.
    Made,
    /// Our end could not be made, for this reason.
    NotMade(String),
    /// Our end was not made, as the port is down.
    Down,
    /// Our end is joined with the peer's.
    Joined,
    /// Our end could not be joined with the peer's, for this reason.
    NotJoined(String),
    /// The probe got through: the path works.
    CameUp,
    /// Nothing has ended for a while.
    Silent,
    /// The channel is lost, for this reason.
    Lost(String),
    /// Our end of a lost channel is gone now.
    Gone,
}

impl Path {
    /// A path without a channel. The connecting end makes one at `retry_at`.
    pub(super) fn new(path: u16, ours: usize, theirs: u16, retry_at: Option<Instant>) -> Self {
        Self {
            id: PathId { path, attempt: 0 },
            ours,
            theirs,
            state: State::Idle { retry_at },
            their_name: String::new(),
            tried: false,
            has_worked: false,
            failed: 0,
            works: false,
            is_told: false,
            backoff: FIRST_RETRY,
            why: None,
            limits: Limits { max_bytes: 0, chunk_bytes: 0, depth: 0, window_bytes: 0 },
            exports: Exports::default(),
            posted: Slab::new(),
            bytes: 0,
            batch: Vec::new(),
            orphans: Vec::new(),
            peer_gone: false,
            refusal: None,
            quiet_looks: 0,
            quiet_since: None,
            port: None,
            looked_at_port: None,
            ended: Vec::new(),
        }
    }

    /// Sets the name of the peer's rail.
    pub(super) fn to(self, their_name: &str) -> Self {
        Self { their_name: their_name.to_owned(), ..self }
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(self.state, State::Up(_))
    }

    /// Why it does not work, if it does not.
    pub(super) fn why_not(&self) -> String {
        let step = match self.state {
            State::Making(_) => "it is being made",
            State::Opening(_) => "the peer has not answered yet",
            State::Probing(..) => "nothing has got through yet",
            _ => "not tried yet",
        };
        self.why.clone().unwrap_or_else(|| step.to_owned())
    }

    pub(super) fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle { .. })
    }

    /// Whether it works or its first attempt has failed.
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

    /// The port is down: there is an attempt soon after it is up again.
    pub(super) fn port_is_down(&mut self) {
        (self.tried, self.backoff) = (true, FIRST_RETRY);
        self.why = Some(PORT_IS_DOWN.to_owned());
        self.state = State::Idle { retry_at: Some(Instant::now() + DOWN_LOOK) };
    }

    /// Why it has never worked, if an attempt has failed. Some once.
    pub(super) fn why_never(&mut self) -> Option<&str> {
        if self.has_worked || self.is_told || !self.tried {
            return None;
        }
        self.is_told = true;
        self.why.as_deref()
    }

    fn channel(&mut self) -> Option<&mut Box<dyn Channel>> {
        match &mut self.state {
            State::Opening(channel) | State::Probing(channel, _) | State::Up(channel) => {
                Some(channel)
            }
            State::Idle { .. }
            | State::Making(_)
            | State::Joining(_)
            | State::Ending(_)
            | State::Dying => None,
        }
    }

    /// The address of our end, while the channel is opening.
    pub(super) fn address(&self) -> Option<&[u8]> {
        if let State::Opening(channel) = &self.state { Some(channel.address()) } else { None }
    }

    /// The channel, if it belongs to this attempt and is not lost.
    pub(super) fn channel_of(&mut self, id: PathId) -> Option<&mut Box<dyn Channel>> {
        if self.id == id { self.channel() } else { None }
    }

    /// The key with which a peer that has these rights names memory over our channel. None if the
    /// channel does not work, the device does not take the memory, or the key is not
    /// [made](Self::make_key).
    pub(super) fn key_of(&mut self, pinned: &PinnedRegion, rights: Rights) -> Option<RemoteKey> {
        let State::Up(channel) = &mut self.state else { return None };
        let registration = pinned.for_peer(self.ours, rights)?;
        match channel.export(registration) {
            Export::Known(key) => Some(key),
            Export::ToMake(_) => None,
        }
    }

    /// Starts to make that key, if the device takes long over it. [`Self::is_making_key`] tells
    /// when that is done.
    pub(super) fn make_key(&mut self, pinned: &Arc<PinnedRegion>, rights: Rights) {
        let State::Up(channel) = &mut self.state else { return };
        let Some(registration) = pinned.for_peer(self.ours, rights) else { return };
        if let Export::ToMake(make) = channel.export(registration)
            && let Some(held) = pinned.hold()
        {
            let (number, registration) = (pinned.number, registration.local_key());
            self.exports.make(KeyPurpose { number, registration }, make, held);
        }
    }

    /// Whether a key for this memory is still to be made.
    pub(super) fn is_making_key(&self, pinned: &PinnedRegion) -> bool {
        self.exports.is_making(pinned.number)
    }

    /// Starts to make our end of a channel, for the next attempt. [`Self::look`] tells when that is
    /// done.
    pub(super) fn make(&mut self, rails: &Arc<Rails>) {
        self.id.attempt = self.id.attempt.wrapping_add(1);
        self.state = State::Making(ChannelSetup::of(rails, self.ours, self.failed));
    }

    /// The peer's end is made: starts to make ours, for this attempt, and to join it.
    /// [`Self::look`] tells when that is done.
    pub(super) fn make_joined(&mut self, attempt: u32, rails: &Arc<Rails>, address: &[u8]) {
        self.id.attempt = attempt;
        self.state = State::Joining(ChannelSetup::joined(rails, self.ours, address.to_vec()));
    }

    /// Our end has just been made: from now on it rings the bell.
    pub(super) fn watch(&mut self, bell: &Bell) {
        let State::Opening(channel) = &mut self.state else { return };
        // Arm it, as a thread may already be asleep on the bell. If arming fails, the next look
        // fails too.
        let _ = channel.arm();
        if let Some(fd) = channel.fd()
            && let Err(e) = bell.watch(fd)
        {
            tracing::warn!("a channel is looked at only when its peers are awake: {e}");
        }
    }

    /// The peer's end is made: starts to join ours with it. [`Self::look`] tells when that is done.
    pub(super) fn join(&mut self, address: &[u8]) {
        self.state = match std::mem::replace(&mut self.state, State::Dying) {
            State::Opening(channel) => {
                State::Joining(ChannelSetup::joining(channel, address.to_vec()))
            }
            other => other,
        };
    }

    /// Takes the channel from the thread that has made or joined it, and returns the result.
    fn made(&mut self) -> LookResult {
        match std::mem::replace(&mut self.state, State::Dying) {
            State::Making(making) => match making.end() {
                ChannelResult::Channel(channel, _) => {
                    self.state = State::Opening(channel);
                    LookResult::Made
                }
                ChannelResult::Nothing(why) => LookResult::NotMade(why.to_string()),
                ChannelResult::Down => LookResult::Down,
            },
            State::Joining(joining) => {
                let joined = match joining.end() {
                    ChannelResult::Channel(channel, joined) => {
                        self.state = State::Opening(channel);
                        joined.map_err(|e| e.to_string())
                    }
                    ChannelResult::Nothing(why) => Err(why.to_string()),
                    ChannelResult::Down => Err(PORT_IS_DOWN.to_owned()),
                };
                if joined.is_err() && matches!(self.state, State::Dying) {
                    self.state = State::Ending(ChannelTeardown::past());
                }
                joined.map_or_else(LookResult::NotJoined, |()| LookResult::Joined)
            }
            other => {
                self.state = other;
                LookResult::Fine(false)
            }
        }
    }

    /// Sends a probe to find out whether the channel works, which may take this long.
    pub(super) fn probe(&mut self, limit: Option<Duration>) -> Result<(), RailError> {
        match std::mem::replace(&mut self.state, State::Dying) {
            State::Opening(mut channel) => {
                let probed = channel.probe(PROBE);
                self.state = State::Probing(channel, limit.map(|limit| Instant::now() + limit));
                probed
            }
            other => {
                self.state = other;
                Ok(())
            }
        }
    }

    /// Marks the path as working. False if it has no channel, or one that works already.
    pub(super) fn come_up(&mut self) -> bool {
        match std::mem::replace(&mut self.state, State::Dying) {
            State::Opening(channel) | State::Probing(channel, _) => {
                self.limits = channel.limits();
                self.state = State::Up(channel);
                (self.tried, self.has_worked, self.why) = (true, true, None);
                (self.failed, self.works) = (0, true);
                true
            }
            other => {
                self.state = other;
                false
            }
        }
    }

    /// Nothing has ended for a while: finds out whether the port is up, as the device may be slow
    /// to report it.
    pub(super) fn look_at_port(&mut self, rail: &Arc<dyn Rail>) {
        if self.port.is_none() && self.looked_at_port.is_none_or(|at| at.elapsed() >= SILENCE) {
            self.looked_at_port = Some(Instant::now());
            self.port = Some(PortLook::at(rail));
        }
    }

    /// Drops our end. The path is dying until both our end and the peer's are gone.
    pub(super) fn lose(&mut self, why: &str, bell: &Bell) {
        self.state = match std::mem::replace(&mut self.state, State::Dying) {
            State::Opening(channel) | State::Probing(channel, _) | State::Up(channel) => {
                if let Some(fd) = channel.fd() {
                    bell.unwatch(fd);
                }
                self.peer_gone = false;
                let exports = std::mem::take(&mut self.exports);
                State::Ending(ChannelTeardown::of(channel, self.port.take(), exports))
            }
            State::Making(making) | State::Joining(making) => {
                self.peer_gone = false;
                State::Ending(ChannelTeardown::of_making(making))
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

    /// Whether our end is being dropped and not gone yet.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.state, State::Ending(_))
    }

    /// Both ends are gone, or the peer never had one. Returns the parts that may be requested
    /// again. If our end is still being dropped, this waits for it.
    pub(super) fn settle(&mut self, connects: bool) -> Vec<Part> {
        if !std::mem::take(&mut self.works) {
            self.failed = self.failed.wrapping_add(1);
        }
        let retry_at = connects.then(|| Instant::now() + self.backoff);
        self.backoff = (self.backoff * 2).min(LAST_RETRY);
        (self.state, self.peer_gone) = (State::Idle { retry_at }, false);
        std::mem::take(&mut self.orphans)
    }

    /// Whether it has parts under way.
    pub(super) fn is_busy(&self) -> bool {
        !self.posted.is_empty()
    }

    /// Bytes under way.
    pub(super) fn load(&self) -> u64 {
        self.bytes
    }

    /// How many bytes of a part it takes now. None if it is full.
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

    /// Posts the batch, as far as the device takes it.
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

    /// Polls the channel, and appends the parts that have ended to `parts`.
    pub(super) fn look(
        &mut self,
        stall: Option<Duration>,
        parts: &mut Vec<(Part, Result<(), RequestError>)>,
    ) -> LookResult {
        let (channel, is_probing, until) = match &mut self.state {
            State::Up(channel) => (channel, false, None),
            State::Making(making) | State::Joining(making) if making.is_over() => {
                return self.made();
            }
            State::Opening(channel) => (channel, false, None),
            State::Probing(channel, until) => (channel, true, *until),
            State::Ending(ending) if ending.is_over() => {
                self.state = State::Dying;
                return LookResult::Gone;
            }
            State::Idle { .. }
            | State::Making(_)
            | State::Joining(_)
            | State::Ending(_)
            | State::Dying => return LookResult::Fine(false),
        };
        let polled = channel.poll(&mut self.ended);
        let (mut moved, mut works) = (false, false);
        for RequestEnd { tag, result } in self.ended.drain(..) {
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
            return LookResult::Lost(e.to_string());
        }
        if works && is_probing {
            return LookResult::CameUp;
        }
        if until.is_some_and(|until| until <= Instant::now()) {
            return LookResult::Lost("nothing gets through".into());
        }
        if moved {
            (self.quiet_looks, self.quiet_since) = (0, None);
        } else if !self.posted.is_empty() {
            self.quiet_looks = self.quiet_looks.wrapping_add(1);
            // Reading a clock is not free everywhere.
            if self.quiet_looks.is_multiple_of(LOOKS_A_CLOCK) {
                return self.listen(stall);
            }
        }
        LookResult::Fine(moved)
    }

    /// Parts are under way and none has ended: judges by how long.
    fn listen(&mut self, stall: Option<Duration>) -> LookResult {
        if let Some(port) = self.port.take_if(|port| port.is_over())
            && !port.found_up()
        {
            return LookResult::Lost(PORT_IS_DOWN.to_owned());
        }
        let quiet = self.quiet_for(Instant::now());
        match stall.filter(|stall| quiet > *stall) {
            Some(stall) => LookResult::Lost(format!("nothing has ended for {stall:?}")),
            None if quiet >= SILENCE => LookResult::Silent,
            None => LookResult::Fine(false),
        }
    }

    /// How long no part under way has ended, counted from the first call since one did.
    fn quiet_for(&mut self, now: Instant) -> Duration {
        now.saturating_duration_since(*self.quiet_since.get_or_insert(now))
    }

    /// Prepares for sleep. False if there is something to do. Also says after how long the path
    /// must be looked at.
    pub(super) fn arm(
        &mut self,
        now: Instant,
        stall: Option<Duration>,
    ) -> (bool, Option<Duration>) {
        // If arming fails, the channel is lost: no sleep, and the next look reports the loss.
        let armed = self.channel().is_none_or(|channel| channel.arm().unwrap_or(false));
        let patience = (!self.posted.is_empty()).then(|| {
            // Makes the look after this sleep read the clock.
            self.quiet_looks = LOOKS_A_CLOCK - 1;
            let rest = stall.map_or(SILENCE, |stall| stall.saturating_sub(self.quiet_for(now)));
            rest.clamp(FULL_RETRY, SILENCE)
        });
        (armed, [self.wake_in(now), patience].into_iter().flatten().min())
    }

    /// After how long it must be looked at, even without an event.
    pub(super) fn wake_in(&self, now: Instant) -> Option<Duration> {
        let (channel, own) = match &self.state {
            State::Idle { retry_at } => {
                return retry_at.map(|at| at.saturating_duration_since(now));
            }
            State::Making(_) | State::Joining(_) | State::Ending(_) => return Some(ASIDE_LOOK),
            State::Dying => return None,
            State::Probing(channel, until) => {
                (channel, until.map(|until| until.saturating_duration_since(now)))
            }
            // No event tells when the device has room for the rest of the batch.
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

    /// Whether a part for the peer's region of this slot and key is under way.
    pub(super) fn uses(&self, slot: u32, key: u64) -> bool {
        let parts = self.posted.iter().map(|(_, part)| part).chain(&self.orphans);
        parts.into_iter().any(|part| (part.remote.slot, part.remote.key) == (slot, key))
    }

    /// Begins to end the path, for a lane that is killed.
    pub(super) fn shut(&mut self, bell: &Bell) {
        self.lose("shut down", bell);
    }

    /// Whether our end is gone, or there was none.
    pub(super) fn is_gone(&self) -> bool {
        match &self.state {
            State::Ending(ending) => ending.is_over(),
            state => matches!(state, State::Idle { .. } | State::Dying),
        }
    }

    /// Ends the path and forgets its parts. If our end is still being dropped, returns it with its
    /// parts.
    pub(super) fn end(&mut self) -> Option<(ChannelTeardown, Vec<Part>)> {
        let orphans = std::mem::take(&mut self.orphans);
        match std::mem::replace(&mut self.state, State::Idle { retry_at: None }) {
            State::Ending(ending) if !ending.is_over() => Some((ending, orphans)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_does_not_work_is_tried_ever_more_rarely() {
        let mut path = Path::new(0, 0, 0, None);
        let mut pause = || {
            let now = Instant::now();
            path.settle(true);
            path.retry_at().expect("it is tried again").saturating_duration_since(now)
        };
        let pauses: Vec<_> = (0..20).map(|_| pause()).collect();
        assert!(pauses.is_sorted_by_key(|pause| pause.as_millis().next_power_of_two()));
        assert!(pauses[0] < LAST_RETRY && pauses[19] >= LAST_RETRY);
        // A port that is down says when it is worth another try.
        path.port_is_down();
        path.settle(true);
        let soon = path.retry_at().expect("it is tried again");
        assert!(soon < Instant::now() + LAST_RETRY);
    }
}
