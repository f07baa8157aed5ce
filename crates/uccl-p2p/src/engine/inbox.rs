//! What we receive two-sidedly: receives that wait for their sends, and sends that wait for their
//! receives. The two meet in order.

use std::{collections::VecDeque, sync::Arc};

use smallvec::SmallVec;
use uccl_fabric::{
    cuda_ipc,
    lane::{RemoteSpans, Spans},
    mem::{RemoteSpan, Span},
};
use uccl_wire::message::{Lens, Source, Sources};

use super::{
    connection::Connection,
    transfer::{After, Fence, Transfer},
};
use crate::{
    endpoint::Op,
    error::{Error, Result},
};

/// Bytes of sends and notifications that may have travelled with their messages and not be answered.
pub(crate) const EAGER_WINDOW: usize = 1 << 20;
/// Sends that may wait for their receives.
const MAX_UNEXPECTED: usize = super::transfer::MAX_PENDING;
/// Pieces of such sends, together. Senders know it, and go no further.
pub(crate) const MAX_PIECES: usize = 4 << 20;

/// A send that no receive has met.
enum Arrived {
    Eager { seq: u64, lens: Vec<u32>, data: Vec<u8> },
    Rts { seq: u64, sources: Vec<Source> },
}

impl Arrived {
    fn seq(&self) -> u64 {
        match self {
            Self::Eager { seq, .. } | Self::Rts { seq, .. } => *seq,
        }
    }

    fn pieces(&self) -> usize {
        match self {
            Self::Eager { lens, .. } => lens.len(),
            Self::Rts { sources, .. } => sources.len(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Eager { data, .. } => data.len(),
            Self::Rts { .. } => 0,
        }
    }
}

/// Receives and sends that have not met.
#[derive(Default)]
pub(crate) struct Inbox {
    posted: VecDeque<Arc<Transfer>>,
    arrived: VecDeque<Arrived>,
    bytes: usize,
    pieces: usize,
    /// Receives whose data is being fetched, by the number of their send.
    fetching: Vec<(u64, Arc<Transfer>)>,
    closed: bool,
}

impl Inbox {
    /// Forgets everything, for a connection that ends; nothing can be added any more.
    pub(crate) fn clear(&mut self) {
        self.posted.clear();
        self.arrived.clear();
        self.fetching.clear();
        self.closed = true;
    }

    fn keep(&mut self, arrived: Arrived) -> Result<(), String> {
        self.bytes += arrived.bytes();
        self.pieces += arrived.pieces();
        if self.bytes > EAGER_WINDOW
            || self.pieces > MAX_PIECES
            || self.arrived.len() >= MAX_UNEXPECTED
        {
            return Err("more unanswered sends than agreed".into());
        }
        self.arrived.push_back(arrived);
        Ok(())
    }

    fn next_arrived(&mut self) -> Option<Arrived> {
        let arrived = self.arrived.pop_front()?;
        self.bytes -= arrived.bytes();
        self.pieces -= arrived.pieces();
        Some(arrived)
    }
}

impl Connection {
    /// Starts a receive. Its transfer expects one operation to end: the meeting with its send.
    pub(crate) fn post_recv(self: &Arc<Self>, transfer: &Arc<Transfer>) -> Result<()> {
        let mut inbox = self.inbox.lock();
        if inbox.closed {
            return Err(self.lost_error());
        }
        match inbox.next_arrived() {
            None => inbox.posted.push_back(Arc::clone(transfer)),
            Some(Arrived::Eager { seq, lens, data }) => {
                drop(inbox);
                take_eager(transfer, seq, lens.into_iter(), &data);
            }
            Some(Arrived::Rts { seq, sources }) => {
                inbox.fetching.push((seq, Arc::clone(transfer)));
                drop(inbox);
                self.fetch(transfer, seq, &sources);
            }
        }
        Ok(())
    }

    /// Data came with its message.
    pub(crate) fn on_eager(
        self: &Arc<Self>,
        seq: u64,
        lens: Lens<'_>,
        data: &[u8],
    ) -> Result<(), String> {
        let mut inbox = self.inbox.lock();
        let Some(transfer) = inbox.posted.pop_front() else {
            let lens = lens.iter().collect();
            return inbox.keep(Arrived::Eager { seq, lens, data: data.to_vec() });
        };
        drop(inbox);
        take_eager(&transfer, seq, lens.iter(), data);
        Ok(())
    }

    /// Data is there to be fetched.
    pub(crate) fn on_rts(self: &Arc<Self>, seq: u64, sources: Sources<'_>) -> Result<(), String> {
        let mut inbox = self.inbox.lock();
        let sources = sources.iter().collect();
        let Some(transfer) = inbox.posted.pop_front() else {
            return inbox.keep(Arrived::Rts { seq, sources });
        };
        inbox.fetching.push((seq, Arc::clone(&transfer)));
        drop(inbox);
        self.fetch(&transfer, seq, &sources);
        Ok(())
    }

