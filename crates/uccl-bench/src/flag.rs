//! A byte that one side writes into the other's memory, and that the other watches for.

use std::{
    marker::PhantomData,
    sync::atomic::{AtomicU8, Ordering::*},
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use uccl_p2p::Interrupt;

use super::control::HangUp;

/// Looks at the byte between two yields of the processor.
const LOOKS_A_YIELD: u32 = 2048;
/// Yields between two looks at the clock and at the other side.
const YIELDS_A_CLOCK: u32 = 64;

/// The byte holds a mark of the last round. Consecutive rounds have different marks.
pub(crate) struct Flag<'a> {
    byte: *mut u8,
    of: PhantomData<&'a ()>,
}

impl Flag<'_> {
    /// # Safety
    /// The byte must stay valid, and reached by processors as atomic memory alone, for as long as
    /// this lives.
    pub(crate) unsafe fn at(address: usize) -> Self {
        Self { byte: address as *mut u8, of: PhantomData }
    }

    fn byte(&self) -> &AtomicU8 {
        // SAFETY: the promise of `at`; the peer's writes come through a device or another mapping.
        unsafe { AtomicU8::from_ptr(self.byte) }
    }

    /// Resets it to the state before the first round.
    pub(crate) fn clear(&self) {
        self.byte().store(0, Release);
    }

    /// Sets it for a round, to be written to the other side.
    pub(crate) fn raise(&self, round: u64) {
        self.byte().store(mark(round), Release);
    }

    /// Waits for the other side's flag of a round.
    pub(crate) fn await_round(
        &self,
        round: u64,
        timeout: Duration,
        watch: &mut HangUp,
    ) -> Result<()> {
        let mark = mark(round);
        let mut since = None;
        loop {
            for _ in 0..YIELDS_A_CLOCK {
                for _ in 0..LOOKS_A_YIELD {
                    if self.byte().load(Acquire) == mark {
                        return Ok(());
                    }
                    std::hint::spin_loop();
                }
                std::thread::yield_now();
            }
            if watch.interrupted() {
                bail!("the other side is gone; see what it printed");
            }
            if since.get_or_insert_with(Instant::now).elapsed() > timeout {
                bail!("the other side's write did not come within --timeout {timeout:?}");
            }
        }
    }
}

/// The mark of a round. It is never 0, which fresh memory holds.
fn mark(round: u64) -> u8 {
    (round % 255) as u8 + 1
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::control::Channel;

    #[test]
    fn each_round_has_a_mark_of_its_own() {
        assert!((0..600).all(|round| mark(round) != 0 && mark(round) != mark(round + 1)));
    }

    #[test]
    fn a_round_that_does_not_come_ends() {
        let (near, far) = UnixStream::pair().expect("a socket pair");
        let other = near.try_clone().expect("a clone");
        let mut watch = Channel::new(near.into(), other.into()).watch().expect("a watch");
        let mut memory = 0_u8;
        // SAFETY: the byte outlives the flag, and nothing else touches it meanwhile.
        let flag = unsafe { Flag::at(&raw mut memory as usize) };
        flag.raise(7);
        flag.await_round(7, Duration::from_secs(20), &mut watch).expect("it is there");
        let late = flag.await_round(8, Duration::ZERO, &mut watch).expect_err("it never comes");
        assert!(late.to_string().contains("--timeout"), "{late}");
        drop(far);
        let gone = flag.await_round(8, Duration::from_secs(20), &mut watch).expect_err("gone");
        assert!(gone.to_string().contains("gone"), "{gone}");
    }
}
