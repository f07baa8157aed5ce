//! The reaper: a thread for driver calls, mostly ones that free resources, for which the driver may
//! have to wait. A drop does not wait for this thread.
//!
//! While a stream waits for the host (`cuStreamWaitValue32`), these calls do not return:
//! `cuMemFree`, `cuMemFreeHost`, `cuMemHostUnregister`, `cuIpcCloseMemHandle`,
//! `cuModuleLoadDataEx`, `cuModuleUnload` and `cuCtxSynchronize`. While one of the first five waits
//! so, every other thread that allocates or enqueues a copy on that GPU waits too. So it is not
//! enough to make these calls on another thread: the copy that is held up may be the one that the
//! stream waits for. (Measured: H100 and H200, drivers 580.159.03 and .04, CUDA 13.) Hence:
//!
//! - a drop leaves such a call to the reaper ([`later`]);
//! - the reaper makes no call while a [`Signal`](super::Signal) exists ([`hold_begins`]), and no
//!   signal is made while the reaper is in a call;
//! - kernels are loaded when a context is retained, before any of its streams can be held.
//!
//! The thread runs while there are calls to make. At exit the process waits for it, for a second.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::{
    device::Context,
    driver::Driver,
    raw::{CAPTURE_UNSUPPORTED, Code, SUCCESS},
};
use crate::DemandThread;

/// How long the process waits at exit for the remaining calls.
const EXIT_PATIENCE: Duration = Duration::from_secs(1);
/// How long a graph may be recorded while memory waits for the context's work.
const RECORDING_PATIENCE: Duration = Duration::from_secs(10);
/// The time between two attempts meanwhile.
const RECORDING_NAP: Duration = Duration::from_millis(1);

/// A call to make to the driver, and the memory that must stay until the call has returned.
struct Return {
    context: &'static Context,
    say: Box<dyn FnOnce(&Driver) -> Code + Send>,
    keep: Option<Box<dyn Send>>,
}

struct State {
    returns: VecDeque<Return>,
    /// How many signals have not been given.
    holds: usize,
    /// The reaper is in a driver call.
    speaking: bool,
    thread: DemandThread,
    /// Whether `at_exit` is registered, and whether the process is exiting.
    watches_exit: bool,
    exiting: bool,
}

static STATE: Mutex<State> = Mutex::new(State {
    returns: VecDeque::new(),
    holds: 0,
    speaking: false,
    thread: DemandThread::new(),
    watches_exit: false,
    exiting: false,
});
static CHANGED: Condvar = Condvar::new();

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait(state: MutexGuard<'static, State>) -> MutexGuard<'static, State> {
    CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner)
}

fn wait_until(
    mut state: MutexGuard<'static, State>,
    patience: Duration,
    is_over: impl Fn(&State) -> bool,
) -> bool {
    let until = Instant::now() + patience;
    while !is_over(&state) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        let waited = CHANGED.wait_timeout(state, left);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    true
}

/// Makes a driver call on the reaper's thread, when no stream is held. `keep` is dropped after the
/// call.
pub(crate) fn later(
    context: &'static Context,
    say: impl FnOnce(&Driver) -> Code + Send + 'static,
    keep: Option<Box<dyn Send>>,
) {
    let mut state = state();
    state.returns.push_back(Return { context, say: Box::new(say), keep });
    if state.exiting {
        // The driver frees the rest. Memory that it may still be using is leaked.
        std::mem::forget(state.returns.pop_back());
        return;
    }
    start(&mut state);
    CHANGED.notify_all();
}

/// Drops mapped memory on the reaper's thread, when the context's present work has ended: unlike
/// `cuMemFree`, `cuMemUnmap` waits for no work that uses the memory. If that end cannot be known,
/// the memory stays mapped as long as the process.
pub(crate) fn later_than_work(context: &'static Context, memory: impl Send + 'static) {
    let give_back = move |driver: &Driver| {
        let code = wait_for_work(driver);
        match code {
            SUCCESS => drop(memory),
            _ => std::mem::forget(memory),
        }
        code
    };
    later(context, give_back, None);
}

/// Waits for the work of the current context. The driver refuses that while a stream of the context
/// records a graph.
fn wait_for_work(driver: &Driver) -> Code {
    let until = Instant::now() + RECORDING_PATIENCE;
    loop {
        // SAFETY: the reaper has made the context current.
        let code = unsafe { (driver.context_synchronize)() };
        if code != CAPTURE_UNSUPPORTED || Instant::now() > until {
            return code;
        }
        thread::sleep(RECORDING_NAP);
    }
}

/// Starts the thread, unless it runs. If the system has no thread left, the calls wait until one is
/// started for a later call.
fn start(state: &mut State) {
    if !state.watches_exit {
        // SAFETY: the function exists as long as this code does: a library that is unloaded runs
        // its exit handlers first.
        state.watches_exit = unsafe { libc::atexit(at_exit) } == 0;
    }
    let _ = state.thread.start("uccl-gpu-reaper", reap);
}

fn reap() {
    let mut state = state();
    loop {
        if state.exiting || state.returns.is_empty() {
            state.thread.leave();
            CHANGED.notify_all();
            return;
        }
        if state.holds > 0 {
            state = wait(state);
            continue;
        }
        let Some(Return { context, say, keep }) = state.returns.pop_front() else { continue };
        state.speaking = true;
        drop(state);
        context.quietly(say);
        drop(keep);
        state = self::state();
        state.speaking = false;
        CHANGED.notify_all();
    }
}

extern "C" fn at_exit() {
    let mut state = state();
    state.exiting = true;
    CHANGED.notify_all();
    wait_until(state, EXIT_PATIENCE, |state| !state.thread.is_running());
    self::state().thread.join_if_over();
}

/// Announces that streams may be made to wait for the host, until [`hold_ends`]. If the reaper is
/// in a driver call, this first waits for the call, which ends when the GPU's present work does.
pub(crate) fn hold_begins() {
    let mut state = state();
    while state.speaking {
        state = wait(state);
    }
    state.holds += 1;
}

/// Announces that a signal has been given.
pub(crate) fn hold_ends() {
    let mut state = state();
    state.holds = state.holds.saturating_sub(1);
    CHANGED.notify_all();
}

/// Waits until everything dropped so far has been freed. False if that takes longer than
/// `patience`, as it does while a stream is held. For callers that measure the driver's memory.
pub fn wait_until_given_back(patience: Duration) -> bool {
    wait_until(state(), patience, |state| state.returns.is_empty() && !state.speaking)
}
