//! Datagrams that arrive: which of them may touch memory, and the answers to them.

use uccl_fabric::{
    guarded,
    mem::{Access, Span},
    rail::RequestError,
};
use uccl_tran::multipath::{Attempt, Chunk, ChunkVerdict, Load, PathAck};
use uccl_wire::{
    ack::Ack,
    datagram::{DatagramHead, DatagramKind},
};

use super::{Connection, MAX_REQUEST, OPEN};
use crate::{
    counters::UdpCounters,
    memory::{MemoryTable, part},
    outbox::OutMessage,
};

/// A datagram of the peer's, with its head taken apart.
pub(crate) struct Arrival<'a> {
    pub(crate) datagram: &'a [u8],
    pub(crate) head: DatagramHead,
    pub(crate) content: &'a [u8],
    /// Whether a queue marked it (ECN).
    pub(crate) is_marked: bool,
}

/// The memory for a chunk.
enum Target {
    /// It has none.
    Nothing,
    Memory(Span),
    /// The peer may not touch the memory that it names.
    Refused,
    /// Nobody waits for it.
    Unasked,
}

impl Connection {
    /// Takes a datagram that names this connection.
    pub(crate) fn on_datagram(
        &mut self,
        now_ns: u64,
        arrival: &Arrival<'_>,
        memory: &MemoryTable,
        counters: &mut UdpCounters,
    ) {
        if self.loss.is_some() {
            return;
        }
        if !self.keys.theirs.has_sealed(arrival.datagram) {
            counters.forged += 1;
            return;
        }
        match arrival.head.kind {
            DatagramKind::Ack => self.on_ack(now_ns, arrival),
            _ => self.on_load(now_ns, arrival, memory, counters),
        }
        self.take_events(now_ns);
    }

    fn on_ack(&mut self, now_ns: u64, arrival: &Arrival<'_>) {
        let Ok(ack) = Ack::decode(arrival.content) else { return };
        let DatagramHead { path, length: marked, .. } = arrival.head;
        if let Err(e) = self.sender.on_ack(now_ns, &PathAck { path, marked, ack }) {
            self.lose(format!("the peer breaks the rules: {e}"));
        }
    }

    fn on_load(
        &mut self,
        now_ns: u64,
        arrival: &Arrival<'_>,
        memory: &MemoryTable,
        counters: &mut UdpCounters,
    ) {
        let head = &arrival.head;
        let target = match self.target(head, memory) {
            // It is not acknowledged, so that the request cannot end well before the refusal comes.
            Target::Refused if self.refuses(now_ns, head.message) => {
                counters.refused += 1;
                return;
            }
            // The message has come before, and this repeats a part of it.
            Target::Refused => Target::Nothing,
            Target::Unasked => {
                self.receiver.fence(head.message);
                self.keep_posted();
                Target::Nothing
            }
            target => target,
        };
        let (message, total, offset) = (head.message, head.total.into(), head.offset.into());
        let load = match head.kind {
            DatagramKind::Probe => Load::Probe,
            _ => Load::Chunk(Chunk { message, total, offset, len: head.len.into() }),
        };
        let attempt = Attempt { path: head.path, number: head.number, load, wanted_bytes: 0 };
        match self.receiver.on_attempt(now_ns, &attempt, arrival.is_marked) {
            ChunkVerdict::Place => {}
            ChunkVerdict::Probe => return,
            ChunkVerdict::Repeat | ChunkVerdict::Stale => {
                counters.repeated += 1;
                return;
            }
            ChunkVerdict::Early | ChunkVerdict::TooLong { .. } | ChunkVerdict::Wrong(_) => {
                counters.refused += 1;
                return;
            }
        }
        if let Target::Memory(span) = target {
            // SAFETY: of a write, the region is in the table, from which the end of its
            // registration removes it under the lock that is held here; of a reply, the memory is
            // that of a read which has not ended. The span has the content's length, by `target`.
            if unsafe { guarded::copy_to(span, arrival.content) }.is_err() {
                self.lose("memory that is registered or being read to was unmapped");
                return;
            }
        }
        self.incoming[(head.message % OPEN as u64) as usize] = Some(*head);
        self.end_messages(now_ns, memory);
    }

