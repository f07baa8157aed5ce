//! What one queue pair has in flight, and the requests being made for it.

use std::collections::VecDeque;

use crate::{
    lane::OpKind,
    mem::Span,
    rma::rail::{RailError, Request},
    verbs::{
        ffi::abi::{SendWr, Sge, send_flag, wr_opcode},
        qp::Qp,
        registration::READABLE,
    },
};

/// Bits of a request's identifier that count; those above name the queue.
const COUNTER_BITS: u32 = 48;
const COUNTER: u64 = (1 << COUNTER_BITS) - 1;

/// At most this many requests end by one completion, so that the first of many are not told too late.
const MOST_UNSIGNALLED: u32 = 32;

/// What the identifiers of a queue's requests have in common.
pub(super) fn queue_id(index: usize) -> u64 {
    (index as u64) << COUNTER_BITS
}

/// The queue that an identifier names.
pub(super) fn queue_of(wr_id: u64) -> usize {
    (wr_id >> COUNTER_BITS) as usize
}

/// A request that the device has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Outstanding {
    pub(super) what: What,
    bytes: u64,
}

/// Whose request it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum What {
    /// The channel's user's, with this tag.
    Own(u64),
    /// A part of one, whose last part ends it.
    Part,
    /// A piece of one, which had been lost too often on the way that is not reliable.
    Piece(u64),
    /// The protocol's: its end says nothing of whether it came.
    Unreliable,
    /// A read that proves that the writes before it have arrived.
    Fence,
}

/// The accounts of a send queue: what is in it, in order.
///
/// A place is free again when the request's end is known: by its own completion, or by that of a later one.
pub(super) struct Account {
    outstanding: VecDeque<Outstanding>,
    /// The counter of the first that is outstanding.
    first: u64,
    bytes: u64,
    depth: usize,
    /// Fences among what is outstanding, which have room of their own.
    fences: usize,
    queue: u64,
}

impl Account {
    fn new(queue: usize, depth: usize) -> Self {
        let (outstanding, queue) = (VecDeque::with_capacity(depth), queue_id(queue));
        Self { outstanding, first: 0, bytes: 0, depth, fences: 0, queue }
    }

    #[inline]
    fn room(&self) -> usize {
        (self.depth + self.fences).saturating_sub(self.outstanding.len())
    }

    /// Takes a place, and gives the request its identifier.
    fn add(&mut self, what: What, bytes: u64) -> u64 {
        let counter = self.first.wrapping_add(self.outstanding.len() as u64) & COUNTER;
        self.outstanding.push_back(Outstanding { what, bytes });
        self.bytes += bytes;
        self.fences += usize::from(what == What::Fence);
        self.queue | counter
    }

    /// How many requests have ended when this one has; `None` if it is not outstanding.
    fn ended_by(&self, wr_id: u64) -> Option<usize> {
        let ahead = wr_id.wrapping_sub(self.first) & COUNTER;
        let count = usize::try_from(ahead).ok()?.checked_add(1)?;
        (count <= self.outstanding.len()).then_some(count)
    }

    fn remove_first(&mut self) -> Option<Outstanding> {
        let first = self.outstanding.pop_front()?;
        self.first = self.first.wrapping_add(1) & COUNTER;
        self.bytes -= first.bytes;
        self.fences -= usize::from(first.what == What::Fence);
        Some(first)
    }
}

/// How the arrival of writes is proved where the device does not say: it reads a word of the peer's memory, which the
/// peer answers only when all that was sent before has been placed (RFC 5040, 5.5).
///
/// Over iWARP a write's own completion only says that its bytes have been handed to TCP.
#[derive(Clone, Copy)]
pub(super) struct Fence {
    /// Where the word goes.
    pub(super) local: Span,
    pub(super) local_key: u64,
    pub(super) remote_addr: u64,
    pub(super) remote_key: u32,
}

impl Fence {
    pub(super) fn request(&self, tag: u64) -> Request {
        let Self { local, local_key, remote_addr, remote_key } = *self;
        let remote_key = remote_key.into();
        Request { kind: OpKind::Read, local, local_key, remote_addr, remote_key, tag }
    }
}

/// A queue pair with its accounts.
pub(super) struct SendQueue {
    qp: Qp,
    account: Account,
    /// Requests made and not posted: the first `made` of these.
    wrs: Vec<SendWr>,
    sges: Vec<Sge>,
    made: usize,
    unsignalled: u32,
    signal_every: u32,
    fence: Option<Fence>,
}