    /// The peer wants a send back. It is answered as cancelled, unless it has been received already.
    pub(crate) fn on_send_cancel(self: &Arc<Self>, seq: u64) -> Result<(), String> {
        let mut inbox = self.inbox.lock();
        if let Some(at) = inbox.arrived.iter().position(|arrived| arrived.seq() == seq) {
            if let Some(gone) = inbox.arrived.remove(at) {
                inbox.bytes -= gone.bytes();
                inbox.pieces -= gone.pieces();
            }
            drop(inbox);
            let error = Error::Cancelled { by: Arc::clone(&self.peer.name) };
            self.send_fin(seq, Some(&error), Some(Fence::PeerCancel));
            return Ok(());
        }
        let fetching = inbox.fetching.iter().find(|(fetched, _)| *fetched == seq);
        if let Some((_, transfer)) = fetching {
            // Lanes must not be touched from here: a worker carries the fence out.
            transfer.body.lock().fence.get_or_insert(Fence::PeerCancel);
            transfer.fencing.store(true, std::sync::atomic::Ordering::Release);
            self.core.workers.wake_all();
        }
        Ok(())
    }

    /// Fetches the data of a send into the memory of the receive that it met.
    fn fetch(self: &Arc<Self>, transfer: &Arc<Transfer>, seq: u64, sources: &[Source]) {
        let targets = {
            let mut body = transfer.body.lock();
            body.after = After::Fin(seq);
            std::mem::take(&mut body.targets)
        };
        match fit(&targets, sources.len(), |i| sources[i].len) {
            Err(e) => transfer.note_error(e),
            Ok(total) => {
                transfer.bytes.store(total, std::sync::atomic::Ordering::Relaxed);
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
        // The meeting itself, which the transfer has waited for.
        transfer.op_ended();
        self.kick_if_busy();
    }

    /// Takes back a receive that has met no send.
    pub(crate) fn withdraw_recv(&self, transfer: &Arc<Transfer>) {
        let mut inbox = self.inbox.lock();
        let at = inbox.posted.iter().position(|posted| Arc::ptr_eq(posted, transfer));
        if let Some(at) = at {
            inbox.posted.remove(at);
            drop(inbox);
            let fence = transfer.body.lock().fence.unwrap_or(Fence::Cancel);
            transfer.note_error(transfer.fence_error(fence));
            transfer.op_ended();
        }
    }

    /// A receive's data has been fetched, or will not be.
    pub(crate) fn fetched(&self, seq: u64) {
        let mut inbox = self.inbox.lock();
        if let Some(at) = inbox.fetching.iter().position(|(fetched, _)| *fetched == seq) {
            inbox.fetching.swap_remove(at);
        }
    }
}

/// Copies data that came with its message into the memory of the receive that it met.
fn take_eager(
    transfer: &Arc<Transfer>,
    seq: u64,
    lens: impl ExactSizeIterator<Item = u32>,
    data: &[u8],
) {
    let targets = {
        let mut body = transfer.body.lock();
        body.after = After::Fin(seq);
        std::mem::take(&mut body.targets)
    };
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
                    // SAFETY: as below; the driver knows whose memory it is.
                    if let Err(e) = unsafe { cuda_ipc::put(target.addr, bytes) } {
                        let (peer, reason) = (Arc::clone(&transfer.conn.peer.name), e.to_string());
                        transfer.note_error(Error::Gpu { peer, reason });
                    }
                    continue;
                }
                // SAFETY: inside a registered region, which the transfer's lease keeps registered, and
                // `fit` has found it long enough.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        bytes.as_ptr(),
                        target.addr as *mut u8,
                        bytes.len(),
                    );
                }
            }
            transfer.bytes.store(total, std::sync::atomic::Ordering::Relaxed);
            transfer.note_checksum(transfer.conn.lanes[0].caps().checksum);
        }
    }
    transfer.op_ended();
}

/// Whether what was sent fits what was posted; says how much it is.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(iovs: usize, bytes: usize) -> Arrived {
        Arrived::Eager { seq: 0, lens: vec![0; iovs], data: vec![7; bytes] }
    }

    /// An honest peer knows what was agreed, and keeps to it.
    #[test]
    fn what_no_receive_has_met_is_bounded_in_bytes() {
        let mut inbox = Inbox::default();
        for _ in 0..4 {
            inbox.keep(sent(1, EAGER_WINDOW / 4)).expect("as agreed");
        }
        inbox.keep(sent(1, 0)).expect("it is full, and no fuller than agreed");
        inbox.next_arrived().expect("the first");
        inbox.keep(sent(1, EAGER_WINDOW / 4)).expect("there is room again");
        inbox.keep(sent(1, 1)).expect_err("a byte too many");
    }

    #[test]
    fn what_no_receive_has_met_is_bounded_in_pieces() {
        let mut inbox = Inbox::default();
        inbox.keep(sent(MAX_PIECES, 0)).expect("as agreed");
        inbox.keep(sent(1, 0)).expect_err("a piece too many");
    }

    #[test]
    fn what_no_receive_has_met_is_bounded_in_number() {
        let mut inbox = Inbox::default();
        for _ in 0..MAX_UNEXPECTED {
            inbox.keep(sent(0, 0)).expect("as agreed");
        }
        inbox.keep(sent(0, 0)).expect_err("one too many");
    }
}
