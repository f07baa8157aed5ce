//! The receiver's side of a flow: which bytes of chunks may land, and when a message has come.

use uccl_tran::NumberSet;
use uccl_wire::flow::FlowHead;

/// The most messages before their receives; the sender has no more outstanding.
const MOST_EARLY: u64 = 64;

/// The fate of the next bytes of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// They land in the memory of the receive. [`Inbox::end_landing`] follows.
    Land,
    /// The chunk has come already, or its message has ended: they are dropped.
    Repeat,
    /// The receive is not posted: they are kept aside.
    Early,
    /// The message is longer than its receive.
    TooLong {
        /// Bytes of the receive.
        room: u64,
    },
    /// The peer breaks the rules.
    Wrong(&'static str),
}

/// The chunks of a flow: those of open receives, and those before their receives.
pub(crate) struct Inbox {
    chunk_len: u64,
    early_len: u64,
    /// Receives that have been posted.
    posted: u64,
    receives: Vec<Receive>,
    early: Vec<EarlyChunk>,
    early_bytes: u64,
}

/// A receive that has not ended.
struct Receive {
    number: u64,
    room: u64,
    /// The message's length, once a chunk has come.
    total: Option<u64>,
    /// Chunks that have come.
    come: NumberSet,
    /// Bytes that have come.
    bytes: u64,
    /// System calls that may write to its memory.
    landing: u32,
}

/// A chunk that has come before its receive.
pub(crate) struct EarlyChunk {
    pub(crate) head: FlowHead,
    pub(crate) bytes: Box<[u8]>,
}

impl Inbox {
    pub(crate) fn new(chunk_len: u64, early_len: u64) -> Self {
        Self {
            chunk_len,
            early_len,
            posted: 0,
            receives: Vec::new(),
            early: Vec::new(),
            early_bytes: 0,
        }
    }

    /// Posts the next receive.
    pub(crate) fn post(&mut self, room: u64) -> u64 {
        let number = self.posted;
        self.posted += 1;
        let come = NumberSet::default();
        self.receives.push(Receive { number, room, total: None, come, bytes: 0, landing: 0 });
        number
    }

    /// Receives that have been posted.
    pub(crate) fn posted(&self) -> u64 {
        self.posted
    }

    /// A chunk that came before the receive of its message, which is posted now.
    pub(crate) fn take_early(&mut self) -> Option<EarlyChunk> {
        let at = self.early.iter().position(|chunk| chunk.head.message < self.posted)?;
        let chunk = self.early.swap_remove(at);
        self.early_bytes -= chunk.head.len;
        Some(chunk)
    }

    /// The message has come by another way, in whole. False if chunks of it have come, or nobody
    /// waits for it.
    pub(crate) fn end_whole(&mut self, number: u64) -> bool {
        let at = self.receives.iter().position(|receive| receive.number == number);
        match at {
            Some(at) if self.receives[at].total.is_none() => {
                self.receives.swap_remove(at);
                true
            }
            _ => false,
        }
    }

    /// Decides on the next bytes of a chunk.
    pub(crate) fn begin_landing(&mut self, head: &FlowHead) -> Verdict {
        if let Err(mistake) = self.check(head) {
            return Verdict::Wrong(mistake);
        }
        if head.message >= self.posted {
            return self.look_early(head);
        }
        let chunk = head.offset / self.chunk_len;
        let Some(receive) = self.open(head.message) else { return Verdict::Repeat };
        let room = receive.room;
        if head.total > room {
            return Verdict::TooLong { room };
        }
        if *receive.total.get_or_insert(head.total) != head.total {
            return Verdict::Wrong("two chunks of a message name different lengths");
        }
        if receive.come.has(chunk) {
            return Verdict::Repeat;
        }
        receive.landing += 1;
        Verdict::Land
    }

    /// Ends a landing. With `is_whole` all of the chunk has come over this stream. True if the
    /// message has ended.
    pub(crate) fn end_landing(&mut self, head: &FlowHead, is_whole: bool) -> bool {
        let chunk = head.offset / self.chunk_len;
        let Some(at) = self.receives.iter().position(|other| other.number == head.message) else {
            return false;
        };
        let receive = &mut self.receives[at];
        receive.landing = receive.landing.saturating_sub(1);
        if is_whole && receive.come.insert(chunk) {
            receive.bytes += head.len;
        }
        let has_ended = receive.landing == 0 && receive.total == Some(receive.bytes);
        if has_ended {
            self.receives.swap_remove(at);
        }
        has_ended
    }

    /// Keeps a chunk that has come before its receive. It comes back from [`Inbox::take_early`],
    /// also when the receive has been posted meanwhile.
    pub(crate) fn keep_early(&mut self, head: FlowHead, bytes: Box<[u8]>) {
        let name = |head: &FlowHead| (head.message, head.offset);
        if self.early.iter().any(|chunk| name(&chunk.head) == name(&head)) {
            return;
        }
        self.early_bytes += head.len;
        self.early.push(EarlyChunk { head, bytes });
    }

    /// Whether chunks wait for receives.
    pub(crate) fn has_early(&self) -> bool {
        !self.early.is_empty()
    }

    /// Whether any system call may write to memory of receives.
    pub(crate) fn is_landing(&self) -> bool {
        self.receives.iter().any(|receive| receive.landing > 0)
    }

    fn open(&mut self, number: u64) -> Option<&mut Receive> {
        self.receives.iter_mut().find(|receive| receive.number == number)
    }

    fn check(&self, head: &FlowHead) -> Result<(), &'static str> {
        let is_last = head.offset + head.len == head.total;
        match () {
            () if !head.offset.is_multiple_of(self.chunk_len) => {
                Err("a chunk begins at an odd place")
            }
            () if head.len > self.chunk_len => Err("a chunk is too long"),
            () if head.len < self.chunk_len && !is_last => Err("a chunk is too short"),
            () => Ok(()),
        }
    }

    fn look_early(&self, head: &FlowHead) -> Verdict {
        let name = |head: &FlowHead| (head.message, head.offset);
        if self.early.iter().any(|chunk| name(&chunk.head) == name(head)) {
            return Verdict::Repeat;
        }
        if head.message >= self.posted + MOST_EARLY || self.early_bytes + head.len > self.early_len
        {
            return Verdict::Wrong("more than agreed comes before its receives");
        }
        Verdict::Early
    }
}
