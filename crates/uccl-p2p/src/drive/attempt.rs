//! Work in steps that wait for sockets or for times, such as a handshake, without a thread of its
//! own. Each call of [`Attempt::step`] does the steps that can be done, and says how long they may
//! sleep: not at all for a caller that polls.

use std::{
    future::poll_fn,
    os::fd::AsFd,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::{Error, Result};

/// The work, as the compiler cuts it into steps.
type Work<T> = Pin<Box<dyn Future<Output = Result<T>> + Send>>;

/// Until when the present step may sleep. The work and the attempt that runs it share this.
#[derive(Clone)]
pub(crate) struct SleepLimit(Arc<Mutex<Instant>>);

/// Work that is under way, or its result.
pub(crate) struct Attempt<T> {
    limit: SleepLimit,
    stage: Stage<T>,
}

enum Stage<T> {
    Running(Work<T>),
    Ended(Result<T>),
}

impl SleepLimit {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    /// Whether the present step may sleep no longer.
    fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// How long the present step may still sleep.
    fn left(&self) -> Duration {
        self.0.lock().saturating_duration_since(Instant::now())
    }

    /// Waits until the descriptor is ready, or until this time.
    ///
    /// # Errors
    /// The system's.
    pub(crate) async fn ready(
        &self,
        fd: &(impl AsFd + Sync),
        flags: PollFlags,
        until: Option<Instant>,
    ) -> Result<bool> {
        poll_fn(|_| {
            let now = Instant::now();
            let left = until.map(|until| until.saturating_duration_since(now));
            let sleep = left.map_or_else(|| self.left(), |left| left.min(self.left()));
            let timeout =
                Timespec { tv_sec: sleep.as_secs() as _, tv_nsec: sleep.subsec_nanos() as _ };
            match poll(&mut [PollFd::new(fd, flags)], Some(&timeout)) {
                Ok(0) | Err(rustix::io::Errno::INTR)
                    if until.is_some_and(|until| until <= Instant::now()) =>
                {
                    Poll::Ready(Ok(false))
                }
                Ok(0) | Err(rustix::io::Errno::INTR) => Poll::Pending,
                Ok(_) => Poll::Ready(Ok(true)),
                Err(e) => Poll::Ready(Err(Error::os("waiting for a socket", e))),
            }
        })
        .await
    }

    /// Waits until this time.
    pub(crate) async fn sleep_until(&self, wake: Instant) {
        poll_fn(|_| {
            std::thread::sleep(wake.saturating_duration_since(Instant::now()).min(self.left()));
            if wake <= Instant::now() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Waits for the next look at something that no descriptor shows: for `nap` at most, or for the
    /// caller's next step.
    pub(crate) async fn next_look(&self, nap: Duration) {
        let mut was_pending = false;
        poll_fn(|_| {
            if self.is_over() && !was_pending {
                was_pending = true;
                return Poll::Pending;
            }
            std::thread::sleep(nap.min(self.left()));
            Poll::Ready(())
        })
        .await;
    }
}

impl<T: Clone> Attempt<T> {
    /// Work that has not begun. The function gets the limit for the work's sleeps.
    pub(crate) fn new<W>(work: impl FnOnce(SleepLimit) -> W) -> Self
    where
        W: Future<Output = Result<T>> + Send + 'static,
    {
        let limit = SleepLimit::new();
        let stage = Stage::Running(Box::pin(work(limit.clone())));
        Self { limit, stage }
    }

    /// Does the steps that can be done, and sleeps for `at_most` between them. Returns the result
    /// once there is one, each time that it is asked for.
    pub(crate) fn step(&mut self, at_most: Duration) -> Poll<Result<T>> {
        let work = match &mut self.stage {
            Stage::Running(work) => work,
            Stage::Ended(result) => return Poll::Ready(result.clone()),
        };
        *self.limit.0.lock() = Instant::now() + at_most;
        // Nobody is woken: the caller comes back by itself.
        let result = std::task::ready!(work.as_mut().poll(&mut Context::from_waker(Waker::noop())));
        self.stage = Stage::Ended(result.clone());
        Poll::Ready(result)
    }

    /// Drops the work, if it has no result yet; `why` is the result then.
    pub(crate) fn end(&mut self, why: Error) -> Result<T> {
        if let Stage::Ended(result) = &self.stage {
            return result.clone();
        }
        self.stage = Stage::Ended(Err(why.clone()));
        Err(why)
    }

    /// Keeps the objects of unfinished work for ever: those of a forked child belong to its parent.
    pub(crate) fn forget(&mut self) {
        let closed = Stage::Ended(Err(Error::Closed));
        std::mem::forget(std::mem::replace(&mut self.stage, closed));
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn a_step_without_time_does_not_wait() {
        let (near, mut far) = UnixStream::pair().expect("a pair");
        let mut attempt = Attempt::new(|limit| async move {
            assert!(limit.ready(&near, PollFlags::IN, None).await?);
            limit.next_look(Duration::from_secs(3600)).await;
            Ok(7)
        });
        for _ in 0..3 {
            assert!(attempt.step(Duration::ZERO).is_pending(), "nothing was sent");
        }
        far.write_all(&[1]).expect("sent");
        assert!(attempt.step(Duration::ZERO).is_pending(), "the second wait begins");
        for _ in 0..2 {
            assert!(matches!(attempt.step(Duration::ZERO), Poll::Ready(Ok(7))));
        }
        assert!(matches!(attempt.end(Error::Closed), Ok(7)), "it has ended before");
    }

    #[test]
    fn work_that_is_ended_drops_its_objects() {
        let held = Arc::new(());
        let inside = Arc::clone(&held);
        let mut attempt = Attempt::<()>::new(|limit| async move {
            limit.sleep_until(Instant::now() + Duration::from_secs(3600)).await;
            drop(inside);
            Ok(())
        });
        assert!(attempt.step(Duration::ZERO).is_pending());
        assert!(matches!(attempt.end(Error::Interrupted), Err(Error::Interrupted)));
        assert_eq!(Arc::strong_count(&held), 1);
        assert!(matches!(attempt.step(Duration::ZERO), Poll::Ready(Err(Error::Interrupted))));
    }
}
