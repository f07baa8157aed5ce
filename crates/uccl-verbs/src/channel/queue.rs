//! The send queue of one queue pair: the requests in flight, and those being prepared.

use std::collections::VecDeque;

use uccl_fabric::{
    guarded,
    lane::OpKind,
    rail::{RailError, Request},
};

use crate::{
    ffi::abi::{SendWr, Sge, send_flag, wr_opcode},
    qp::Qp,
    registration::READABLE,
};

/// How many bits of a request's identifier are its counter. The bits above are the queue's index.
const COUNTER_BITS: u32 = 48;
const COUNTER: u64 = (1 << COUNTER_BITS) - 1;

/// At most this many requests share one completion, so that the end of the first is not reported
/// too late.
const MOST_UNSIGNALLED: u32 = 32;

/// The bits that the identifiers of all requests of a queue have in common.
pub(super) fn queue_id(index: usize) -> u64 {
    (index as u64) << COUNTER_BITS
}

/// The queue that an identifier names.
pub(super) fn queue_of(wr_id: u64) -> usize {
    (wr_id >> COUNTER_BITS) as usize
}

/// A request that the device has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PostedRequest {
    pub(super) what: RequestOwner,
    bytes: u64,
}

/// The owner of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RequestOwner {
    /// A request from the channel's user, with this tag.
    Own(u64),
    /// A piece of a write that was lost too often over unreliable queue pairs.
    Piece(u64),
    /// A message, acknowledgement or probe on an unreliable queue pair. Its completion does not
    /// mean that it arrived.
    Unreliable,
}

/// The requests in a send queue, in order.
///
/// A place becomes free when the request is known to have ended, by its own completion or by that
/// of a later request.
pub(super) struct RequestQueue {
    outstanding: VecDeque<PostedRequest>,
    /// The counter of the first outstanding request.
    first: u64,
    bytes: u64,
    depth: usize,
    queue: u64,
}

impl RequestQueue {
    fn new(queue: usize, depth: usize) -> Self {
        let (outstanding, queue) = (VecDeque::with_capacity(depth), queue_id(queue));
        Self { outstanding, first: 0, bytes: 0, depth, queue }
    }

    #[inline]
    fn room(&self) -> usize {
        self.depth.saturating_sub(self.outstanding.len())
    }

    /// Takes a place for a request, and returns the request's identifier.
    fn add(&mut self, what: RequestOwner, bytes: u64) -> u64 {
        let counter = self.first.wrapping_add(self.outstanding.len() as u64) & COUNTER;
        self.outstanding.push_back(PostedRequest { what, bytes });
        self.bytes += bytes;
        self.queue | counter
    }

    /// How many requests have ended if this one has. `None` if it is not outstanding.
    fn ended_by(&self, wr_id: u64) -> Option<usize> {
        let ahead = wr_id.wrapping_sub(self.first) & COUNTER;
        let count = usize::try_from(ahead).ok()?.checked_add(1)?;
        (count <= self.outstanding.len()).then_some(count)
    }

    fn remove_first(&mut self) -> Option<PostedRequest> {
        let first = self.outstanding.pop_front()?;
        self.first = self.first.wrapping_add(1) & COUNTER;
        self.bytes -= first.bytes;
        Some(first)
    }
}

/// A queue pair, and the requests in its send queue.
pub(super) struct SendQueue {
    qp: Qp,
    account: RequestQueue,
    /// The first `made` of these are requests that are prepared and not posted.
    wrs: Vec<SendWr>,
    sges: Vec<Sge>,
    made: usize,
    unsignalled: u32,
    signal_every: u32,
}

// SAFETY: the pointers in its requests point into its own vectors, and are set again before each
// use.
unsafe impl Send for SendQueue {}

const NO_REQUEST: SendWr = SendWr {
    wr_id: 0,
    next: std::ptr::null_mut(),
    sg_list: std::ptr::null_mut(),
    num_sge: 0,
    opcode: 0,
    send_flags: 0,
    imm_data: 0,
    remote_addr: 0,
    rkey: 0,
    _rest_of_wr: [0; 5],
    _qp_type: 0,
    _bind_mw: [0; 6],
};

#[inline]
fn opcode_of(kind: OpKind) -> u32 {
    match kind {
        OpKind::Read => wr_opcode::RDMA_READ,
        OpKind::Write => wr_opcode::RDMA_WRITE,
    }
}

impl SendQueue {
    pub(super) fn new(qp: Qp, index: usize, depth: u32) -> Self {
        let places = depth as usize;
        Self {
            qp,
            account: RequestQueue::new(index, places),
            wrs: vec![NO_REQUEST; places],
            sges: vec![Sge::default(); places],
            made: 0,
            unsignalled: 0,
            signal_every: MOST_UNSIGNALLED.min(depth / 4).max(1),
        }
    }

    pub(super) fn qp(&self) -> &Qp {
        &self.qp
    }

