//! Keys that a device makes for one channel alone. It may take long over each, so a thread of its
//! own makes them, one after the other, and the questions that need them are answered afterwards.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use uccl_device::DemandThread;
use uccl_fabric::rail::MakeKey;

use super::pinned::PinGuard;

/// The keys that are being made for a channel.
#[derive(Default)]
pub(super) struct Exports {
    queue: Arc<Mutex<Queue>>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    /// The purpose of the key that is being made.
    current: Option<KeyPurpose>,
    thread: DemandThread,
}

struct Job {
    wanted: KeyPurpose,
    make: MakeKey,
    /// The memory stays registered until the key is made or given up.
    _held: PinGuard,
}

/// The purpose of a key: the memory and the registration.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct KeyPurpose {
    /// The number of the registered memory.
    pub(super) number: u64,
    /// Which of its registrations: the key by which our own requests name it.
    pub(super) registration: u64,
}

impl Queue {
    fn wanted(&self) -> impl Iterator<Item = KeyPurpose> {
        self.waiting.iter().map(|job| job.wanted).chain(self.current)
    }
}

impl Exports {
    /// Has a key made, unless that is under way already.
    pub(super) fn make(&self, wanted: KeyPurpose, make: MakeKey, held: PinGuard) {
        let mut queue = self.queue.lock();
        if queue.wanted().any(|other| other == wanted) {
            return;
        }
        queue.waiting.push_back(Job { wanted, make, _held: held });
        let all = Arc::clone(&self.queue);
        if queue.thread.start("uccl-export", move || make_all(&all)).is_err() {
            // The answers name no such key.
            let dropped = std::mem::take(&mut queue.waiting);
            drop(queue);
            drop(dropped);
        }
    }

    /// Whether a key for this memory is still to be made.
    pub(super) fn is_making(&self, number: u64) -> bool {
        self.queue.lock().wanted().any(|wanted| wanted.number == number)
    }

    /// Gives up the jobs that have not begun.
    pub(super) fn give_up(&self) {
        let dropped = std::mem::take(&mut self.queue.lock().waiting);
        drop(dropped);
    }
}

impl Drop for Exports {
    /// Waits for the key that is being made.
    fn drop(&mut self) {
        self.give_up();
        // Without the lock, which the thread takes.
        let thread = self.queue.lock().thread.take();
        if let Some(thread) = thread {
            // A panic has been reported already.
            let _ = thread.join();
        }
    }
}

fn make_all(queue: &Arc<Mutex<Queue>>) {
    let running = KeyMaker(queue);
    while let Some(Job { make, _held: held, .. }) = running.next() {
        if let Err(e) = make() {
            tracing::warn!("no key for a peer: {e}");
        }
        drop(held);
    }
}

/// The thread that makes keys.
struct KeyMaker<'a>(&'a Mutex<Queue>);

impl KeyMaker<'_> {
    /// The next one. None is said once: nothing more is taken after that.
    fn next(&self) -> Option<Job> {
        let mut queue = self.0.lock();
        let job = queue.waiting.pop_front();
        queue.current = job.as_ref().map(|job| job.wanted);
        if job.is_none() {
            queue.thread.leave();
        }
        job
    }
}

impl Drop for KeyMaker<'_> {
    /// After a panic, gives up the waiting jobs: no thread takes them.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut queue = self.0.lock();
            queue.current = None;
            queue.thread.leave();
            let dropped = std::mem::take(&mut queue.waiting);
            drop(queue);
            drop(dropped);
        }
    }
}
