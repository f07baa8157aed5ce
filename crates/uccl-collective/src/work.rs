//! A call under way: its messages, its memory, and its end.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uccl_p2p::{Interrupt, NoInterrupt, Status};

use crate::{
    error::{Error, Result},
    memory::CallRegions,
    part::Part,
    relays::Relays,
    shared::GroupCore,
};

/// How long a waiting call looks at its messages between two looks at the other ranks' notices.
const SLICE: Duration = Duration::from_millis(20);
/// The same while bytes of any message may be waited for by another rank.
const SLICE_WITH_RELAYS: Duration = Duration::from_millis(1);
/// The pause between two looks at earlier calls' relays.
const PAUSE: Duration = Duration::from_micros(100);

/// A call of a group that has begun. Its memory is kept allocated until it has ended.
pub struct Work {
    pub(crate) id: u64,
    shared: Arc<GroupCore>,
    /// Whether the other ranks depend on it.
    is_collective: bool,
    stage: Mutex<Stage>,
}

enum Stage {
    Open(OpenCall),
    Ended(Result<()>),
}

/// The messages and the memory of a call that has not ended.
pub(crate) struct OpenCall {
    pub(crate) parts: Vec<Part>,
    /// They become parts.
    pub(crate) relays: Relays,
    /// Ends with the call, after its messages.
    pub(crate) regions: CallRegions,
}

impl OpenCall {
    /// Posts the relays of bytes that have come.
    fn pass_on(&mut self, shared: &GroupCore) -> Result<()> {
        self.relays.post_ready(shared, &self.regions, &mut self.parts)
    }
}

impl Work {
    pub(crate) fn new(
        id: u64,
        shared: Arc<GroupCore>,
        is_collective: bool,
        open: OpenCall,
    ) -> Self {
        Self { id, shared, is_collective, stage: Mutex::new(Stage::Open(open)) }
    }

    /// Its number in its group.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Whether it has ended well. Makes progress.
    ///
    /// # Errors
    /// It has failed; asking again gives the same error. No byte of it lands any more.
    pub fn poll(&self) -> Result<bool> {
        self.advance(None, &mut NoInterrupt)
    }

