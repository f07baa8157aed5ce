//! Where the iovs of a transfer lie.

/// Where the iovs of a transfer lie in their buffer: never adjacent, so that they stay apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pieces {
    count: usize,
    len: usize,
    stride: usize,
}

/// The least space between iovs, and the alignment of each.
const GAP: usize = 64;

impl Pieces {
    /// `None` if that many bytes cannot be addressed.
    pub(crate) fn new(count: usize, len: usize) -> Option<Self> {
        let stride = len.checked_next_multiple_of(GAP)?.checked_add(GAP)?;
        stride.checked_mul(count)?;
        Some(Self { count, len, stride })
    }

    /// Bytes of the buffer that holds them.
    pub(crate) fn buffer_len(&self) -> usize {
        self.stride * self.count
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        let Self { count, len, stride } = *self;
        (0..count).map(move |index| index * stride..index * stride + len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iovs_are_never_adjacent() {
        let pieces = Pieces::new(3, 64).expect("small");
        let all: Vec<_> = pieces.iter().collect();
        assert_eq!(all, [0..64, 128..192, 256..320]);
        assert!(pieces.buffer_len() >= 320);
        assert!(Pieces::new(2, usize::MAX / 2).is_none());
    }
}
