//! The workers of an endpoint: how they sleep, how they are woken, and how they are stopped.
//!
//! Each worker sleeps on one epoll. A lane is armed there once at a time: its event wakes the
//! worker once, and it is armed again only when the worker goes back to sleep. Lanes that callers
//! progress themselves stay disarmed, so a caller that spins is not disturbed by a worker that
//! wakes for nothing.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use uccl_device::CpuList;

use super::{Core, connection::attached_lane::AttachedLane};
use crate::{
    drive::{park::Parker, places},
    error::{Error, Result},
};

/// How long a thread that waits for workers to end only yields its processor; then also how long
/// each of its naps is.
const BRISK: Duration = Duration::from_micros(200);

pub(in crate::drive) const BELL: u64 = 0;
/// Tokens with this bit belong to the acceptor.
pub(crate) const ACCEPTOR: u64 = 1 << 62;

pub(in crate::drive) enum Kick {
    /// Progress this lane.
    Lane(Arc<AttachedLane>),
    /// Take part in the lane's shared work.
    Help(Arc<AttachedLane>),
}

/// The epoll and the bell that one worker sleeps on, and its tasks.
pub(in crate::drive) struct Shard {
    pub(in crate::drive) epoll: OwnedFd,
    pub(in crate::drive) bell: Parker,
    pub(in crate::drive) kicks: Mutex<Vec<Kick>>,
    pub(in crate::drive) lanes: Mutex<HashMap<u64, Arc<AttachedLane>>>,
    pub(in crate::drive) started: AtomicBool,
    /// Whether it sleeps without looking at deadlines.
    pub(in crate::drive) unhurried: AtomicBool,
}

/// Runs the worker of an endpoint with this number, until the workers are stopped.
pub(crate) type RunWorker = fn(&Arc<Core>, usize);

/// The workers of an endpoint. Threads start when there is something for them to do.
pub(crate) struct Workers {
    /// The function of the threads: these know how lanes make progress, and this module does not.
    run: RunWorker,
    pub(in crate::drive) shards: Vec<Shard>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    stop: AtomicBool,
    /// The CPUs to keep the workers on (`near`), and those on which the first has been kept
    /// (`settled`).
    near: Option<CpuList>,
    settled: OnceLock<CpuList>,
    pub(in crate::drive) next_token: AtomicU64,
    pub(in crate::drive) next_helper: AtomicUsize,
}

impl Workers {
    /// `near`: the CPUs on which workers run; `None` for any.
    pub(crate) fn new(count: usize, near: Option<CpuList>, run: RunWorker) -> Result<Self> {
        let shards = (0..count.max(1)).map(|_| Shard::new()).collect::<Result<_>>()?;
        Ok(Self {
            run,
            shards,
            threads: Mutex::default(),
            stop: AtomicBool::new(false),
            near,
            settled: OnceLock::new(),
            next_token: AtomicU64::new(1),
            next_helper: AtomicUsize::new(0),
        })
    }

    /// Starts a worker, unless it has been started.
    pub(in crate::drive) fn ensure(core: &Arc<Core>, index: usize) {
        let Self { shards, run, .. } = &core.workers;
        let run = *run;
        if !shards[index].started.swap(true, SeqCst)
            && let Err(e) = Self::spawn(core, index, move |core| run(core, index))
        {
            // The first worker does this one's work.
            tracing::warn!("worker {index} does not start: {e}");
        }
    }

    /// Starts the thread of a worker.
    pub(in crate::drive) fn spawn(
        core: &Arc<Core>,
        index: usize,
        run: impl FnOnce(&Arc<Core>) + Send + 'static,
    ) -> Result<()> {
        let for_thread = Arc::clone(core);
        // Locked until the thread is in the list: `stop` joins the threads in the list, and none
        // may be added afterwards.
        let mut threads = core.workers.threads.lock();
        if core.workers.stopping() {
            return Err(Error::Closed);
        }
        let thread = std::thread::Builder::new()
            .name(format!("uccl-worker-{index}"))
            .spawn(move || {
                let core = for_thread;
                core.workers.settle();
                run(&core);
            })
            .map_err(|e| Error::os("starting a worker", e))?;
        threads.push(thread);
        Ok(())
    }

