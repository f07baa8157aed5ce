//! The bytes of a flow's own stream that the receiver may lack: they go again over the next one.

/// Bytes of a stream from the first one that is not confirmed, and the place from which they go
/// again. Places count bytes from the flow's beginning, over all its streams.
pub(crate) struct History {
    ring: Box<[u8]>,
    /// The most bytes that are not confirmed, but for [`History::append`].
    window: u64,
    /// The receiver has all bytes before.
    confirmed: u64,
    /// The stream has taken all bytes before.
    sent: u64,
    /// Bytes are kept up to here.
    end: u64,
    /// The end of the last bytes that ask for a confirmation.
    asked: u64,
}

impl History {
    /// Keeps `window` bytes, and `spare` ones that are appended beyond.
    pub(crate) fn new(window: usize, spare: usize) -> Self {
        let ring = vec![0; window + spare].into_boxed_slice();
        Self { ring, window: window as u64, confirmed: 0, sent: 0, end: 0, asked: 0 }
    }

    /// Bytes that may be sent and recorded now; none while others go again.
    pub(crate) fn room(&self) -> usize {
        if self.sent < self.end {
            return 0;
        }
        self.window.saturating_sub(self.end - self.confirmed) as usize
    }

    /// Keeps bytes that the stream has taken.
    pub(crate) fn record(&mut self, bytes: &[u8]) {
        debug_assert_eq!(self.sent, self.end, "others go before");
        self.append(bytes);
        self.sent = self.end;
    }

    /// Keeps bytes that the stream takes from here.
    pub(crate) fn append(&mut self, bytes: &[u8]) {
        debug_assert!(self.unconfirmed() + bytes.len() as u64 <= self.ring.len() as u64);
        let at = (self.end % self.ring.len() as u64) as usize;
        let first = bytes.len().min(self.ring.len() - at);
        self.ring[at..at + first].copy_from_slice(&bytes[..first]);
        self.ring[..bytes.len() - first].copy_from_slice(&bytes[first..]);
        self.end += bytes.len() as u64;
    }

    /// The next bytes that the stream has to take from here, as far as they lie together.
    pub(crate) fn unsent(&self) -> &[u8] {
        let at = (self.sent % self.ring.len() as u64) as usize;
        let len = ((self.end - self.sent) as usize).min(self.ring.len() - at);
        &self.ring[at..at + len]
    }

    /// The stream has taken so many of [`History::unsent`].
    pub(crate) fn on_sent(&mut self, count: usize) {
        self.sent = (self.sent + count as u64).min(self.end);
    }

    /// The receiver has so many bytes. False if it cannot have.
    pub(crate) fn confirm(&mut self, received: u64) -> bool {
        if received > self.sent {
            return false;
        }
        self.confirmed = self.confirmed.max(received);
        true
    }

    /// A new stream begins behind the bytes that the receiver has. False if it cannot be so.
    pub(crate) fn resume(&mut self, received: u64) -> bool {
        if received < self.confirmed || received > self.end {
            return false;
        }
        (self.confirmed, self.sent) = (received, received);
        true
    }

    /// Whether a confirmation should be asked for, as half of the window waits for one. True once
    /// for each half.
    pub(crate) fn take_ask(&mut self) -> bool {
        let is_due = self.unconfirmed() >= self.window / 2 && self.asked <= self.confirmed;
        if is_due {
            self.asked = self.end;
        }
        is_due
    }

    /// Whether an answer to [`History::take_ask`] is awaited.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked > self.confirmed
    }

    pub(crate) fn unconfirmed(&self) -> u64 {
        self.end - self.confirmed
    }

    pub(crate) fn confirmed(&self) -> u64 {
        self.confirmed
    }

    pub(crate) fn end(&self) -> u64 {
        self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_not_confirmed_go_again() {
        let mut history = History::new(8, 4);
        history.record(b"abcdef");
        assert_eq!(history.room(), 2);
        assert!(history.confirm(4) && !history.confirm(7));
        history.append(b"ghijklmn");
        assert_eq!((history.room(), history.unsent()), (0, &b"ghijkl"[..]));
        history.on_sent(6);
        assert_eq!(history.unsent(), b"mn", "the ring goes round");
        assert!(!history.resume(3), "it has had 4");
        assert!(!history.resume(15), "it cannot have more than there is");
        assert!(history.resume(5));
        assert_eq!(history.unsent(), b"fghijkl");
    }

    #[test]
    fn a_confirmation_is_asked_for_once_in_half_a_window() {
        let mut history = History::new(8, 4);
        history.record(b"abc");
        assert!(!history.take_ask());
        history.record(b"d");
        assert!(history.take_ask() && !history.take_ask() && history.is_asked());
        history.record(b"ef");
        assert!(!history.take_ask(), "the first is not answered");
        assert!(history.confirm(4) && !history.is_asked());
        history.record(b"gh");
        assert!(history.take_ask());
    }
}