    /// Waits for its end, for at most `timeout`. `false`: it goes on.
    ///
    /// # Errors
    /// As those of [`poll`](Self::poll), or the wait was interrupted, and the call goes on.
    pub fn wait(&self, timeout: Option<Duration>, interrupt: &mut dyn Interrupt) -> Result<bool> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = until.map_or(SLICE, |until| until.saturating_duration_since(Instant::now()));
            if self.advance(Some(left.min(SLICE)), interrupt)? {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
            if interrupt.interrupted() {
                return Err(uccl_p2p::Error::Interrupted.into());
            }
        }
    }

    /// Ends it: when this returns, no byte of it lands any more. A collective that has not ended
    /// before ends the group's collectives.
    pub fn cancel(&self) {
        let mut stage = self.stage.lock();
        if let Stage::Open(open) = &mut *stage {
            let by = uccl_p2p::Error::Cancelled { by: "the caller".into() };
            let why = self.give_up(open, Error::Engine(by));
            *stage = Stage::Ended(Err(why));
        }
    }

    /// Fails the call because a message could not be posted.
    pub(crate) fn fail(&self, error: Error) -> Error {
        let mut stage = self.stage.lock();
        match &mut *stage {
            Stage::Open(open) => {
                let why = self.give_up(open, error);
                *stage = Stage::Ended(Err(why.clone()));
                why
            }
            Stage::Ended(_) => error,
        }
    }

    /// Ends it if its messages have ended, without progress. Whether it has ended.
    pub(crate) fn settle(&self) -> bool {
        {
            let Some(stage) = self.stage.try_lock() else { return false };
            let Stage::Open(open) = &*stage else { return true };
            let is_pending = |part: &Part| matches!(part.handle.status(), Ok(Status::Pending));
            let is_open = |part: &Part| !part.is_done && is_pending(part);
            if !open.relays.is_empty() || open.parts.iter().any(is_open) {
                return false;
            }
        }
        // The next question about the call gets the error.
        !matches!(self.poll(), Ok(false))
    }

    /// Passes on the bytes that have come, without progress, and tells how many messages are left
    /// to be passed on; `None`: a caller does so.
    pub(crate) fn pass_on(&self) -> Option<usize> {
        let mut stage = self.stage.try_lock()?;
        let Stage::Open(open) = &mut *stage else { return Some(0) };
        if self.shared.broken().is_some() {
            // The call fails as soon as its caller asks.
            return Some(0);
        }
        match open.pass_on(&self.shared) {
            Ok(()) => Some(open.relays.len()),
            Err(error) => {
                let why = self.give_up(open, error);
                *stage = Stage::Ended(Err(why));
                Some(0)
            }
        }
    }

    /// Makes progress for at most `slice`; once, if there is none.
    fn advance(&self, slice: Option<Duration>, interrupt: &mut dyn Interrupt) -> Result<bool> {
        let mut stage = self.stage.lock();
        let open = match &mut *stage {
            Stage::Ended(result) => return result.clone().map(|()| true),
            Stage::Open(open) => open,
        };
        let mut moved = self.step(open, slice, interrupt);
        if let (Ok(false), Some(_), true) = (&moved, slice, self.is_collective) {
            self.shared.hear()?;
            moved = self.shared.broken().map_or(moved, Err);
        }
        match moved {
            Ok(false) => Ok(false),
            Ok(true) => {
                *stage = Stage::Ended(Ok(()));
                Ok(true)
            }
            // The wait has ended, and not the call.
            Err(Error::Engine(interrupted)) => Err(Error::Engine(interrupted)),
            Err(error) => {
                let why = self.give_up(open, error);
                *stage = Stage::Ended(Err(why.clone()));
                Err(why)
            }
        }
    }

    /// Whether all messages have ended well.
    fn step(
        &self,
        open: &mut OpenCall,
        slice: Option<Duration>,
        interrupt: &mut dyn Interrupt,
    ) -> Result<bool> {
        let slice = match open.relays.is_empty() {
            true => slice,
            false => slice.map(|slice| slice.min(SLICE_WITH_RELAYS)),
        };
        let until = slice.map(|slice| Instant::now() + slice);
        // Their bytes may have come before the call's turn.
        open.pass_on(&self.shared)?;
        let (mut is_done, mut at) = (true, 0);
        // Relays that are posted meanwhile are behind the others.
        while at < open.parts.len() {
            if !open.parts[at].is_done {
                let handle = &open.parts[at].handle;
                let status = match until {
                    Some(until) => {
                        let left = until.saturating_duration_since(Instant::now());
                        handle.wait(Some(left), interrupt)?
                    }
                    None => handle.poll()?,
                };
                let has_ended = self.judge(&open.parts[at], status)?;
                open.parts[at].is_done = has_ended;
                is_done &= has_ended;
                if has_ended {
                    open.pass_on(&self.shared)?;
                }
            }
            at += 1;
        }
        if is_done && !open.relays.is_empty() {
            // They follow an earlier call's, which the thread of relays posts.
            if let Some(until) = until {
                thread::sleep(until.saturating_duration_since(Instant::now()).min(PAUSE));
            }
            is_done = false;
        }
        Ok(is_done)
    }

    /// Whether a message has ended well.
    fn judge(&self, part: &Part, status: Status) -> Result<bool> {
        match (status, part.expected) {
            (Status::Pending, _) => Ok(false),
            (Status::Failed(reason), _) => Err(self.shared.failure(part.peer, reason)),
            (Status::Done(outcome), Some(expected)) if outcome.bytes != expected => {
                let (rank, received) = (part.peer, outcome.bytes);
                Err(Error::WrongLength { rank, received, expected })
            }
            (Status::Done(_), _) => Ok(true),
        }
    }

    /// Ends all messages, and returns the reason. The other ranks of a collective are told first,
    /// so that they know the reason when they see the end of their messages.
    fn give_up(&self, open: &mut OpenCall, error: Error) -> Error {
        let mut why = error;
        if self.is_collective {
            // A message that its other side has ended fails with less than that side knows.
            if !matches!(why, Error::Lost { .. }) && self.shared.hear().is_ok() {
                why = self.shared.broken().unwrap_or(why);
            }
            self.shared.break_off(&why);
        }
        for part in &open.parts {
            // Where memory may still be touched, its region does not end, and keeps it.
            let _ = part.handle.cancel();
        }
        why
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if let Stage::Open(open) = self.stage.get_mut() {
            for part in &open.parts {
                // As in `give_up`.
                let _ = part.handle.cancel();
            }
        }
    }
}