    /// Stops workers from looking after lanes.
    pub(crate) fn detach(&self, lanes: &[Arc<AttachedLane>]) {
        for attached in lanes {
            let shard = &self.shards[attached.shard];
            shard.lanes.lock().remove(&attached.token);
            let interest = attached.link.interest();
            // A descriptor that was not watched is fine.
            for fd in [Some(interest.fd), interest.end].into_iter().flatten() {
                let _ = epoll::delete(&shard.epoll, fd);
            }
        }
    }

    /// Makes workers look after these lanes now.
    pub(crate) fn kick(&self, lanes: &[Arc<AttachedLane>]) {
        for attached in lanes {
            self.shards[attached.shard].kick(Kick::Lane(Arc::clone(attached)));
        }
    }

    /// Makes sure that the first worker checks deadlines from now on.
    pub(crate) fn hurry(&self) {
        let first = &self.shards[0];
        if first.unhurried.swap(false, SeqCst) {
            first.bell.ring();
        }
    }

    pub(crate) fn wake_all(&self) {
        self.shards.iter().for_each(|shard| shard.bell.ring());
    }

    /// The CPUs that workers keep to, once the first worker has started.
    pub(crate) fn cpus(&self) -> Option<&CpuList> {
        self.settled.get()
    }

    /// Moves the calling thread, a worker, to its CPUs.
    fn settle(&self) {
        if let Some(cpus) = self.near.as_ref().and_then(places::settle) {
            let _ = self.settled.set(cpus);
        }
    }

    pub(in crate::drive) fn stopping(&self) -> bool {
        self.stop.load(Acquire)
    }

    /// Stops every thread, and joins those that end before `until`, except the calling one. Returns
    /// how many have not ended. These keep their resources and end by themselves; a further call
    /// waits for them again.
    pub(crate) fn stop(&self, until: Option<Instant>) -> usize {
        self.stop.store(true, SeqCst);
        self.wake_all();
        let begun = Instant::now();
        let left = loop {
            let is_late = until.is_some_and(|until| until <= Instant::now());
            self.join_ended();
            let left = self.running();
            if left == 0 || is_late {
                break left;
            }
            // Without the lock: a worker that is about to start another one needs it before it
            // ends.
            match begun.elapsed() < BRISK {
                true => std::thread::yield_now(),
                false => std::thread::sleep(BRISK),
            }
        };
        self.shards.iter().for_each(|shard| {
            shard.lanes.lock().clear();
            shard.kicks.lock().clear();
        });
        left
    }

    fn join_ended(&self) {
        let ended: Vec<_> =
            self.threads.lock().extract_if(.., |thread| thread.is_finished()).collect();
        for thread in ended {
            if thread.join().is_err() {
                tracing::error!("a worker panicked outside its guard");
            }
        }
    }

    /// How many threads have not ended, not counting the calling one.
    pub(crate) fn running(&self) -> usize {
        let own = std::thread::current().id();
        self.threads.lock().iter().filter(|thread| thread.thread().id() != own).count()
    }
}

impl Shard {
    fn new() -> Result<Self> {
        let epoll =
            epoll::create(CreateFlags::CLOEXEC).map_err(|e| Error::os("making an epoll", e))?;
        let bell = Parker::new()?;
        epoll::add(&epoll, bell.fd(), EventData::new_u64(BELL), EventFlags::IN)
            .map_err(|e| Error::os("watching an eventfd", e))?;
        Ok(Self {
            epoll,
            bell,
            kicks: Mutex::default(),
            lanes: Mutex::default(),
            started: AtomicBool::new(false),
            unhurried: AtomicBool::new(false),
        })
    }

    pub(in crate::drive) fn kick(&self, kick: Kick) {
        self.kicks.lock().push(kick);
        self.bell.ring();
    }
}
