//! The receiver: which chunks may be placed, when a message has come, and acknowledgements.

use std::collections::VecDeque;

use super::{
    Attempt, Chunk, Load, MultipathParams, PathAck,
    numbers::{NumberState, PathNumbers},
};
use crate::{NumberSet, ParamsError};

/// The result of an attempt that has arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChunkVerdict {
    /// The chunk is to be placed in its message's memory, before anything else is called.
    Place,
    /// It is a probe, which has no bytes.
    Probe,
    /// It has come before, or its message has ended: it must not be placed.
    Repeat,
    /// Its receive is not posted. It is not acknowledged, so it comes again.
    Early,
    /// Its number is too old or too new for its path. It must not be placed.
    Stale,
    /// The message is longer than its receive.
    TooLong {
        /// Bytes of the receive.
        room: u64,
    },
    /// The peer breaks the rules.
    Wrong(&'static str),
}

/// A receive that was posted.
#[derive(Debug)]
struct Receive {
    room: u64,
    /// The message's length, once a chunk has come.
    total: Option<u64>,
    /// Chunks that have come.
    come: NumberSet,
    has_ended: bool,
}

/// The receiving end of many paths.
#[derive(Debug)]
pub struct MultipathReceiver {
    params: MultipathParams,
    paths: Vec<PathNumbers>,
    /// Receives from `first` on.
    receives: VecDeque<Receive>,
    first: u64,
    /// Empty sets of receives that have ended, kept for their memory.
    spare: Vec<NumberSet>,
    /// Messages that have come and are to be reported.
    ended: VecDeque<u64>,
    /// Paths to be acknowledged at once.
    urgent: VecDeque<u16>,
    /// Paths to be acknowledged in time, the earliest first.
    delayed: VecDeque<(u64, u16)>,
    repeats: u64,
}

impl MultipathReceiver {
    /// Makes the receiving end.
    ///
    /// # Errors
    /// When the parameters cannot be used.
    pub fn new(params: MultipathParams) -> Result<Self, ParamsError> {
        let params = params.checked()?;
        Ok(Self {
            params,
            paths: vec![PathNumbers::default(); params.paths.into()],
            receives: VecDeque::new(),
            first: 0,
            spare: Vec::new(),
            ended: VecDeque::new(),
            urgent: VecDeque::new(),
            delayed: VecDeque::new(),
            repeats: 0,
        })
    }

    /// Posts memory of so many bytes for the next message, and returns its number.
    pub fn post(&mut self, room: u64) -> u64 {
        let come = self.spare.pop().unwrap_or_default();
        self.receives.push_back(Receive { room, total: None, come, has_ended: false });
        self.first + self.receives.len() as u64 - 1
    }

    /// Receives from the first one on whose message has not ended. A one-sided receiver, which
    /// posts no memory, keeps as many as the sender has messages open
    /// ([`MultipathParams::most_open`]): then no chunk of an honest sender is early.
    #[must_use]
    pub fn posted(&self) -> usize {
        self.receives.len()
    }

    /// Decides on an attempt that has arrived. `is_marked` means that a queue marked it (ECN).
    pub fn on_attempt(&mut self, now_ns: u64, attempt: &Attempt, is_marked: bool) -> ChunkVerdict {
        let Some(numbers) = self.paths.get(usize::from(attempt.path)) else {
            return ChunkVerdict::Wrong("there is no such path");
        };
        let seen = numbers.look(attempt.number);
        if seen == NumberState::Stale {
            return ChunkVerdict::Stale;
        }
        let verdict = match attempt.load {
            Load::Probe => ChunkVerdict::Probe,
            Load::Chunk(_) if seen == NumberState::Again => ChunkVerdict::Repeat,
            Load::Chunk(chunk) => self.look(&chunk),
        };
        match verdict {
            ChunkVerdict::Place | ChunkVerdict::Probe | ChunkVerdict::Repeat => {
                self.record(now_ns, attempt, is_marked);
            }
            _ => return verdict,
        }
        match (verdict, attempt.load) {
            (ChunkVerdict::Place, Load::Chunk(chunk)) => self.place(&chunk),
            (ChunkVerdict::Repeat, _) => self.repeats += 1,
            _ => {}
        }
        verdict
    }

    /// Ends a message before it has come: no chunk of it is placed any more. False if it has ended.
    pub fn fence(&mut self, message: u64) -> bool {
        let Some(receive) = self.receive(message).filter(|receive| !receive.has_ended) else {
            return false;
        };
        receive.has_ended = true;
        self.drop_ended();
        true
    }

    /// The next message that has come.
    pub fn poll_ended(&mut self) -> Option<u64> {
        self.ended.pop_front()
    }