    /// Refuses a message. False if it had come before its region ended.
    fn refuses(&mut self, now_ns: u64, message: u64) -> bool {
        if !self.receiver.fence(message) {
            return self.outbox.is_refusing(message);
        }
        self.keep_posted();
        self.push(now_ns, OutMessage::answer(DatagramKind::Refusal, 0, message));
        true
    }

    /// The memory that a chunk is for. The whole message has to be admitted, so that each of its
    /// chunks gets the same answer.
    fn target(&self, head: &DatagramHead, memory: &MemoryTable) -> Target {
        let len = usize::from(head.len);
        let whole = match head.kind {
            DatagramKind::Write if head.total == 0 => return Target::Nothing,
            DatagramKind::Write => memory.locate(head.key, head.addr, head.total, Access::Write),
            DatagramKind::Reply => {
                let is_asked = |sent: &&OutMessage| {
                    let is_read = sent.kind == DatagramKind::Read && !sent.is_over;
                    is_read && sent.length == head.total
                };
                let Some(read) = self.outbox.get(head.key).filter(is_asked) else {
                    return Target::Unasked;
                };
                Some(read.local)
            }
            _ => return Target::Nothing,
        };
        whole
            .and_then(|whole| part(whole, head.offset, len))
            .map_or(Target::Refused, Target::Memory)
    }

    /// Answers the messages that have come.
    fn end_messages(&mut self, now_ns: u64, memory: &MemoryTable) {
        while let Some(message) = self.receiver.poll_ended() {
            let place = &mut self.incoming[(message % OPEN as u64) as usize];
            let Some(head) = place.take_if(|head| head.message == message) else { continue };
            match head.kind {
                DatagramKind::Read => self.answer(now_ns, &head, memory),
                DatagramKind::Reply => self.finish(head.key, Ok(())),
                DatagramKind::Refusal => self.on_refusal(head.key),
                DatagramKind::Ping => {
                    let pong = OutMessage::answer(DatagramKind::Pong, head.total, message);
                    self.push(now_ns, pong);
                }
                DatagramKind::Pong => {
                    let is_ping = |sent: &OutMessage| sent.kind == DatagramKind::Ping;
                    if self.outbox.get(head.key).is_some_and(is_ping) {
                        self.finish(head.key, Ok(()));
                    }
                }
                DatagramKind::Write | DatagramKind::Probe | DatagramKind::Ack => {}
            }
        }
        self.keep_posted();
    }

    /// Answers a read. Each datagram of the answer looks for the region again.
    fn answer(&mut self, now_ns: u64, head: &DatagramHead, memory: &MemoryTable) {
        let DatagramHead { key, addr, length, message, .. } = *head;
        let is_admitted = length == 0
            || u64::from(length) <= MAX_REQUEST
                && memory.locate(key, addr, length, Access::Read).is_some();
        let answer = if is_admitted {
            let reply = OutMessage::answer(DatagramKind::Reply, length, key);
            OutMessage { addr, answers: message, ..reply }
        } else {
            OutMessage::answer(DatagramKind::Refusal, 0, message)
        };
        self.push(now_ns, answer);
    }

    /// A refused write is not sent any more. Late parts of a refused read find nobody that waits.
    fn on_refusal(&mut self, message: u64) {
        let Some(sent) = self.outbox.get(message) else { return };
        match sent.kind {
            DatagramKind::Write => self.sender.cancel(message),
            DatagramKind::Read => {}
            _ => return,
        }
        self.finish(message, Err(RequestError::Access));
    }

    fn keep_posted(&mut self) {
        while self.receiver.posted() < OPEN {
            self.receiver.post(MAX_REQUEST);
        }
    }
}
