//! Large copies between address spaces, done in chunks by as many threads as have time for them.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::{
    lane::{Completion, OpError, OpResult, RemoteSpans, Spans},
    mem::{Access, RemoteSpan, Span},
};

/// What one thread copies at a time: enough to be worth the handing out, little enough that the threads
/// end together.
const CHUNK: usize = 512 << 10;
/// Pieces that it copies at most: each costs the kernel about as much as copying 4 KiB.
const CHUNK_PIECES: usize = 64;

/// A copy in progress.
pub(super) struct Job {
    access: Access,
    local: Spans,
    remote: RemoteSpans,
    state: Mutex<State>,
    idle: Condvar,
}

struct State {
    index: usize,
    offset: usize,
    /// Chunks being copied right now.
    active: usize,
    error: Option<OpError>,
    /// No chunk is given out any more.
    closed: bool,
    done: Option<Arc<dyn Completion>>,
}

/// A part of a job: pieces that pair up, as they are given to one thread.
pub(super) struct Chunk {
    pub(super) access: Access,
    pub(super) local: Spans,
    pub(super) remote: RemoteSpans,
}

impl Job {
    /// Local and remote pieces pair up.
    pub(super) fn new(
        access: Access,
        local: Spans,
        remote: RemoteSpans,
        done: Arc<dyn Completion>,
    ) -> Self {
        let state =
            State { index: 0, offset: 0, active: 0, error: None, closed: false, done: Some(done) };
        Self { access, local, remote, state: Mutex::new(state), idle: Condvar::new() }
    }

    /// The next chunk, for the caller to copy and then to report with [`Self::copied`].
    pub(super) fn next(&self) -> Option<Chunk> {
        let mut state = self.state.lock();
        if state.closed {
            return None;
        }
        let mut chunk =
            Chunk { access: self.access, local: Spans::new(), remote: RemoteSpans::new() };
        let mut left = CHUNK;
        while let (Some(span), Some(peer)) =
            (self.local.get(state.index), self.remote.get(state.index))
        {
            if left == 0 || chunk.local.len() == CHUNK_PIECES {
                break;
            }
            let len = (span.len - state.offset).min(left);
            chunk.local.push(Span { addr: span.addr + state.offset, len });
            let addr = peer.addr + state.offset as u64;
            chunk.remote.push(RemoteSpan { addr, len: len as u64, ..*peer });
            left -= len;
            state.offset += len;
            if state.offset == span.len {
                state.index += 1;
                state.offset = 0;
            }
        }
        state.closed = state.index == self.local.len();
        state.active += 1;
        Some(chunk)
    }

    /// Whether all of it has been given out.
    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// A chunk has been copied.
    pub(super) fn copied(&self, result: OpResult) {
        let mut state = self.state.lock();
        state.active -= 1;
        if let Err(e) = result {
            state.error.get_or_insert(e);
            state.closed = true;
        }
        self.settle(state);
    }

    /// Gives no chunk out any more; the job ends when those given out are done.
    pub(super) fn close(&self, why: OpError) {
        let mut state = self.state.lock();
        if state.done.is_some() && !(state.closed && state.active == 0) {
            if !state.closed {
                state.error.get_or_insert(why);
            }
            state.closed = true;
        }
        self.settle(state);
    }

    /// Waits until nobody copies a chunk of a closed job.
    pub(super) fn wait_idle(&self) {
        let mut state = self.state.lock();
        while state.active > 0 {
            self.idle.wait(&mut state);
        }
    }

    fn settle(&self, mut state: parking_lot::MutexGuard<'_, State>) {
        if !state.closed || state.active > 0 {
            return;
        }
        let result = state.error.map_or(Ok(()), Err);
        let done = state.done.take();
        self.idle.notify_all();
        drop(state);
        if let Some(done) = done {
            done.complete(result);
        }
    }
}
