//! A rank's means for one-sided checks: a group, its memory, and waits with a deadline.

use std::{
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Relaxed},
        },
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use parking_lot::Mutex;

use crate::{
    memory::GuardedMemory,
    net::{Handle, Pointer},
    rank::{NotApplicable, PATIENCE, Rank},
    rma::{At, Move, Rma, Signal},
};

/// An initialised one-sided plugin.
#[derive(Clone)]
pub(crate) struct Plugin {
    pub(crate) rma: Rma,
    context: Pointer,
}

/// Ranks that have joined, and this one's part in that. A thread makes progress, as NCCL's does.
pub(crate) struct Group {
    pub(crate) rma: Rma,
    pub(crate) coll: Pointer,
    pub(crate) contexts: Pointer,
    /// The own rank within the group, and the number of ranks.
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// NCCL calls operations, tests and progress from one thread.
    turn: Arc<Mutex<()>>,
    driver: Option<JoinHandle<()>>,
    is_over: Arc<AtomicBool>,
    failure: Arc<Mutex<Option<String>>>,
}

/// Registered memory of a group.
pub(crate) struct Room {
    pub(crate) memory: GuardedMemory,
    pub(crate) mr: Pointer,
}

/// A listener that others may join, and its handle.
pub(crate) struct Listener {
    pub(crate) handle: Handle,
    comm: Pointer,
}

impl Plugin {
    /// The plugin, initialised. A plugin that refuses is not checked: NCCL passes it over.
    pub(crate) fn start(rank: &Rank, id: u64) -> Result<Self> {
        let rma = Rma::new(rank.rma_table()?);
        let context = rma.init(id).map_err(|error| {
            NotApplicable(format!("NCCL passes the one-sided tables over: {error:#}"))
        })?;
        ensure!(rma.devices()? > 0, "there is no device");
        Ok(Self { rma, context })
    }

    pub(crate) fn finish(&self, rank: &Rank) -> Result<()> {
        self.rma.finalize(self.context)?;
        rank.check_slowest(self.rma.slowest())
    }

    pub(crate) fn listen(&self) -> Result<Listener> {
        let (handle, comm) = self.rma.listen(self.context)?;
        Ok(Listener { handle, comm })
    }

    /// Joins processes, each at its place in the list.
    pub(crate) fn join(&self, rank: &mut Rank, members: &[usize], contexts: i32) -> Result<Group> {
        let listener = self.listen()?;
        let mut handles = exchange(rank, members, &listener.handle)?;
        let own = place(rank, members)?;
        let group = self.connect(&listener, &mut handles, own)?;
        self.group(group, (own, members.len()), contexts)
    }

    /// Connects to ranks whose handles are known; closes the listener.
    pub(crate) fn connect(
        &self,
        listener: &Listener,
        handles: &mut [Handle],
        own: usize,
    ) -> Result<Pointer> {
        let joined = self.rma.connect(self.context, handles, own, listener.comm);
        self.rma.close_listen(listener.comm)?;
        joined
    }

    /// A group with contexts and a thread that makes progress.
    pub(crate) fn group(
        &self,
        coll: Pointer,
        (rank, ranks): (usize, usize),
        contexts: i32,
    ) -> Result<Group> {
        let rma = self.rma.clone();
        let contexts = rma.create_context(coll, contexts)?;
        let (turn, is_over) = (Arc::<Mutex<()>>::default(), Arc::<AtomicBool>::default());
        let failure = Arc::<Mutex<Option<String>>>::default();
        let mut group =
            Group { rma, coll, contexts, rank, ranks, turn, driver: None, is_over, failure };
        group.drive();
        Ok(group)
    }
}

/// The place of this process in a list of them.
pub(crate) fn place(rank: &Rank, members: &[usize]) -> Result<usize> {
    let own = rank.job.rank;
    members.iter().position(|member| *member == own).context("this process is no member")
}

/// Gives all processes of a list a handle, and takes theirs.
pub(crate) fn exchange(rank: &mut Rank, members: &[usize], own: &Handle) -> Result<Vec<Handle>> {
    let (me, others) = (rank.job.rank, || members.iter().copied());
    for other in others().filter(|other| *other != me) {
        rank.tell(other, own)?;
    }
    others().map(|other| if other == me { Ok(*own) } else { rank.hear_handle(other) }).collect()
}

impl Group {
    fn drive(&mut self) {
        let (rma, contexts) = (self.rma.clone(), self.contexts);
        let (turn, is_over) = (Arc::clone(&self.turn), Arc::clone(&self.is_over));
        let failure = Arc::clone(&self.failure);
        let body = move || {
            // The whole pointer, which may go from thread to thread.
            let contexts = { contexts };
            while !is_over.load(Relaxed) {
                let held = turn.lock();
                let failed = rma.progress(contexts).err();
                drop(held);
                if let Some(error) = failed {
                    *failure.lock() = Some(format!("{error:#}"));
                    return;
                }
                thread::yield_now();
            }
        };
        self.driver = Some(thread::spawn(body));
    }

