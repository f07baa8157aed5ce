//! The thread that passes on the bytes of calls that no caller waits for.

use std::{collections::VecDeque, sync::Arc, thread, time::Duration};

use parking_lot::{Condvar, Mutex};

use crate::{
    error::{Error, Result},
    work::Work,
};

/// The pauses between two looks at a call: the first one, and the longest.
const PAUSES: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(2)];

/// Calls with relays, in their order, and the thread that looks at the first of them. The first
/// such call starts it.
#[derive(Default)]
pub(crate) struct Relayer {
    desk: Arc<Desk>,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
}

#[derive(Default)]
struct Desk {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    works: VecDeque<Arc<Work>>,
    is_closed: bool,
}

impl Relayer {
    /// Takes care of a call until its relays have been posted.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn add(&self, work: &Arc<Work>) -> Result<()> {
        let mut thread = self.thread.lock();
        {
            let mut state = self.desk.state.lock();
            if state.is_closed {
                return Err(Error::Closed);
            }
            state.works.push_back(Arc::clone(work));
        }
        if thread.is_some() {
            self.desk.changed.notify_one();
            return Ok(());
        }
        let desk = Arc::clone(&self.desk);
        let begun = thread::Builder::new().name("uccl-relay".into()).spawn(move || desk.run());
        *thread = Some(begun.map_err(|e| Error::Engine(uccl_p2p::Error::os("thread", e)))?);
        Ok(())
    }

    /// Lets go of all calls, and joins the thread.
    pub(crate) fn close(&self) {
        let works = {
            let mut state = self.desk.state.lock();
            state.is_closed = true;
            std::mem::take(&mut state.works)
        };
        self.desk.changed.notify_one();
        drop(works);
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of relays has panicked");
        }
    }
}

impl Desk {
    fn run(&self) {
        let (mut pause, mut before) = (PAUSES[0], None);
        loop {
            let Some(work) = self.first() else { return };
            let left = work.pass_on();
            let mut state = self.state.lock();
            if left == Some(0) {
                state.works.pop_front();
                (pause, before) = (PAUSES[0], None);
                continue;
            }
            // A call that moves is looked at often.
            pause = if left == before { (pause * 2).min(PAUSES[1]) } else { PAUSES[0] };
            before = left;
            if !state.is_closed {
                self.changed.wait_for(&mut state, pause);
            }
        }
    }

    /// The first call, as soon as there is one; `None` at the end.
    fn first(&self) -> Option<Arc<Work>> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(work) = state.works.front() {
                return Some(Arc::clone(work));
            }
            self.changed.wait(&mut state);
        }
    }
}
