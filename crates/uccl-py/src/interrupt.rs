//! Ctrl-C in calls that wait.

use std::time::{Duration, Instant};

use pyo3::prelude::*;
use uccl_p2p::{Endpoint, Interrupt};

/// The shortest time between two checks, which take the GIL.
const EVERY: Duration = Duration::from_millis(20);

/// Runs Python's signal handlers when a waiting call asks whether to go on.
struct Signals {
    raised: Option<PyErr>,
    /// `None` before the first question: a short call ends before that, and the clock takes time.
    next: Option<Instant>,
}

impl Interrupt for Signals {
    fn interrupted(&mut self) -> bool {
        if self.raised.is_some() {
            return true;
        }
        let now = Instant::now();
        if self.next.is_none_or(|next| now < next) {
            self.next.get_or_insert(now + EVERY);
            return false;
        }
        self.next = Some(now + EVERY);
        match Python::try_attach(|py| py.check_signals()) {
            Some(Ok(())) => false,
            Some(Err(e)) => {
                self.raised = Some(e);
                true
            }
            // The interpreter is shutting down.
            None => true,
        }
    }
}

/// Runs `call` without the GIL. An exception that a signal handler raises meanwhile is returned in
/// place of the result: the signal does not come a second time.
pub(crate) fn waiting<T: Send>(
    py: Python<'_>,
    core: &Endpoint,
    call: impl FnOnce(&Endpoint, &mut dyn Interrupt) -> T + Send,
) -> PyResult<T> {
    listening(py, |signals| call(core, signals))
}

/// Like [`waiting`], for calls without an endpoint.
pub(crate) fn listening<T: Send>(
    py: Python<'_>,
    call: impl FnOnce(&mut dyn Interrupt) -> T + Send,
) -> PyResult<T> {
    let mut signals = Signals { raised: None, next: None };
    let result = py.detach(|| call(&mut signals));
    match signals.raised {
        Some(e) => Err(e),
        None => Ok(result),
    }
}
