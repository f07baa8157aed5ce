//! The receives of an unreliable queue pair. Every message that arrives uses one up.

use std::sync::Arc;

use uccl_fabric::{mem::Span, rail::RailError};
use uccl_wire::ack::ACK_LEN;

use crate::{
    ffi::abi::{RecvWr, Sge},
    mr::{Mr, Reach},
    pd::Pd,
    qp::Qp,
};

/// The bit that marks a request's identifier as a receive's.
pub(in super::super) const RECEIVE: u64 = 1 << 63;

/// How many receives a queue pair has: enough for all messages that the peer may have under way,
/// and for as many acknowledgements.
pub(in super::super) const RECEIVES: u32 = 512;

/// The number of receives in one batch.
const REPOST: usize = 32;

/// Bytes of each receive: room for an acknowledgement, in a cache line of its own.
const SLOT: usize = 64;
const _: () = assert!(ACK_LEN <= SLOT);

pub(super) struct Receives {
    /// Declared before the bytes, so that it ends before they are freed.
    mr: Mr,
    bytes: Vec<u8>,
    wrs: Vec<RecvWr>,
    sges: Vec<Sge>,
    /// Slots that no posted receive uses.
    free: Vec<u32>,
    id: u64,
}

// SAFETY: the pointers in its requests point into its own vectors, and are set again before each
// use.
unsafe impl Send for Receives {}

impl Receives {
    /// `id` holds the bits that the receives' identifiers have in common.
    pub(super) fn new(pd: &Arc<Pd>, id: u64) -> Result<Self, RailError> {
        let places = RECEIVES as usize;
        let mut bytes = vec![0; places * SLOT];
        let span = Span { addr: bytes.as_mut_ptr().expose_provenance(), len: bytes.len() };
        let mr = Mr::new(pd, span, Reach::OURS)
            .map_err(|errno| pd.context().error("ibv_reg_mr of receives", errno))?;
        let none = RecvWr {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 1,
        };
        Ok(Self {
            mr,
            bytes,
            wrs: vec![none; REPOST],
            sges: vec![Sge::default(); REPOST],
            free: (0..RECEIVES).rev().collect(),
            id: id | RECEIVE,
        })
    }

    /// Frees the slot of a receive that has ended. Returns the bytes of an acknowledgement, if one
    /// came.
    pub(super) fn ended(&mut self, wr_id: u64, len: u32) -> Option<[u8; ACK_LEN]> {
        let slot =
            u32::try_from(wr_id & u64::from(u32::MAX)).ok().filter(|&slot| slot < RECEIVES)?;
        self.free.push(slot);
        let at = slot as usize * SLOT;
        let bytes = self.bytes.get(at..at + ACK_LEN).filter(|_| len as usize == ACK_LEN)?;
        bytes.try_into().ok()
    }

    /// Posts ended receives once more: all of them, or only full batches of [`REPOST`].
    pub(super) fn post(&mut self, qp: &Qp, all: bool) -> Result<(), RailError> {
        while self.free.len() >= REPOST || (all && !self.free.is_empty()) {
            let count = self.free.len().min(REPOST);
            let (wrs, sges) = (self.wrs.as_mut_ptr(), self.sges.as_mut_ptr());
            for index in 0..count {
                let Some(slot) = self.free.pop() else { break };
                let addr = self.bytes.as_ptr().addr() as u64 + u64::from(slot) * SLOT as u64;
                let next = if index + 1 < count {
                    wrs.wrapping_add(index + 1)
                } else {
                    std::ptr::null_mut()
                };
                let sge = Sge { addr, length: SLOT as u32, lkey: self.mr.lkey() };
                // SAFETY: the index is below REPOST, the length of both vectors.
                unsafe {
                    *sges.add(index) = sge;
                    *wrs.add(index) = RecvWr {
                        wr_id: self.id | u64::from(slot),
                        next,
                        sg_list: sges.add(index),
                        num_sge: 1,
                    };
                }
            }
            // SAFETY: a chain of `count` requests that ends with a null pointer. Each has a slot
            // that no other has, and the slots are freed after the queue pair.
            unsafe { qp.receive(wrs) }?;
        }
        Ok(())
    }
}
