//! Receives: how they begin, and how they go on when they meet their sends.

use std::sync::{Arc, atomic::Ordering};

use smallvec::SmallVec;
use uccl_fabric::{
    gpu, guarded,
    lane::{OpError, RemoteSpans, Spans},
    mem::{RemoteSpan, Span},
};
use uccl_proto::incoming::EarlySend;
use uccl_wire::message::Source;

use super::core::connection::{
    Connection,
    transfer::{After, Fence, Transfer},
};
use crate::{
    error::{Error, Result},
    types::Op,
};

impl Connection {
    /// Starts a receive. Its transfer has one operation more, which ends after it has met its send.
    pub(crate) fn post_recv(self: &Arc<Self>, transfer: &Arc<Transfer>) -> Result<()> {
        let met = {
            let session = &mut self.talk.lock().session;
            if session.is_closed() {
                return Err(self.lost_error());
            }
            session.incoming.receive(Arc::clone(transfer))
        };
        match met {
            None => {}
            Some((_, EarlySend::Eager { seq, lens, data })) => {
                self.take_eager(transfer, seq, lens.into_iter(), &data);
            }
            Some((_, EarlySend::Rendezvous { seq, sources })) => {
                self.fetch(transfer, seq, &sources)
            }
        }
        Ok(())
    }

    /// Fetches the data of a send into the memory of the receive that it met.
    pub(super) fn fetch(self: &Arc<Self>, transfer: &Arc<Transfer>, seq: u64, sources: &[Source]) {
        let targets = meet(transfer, seq);
        match fit(&targets, sources.len(), |i| sources[i].len) {
            Err(e) => transfer.note_error(e),
            Ok(total) => {
                transfer.bytes.store(total, Ordering::Relaxed);
                let local: Spans = (targets.iter().zip(sources))
                    .map(|(target, source)| Span { addr: target.addr, len: source.len as usize })
                    .collect();
                let remote: RemoteSpans = sources
                    .iter()
                    .map(|s| RemoteSpan { addr: s.addr, len: s.len, key: s.key, slot: s.slot })
                    .collect();
                self.post_ops(transfer, Op::Read, local, remote);
                self.call_help();
            }
        }
        // Ends the operation that stands for meeting the send.
        transfer.op_ended();
        self.kick_if_busy();
    }

    /// Copies data that came with its message into the memory of the receive that it met.
    pub(super) fn take_eager(
        &self,
        transfer: &Arc<Transfer>,
        seq: u64,
        lens: impl ExactSizeIterator<Item = u32>,
        data: &[u8],
    ) {
        let targets = meet(transfer, seq);
        let lens: SmallVec<[u32; 8]> = lens.collect();
        match fit(&targets, lens.len(), |i| u64::from(lens[i])) {
            Err(e) => transfer.note_error(e),
            Ok(total) => {
                let mut rest = data;
                let on_host = transfer.is_host_accessible();
                for (target, len) in targets.iter().zip(&lens) {
                    let (bytes, after) = rest.split_at(*len as usize);
                    rest = after;
                    if !on_host {
                        // SAFETY: as below; the driver knows the GPU that owns the memory.
                        if let Err(e) = unsafe { gpu::put(target.addr, bytes) } {
                            let (peer, reason) = (Arc::clone(&self.peer.name), e.to_string());
                            transfer.note_error(Error::Gpu { peer, reason });
                        }
                        continue;
                    }
                    let to = Span { len: bytes.len(), ..*target };
                    // SAFETY: inside a registered region, which the transfer's lease keeps
                    // registered, and `fit` has found it long enough. The caller may have unmapped
                    // it.
                    if unsafe { guarded::copy_to(to, bytes) }.is_err() {
                        transfer.note_error(transfer.op_error(OpError::LocalFault));
                    }
                }
                transfer.bytes.store(total, Ordering::Relaxed);
                transfer.note_checksum(self.lanes.all[0].caps().checksum);
            }
        }
        transfer.op_ended();
    }

    /// Ends a transfer for a peer that cancels its send or its ask. The peer gets its answer when
    /// no data moves any more.
    pub(super) fn end_for_peer(&self, transfer: &Transfer) {
        // Lanes must not be touched from here, so a worker carries out the fence.
        transfer.body.lock().fence.get_or_insert(Fence::PeerCancel);
        transfer.fencing.store(true, Ordering::Release);
        self.core.workers.wake_all();
    }

    /// Takes back a receive that has met no send.
    pub(crate) fn withdraw_recv(&self, transfer: &Arc<Transfer>) {
        let is_it = |posted: &Arc<Transfer>| Arc::ptr_eq(posted, transfer);
        let withdrawn = self.talk.lock().session.incoming.withdraw(is_it);
        if withdrawn.is_some() {
            let fence = transfer.body.lock().fence.unwrap_or(Fence::Cancel);
            transfer.note_error(transfer.fence_error(fence));
            transfer.op_ended();
        }
    }
}

/// Notes that a receive has met its send. Returns where the data goes.
fn meet(transfer: &Transfer, seq: u64) -> SmallVec<[Span; 1]> {
    let mut body = transfer.body.lock();
    body.after = After::Fin(seq);
    std::mem::take(&mut body.targets)
}

/// Checks that the sent iovs fit the posted ones. Returns the length of the data.
fn fit(targets: &[Span], sent: usize, len: impl Fn(usize) -> u64) -> Result<u64> {
    if targets.len() != sent {
        return Err(Error::Invalid(format!(
            "a send of {sent} iovs met a receive of {} iovs",
            targets.len()
        )));
    }
    let mut total = 0u64;
    for (i, target) in targets.iter().enumerate() {
        total = total.saturating_add(len(i));
        if len(i) > target.len as u64 {
            return Err(Error::Truncated { sent: len(i), capacity: target.len as u64 });
        }
    }
    Ok(total)
}
