//! The ends of the peer's writes and of our reads.

use std::sync::Arc;

use uccl_fabric::{
    lane::{Handling, OpError, OpName, OpResult},
    pipe::PipeRx,
    signal::{self, Word},
};
use uccl_wire::frame::Status;

use super::{PendingChange, Rx, RxContext};
use crate::{
    ReportedCompletion,
    ops::{InFlight, ReadTarget},
    upload::End,
};

impl<P: PipeRx> Rx<P> {
    /// Ends a write of the peer's: changes the word of its signal, and answers. If the status is
    /// good, all its bytes are visible here.
    pub(super) fn end_write(
        &mut self,
        op: u64,
        status: Status,
        word: Option<Word>,
        around: &RxContext<'_>,
    ) {
        // The data that has come since the pipe was cut was thrown away, so a signal or an answer
        // would be false. An answer could still reach the peer, if this side cuts a pipe in shared
        // memory. So none is sent, and the peer learns that the lane has ended.
        if self.is_cut {
            return;
        }
        let status = match word.filter(|_| status == Status::Ok) {
            None => status,
            Some(word) => match signal::apply(around.regions, &word) {
                Ok(Some(change)) => {
                    self.changing = Some(PendingChange::Write { op, change });
                    return;
                }
                Ok(None) => {
                    around.sink.signalled();
                    status
                }
                Err(refused) => refused,
            },
        };
        self.answers.ack(op, status);
    }

    /// Looks at the change of a word that is under way. Returns whether it has ended.
    pub(super) fn end_change(&mut self, around: &RxContext<'_>) -> bool {
        match &self.changing {
            None => return false,
            Some(PendingChange::Message) if around.sink.go_on() == Handling::UnderWay => {
                return false;
            }
            Some(PendingChange::Message) => {}
            Some(PendingChange::Write { op, change }) => {
                let Some(changed) = change.ended() else { return false };
                around.sink.signalled();
                self.answers.ack(*op, changed.map_or(Status::Fault, |()| Status::Ok));
            }
        }
        self.changing = None;
        true
    }
}

/// Ends a read of ours after all copies of its data have ended.
pub(super) fn end_read(name: OpName, end: End, around: &RxContext<'_>) {
    let mut ops = around.ops.lock();
    if let End::Data(target) = end {
        let op = ops.remove(name);
        drop(ops);
        if let Some(op) = op {
            let result = read_result(&op, &target);
            op.done.complete(result);
        }
        return;
    }
    // More of its data may come from the peer, and is thrown away.
    let done =
        ops.get_mut(name).map(|op| std::mem::replace(&mut op.done, Arc::new(ReportedCompletion)));
    drop(ops);
    if let Some(done) = done {
        done.complete(Err(OpError::Cancelled));
    }
}

pub(super) fn read_result(op: &InFlight, target: &ReadTarget) -> OpResult {
    match op.doomed.as_ref().or(target.failed.as_ref()) {
        Some(e) => Err(e.clone()),
        None if target.received != op.len => Err(OpError::Remote(Status::Protocol)),
        None => Ok(()),
    }
}