    /// Bytes in flight.
    #[inline]
    pub(super) fn bytes(&self) -> u64 {
        self.account.bytes
    }

    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.room() > 0
    }

    /// How many more requests there is room for.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.account.room()
    }

    /// Whether nothing is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.account.outstanding.is_empty()
    }

    /// Prepares a request; there must be room. [`Self::ring`] posts it.
    #[inline]
    pub(super) fn make(&mut self, request: &Request) {
        self.make_as(RequestOwner::Own(request.tag), opcode_of(request.kind), 0, request);
    }

    /// Prepares a request of no bytes, which succeeds only if packets get to the peer and back.
    /// There must be room.
    pub(super) fn make_probe(&mut self, tag: u64) {
        self.make(&Request::of_nothing(tag));
    }

    /// Like [`Self::make`], with a given opcode and immediate.
    #[inline]
    pub(super) fn make_as(
        &mut self,
        what: RequestOwner,
        opcode: u32,
        immediate: u32,
        request: &Request,
    ) {
        self.fill(what, opcode, immediate, request);
        self.unsignalled += 1;
        if self.unsignalled == self.signal_every {
            self.signal();
        }
    }

    /// Has the last prepared request make a completion, which also stands for the unsignalled ones
    /// before it.
    #[inline]
    fn signal(&mut self) {
        if let Some(last) = self.made.checked_sub(1).and_then(|last| self.wrs.get_mut(last)) {
            last.send_flags |= send_flag::SIGNALED;
        }
        self.unsignalled = 0;
    }

    #[inline]
    fn fill(&mut self, what: RequestOwner, opcode: u32, immediate: u32, request: &Request) {
        let (Some(wr), Some(sge)) = (self.wrs.get_mut(self.made), self.sges.get_mut(self.made))
        else {
            return;
        };
        let len = request.local.len;
        wr.wr_id = self.account.add(what, len as u64);
        wr.opcode = opcode;
        wr.imm_data = immediate.to_be();
        wr.send_flags = 0;
        wr.num_sge = i32::from(len > 0);
        wr.remote_addr = request.remote_addr;
        wr.rkey = request.remote_key as u32;
        *sge = Sge {
            addr: request.local.addr as u64,
            length: len as u32,
            lkey: request.local_key as u32,
        };
        let readable = request.kind == OpKind::Write && request.local_key & READABLE != 0;
        // The library copies such data in this process. Memory that the caller has unmapped is left
        // to the device, which has the pages.
        // SAFETY: host memory that a request is for, as far as it is mapped.
        if readable && len <= self.qp.max_inline() && unsafe { guarded::is_readable(request.local) }
        {
            wr.send_flags |= send_flag::INLINE;
        }
        self.made += 1;
    }

    /// Posts the prepared requests, if there are any. The last is signalled, so that every request
    /// is covered by a completion.
    ///
    /// # Safety
    /// The memory of the requests must stay valid and registered until they have ended or this is
    /// dropped.
    #[inline]
    pub(super) unsafe fn ring(&mut self) -> Result<(), RailError> {
        if self.made == 0 {
            return Ok(());
        }
        if self.unsignalled > 0 {
            self.signal();
        }
        let made = std::mem::take(&mut self.made).min(self.wrs.len());
        let (wrs, sges) = (self.wrs.as_mut_ptr(), self.sges.as_mut_ptr());
        for index in 0..made {
            let next =
                if index + 1 < made { wrs.wrapping_add(index + 1) } else { std::ptr::null_mut() };
            // SAFETY: `made` is at most the length of both vectors, which are equally long.
            unsafe {
                let wr = &mut *wrs.add(index);
                wr.next = next;
                wr.sg_list = sges.add(index);
            }
        }
        // SAFETY: a chain of `made` requests that ends with a null pointer; their memory is the
        // caller's promise.
        unsafe { self.qp.post(wrs) }
    }

    /// Removes this request and those before it, which have all ended, and calls `each` for each of
    /// them, saying whether it is the last. False if this request is not in flight.
    pub(super) fn retire(&mut self, wr_id: u64, mut each: impl FnMut(PostedRequest, bool)) -> bool {
        let Some(count) = self.account.ended_by(wr_id) else { return false };
        for left in (0..count).rev() {
            if let Some(request) = self.account.remove_first() {
                each(request, left == 0);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_tells_of_all_before_it() {
        let mut account = RequestQueue::new(3, 4);
        account.first = COUNTER - 1;
        let ids: Vec<_> = (0..4).map(|tag| account.add(RequestOwner::Own(tag), 10)).collect();
        assert!(ids.iter().all(|&id| queue_of(id) == 3));
        assert_eq!((account.bytes, account.outstanding.len()), (40, 4));
        let counts: Vec<_> = ids.iter().map(|&id| account.ended_by(id)).collect();
        assert_eq!(counts, [Some(1), Some(2), Some(3), Some(4)]);
        assert_eq!(account.remove_first().map(|request| request.what), Some(RequestOwner::Own(0)));
        assert_eq!(account.remove_first().map(|request| request.what), Some(RequestOwner::Own(1)));
        assert_eq!(account.ended_by(ids[1]), None, "known already");
        assert_eq!(account.ended_by(ids[3]), Some(2));
        assert_eq!(account.ended_by(ids[3] + 1), None, "not posted");
        assert_eq!(account.bytes, 20);
    }
}
