//! A flow's ring at the receiver, and the message in it that has begun.

use std::io;

use uccl_wire::flow::HEAD_LEN;

use crate::{ring::RingReceiver, socket::Span};

/// Looks at a ring between two looks at the stream, which tells of the peer's end.
const LOOKS: u32 = 16;
/// Extra looks at the own stream of a flow whose messages all come in chunks, for a ring's note.
const EXTRA_LOOKS: u32 = 1000;

/// The ring of a flow.
pub(crate) enum LocalRing {
    /// There is none.
    None,
    /// Its note may be the first thing on the own stream.
    Expected {
        looks: u32,
    },
    Open(InboundRing),
}

/// A ring, and the message in it that has begun.
pub(crate) struct InboundRing {
    pub(crate) ring: RingReceiver,
    head: [u8; HEAD_LEN],
    filled: usize,
    /// The place of its slot.
    pub(crate) begun: Option<usize>,
    /// Looks at the ring since the stream was last looked at.
    looks: u32,
}

impl LocalRing {
    pub(crate) fn new(is_expected: bool) -> Self {
        if is_expected { Self::Expected { looks: EXTRA_LOOKS } } else { Self::None }
    }

    pub(crate) fn is_expected(&self) -> bool {
        matches!(self, Self::Expected { .. })
    }

    /// The own stream begins with something else than a note.
    pub(crate) fn end_wait(&mut self) {
        if self.is_expected() {
            *self = Self::None;
        }
    }

    /// Whether the own stream should be looked at for a note, though no message is awaited there.
    pub(crate) fn takes_extra_look(&mut self) -> bool {
        match self {
            Self::Expected { looks } if *looks > 0 => {
                *looks -= 1;
                true
            }
            _ => false,
        }
    }

    /// Whether bytes are there that the user of the flow has not taken.
    pub(crate) fn has_bytes(&self) -> bool {
        matches!(self, Self::Open(local) if local.ring.has_bytes())
    }
}

impl InboundRing {
    pub(crate) fn new(ring: RingReceiver) -> Self {
        Self { ring, head: [0; HEAD_LEN], filled: 0, begun: None, looks: 0 }
    }

    /// Counts a look. True if the stream has its turn.
    pub(crate) fn end_look(&mut self) -> bool {
        self.looks = (self.looks + 1) % LOOKS;
        self.looks == 0
    }

    /// The head of the next message, once all of it is there. It stays until
    /// [`InboundRing::begin`].
    pub(crate) fn head(&mut self) -> io::Result<Option<[u8; HEAD_LEN]>> {
        while self.filled < HEAD_LEN {
            let room = Span::of_mut(&mut self.head).after(self.filled);
            // SAFETY: the rest of the head's own bytes.
            match unsafe { self.ring.recv(room) }? {
                Some(count) => self.filled += count,
                None => return Ok(None),
            }
        }
        Ok(Some(self.head))
    }

    /// The message of the head has begun, in the slot at a place.
    pub(crate) fn begin(&mut self, place: usize) {
        (self.filled, self.begun) = (0, Some(place));
    }
}
