//! How long messages are on a path that loses packets.

/// The length is adjusted after this many messages.
const LOOK_EVERY: u32 = 32;

/// The length of messages. One lost packet loses the whole message, so where many are lost, shorter
/// messages get more data across.
#[derive(Debug)]
pub(super) struct MessageSize {
    len: usize,
    least: usize,
    most: usize,
    ended: u32,
    lost: u32,
}

impl MessageSize {
    pub(super) fn new(least: usize, most: usize) -> Self {
        let most = most.max(least);
        Self { len: most, least, most, ended: 0, lost: 0 }
    }

    /// Bytes of a message.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Records whether a message was lost.
    pub(super) fn record(&mut self, was_lost: bool) {
        self.ended += 1;
        self.lost += u32::from(was_lost);
        if self.ended < LOOK_EVERY {
            return;
        }
        // Halve the length if more than an eighth were lost; double it if at most one in 32 was.
        if self.lost * 8 > self.ended {
            self.len = (self.len / 2).max(self.least);
        } else if self.lost * 32 <= self.ended {
            self.len = (self.len * 2).min(self.most);
        }
        (self.ended, self.lost) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_shorter_where_many_are_lost() {
        let mut cut = MessageSize::new(4096, 65536);
        let mut after = |lost_of_8: usize| {
            (0..LOOK_EVERY as usize).for_each(|n| cut.record(n % 8 < lost_of_8));
            cut.len()
        };
        assert_eq!(after(0), 65536);
        assert_eq!(after(1), 65536, "an eighth is borne");
        assert_eq!(
            [after(2), after(4), after(8), after(8), after(8)],
            [32768, 16384, 8192, 4096, 4096]
        );
        assert_eq!([after(1), after(0), after(0)], [4096, 8192, 16384]);
    }
}
