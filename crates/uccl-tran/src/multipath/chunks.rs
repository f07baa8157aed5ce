//! The messages of a sender and their chunks: those that wait, and those under way.

use std::collections::VecDeque;

use super::{Chunk, MultipathEvent};

/// A chunk that was sent and has not been forgotten.
#[derive(Clone, Copy, Debug)]
struct ChunkState {
    chunk: Chunk,
    /// Attempts under way.
    carriers: u16,
    /// Attempts that paths remember, those included that were taken for lost.
    references: u16,
    /// It has come, or nobody wants it any more.
    has_come: bool,
    /// It waits to be sent again.
    is_queued: bool,
    /// The path over which it was lost last.
    lost_on: Option<u16>,
}

#[derive(Clone, Copy, Debug)]
struct MessageState {
    total: u64,
    /// Bytes that were cut into chunks.
    cut: u64,
    is_cut: bool,
    /// Chunks that have not come.
    chunks_left: u64,
    /// Attempts under way.
    carriers: u32,
    is_cancelled: bool,
    has_ended: bool,
}

/// A chunk that may go out now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NextChunk {
    pub(super) len: u32,
    pub(super) lost_on: Option<u16>,
}

/// All chunks of a sender.
#[derive(Debug)]
pub(super) struct ChunkTable {
    chunk_len: u64,
    most_open: u64,
    /// Messages from `first` on.
    messages: VecDeque<MessageState>,
    first: u64,
    /// The message that is being cut.
    cutting: u64,
    slots: Vec<ChunkState>,
    free: Vec<u32>,
    again: VecDeque<u32>,
    /// Bytes that wait to be sent.
    backlog: u64,
    repeats: u64,
}

impl ChunkTable {
    pub(super) fn new(chunk_len: u32, most_open: u32) -> Self {
        Self {
            chunk_len: chunk_len.into(),
            most_open: most_open.into(),
            messages: VecDeque::new(),
            first: 0,
            cutting: 0,
            slots: Vec::new(),
            free: Vec::new(),
            again: VecDeque::new(),
            backlog: 0,
            repeats: 0,
        }
    }

    pub(super) fn push(&mut self, total: u64) -> u64 {
        self.backlog += total;
        self.messages.push_back(MessageState {
            total,
            cut: 0,
            is_cut: false,
            chunks_left: total.div_ceil(self.chunk_len).max(1),
            carriers: 0,
            is_cancelled: false,
            has_ended: false,
        });
        self.first + self.messages.len() as u64 - 1
    }

    /// Whether every message has ended.
    pub(super) fn is_idle(&self) -> bool {
        self.messages.is_empty()
    }

    pub(super) fn backlog_bytes(&self) -> u64 {
        self.backlog
    }

    pub(super) fn repeats(&self) -> u64 {
        self.repeats
    }

    fn message(&mut self, message: u64) -> Option<&mut MessageState> {
        let at = message.checked_sub(self.first)?;
        self.messages.get_mut(usize::try_from(at).ok()?)
    }

    /// The chunk that [`ChunkTable::take`] would give.
    pub(super) fn peek(&mut self) -> Option<NextChunk> {
        while let Some(&slot) = self.again.front() {
            let state = self.slots[slot as usize];
            if !state.has_come {
                return Some(NextChunk { len: state.chunk.len, lost_on: state.lost_on });
            }
            self.drop_first_again();
        }
        let at = self.cut_at()?;
        let message = self.messages[at];
        let len = self.chunk_len.min(message.total - message.cut) as u32;
        Some(NextChunk { len, lost_on: None })
    }

    /// The place of the message to cut next.
    fn cut_at(&mut self) -> Option<usize> {
        self.cutting = self.cutting.max(self.first);
        loop {
            let at = (self.cutting - self.first) as usize;
            let message = self.messages.get(at)?;
            if message.is_cut {
                self.cutting += 1;
            } else {
                return (at < self.most_open as usize).then_some(at);
            }
        }
    }

    /// Takes the next chunk, which goes out now. Returns its place and itself.
    pub(super) fn take(&mut self) -> Option<(u32, Chunk)> {
        self.peek()?;
        let slot = match self.again.front() {
            Some(&slot) => {
                self.again.pop_front();
                self.repeats += 1;
                self.slots[slot as usize].is_queued = false;
                slot
            }
            None => self.cut()?,
        };
        let state = &mut self.slots[slot as usize];
        state.carriers += 1;
        state.references += 1;
        let chunk = state.chunk;
        self.backlog -= u64::from(chunk.len);
        if let Some(message) = self.message(chunk.message) {
            message.carriers += 1;
        }
        Some((slot, chunk))
    }

