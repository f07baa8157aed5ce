//! One unreliable queue pair, with the protocol that makes it reliable.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use uccl_fabric::{
    mem::Span,
    rail::{RailError, Request},
};
use uccl_tran::{OutOfOrder, Params, Receiver, Sender};
use uccl_wire::{
    ack::{ACK_LEN, Ack},
    verbs::{QueuePair, VerbsAddress},
};

use super::{
    super::queue::{RequestOwner, SendQueue, queue_id},
    receives::{RECEIVES, Receives},
};
use crate::{
    cq::Cq,
    ffi::abi::{Wc, wc_opcode, wc_status, wr_opcode},
    pd::Pd,
    qp::{Path, Qp, QueueCapacity, Service},
    registration::READABLE,
};

/// Requests that the send queue has room for.
pub(in super::super) const SENDS: u32 = 512;

/// How many of these are reserved for acknowledgements and probes.
const SPARE: usize = 64;

pub(super) struct UcPath {
    /// Declared before the receives, so that its queue pair is destroyed before their memory.
    queue: SendQueue,
    receives: Receives,
    /// The protocol's sender and receiver. None before the path is joined.
    ends: Option<(Sender, Receiver)>,
    /// The acknowledgement being posted. Its bytes are copied into the request (inline).
    ack: [u8; ACK_LEN],
}

impl UcPath {
    pub(super) fn new(
        pd: &Arc<Pd>,
        cq: &Arc<Cq>,
        index: usize,
        path: &Path,
    ) -> Result<Self, RailError> {
        let room = QueueCapacity { sends: SENDS, receives: RECEIVES };
        let qp = Qp::new(pd, cq, Service::Unreliable, room)?;
        if qp.max_inline() < ACK_LEN {
            return Err(RailError::Provider {
                what: "making a UC queue pair".to_owned(),
                why: format!("requests must take {ACK_LEN} bytes inline; set UCCL_RCMODE=1"),
            });
        }
        qp.to_init(path)?;
        let mut receives = Receives::new(pd, queue_id(index))?;
        receives.post(&qp, true)?;
        Ok(Self {
            queue: SendQueue::new(qp, index, SENDS),
            receives,
            ends: None,
            ack: [0; ACK_LEN],
        })
    }

    pub(super) fn name(&self) -> QueuePair {
        self.queue.qp().name()
    }

    pub(super) fn join(
        &mut self,
        path: &Path,
        peer: &VerbsAddress,
        qp: QueuePair,
        now: Instant,
    ) -> Result<(), RailError> {
        let params = Params { dead_after: dead_after(path), ..Params::default() };
        let refused = |error| RailError::Provider {
            what: "beginning the protocol for UC".to_owned(),
            why: format!("{error}"),
        };
        let sender = Params { first: self.name().first_packet, ..params };
        let sender = Sender::new(sender, now).map_err(refused)?;
        let receiver =
            Receiver::new(Params { first: qp.first_packet, ..params }).map_err(refused)?;
        self.queue.qp().join(path, peer, qp)?;
        self.ends = Some((sender, receiver));
        Ok(())
    }

    /// The protocol's sender.
    pub(super) fn sender(&mut self) -> Option<&mut Sender> {
        Some(&mut self.ends.as_mut()?.0)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.queue.bytes()
    }

    pub(super) fn can_send(&self, len: usize) -> bool {
        let can = |(sender, _): &(Sender, _)| sender.can_send(len as u64);
        self.queue.room() > SPARE && self.ends.as_ref().is_some_and(can)
    }

    /// Prepares a message of a write. False if it cannot be sent now.
    pub(super) fn send(&mut self, now: Instant, item: u64, write: &Request) -> bool {
        let Some((sender, _)) = self.ends.as_mut() else { return false };
        let Ok(number) = sender.send(now, item, write.local.len as u64) else { return false };
        let opcode = wr_opcode::RDMA_WRITE_WITH_IMM;
        self.queue.make_as(RequestOwner::Unreliable, opcode, number.0, write);
        true
    }

    /// Prepares a probe, which is a message of no bytes. If there is no room, the probe counts as
    /// lost.
    pub(super) fn probe(&mut self, number: u32) {
        if self.queue.has_room() {
            let opcode = wr_opcode::RDMA_WRITE_WITH_IMM;
            self.queue.make_as(RequestOwner::Unreliable, opcode, number, &Request::of_nothing(0));
        }
    }

    /// Handles a receive that has ended.
    ///
    /// # Errors
    /// When the network does not keep messages in order.
    pub(super) fn received(&mut self, now: Instant, wc: &Wc) -> Result<(), OutOfOrder> {
        let bytes = self.receives.ended(wc.wr_id, wc.byte_len);
        let Some((sender, receiver)) = self.ends.as_mut() else { return Ok(()) };
        if wc.status != wc_status::SUCCESS {
            // A message arrived and was refused. That is the same as if it was lost.
            return Ok(());
        }
        let immediate = u32::from_be(wc.imm_data);
        match (wc.opcode, wc.byte_len) {
            (wc_opcode::RECV_RDMA_WITH_IMM, 0) => {
                receiver.on_probe(now, immediate)?;
            }
            (wc_opcode::RECV_RDMA_WITH_IMM, _) => {
                receiver.on_packet(now, immediate)?;
            }
            (wc_opcode::RECV, _) => {
                let ack = bytes.and_then(|bytes| Ack::decode(&bytes).ok());
                if ack.is_none_or(|ack| sender.on_ack(now, &ack).is_err()) {
                    tracing::debug!("the peer sent an acknowledgement that makes no sense");
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Posts prepared messages, receives, and an acknowledgement if one is due. If there is nothing
    /// else to do, it acknowledges everything that has come.
    pub(super) fn post(&mut self, now: Instant, is_idle: bool) -> Result<(), RailError> {
        self.receives.post(self.queue.qp(), is_idle)?;
        if let Some((_, receiver)) = self.ends.as_mut()
            && self.queue.has_room()
        {
            let ack = if is_idle { receiver.flush(now) } else { receiver.poll_ack(now) };
            if let Some(ack) = ack {
                self.ack = ack.encode();
                let span = Span { addr: self.ack.as_ptr().expose_provenance(), len: ACK_LEN };
                let send = Request { local: span, local_key: READABLE, ..Request::of_nothing(0) };
                self.queue.make_as(RequestOwner::Unreliable, wr_opcode::SEND, 0, &send);
            }
        }
        // SAFETY: an acknowledgement's bytes are copied into its request. A message is a piece of a
        // write and ends before it does; the poster of the write promised that its memory stays
        // valid until then.
        unsafe { self.queue.ring() }
    }

    pub(super) fn retire(&mut self, wr_id: u64) -> bool {
        self.queue.retire(wr_id, |_, _| {})
    }

    /// When a timeout is due, if no completion comes before.
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let (sender, receiver) = self.ends.as_ref()?;
        [sender.next_timeout(), receiver.next_timeout()].into_iter().flatten().min()
    }
}

/// How long a peer may be silent: as long as a device would keep trying, and at least 2 s, as the
/// peer's process may have to be woken to answer.
fn dead_after(path: &Path) -> Duration {
    let once = Duration::from_nanos(4096 << path.timeout);
    (once * (u32::from(path.retries) + 1) * 2).max(Duration::from_secs(2))
}