    /// The acknowledgement that is due, if one is. Call this until it returns none.
    pub fn poll_ack(&mut self, now_ns: u64) -> Option<PathAck> {
        while let Some(path) = self.urgent.pop_front() {
            let numbers = self.paths.get_mut(usize::from(path))?;
            if numbers.waiting > 0 {
                return numbers.write(now_ns, path);
            }
        }
        while let Some((due_ns, path)) = self.delayed.front().copied() {
            let numbers = self.paths.get_mut(usize::from(path))?;
            if numbers.waiting > 0 && due_ns > now_ns {
                return None;
            }
            self.delayed.pop_front();
            if numbers.waiting > 0 {
                return numbers.write(now_ns, path);
            }
        }
        None
    }

    /// The last word on a path that has been torn down at this end; `None` if nothing has come over
    /// it. The sender takes it before [`close_path`](super::MultipathSender::close_path).
    pub fn last_ack(&mut self, now_ns: u64, path: u16) -> Option<PathAck> {
        self.paths.get_mut(usize::from(path))?.write(now_ns, path)
    }

    /// When to call [`MultipathReceiver::poll_ack`] if nothing arrives before, in nanoseconds.
    #[must_use]
    pub fn next_timeout_ns(&self) -> Option<u64> {
        self.delayed.front().map(|(due_ns, _)| *due_ns)
    }

    /// Chunks that have come more than once.
    #[must_use]
    pub fn repeats(&self) -> u64 {
        self.repeats
    }

    fn receive(&mut self, message: u64) -> Option<&mut Receive> {
        let at = message.checked_sub(self.first)?;
        self.receives.get_mut(usize::try_from(at).ok()?)
    }

    fn look(&mut self, chunk: &Chunk) -> ChunkVerdict {
        if let Err(mistake) = check(chunk, self.params.chunk_len) {
            return ChunkVerdict::Wrong(mistake);
        }
        if chunk.message < self.first {
            return ChunkVerdict::Repeat;
        }
        let chunk_len = u64::from(self.params.chunk_len);
        let Some(receive) = self.receive(chunk.message) else { return ChunkVerdict::Early };
        if receive.has_ended {
            return ChunkVerdict::Repeat;
        }
        if chunk.total > receive.room {
            return ChunkVerdict::TooLong { room: receive.room };
        }
        if receive.total.is_some_and(|total| total != chunk.total) {
            return ChunkVerdict::Wrong("two chunks of a message name different lengths");
        }
        match receive.come.has(chunk.offset / chunk_len) {
            true => ChunkVerdict::Repeat,
            false => ChunkVerdict::Place,
        }
    }

    fn place(&mut self, chunk: &Chunk) {
        let chunk_len = u64::from(self.params.chunk_len);
        let Some(receive) = self.receive(chunk.message) else { return };
        receive.total = Some(chunk.total);
        receive.come.insert(chunk.offset / chunk_len);
        if receive.come.len() == chunk.total.div_ceil(chunk_len).max(1) {
            receive.has_ended = true;
            self.ended.push_back(chunk.message);
            self.drop_ended();
        }
    }

    fn drop_ended(&mut self) {
        while let Some(mut receive) = self.receives.pop_front_if(|receive| receive.has_ended) {
            receive.come.clear();
            self.spare.push(receive.come);
            self.first += 1;
        }
    }

    fn record(&mut self, now_ns: u64, attempt: &Attempt, is_marked: bool) {
        let Some(numbers) = self.paths.get_mut(usize::from(attempt.path)) else { return };
        let was_waiting = numbers.waiting > 0;
        let was_urgent = numbers.is_urgent;
        numbers.record(now_ns, attempt.number, is_marked);
        numbers.is_urgent |=
            attempt.load == Load::Probe || is_marked || numbers.waiting >= self.params.ack_every;
        if numbers.is_urgent && !was_urgent {
            self.urgent.push_back(attempt.path);
        } else if !was_waiting {
            self.delayed.push_back((now_ns + self.params.ack_delay_ns, attempt.path));
        }
    }
}

/// Whether a chunk is one into which a sender cuts a message.
fn check(chunk: &Chunk, chunk_len: u32) -> Result<(), &'static str> {
    let Some(end) = chunk.offset.checked_add(chunk.len.into()) else {
        return Err("a chunk ends beyond all numbers");
    };
    match () {
        () if !chunk.offset.is_multiple_of(chunk_len.into()) => {
            Err("a chunk begins at an odd place")
        }
        () if chunk.len > chunk_len => Err("a chunk is too long"),
        () if end > chunk.total => Err("a chunk ends after its message"),
        () if chunk.len < chunk_len && end != chunk.total => Err("a chunk is too short"),
        () if chunk.len == 0 && chunk.total > 0 => Err("a chunk is empty"),
        () => Ok(()),
    }
}
