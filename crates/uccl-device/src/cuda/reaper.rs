//! Gives back to the driver what it must wait for, on a thread that nobody waits for.
//!
//! While a stream waits for the host (`cuStreamWaitValue32`), these calls do not return: `cuMemFree`, `cuMemFreeHost`,
//! `cuMemHostUnregister`, `cuIpcCloseMemHandle`, `cuModuleLoadDataEx`, `cuModuleUnload` and `cuCtxSynchronize`. While
//! one of the first five waits so, every other thread that allocates or enqueues a copy on that GPU waits as well, so
//! that a thread of their own is not enough: the copy may be the one that the stream waits for. (Measured: H100 and
//! H200, drivers 580.159.03 and .04, CUDA 13.) Hence:
//!
//! - what a drop would have to say in one of these calls is left to the reaper ([`later`]);
//! - the reaper says nothing while a [`Signal`](super::Signal) is out ([`hold_begins`]), and none is made while the
//!   reaper speaks;
//! - kernels are loaded when a context is taken, before anything of it can be held.
//!
//! The thread is there while something is to be given back. At exit it is waited for, for a second.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{context::Context, driver::Driver, raw::Code};

/// How long the end of the process waits for what is being given back.
const EXIT_PATIENCE: Duration = Duration::from_secs(1);

/// What is to be said to the driver, with the memory that must stay until it has been.
struct Return {
    context: &'static Context,
    say: Box<dyn FnOnce(&Driver) -> Code + Send>,
    keep: Option<Box<dyn Send>>,
}

struct State {
    returns: VecDeque<Return>,
    /// Signals that have not been given.
    holds: usize,
    /// The reaper is in the driver.
    speaking: bool,
    /// It is there, or has just ended.
    thread: Option<JoinHandle<()>>,
    is_running: bool,
    /// Whether the end of the process has been prepared for, and has come.
    watches_exit: bool,
    exiting: bool,
}

static STATE: Mutex<State> = Mutex::new(State {
    returns: VecDeque::new(),
    holds: 0,
    speaking: false,
    thread: None,
    is_running: false,
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

/// Says something to the driver when no stream is held, on another thread. `keep` is let go of afterwards.
pub(crate) fn later(
    context: &'static Context,
    say: impl FnOnce(&Driver) -> Code + Send + 'static,
    keep: Option<Box<dyn Send>>,
) {
    let mut state = state();
    state.returns.push_back(Return { context, say: Box::new(say), keep });
    if state.exiting {
        // The driver takes back what is left; what it may still be using stays.
        std::mem::forget(state.returns.pop_back());
        return;
    }
    if !state.is_running {
        start(&mut state);
    }
    CHANGED.notify_all();
}

/// Starts the thread. Where the system gives none, what waits is given back when the next one is started.
fn start(state: &mut State) {
    if !state.watches_exit {
        // SAFETY: the function is there as long as this code is: a library that is unloaded runs it before.
        state.watches_exit = unsafe { libc::atexit(at_exit) } == 0;
    }
    if let Some(ended) = state.thread.take() {
        // It has left its loop, and returns.
        let _ = ended.join();
    }
    let thread = thread::Builder::new().name("uccl-gpu-reaper".to_owned()).spawn(reap);
    state.is_running = thread.is_ok();
    state.thread = thread.ok();
}

fn reap() {
    let mut state = state();
    loop {
        if state.exiting || state.returns.is_empty() {
            state.is_running = false;
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
    wait_until(state, EXIT_PATIENCE, |state| !state.is_running);
    let thread = self::state().thread.take();
    if let Some(thread) = thread.filter(JoinHandle::is_finished) {
        let _ = thread.join();
    }
}

/// A stream may be made to wait from now on, until [`hold_ends`]. Waits while the reaper is in the driver, which waits
/// for work of the caller's that runs already.
pub(crate) fn hold_begins() {
    let mut state = state();
    while state.speaking {
        state = wait(state);
    }
    state.holds += 1;
}

/// The signal has been given.
pub(crate) fn hold_ends() {
    let mut state = state();
    state.holds = state.holds.saturating_sub(1);
    CHANGED.notify_all();
}

/// Waits until all that was dropped so far is with the driver again; false if that takes longer than `patience`, as
/// it does while a stream is held. For whoever counts the driver's memory.
pub fn wait_until_given_back(patience: Duration) -> bool {
    wait_until(state(), patience, |state| state.returns.is_empty() && !state.speaking)
}
