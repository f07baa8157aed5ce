//! Transfers that are done at once where that takes no longer than to start them.

use super::{
    CudaStream, Endpoint, Interrupt, Outcome, Request, TryOutcome, transfers::StartOutcome,
};
use crate::error::Result;
use std::sync::Arc;

impl Endpoint {
    /// Does a transfer at once if that takes no longer than to start it, and else starts it. A
    /// transfer that was done at once has no id.
    pub fn try_run(&self, request: &Request<'_>) -> Result<TryOutcome> {
        Ok(match self.try_begin(request)? {
            StartOutcome::Done(outcome) => TryOutcome::Done(outcome),
            StartOutcome::Transfer(transfer) => TryOutcome::Under(transfer.id),
        })
    }

    pub(super) fn try_begin(&self, request: &Request<'_>) -> Result<StartOutcome> {
        let made = match self.single(request)? {
            Some(single) => self.make_now(&single)?,
            None => None,
        };
        made.map_or_else(|| self.post_transfer(request).map(StartOutcome::Transfer), Ok)
    }

    /// Starts a transfer and waits for its end. If it is interrupted, it cancels the transfer
    /// before it returns.
    pub fn run(&self, request: &Request<'_>, interrupt: &mut dyn Interrupt) -> Result<Outcome> {
        let begun = match self.single(request)? {
            Some(single) => self.begin_now(&single)?,
            None => None,
        };
        match begun {
            Some(StartOutcome::Done(outcome)) => Ok(outcome),
            Some(StartOutcome::Transfer(transfer)) => {
                self.finish(transfer.conn.claim(), &transfer, interrupt)
            }
            None => {
                let after = request.after.map(CudaStream::mark).transpose()?;
                let conn = self.usable_conn(request.conn)?;
                let claim = conn.claim();
                let transfer = self.start(Arc::clone(&conn), request, after)?;
                self.finish(claim, &transfer, interrupt)
            }
        }
    }
}