    fn cut(&mut self) -> Option<u32> {
        let at = self.cut_at()?;
        let number = self.first + at as u64;
        let message = &mut self.messages[at];
        let len = self.chunk_len.min(message.total - message.cut);
        let chunk =
            Chunk { message: number, total: message.total, offset: message.cut, len: len as u32 };
        message.cut += len;
        message.is_cut = message.cut == message.total;
        let state = ChunkState {
            chunk,
            carriers: 0,
            references: 0,
            has_come: false,
            is_queued: false,
            lost_on: None,
        };
        let slot = self.free.pop().unwrap_or(self.slots.len() as u32);
        match self.slots.get_mut(slot as usize) {
            Some(place) => *place = state,
            None => self.slots.push(state),
        }
        Some(slot)
    }

    /// An attempt of the chunk has come. `was_under_way` is false if it had been taken for lost.
    pub(super) fn on_come(&mut self, slot: u32, was_under_way: bool) -> Option<MultipathEvent> {
        let state = &mut self.slots[slot as usize];
        let is_first = !std::mem::replace(&mut state.has_come, true);
        let number = state.chunk.message;
        if was_under_way {
            self.end_attempt(slot);
        }
        self.forget(slot);
        if let Some(message) = self.message(number).filter(|_| is_first) {
            message.chunks_left -= 1;
        }
        self.end_message(number)
    }

    /// An attempt of the chunk is lost: the chunk goes again. The path remembers the attempt until
    /// [`ChunkTable::forget`].
    pub(super) fn on_loss(&mut self, slot: u32, path: u16) -> Option<MultipathEvent> {
        let number = self.slots[slot as usize].chunk.message;
        let is_wanted = self.message(number).is_some_and(|message| !message.is_cancelled);
        self.end_attempt(slot);
        let state = &mut self.slots[slot as usize];
        state.lost_on = Some(path);
        state.has_come |= !is_wanted;
        if !state.has_come && !state.is_queued {
            state.is_queued = true;
            self.backlog += u64::from(state.chunk.len);
            self.again.push_back(slot);
        }
        self.end_message(number)
    }

    fn end_attempt(&mut self, slot: u32) {
        let state = &mut self.slots[slot as usize];
        state.carriers -= 1;
        let number = state.chunk.message;
        if let Some(message) = self.message(number) {
            message.carriers -= 1;
        }
    }

    /// A path does not remember an attempt of the chunk any more.
    pub(super) fn forget(&mut self, slot: u32) {
        self.slots[slot as usize].references -= 1;
        self.release(slot);
    }

    /// Frees the place of a chunk that nothing refers to.
    fn release(&mut self, slot: u32) {
        let state = &self.slots[slot as usize];
        if state.has_come && state.references == 0 && !state.is_queued {
            self.free.push(slot);
        }
    }

    /// Ends a message that is complete, or cancelled without an attempt under way.
    fn end_message(&mut self, number: u64) -> Option<MultipathEvent> {
        let message = self.message(number)?;
        let is_over = match message.is_cancelled {
            true => message.carriers == 0,
            false => message.chunks_left == 0,
        };
        if message.has_ended || !is_over {
            return None;
        }
        message.has_ended = true;
        let is_cancelled = message.is_cancelled;
        while self.messages.front().is_some_and(|message| message.has_ended) {
            self.messages.pop_front();
            self.first += 1;
        }
        Some(match is_cancelled {
            true => MultipathEvent::Cancelled { message: number },
            false => MultipathEvent::Sent { message: number },
        })
    }

    /// Sends nothing of the message any more.
    pub(super) fn cancel(&mut self, number: u64) -> Option<MultipathEvent> {
        let message = self.message(number).filter(|message| !message.has_ended)?;
        let uncut = message.total - message.cut;
        (message.is_cancelled, message.is_cut, message.cut) = (true, true, message.total);
        self.backlog -= uncut;
        for at in 0..self.again.len() {
            let state = &mut self.slots[self.again[at] as usize];
            if state.chunk.message == number {
                state.has_come = true;
            }
        }
        self.end_message(number)
    }

    fn drop_first_again(&mut self) {
        let Some(slot) = self.again.pop_front() else { return };
        let state = &mut self.slots[slot as usize];
        state.is_queued = false;
        self.backlog -= u64::from(state.chunk.len);
        self.release(slot);
    }
}
