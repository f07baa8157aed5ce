//! CUDA streams that wait for transfers.
//!
//! A wait for a word in memory stands in a hardware queue of the GPU, of which there may be fewer
//! than streams. All work behind it in that queue waits as well, even work of other streams. So our
//! GPUs' own work for a transfer is enqueued first, and the stream waits for that by an event.

use std::sync::Arc;

use smallvec::SmallVec;
use uccl_device::cuda::Stream;
use uccl_fabric::lane::{HostLane, OpKind, OpName};

use super::{
    core::connection::{
        Connection,
        deferred_transfers::{DeferredTransfer, Start},
        transfer::Transfer,
    },
    route::Route,
    work::{Memory, Pieces, Work},
};
use crate::types::Op;

impl Connection {
    /// Makes all later work on a stream wait for a transfer that GPUs of ours copy. False: the
    /// transfer depends on something else, too; GPUs have been given all of its work that they can
    /// be given now.
    pub(crate) fn lead_stream(self: &Arc<Self>, transfer: &Arc<Transfer>, stream: &Stream) -> bool {
        let Some(host) = &self.lanes.host else { return false };
        self.begin_behind(transfer, &**host);
        let Some(ops) = transfer.plain_ops() else { return false };
        let left = transfer.ops_left();
        let names: SmallVec<[OpName; 4]> =
            ops.iter().filter(|(lane, _)| *lane == 0).map(|(_, name)| *name).collect();
        if names.is_empty() || names.len() < ops.len() {
            return false;
        }
        host.lead(&names, stream).is_some_and(|open| open == left as usize)
    }

    /// Whether GPUs of ours may have work for a transfer that they have not been given.
    pub(crate) fn may_stage(&self, transfer: &Transfer) -> bool {
        if transfer.is_host_accessible() {
            return false;
        }
        let body = transfer.body.lock();
        let by_rails = |(lane, _): &(u16, OpName)| usize::from(*lane) >= self.lanes.streams.len();
        body.ops.is_empty() || !body.ops.iter().all(by_rails)
    }

    /// Begins a transfer that waits for a stream: a GPU of ours that copies all of it waits
    /// instead.
    fn begin_behind(self: &Arc<Self>, transfer: &Arc<Transfer>, host: &dyn HostLane) {
        if !self.deferred.any() {
            return;
        }
        let _beginning = self.deferred.beginning.lock();
        let Some(waiting) = self.deferred.take(transfer) else { return };
        let order = waiting.start.order();
        let hold = transfer.hold();
        match self.post_behind(waiting, host) {
            None => transfer.op_ended(),
            Some(waiting) => {
                if !self.deferred.push(waiting) {
                    transfer.note_error(self.lost_error());
                    transfer.op_ended();
                }
            }
        }
        drop(hold);
        self.deferred.ended(order);
    }

    /// `Some`: it has not begun.
    fn post_behind(
        self: &Arc<Self>,
        waiting: DeferredTransfer,
        host: &dyn HostLane,
    ) -> Option<DeferredTransfer> {
        let DeferredTransfer { after, transfer, start } = waiting;
        let event = after.as_ref().and_then(|after| after.event());
        let (Some(event), Memory::One(memory)) = (event, transfer.memory()) else {
            return Some(DeferredTransfer { after, transfer, start });
        };
        let Start::OneSided(op, Pieces { local, remote, .. }) = start else {
            return Some(DeferredTransfer { after, transfer, start });
        };
        let kind = if op == Op::Read { OpKind::Read } else { OpKind::Write };
        let work = Work { kind, memory, local, remote };
        if !matches!(self.choose(&work, None), Route::Stream | Route::Streams) {
            let start = Start::OneSided(op, Pieces::merged(work.local, work.remote));
            return Some(DeferredTransfer { after, transfer, start });
        }
        transfer.expect_ops(1);
        // SAFETY: the memory is inside regions, and the transfer holds their leases until its last
        // operation has ended.
        match unsafe { host.post_behind(work.operation(Arc::clone(&transfer) as _), event) } {
            Ok(name) => {
                transfer.body.lock().ops.push((0, name));
                None
            }
            Err(back) => {
                transfer.op_ended();
                let start = Start::OneSided(op, Pieces::merged(back.local, back.remote));
                Some(DeferredTransfer { after, transfer, start })
            }
        }
    }
}
