//! Staging: the bytes of GPU memory pass through chunks of locked host memory, on their way to a
//! link or from one.
//!
//! ```text
//!   to a link      free -> a GPU fills it -> ready -> on the link -> free
//!   from a link    free -> on the link -> a GPU empties it -> free
//! ```
//!
//! The link owns a chunk while it is ready or on the link, and [`Staging`] owns it while a GPU uses
//! it. A chunk that is dropped is free. Nothing here sleeps or calls back: the link polls.

use std::{
    collections::VecDeque,
    mem,
    time::{Duration, Instant},
};

use uccl_device::cuda::{Direction, GpuError};

use super::{
    Chunk, CopyBy,
    copier::{Copier, StagedCopy},
};
use crate::mem::LocatedSpan;

/// The most chunks that GPUs use at once for a link, where nothing else limits them: enough for
/// copies and the link to work at the same time.
const AHEAD: usize = 4;

/// How long a lane that ends waits for GPUs. A chunk takes them well under a millisecond, so a copy
/// that takes longer than this waits for work of other programs or streams that does not end.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The copies of one direction, each with the link's next step (`T`). Their ends are reported in
/// the order of their starts, even if they end in another order.
pub struct Staging<T> {
    copier: Copier,
    direction: Direction,
    line: VecDeque<(Step, T)>,
}

/// The condition for the link's next step.
enum Step {
    Copy(StagedCopy),
    /// No copy: the result is known already.
    Known(Result<(), GpuError>),
}

/// A reported end: of a copy, or of a step that only [follows](Staging::follow) copies.
pub struct StepEnd<T> {
    /// The link's next step.
    pub what: T,
    /// The chunk, if there was one, or the error.
    pub result: Result<Option<Chunk>, GpuError>,
}

impl<T> Staging<T> {
    /// Copies from GPUs to chunks ([`Direction::DeviceToHost`]), or from chunks to GPUs.
    #[must_use]
    pub fn new(by: &CopyBy, direction: Direction) -> Self {
        Self { copier: Copier::new(by), direction, line: VecDeque::new() }
    }

    /// Whether all ends have been reported.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.line.is_empty()
    }

    /// Whether ends must be reported before more is started.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.line.len() >= AHEAD
    }

    /// The link's steps after the copies, in their order.
    pub fn waiting(&self) -> impl Iterator<Item = &T> {
        self.line.iter().map(|(_, what)| what)
    }

    /// As [`Self::waiting`], but mutable.
    pub fn waiting_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.line.iter_mut().map(|(_, what)| what)
    }

    /// Whether a copy may be accessing our region in this slot.
    pub fn touches(&mut self, slot: u32) -> bool {
        let Self { copier, line, .. } = self;
        copies(line).any(|copying| copier.may_touch(copying, slot))
    }

    /// A free chunk near a GPU, which is given by its ordinal.
    ///
    /// # Errors
    /// When there is no such GPU, or no more memory can be locked.
    pub fn chunk(&self, device: u32) -> Result<Chunk, GpuError> {
        self.copier.chunk(device)
    }

    /// Starts to copy between the first bytes of a chunk and pieces of memory, in their order. A
    /// copy that cannot be started [ends](Self::ended) with the reason.
    ///
    /// # Safety
    /// The pieces together must fit the chunk. They must stay valid, and nobody else may use them,
    /// until the end is reported or [`Self::settle`] has succeeded; those in the regions of
    /// `slots`, while they are [touched](Self::touches).
    pub unsafe fn start(
        &mut self,
        what: T,
        chunk: Chunk,
        memory: &[LocatedSpan],
        slots: impl IntoIterator<Item = u32>,
    ) {
        // SAFETY: the caller's promise.
        let copying = unsafe { self.copier.start(chunk, memory, slots, self.direction) };
        self.line.push_back((Step::Copy(copying), what));
    }

    /// Adds a step of the link after all copies so far, with this result.
    pub fn follow(&mut self, what: T, result: Result<(), GpuError>) {
        self.line.push_back((Step::Known(result), what));
    }

    /// The next end, if it has come.
    pub fn ended(&mut self) -> Option<StepEnd<T>> {
        let result = match &self.line.front()?.0 {
            Step::Copy(copying) => self.copier.ended(copying)?,
            Step::Known(result) => result.clone(),
        };
        let (step, what) = self.line.pop_front()?;
        let chunk = match step {
            Step::Copy(copying) => Some(self.copier.release(copying)),
            Step::Known(_) => None,
        };
        Some(StepEnd { what, result: result.map(|()| chunk) })
    }

    /// Waits until no copy runs any more. [`Self::ended`] has yet to report their ends.
    ///
    /// # Errors
    /// When copies still run after `patience`.
    pub fn settle(&mut self, patience: Duration) -> Result<(), GpuError> {
        let until = Instant::now() + patience;
        loop {
            let left = self.running();
            if left == 0 {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(GpuError::System {
                    doing: "waiting for copies by GPUs".to_owned(),
                    reason: format!(
                        "{left} have not ended after {patience:?}, and still use their memory"
                    ),
                });
            }
            std::thread::yield_now();
        }
    }

    /// [Settles](Self::settle), and drops the link's steps.
    ///
    /// # Errors
    /// As for [`Self::settle`]. Then no step is dropped.
    pub fn clear(&mut self, patience: Duration) -> Result<(), GpuError> {
        self.settle(patience)?;
        for (step, _) in self.line.drain(..) {
            if let Step::Copy(copying) = step {
                self.copier.release(copying);
            }
        }
        Ok(())
    }

    /// How many copies have not ended.
    fn running(&mut self) -> usize {
        let Self { copier, line, .. } = self;
        copies(line).filter(|copying| copier.ended(copying).is_none()).count()
    }
}

fn copies<T>(line: &VecDeque<(Step, T)>) -> impl Iterator<Item = &StagedCopy> {
    line.iter().filter_map(|(step, _)| match step {
        Step::Copy(copying) => Some(copying),
        Step::Known(_) => None,
    })
}

impl<T> Drop for Staging<T> {
    fn drop(&mut self) {
        if self.running() > 0 {
            // A GPU finishes the copies that it was given. So the chunks are leaked, and with the
            // copier the memory that the GPU reads its orders from.
            mem::forget(mem::take(&mut self.line));
            mem::forget(mem::replace(&mut self.copier, Copier::new(&CopyBy::default())));
        }
    }
}

#[cfg(test)]
mod tests;
