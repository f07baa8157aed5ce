//! A transfer: prepared once, posted as often as NIXL likes.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uccl_p2p::{
    Endpoint, Error as Engine, PreparedTransfer, Status as Stand, TransferHandle, TryOutcome,
};

use crate::{
    remote::Remote,
    status::{Error, Result, Status},
};

/// Checked descriptors, and the state of the last post.
pub(crate) struct Transfer {
    pub(crate) remote: Arc<Remote>,
    /// `None`: all of it is memory without bytes.
    prepared: Option<PreparedTransfer>,
    posted: Mutex<TransferState>,
}

enum TransferState {
    Idle,
    InFlight(TransferHandle, Instant),
    Failed(Engine),
    Ended,
}

impl Transfer {
    pub(crate) fn new(remote: Arc<Remote>, prepared: Option<PreparedTransfer>) -> Self {
        Self { remote, prepared, posted: Mutex::new(TransferState::Idle) }
    }

    fn bytes(&self) -> u64 {
        self.prepared.as_ref().map_or(0, PreparedTransfer::len_bytes)
    }

    /// Starts it. The notification is this post's alone: the next one has its own, or none.
    pub(crate) fn post(&self, endpoint: &Endpoint, notif: Option<&[u8]>) -> Result<Status> {
        let mut posted = self.posted.lock();
        if let TransferState::InFlight(transfer, _) = &*posted
            && matches!(transfer.poll()?, Stand::Pending)
        {
            return Err(Error::StillActive);
        }
        *posted = TransferState::Idle;
        let Some(prepared) = &self.prepared else {
            if let Some(notif) = notif {
                self.remote.notify(endpoint, notif)?;
            }
            *posted = TransferState::Ended;
            return Ok(Status::Success);
        };
        let conn = self.remote.conn(endpoint)?;
        let started = Instant::now();
        match endpoint.try_run_prepared(conn, prepared, notif)? {
            TryOutcome::Done(_) => Ok(self.ended(&mut posted, started)),
            TryOutcome::Under(transfer) => {
                // No progress here: it would copy a part of the data on the caller's time.
                let stand = transfer.status()?;
                *posted = TransferState::InFlight(transfer, started);
                self.note(&mut posted, stand, started)
            }
        }
    }

    /// The state of the transfer. Each call also makes progress.
    pub(crate) fn check(&self) -> Result<Status> {
        self.look(&mut self.posted.lock())
    }

    fn look(&self, posted: &mut TransferState) -> Result<Status> {
        let (stand, started) = match posted {
            TransferState::InFlight(transfer, started) => (transfer.poll()?, *started),
            TransferState::Failed(e) => return Err(e.clone().into()),
            TransferState::Ended => return Ok(Status::Success),
            TransferState::Idle => {
                return Err(Error::Invalid("the transfer has not been posted".into()));
            }
        };
        self.note(posted, stand, started)
    }

    fn note(&self, posted: &mut TransferState, stand: Stand, started: Instant) -> Result<Status> {
        match stand {
            Stand::Pending => Ok(Status::InProgress),
            Stand::Failed(e) => {
                *posted = TransferState::Failed(e.clone());
                Err(e.into())
            }
            Stand::Done(_) => Ok(self.ended(posted, started)),
        }
    }

    fn ended(&self, posted: &mut TransferState, started: Instant) -> Status {
        *posted = TransferState::Ended;
        self.remote.cost.lock().learn(self.bytes(), started.elapsed());
        Status::Success
    }

    /// Ends it: no byte of it lands in either side's memory any more.
    ///
    /// # Errors
    /// Memory of this side may still be touched. NIXL calls again then, to let go of the transfer:
    /// that succeeds, because it has been said.
    pub(crate) fn cancel(&self) -> Result<()> {
        let mut posted = self.posted.lock();
        let TransferState::InFlight(transfer, _) = &*posted else { return Ok(()) };
        let said = cancel_result(&transfer.cancel()?);
        *posted =
            said.as_ref().err().map_or(TransferState::Ended, |e| TransferState::Failed(e.clone()));
        Ok(said?)
    }

    /// The estimated time of the transfer, and the likely error.
    pub(crate) fn estimate(&self) -> (Duration, Duration) {
        self.remote.cost.lock().estimate(self.bytes())
    }
}

/// A transfer that ended by itself, with or without success, has no error left to report, unless
/// its memory must not be freed.
fn cancel_result(status: &Stand) -> Result<(), Engine> {
    match status {
        Stand::Failed(e @ Engine::StillTouched { .. }) => Err(e.clone()),
        Stand::Done(_) | Stand::Failed(_) | Stand::Pending => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use uccl_p2p::Outcome;

    use super::*;

    #[test]
    fn a_cancel_tells_of_memory_that_may_still_be_touched_and_of_nothing_else() {
        let cancelled = Engine::Cancelled { by: "the caller".into() };
        for ended in [Stand::Done(Outcome::default()), Stand::Failed(cancelled)] {
            assert!(cancel_result(&ended).is_ok());
        }
        let (by, reason) = ("peer".into(), "it is stuck".into());
        let touched = Engine::StillTouched { regions: [].into(), by, reason };
        let said = cancel_result(&Stand::Failed(touched));
        assert!(matches!(said, Err(Engine::StillTouched { .. })), "{said:?}");
    }
}
