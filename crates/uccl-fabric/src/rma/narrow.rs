//! A second registration of memory, for peers that may do less with it than others.
//!
//! It is made when the first of them asks. A device may take long over it, seconds for much memory, so that it is made on
//! a thread of its own, and the peer is answered when that is over.

use std::{
    sync::{Arc, OnceLock},
    thread::{Builder, JoinHandle},
};

use parking_lot::Mutex;

use super::{
    pinned::ToPin,
    rail::{Rail, RailError, Registration},
};

/// What a device made of it, by the device's place.
type Made = Vec<(usize, Result<Box<dyn Registration>, RailError>)>;

/// After so many failures one behind the other, a device is asked no more rarely than before.
const MOST_FAILURES: u32 = 10;

/// Registrations of the same memory with the same rights, one a device.
pub(super) struct Narrow {
    by_rail: Vec<OnceLock<Box<dyn Registration>>>,
    making: Mutex<Making>,
}

#[derive(Default)]
struct Making {
    thread: Option<JoinHandle<Made>>,
    /// Nothing is made any more.
    is_over: bool,
    /// How often it failed, one time behind the other, and how many questions pass until it is tried again.
    failures: u32,
    passes: u32,
}

impl Narrow {
    /// For so many devices.
    pub(super) fn new(rails: usize) -> Self {
        Self { by_rail: (0..rails).map(|_| OnceLock::new()).collect(), making: Mutex::default() }
    }

    /// The device's, if it is made.
    pub(super) fn with(&self, rail: usize) -> Option<&dyn Registration> {
        self.by_rail.get(rail)?.get().map(|registration| &**registration)
    }

    /// Has those made of these devices that lack, aside. True while that lasts, and the answer has to wait. What a device
    /// refused may be tried again, ever more rarely.
    pub(super) fn make(
        &self,
        memory: ToPin,
        rails: &[Arc<dyn Rail>],
        takes: impl Fn(usize) -> bool,
    ) -> bool {
        let mut making = self.making.lock();
        self.look(&mut making);
        if making.thread.is_some() {
            return true;
        }
        let lacks = |at: &usize| takes(*at) && self.with(*at).is_none();
        let lacking: Vec<_> = (0..self.by_rail.len()).filter(lacks).collect();
        if lacking.is_empty() || making.is_over {
            return false;
        }
        if making.passes > 0 {
            making.passes -= 1;
            return false;
        }
        let rails: Vec<_> =
            lacking.into_iter().filter_map(|at| Some((at, Arc::clone(rails.get(at)?)))).collect();
        let ToPin { span, kind, rights } = memory;
        let register = move || {
            let made = rails.iter().map(|(at, rail)| (*at, rail.register(span, kind, rights)));
            made.collect()
        };
        // Where there is no thread to be had, another question tries again.
        making.thread = Builder::new().name("uccl-register".into()).spawn(register).ok();
        making.thread.is_some()
    }

    /// Whether some are being made.
    pub(super) fn is_making(&self) -> bool {
        let mut making = self.making.lock();
        self.look(&mut making);
        making.thread.is_some()
    }

    fn look(&self, making: &mut Making) {
        if let Some(thread) = making.thread.take_if(|thread| thread.is_finished()) {
            self.take_in(making, thread);
        }
    }

    fn take_in(&self, making: &mut Making, thread: JoinHandle<Made>) {
        // A panic has been told already.
        let made = thread.join().unwrap_or_default();
        let all = made.len();
        let taken = made.into_iter().filter_map(|(at, made)| {
            let warn = |e: &_| tracing::warn!("memory of which a part is lent: {e}");
            let registration = made.inspect_err(warn).ok()?;
            self.by_rail.get(at)?.set(registration).ok()
        });
        making.failures = match taken.count() == all && all > 0 {
            true => 0,
            false => (making.failures + 1).min(MOST_FAILURES),
        };
        // At once after the first failure.
        making.passes = (1 << making.failures >> 1) - u32::from(making.failures > 0);
    }

    /// Nothing is made from now on; what was made, to be ended. None while something is still being made.
    pub(super) fn end(&self) -> Option<impl Iterator<Item = &dyn Registration>> {
        let mut making = self.making.lock();
        making.is_over = true;
        self.look(&mut making);
        let is_still = making.thread.is_none();
        is_still.then(|| (0..self.by_rail.len()).filter_map(|rail| self.with(rail)))
    }
}

impl Drop for Narrow {
    /// Waits for what is being made, so that whoever drops it knows that no device reaches the memory afterwards.
    fn drop(&mut self) {
        if let Some(thread) = self.making.get_mut().thread.take() {
            drop(thread.join());
        }
    }
}
