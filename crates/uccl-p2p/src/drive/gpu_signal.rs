//! The peer's signal that a GPU applies. Messages behind it wait until its word has changed.

use parking_lot::Mutex;
use uccl_fabric::gpu::WordChange;
use uccl_wire::frame::Status;

/// The signal that a GPU applies, if there is one.
#[derive(Default)]
pub(crate) struct GpuSignal(Mutex<Option<(u64, WordChange)>>);

/// How far the change of its word has come.
pub(super) enum SignalStep {
    /// There is no signal.
    Nothing,
    UnderWay,
    /// The word has changed or cannot be changed: the signal of this number has to be answered.
    Ended(u64, Status),
}

impl GpuSignal {
    pub(super) fn begin(&self, id: u64, change: WordChange) {
        *self.0.lock() = Some((id, change));
    }

    /// Looks at the change, which is forgotten once it has ended.
    pub(super) fn look(&self) -> SignalStep {
        let mut signal = self.0.lock();
        let Some((id, change)) = &*signal else { return SignalStep::Nothing };
        let (id, Some(changed)) = (*id, change.ended()) else { return SignalStep::UnderWay };
        *signal = None;
        SignalStep::Ended(id, changed.map_or(Status::Fault, |()| Status::Ok))
    }

    /// Ends it with its connection: a change that has not begun is not made.
    pub(super) fn cancel(&self) {
        self.0.lock().take();
    }
}
