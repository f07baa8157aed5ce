//! A second registration of memory, for peers that have fewer rights than others.
//!
//! It is made when the first such peer asks. A device may need seconds to register much memory. So
//! a separate thread does it, and the peer is answered when that thread has finished.

use std::{
    sync::Arc,
    thread::{Builder, JoinHandle},
};

use parking_lot::Mutex;
use uccl_fabric::rail::{Rail, RailError, Registration};

use super::{Chain, PinRequest};

/// The result of each device, with the device's index.
type Registrations = Vec<(usize, Result<Box<dyn Registration>, RailError>)>;

/// After this many failures in a row, the pause between tries grows no further.
const MOST_FAILURES: u32 = 10;

/// Registrations of the same memory with the same rights, one a device.
pub(super) struct Narrow {
    by_rail: Vec<Chain>,
    making: Mutex<RegistrationJob>,
}

#[derive(Default)]
struct RegistrationJob {
    thread: Option<JoinHandle<Registrations>>,
    /// No more registrations are to be made.
    is_over: bool,
    /// How many tries failed in a row, and how many questions still pass before the next try.
    failures: u32,
    passes: u32,
}

impl Narrow {
    /// For this many devices, with nothing registered yet.
    pub(super) fn new(rails: usize) -> Self {
        let none = |_| Chain::new(Err(not_made()));
        Self { by_rail: (0..rails).map(none).collect(), making: Mutex::default() }
    }

    /// The device's registration, if it has been made.
    pub(super) fn with(&self, rail: usize) -> Option<&dyn Registration> {
        self.by_rail.get(rail)?.now()
    }

    /// The device was lost and opened again: the next peer that asks has the memory registered with
    /// it again.
    pub(super) fn forget(&self, rail: usize) {
        let mut making = self.making.lock();
        self.look(&mut making);
        let chain = self.by_rail.get(rail).filter(|chain| chain.now().is_some());
        chain.into_iter().for_each(|chain| chain.renew(Err(not_made())));
    }

    /// Starts to register with the devices that still lack a registration, on another thread. True
    /// while that thread runs and the peer's answer has to wait. A device that refused is tried
    /// again, ever more rarely.
    pub(super) fn make(
        &self,
        memory: PinRequest,
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
        let PinRequest { span, kind, rights } = memory;
        let register = move || {
            let made = rails.iter().map(|(at, rail)| (*at, rail.register(span, kind, rights)));
            made.collect()
        };
        // If no thread can be started, the next question tries again.
        making.thread = Builder::new().name("uccl-register".into()).spawn(register).ok();
        making.thread.is_some()
    }

    /// Whether the thread that registers is still running.
    pub(super) fn is_making(&self) -> bool {
        let mut making = self.making.lock();
        self.look(&mut making);
        making.thread.is_some()
    }

    fn look(&self, making: &mut RegistrationJob) {
        if let Some(thread) = making.thread.take_if(|thread| thread.is_finished()) {
            self.take_in(making, thread);
        }
    }

    fn take_in(&self, making: &mut RegistrationJob, thread: JoinHandle<Registrations>) {
        // A panic has been reported already.
        let made = thread.join().unwrap_or_default();
        let all = made.len();
        let taken = made.into_iter().filter_map(|(at, made)| {
            let warn = |e: &_| tracing::warn!("memory of which a part is lent: {e}");
            let registration = made.inspect_err(warn).ok()?;
            self.by_rail.get(at)?.renew(Ok(registration));
            Some(())
        });
        making.failures = match taken.count() == all && all > 0 {
            true => 0,
            false => (making.failures + 1).min(MOST_FAILURES),
        };
        // This is 0 after the first failure: the next question tries again at once.
        making.passes = (1 << making.failures >> 1) - u32::from(making.failures > 0);
    }

    /// Allows no more registrations, and returns those that were made, for the caller to end. None
    /// while some are still being made.
    pub(super) fn end(&self) -> Option<impl Iterator<Item = &dyn Registration>> {
        let mut making = self.making.lock();
        making.is_over = true;
        self.look(&mut making);
        let is_still = making.thread.is_none();
        is_still.then(|| self.by_rail.iter().flat_map(Chain::all))
    }
}

fn not_made() -> RailError {
    RailError::Unavailable("no peer has asked for it".into())
}

impl Drop for Narrow {
    /// Waits for the thread that registers, so that no device reaches the memory after the drop.
    fn drop(&mut self) {
        if let Some(thread) = self.making.get_mut().thread.take() {
            drop(thread.join());
        }
    }
}
