//! Waits with a deadline that an abort or the caller ends.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread::sleep,
    time::{Duration, Instant},
};

use uccl_p2p::Interrupt;

use super::error::{Error, Result};

/// The first pause between two looks at a word. Later ones are longer.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// The bounds of a call: its deadline, its caller's interrupt, and its abort.
pub(crate) struct Bounds<'a> {
    time: Duration,
    end: Option<Instant>,
    interrupt: &'a mut dyn Interrupt,
    is_aborted: &'a AtomicBool,
}

impl Interrupt for Bounds<'_> {
    fn interrupted(&mut self) -> bool {
        self.is_aborted.load(Ordering::SeqCst) || self.interrupt.interrupted()
    }
}

impl<'a> Bounds<'a> {
    /// A time of zero is no limit, as everywhere in the engine.
    pub(crate) fn new(
        time: Duration,
        interrupt: &'a mut dyn Interrupt,
        is_aborted: &'a AtomicBool,
    ) -> Self {
        let time = if time.is_zero() { Duration::MAX } else { time };
        Self { time, end: Instant::now().checked_add(time), interrupt, is_aborted }
    }

    /// The time that is left.
    pub(crate) fn left(&self) -> Duration {
        self.end.map_or(self.time, |end| end.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn timeout(&self, reason: String) -> Error {
        Error::Timeout { waited: self.time, reason }
    }

    /// The error of the engine, or the abort that it stands for.
    pub(crate) fn error(&self, error: uccl_p2p::Error) -> Error {
        match error {
            uccl_p2p::Error::Interrupted if self.is_aborted.load(Ordering::SeqCst) => {
                Error::Aborted
            }
            error => Error::Engine(error),
        }
    }

    /// Fails if the call has to end. `reason` says what it waits for.
    pub(crate) fn check(&mut self, reason: impl FnOnce() -> String) -> Result<()> {
        if self.interrupted() {
            return Err(self.error(uccl_p2p::Error::Interrupted));
        }
        match self.left().is_zero() {
            true => Err(self.timeout(reason())),
            false => Ok(()),
        }
    }

    /// Calls `look` until it has an answer. `reason` says what is waited for.
    pub(crate) fn until<T>(
        &mut self,
        reason: impl Fn() -> String,
        mut look: impl FnMut(&mut Self) -> Result<Option<T>>,
    ) -> Result<T> {
        let mut pause = FIRST_PAUSE;
        loop {
            match look(self) {
                Ok(None) => {}
                Ok(Some(answer)) => return Ok(answer),
                // The look itself was too long. Its caller wants to know of the answer.
                Err(Error::Timeout { .. }) => return Err(self.timeout(reason())),
                Err(error) => return Err(error),
            }
            self.check(&reason)?;
            sleep(pause.min(self.left()));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}