    /// Ends the thread that makes progress.
    pub(crate) fn stop(&mut self) -> Result<()> {
        self.is_over.store(true, Relaxed);
        match self.driver.take() {
            Some(thread) => thread.join().ok().context("the thread that makes progress"),
            None => Ok(()),
        }
    }

    /// Registers memory of so many bytes.
    pub(crate) fn register(&self, bytes: usize) -> Result<Room> {
        let memory = GuardedMemory::new(bytes)?;
        let mr = self.rma.register(self.coll, memory.at(), bytes)?;
        Ok(Room { memory, mr })
    }

    pub(crate) fn deregister(&self, room: &Room) -> Result<()> {
        self.rma.deregister(self.coll, room.mr)
    }

    pub(crate) fn put(&self, put: Move) -> Result<Pointer> {
        let _turn = self.turn.lock();
        self.rma.put(self.contexts, put)
    }

    pub(crate) fn put_signal(&self, put: Move, signal: Signal) -> Result<Pointer> {
        let _turn = self.turn.lock();
        self.rma.put_signal(self.contexts, put, signal)
    }

    /// Changes a word of a rank's.
    pub(crate) fn signal(&self, context: i32, rank: usize, signal: Signal) -> Result<Pointer> {
        let nothing = Move { context, from: At::NONE, to: At::NONE, bytes: 0, rank };
        self.put_signal(nothing, signal)
    }

    pub(crate) fn get(&self, get: Move) -> Result<Pointer> {
        let _turn = self.turn.lock();
        self.rma.get(self.contexts, get)
    }

    pub(crate) fn flush(&self, context: i32, mr: Pointer) -> Result<Option<Pointer>> {
        let _turn = self.turn.lock();
        self.rma.flush(self.contexts, context, mr, self.rank)
    }

    pub(crate) fn test(&self, request: Pointer) -> Result<bool> {
        self.check()?;
        let _turn = self.turn.lock();
        self.rma.test(self.coll, request)
    }

    /// Fails if progress has.
    pub(crate) fn check(&self) -> Result<()> {
        match &*self.failure.lock() {
            Some(error) => bail!("{error}"),
            None => Ok(()),
        }
    }

    pub(crate) fn wait(&self, request: Pointer) -> Result<()> {
        self.until("a request", || self.test(request))
    }

    /// Waits until a word has a value; fails if it goes beyond.
    pub(crate) fn wait_word(&self, room: &Room, offset: usize, value: u64) -> Result<()> {
        self.until("a signal", || {
            let seen = room.word(offset).load(Acquire);
            ensure!(seen <= value, "the word at {offset} is {seen}, and should be {value}");
            Ok(seen == value)
        })
    }

    pub(crate) fn until(&self, what: &str, is_it: impl FnMut() -> Result<bool>) -> Result<()> {
        self.until_within(PATIENCE, what, is_it)
    }

    fn until_within(
        &self,
        limit: Duration,
        what: &str,
        mut is_it: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let end = Instant::now() + limit;
        while !is_it()? {
            self.check()?;
            ensure!(Instant::now() < end, "{what} has not come within {limit:?}");
            thread::yield_now();
        }
        Ok(())
    }

    /// Waits for the error that the loss of a rank must be.
    pub(crate) fn wait_error(&self, limit: Duration, request: Option<Pointer>) -> Result<()> {
        let mut request = request;
        let mut is_error = || {
            if self.check().is_err() {
                return anyhow::Ok(true);
            }
            let _turn = self.turn.lock();
            let has_failed = match request.map(|request| self.rma.test(self.coll, request)) {
                Some(Ok(false)) | None => false,
                Some(Ok(true)) => {
                    // It had ended before the loss.
                    request = None;
                    false
                }
                Some(Err(_)) => true,
            };
            Ok(has_failed || self.rma.has_error(self.contexts)?)
        };
        let end = Instant::now() + limit;
        while !is_error()? {
            ensure!(Instant::now() < end, "no error within {limit:?} after the rank's end");
            thread::yield_now();
        }
        Ok(())
    }

    /// Ends the group as NCCL does: contexts, registrations, the group itself.
    pub(crate) fn close(&mut self, rooms: &[&Room]) -> Result<()> {
        self.stop()?;
        self.rma.destroy_context(self.contexts)?;
        for room in rooms {
            self.deregister(room)?;
        }
        self.rma.close_coll(self.coll)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
        if let Some(thread) = self.driver.take() {
            // The check has failed already.
            let _ended = thread.join();
        }
    }
}

impl Room {
    pub(crate) fn at(&self, offset: usize) -> At {
        At { mr: self.mr, offset: offset as u64 }
    }

    /// A word, which peers may change at any time.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + 8 <= self.memory.len(), "a word beyond the memory");
        // SAFETY: within the memory, aligned as its length is, and used as an atomic alone.
        unsafe { AtomicU64::from_ptr(self.memory.at().add(offset).cast()) }
    }
}
