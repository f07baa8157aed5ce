//! Datagrams that go out: acknowledgements, chunks and probes.

use uccl_fabric::{
    guarded,
    mem::{Access, Span},
    rail::RequestError,
};
use uccl_tran::multipath::{Attempt, Load, PathAck};
use uccl_wire::{
    ack::ACK_LEN,
    datagram::{DatagramHead, DatagramKind, HEAD_LEN},
};

use super::{Connection, LAST_NUMBER};
use crate::{
    memory::{MemoryTable, part},
    outbox::OutMessage,
    outlet::Outlet,
};

/// Why a chunk cannot be sent.
enum ContentError {
    /// Our memory was unmapped.
    Unmapped,
    /// The region that the peer reads has ended.
    Ended,
}

impl Connection {
    /// Puts acknowledgements, chunks and probes that are due into the outlet.
    pub(crate) fn flush(&mut self, now_ns: u64, outlet: &mut Outlet<'_>, memory: &MemoryTable) {
        if self.loss.is_some() {
            return;
        }
        while let Some(ack) = self.receiver.poll_ack(now_ns) {
            self.send_ack(&ack, outlet);
        }
        while let Some(attempt) = self.sender.next(now_ns) {
            if attempt.number > LAST_NUMBER {
                self.lose("the numbers of a path are used up");
                return;
            }
            self.send(now_ns, &attempt, outlet, memory);
        }
        if outlet.finish(&self.to).is_err() {
            self.lose("the interface does not take datagrams of this length");
        }
        self.take_events(now_ns);
    }

    fn send_ack(&mut self, ack: &PathAck, outlet: &mut Outlet<'_>) {
        let Some(to) = self.to.get(usize::from(ack.path)) else { return };
        let bare = DatagramHead::bare(DatagramKind::Ack, self.peer);
        let (len, length) = (ACK_LEN as u16, ack.marked);
        let head = DatagramHead { path: ack.path, number: ack.ack.largest, len, length, ..bare };
        let Some(room) = outlet.room(ack.path.into(), to, HEAD_LEN + ACK_LEN) else { return };
        room[..HEAD_LEN].copy_from_slice(&head.encode());
        room[HEAD_LEN..].copy_from_slice(&ack.ack.encode());
        self.keys.ours.seal(room);
        outlet.commit(ack.path.into(), HEAD_LEN + ACK_LEN);
    }

    fn send(
        &mut self,
        now_ns: u64,
        attempt: &Attempt,
        outlet: &mut Outlet<'_>,
        memory: &MemoryTable,
    ) {
        let Some(to) = self.to.get(usize::from(attempt.path)) else { return };
        let bare = DatagramHead {
            path: attempt.path,
            number: attempt.number,
            ..DatagramHead::bare(DatagramKind::Probe, self.peer)
        };
        let (head, sent) = match attempt.load {
            Load::Probe => (bare, None),
            Load::Chunk(chunk) => {
                let Some(sent) = self.outbox.get(chunk.message) else { return };
                let (kind, total, length) = (sent.kind, sent.total, sent.length);
                // A reply's own region is no business of the peer's.
                let is_reply = kind == DatagramKind::Reply;
                let (key, addr) = if is_reply { (sent.answers, 0) } else { (sent.key, sent.addr) };
                let (message, offset, len) = (chunk.message, chunk.offset as u32, chunk.len as u16);
                let head =
                    DatagramHead { kind, total, length, key, addr, message, offset, len, ..bare };
                (head, Some(*sent))
            }
        };
        let len = HEAD_LEN + usize::from(head.len);
        let Some(room) = outlet.room(attempt.path.into(), to, len) else { return };
        let (first, content) = room.split_at_mut(HEAD_LEN);
        first.copy_from_slice(&head.encode());
        let filled = sent.map_or(Ok(()), |sent| fill(content, &sent, head.offset, memory));
        match filled {
            Ok(()) => {
                self.keys.ours.seal(room);
                outlet.commit(attempt.path.into(), len);
            }
            Err(ContentError::Unmapped) => {
                self.sender.cancel(head.message);
                self.finish(head.message, Err(RequestError::Local));
            }
            Err(ContentError::Ended) => {
                self.sender.cancel(head.message);
                self.push(now_ns, OutMessage::answer(DatagramKind::Refusal, 0, head.key));
            }
        }
    }
}

/// Copies the bytes of a message from `offset` on.
fn fill(
    content: &mut [u8],
    sent: &OutMessage,
    offset: u32,
    memory: &MemoryTable,
) -> Result<(), ContentError> {
    let whole = match sent.kind {
        DatagramKind::Write => sent.local,
        DatagramKind::Reply if sent.total > 0 => memory
            .locate(sent.key, sent.addr, sent.total, Access::Read)
            .ok_or(ContentError::Ended)?,
        _ => {
            content.fill(0);
            return Ok(());
        }
    };
    let Some(Span { addr, len }) = part(whole, offset, content.len()) else {
        return Err(ContentError::Unmapped);
    };
    // SAFETY: a write's memory is valid until its request has ended or the channel is dropped, as
    // the caller of `Channel::post` promised, and then it is not sent any more; a reply's region is
    // in the table, from which the end of its registration removes it under the lock that is held
    // here. The outlet's buffer is another one.
    let copied = unsafe { guarded::copy(addr as *const u8, content.as_mut_ptr(), len) };
    copied.map_err(|_| match sent.kind {
        DatagramKind::Reply => ContentError::Ended,
        _ => ContentError::Unmapped,
    })
}
