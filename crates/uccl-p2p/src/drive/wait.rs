//! How a caller waits: it makes progress itself, spins for a while, and then sleeps on its lanes.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smallvec::SmallVec;
use uccl_fabric::lane::Lane;

use super::{
    core::connection::{Connection, care::Claim, transfer::Transfer},
    deadline,
    park::Parker,
};
use crate::{error::Error, types::Interrupt};

/// A sleeping caller asks at least this often whether it was interrupted.
const SLICE: Duration = Duration::from_millis(50);
/// A caller that is awake asks this often.
const ASK: Duration = Duration::from_millis(10);
/// How long to spin with more than [`MUCH`] bytes outstanding on a lane. Spinning for longer only
/// takes the processor from the thread that moves the data. Does not apply to lanes on which a
/// device moves the data.
const SHORT_SPIN: Duration = Duration::from_micros(5);
const MUCH: u64 = 128 << 10;
/// After spinning for this long, a thread lets others have its processor: the peer's thread may be
/// among them.
pub(crate) const YIELD_AFTER: Duration = Duration::from_micros(20);
/// How many looks at the lanes to make, while spinning, between two looks at the clock.
const LOOKS: u32 = 16;
/// The same number while operations are under way on rails: looking at them takes no system call.
/// The other lanes are then looked at only as often as the clock.
const LOOKS_AT_RAILS: u32 = 512;

/// How long a caller sleeps if it cannot wait for descriptors.
const NAP: Duration = Duration::from_millis(1);

/// The caller was interrupted. Nothing else ends a wait early: a caller that stops waiting without
/// ending its transfer would leave its memory to a peer.
#[derive(Debug)]
pub(crate) struct Interruption;

impl From<Interruption> for Error {
    fn from(_: Interruption) -> Self {
        Self::Interrupted
    }
}

/// Waits until the transfer has ended or `until` has come. `Ok(false)`: it has not ended. `claim`
/// is on its connection.
pub(crate) fn wait(
    mut claim: Claim<'_>,
    transfer: &Arc<Transfer>,
    until: Option<Instant>,
    interrupt: &mut dyn Interrupt,
) -> Result<bool, Interruption> {
    if transfer.finished() {
        return Ok(true);
    }
    let conn = &transfer.conn;
    let spin = conn.core.config.spin;
    let mut looks = 0_u32;
    let mut quiet_since = None;
    let mut asked = None;
    let fence_at = transfer.fence_at();
    loop {
        looks = looks.wrapping_add(1);
        let rails = conn.lanes.rails_under_way();
        let is_due = looks.is_multiple_of(if rails.is_some() { LOOKS_AT_RAILS } else { LOOKS });
        let moved = match rails {
            Some(_) if !is_due => conn.progress_lane(conn.lanes.rails_place()),
            _ => conn.progress(),
        };
        if transfer.finished() {
            return Ok(true);
        }
        if moved {
            quiet_since = None;
        }
        if !is_due {
            std::hint::spin_loop();
            continue;
        }
        claim.beat();
        let now = Instant::now();
        if now - *asked.get_or_insert(now) >= ASK || fence_at.is_some_and(|at| at <= now) {
            asked = Some(now);
            // The callback may wait for something that other threads hold.
            let interrupted;
            (claim, interrupted) = claim.aside(|| interrupt.interrupted());
            if interrupted {
                return Err(Interruption);
            }
            deadline::enforce(transfer, now);
            conn.check_liveness();
        }
        if until.is_some_and(|until| until <= now) {
            return Ok(transfer.finished());
        }
        let quiet = now - *quiet_since.get_or_insert(now);
        let much =
            conn.lanes.living().any(|(_, lane)| lane.load() > MUCH && !lane.caps().by_device);
        if quiet >= if much { SHORT_SPIN.min(spin) } else { spin } {
            sleep(conn, transfer, until, now);
            quiet_since = None;
        } else if quiet >= YIELD_AFTER {
            std::thread::yield_now();
        }
    }
}

/// Sleeps until a lane shows something, the transfer has ended, or a slice of time has passed.
fn sleep(conn: &Connection, transfer: &Transfer, until: Option<Instant>, now: Instant) {
    let Ok(parker) = Parker::of_thread() else {
        // There are no descriptors left.
        return std::thread::sleep(NAP);
    };
    parker.clear();
    if !transfer.watch(&parker) {
        return;
    }
    // Before the lanes are armed: a thread that posts after that rings the bell.
    conn.care.sleeper_comes(&parker);
    sleep_on(conn, &parker, nap(transfer, until, now));
    conn.care.sleeper_goes(&parker);
    transfer.unwatch(&parker);
}

/// How long to sleep at most.
fn nap(transfer: &Transfer, until: Option<Instant>, now: Instant) -> Duration {
    let fence_at = transfer.fence_at();
    [until, fence_at]
        .into_iter()
        .flatten()
        .fold(SLICE, |nap, at| nap.min(at.saturating_duration_since(now)))
        .max(Duration::from_millis(1))
}

fn sleep_on(conn: &Connection, parker: &Parker, nap: Duration) {
    let arm = |(index, lane): (usize, &Arc<dyn Lane>)| {
        conn.care.borrow_lane(index);
        lane.arm()
    };
    // No descriptor shows that a stream has reached the point at which a transfer may begin: it has
    // to be polled.
    if conn.deferred.any() || conn.lanes.lost.to_be_ended() || !conn.lanes.living().all(arm) {
        return;
    }
    let timeout = Timespec { tv_sec: 0, tv_nsec: nap.as_nanos() as _ };
    let interests: SmallVec<[_; 4]> =
        conn.lanes.living().map(|(_, lane)| lane.interest()).collect();
    let mut fds: SmallVec<[PollFd<'_>; 5]> = interests
        .iter()
        .map(|interest| {
            let write = if interest.write { PollFlags::OUT } else { PollFlags::empty() };
            PollFd::from_borrowed_fd(interest.fd, PollFlags::IN | write)
        })
        .collect();
    let ends = interests.iter().filter_map(|interest| interest.end);
    fds.extend(ends.map(|end| PollFd::from_borrowed_fd(end, PollFlags::IN)));
    fds.push(PollFd::from_borrowed_fd(parker.fd(), PollFlags::IN));
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        // No memory, or more descriptors than the process may have open by now.
        Err(_) => std::thread::sleep(NAP),
    }
}