// SAFETY: the pointers in its requests lead into its own vectors, and are set anew before they are used.
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
            account: Account::new(index, places),
            wrs: vec![NO_REQUEST; places],
            sges: vec![Sge::default(); places],
            made: 0,
            unsignalled: 0,
            signal_every: MOST_UNSIGNALLED.min(depth / 4).max(1),
            fence: None,
        }
    }

    /// From now on writes are followed by fences, each of which has room beside its writes. Nothing is in
    /// flight.
    pub(super) fn set_fence(&mut self, fence: Fence) {
        let places = self.account.depth * 2;
        self.wrs.resize(places, NO_REQUEST);
        self.sges.resize(places, Sge::default());
        self.fence = Some(fence);
    }

    /// Whether the end of a write is told only by what follows it.
    #[inline]
    pub(super) fn is_fenced(&self) -> bool {
        self.fence.is_some()
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

    /// Requests that can be made.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.account.room()
    }

    /// Whether nothing is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.account.outstanding.is_empty()
    }

    /// Makes a request, for which there is room. It is posted by [`Self::ring`].
    #[inline]
    pub(super) fn make(&mut self, request: &Request) {
        self.make_as(What::Own(request.tag), opcode_of(request.kind), 0, request);
    }

    /// Makes a request of two parts, which end as one, for which there is room.
    pub(super) fn make_in_parts(&mut self, [first, second]: &[Request; 2]) {
        self.make_as(What::Part, opcode_of(first.kind), 0, first);
        self.make(second);
    }

    /// Makes a request that ends only if the way to the peer works, for which there is room.
    pub(super) fn make_probe(&mut self, tag: u64) {
        let request = self.fence.map_or(Request::of_nothing(tag), |fence| fence.request(tag));
        self.make(&request);
    }

    /// The same with another opcode, and an immediate.
    #[inline]
    pub(super) fn make_as(&mut self, what: What, opcode: u32, immediate: u32, request: &Request) {
        self.fill(what, opcode, immediate, request);
        self.unsignalled += 1;
        if self.unsignalled == self.signal_every {
            self.signal();
        }
    }

    /// Has a completion tell of all that was made last.
    #[inline]
    fn signal(&mut self) {
        let last = |wrs: &[SendWr], made: usize| wrs.get(made.checked_sub(1)?).map(|wr| wr.opcode);
        if let Some(fence) = self.fence
            && last(&self.wrs, self.made) != Some(wr_opcode::RDMA_READ)
        {
            self.fill(What::Fence, wr_opcode::RDMA_READ, 0, &fence.request(0));
        }
        if let Some(last) = self.made.checked_sub(1).and_then(|last| self.wrs.get_mut(last)) {
            last.send_flags |= send_flag::SIGNALED;
        }
        self.unsignalled = 0;
    }

    #[inline]
    fn fill(&mut self, what: What, opcode: u32, immediate: u32, request: &Request) {
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
        if readable && len <= self.qp.max_inline() {
            wr.send_flags |= send_flag::INLINE;
        }
        self.made += 1;
    }

    /// Posts what was made, if anything was. The last of it is signalled, so that every request has a
    /// completion that tells of it.
    ///
    /// # Safety
    /// The memory of the requests stays valid and registered until they have ended, or this is dropped.
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
        // SAFETY: a chain of `made` requests that ends with a null; their memory is the caller's promise.
        unsafe { self.qp.post(wrs) }
    }

    /// Takes the requests that have ended when this one has; false if it is not in flight.
    pub(super) fn retire(&mut self, wr_id: u64, mut each: impl FnMut(Outstanding, bool)) -> bool {
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
        let mut account = Account::new(3, 4);
        account.first = COUNTER - 1;
        let ids: Vec<_> = (0..4).map(|tag| account.add(What::Own(tag), 10)).collect();
        assert!(ids.iter().all(|&id| queue_of(id) == 3));
        assert_eq!((account.bytes, account.outstanding.len()), (40, 4));
        let counts: Vec<_> = ids.iter().map(|&id| account.ended_by(id)).collect();
        assert_eq!(counts, [Some(1), Some(2), Some(3), Some(4)]);
        assert_eq!(account.remove_first().map(|request| request.what), Some(What::Own(0)));
        assert_eq!(account.remove_first().map(|request| request.what), Some(What::Own(1)));
        assert_eq!(account.ended_by(ids[1]), None, "known already");
        assert_eq!(account.ended_by(ids[3]), Some(2));
        assert_eq!(account.ended_by(ids[3] + 1), None, "not posted");
        assert_eq!(account.bytes, 20);
    }
}
