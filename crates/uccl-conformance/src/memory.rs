//! Memory that checks look into while a lane may be writing it.

use std::sync::Arc;

use uccl_fabric::{
    alloc::SharedBuf,
    mem::{RemoteSpan, Span},
};

/// Memory of one end's, private or such that the peer can map it.
pub(crate) enum Memory {
    Private(Box<[u64]>, usize),
    Shared(Arc<SharedBuf>),
}

impl Memory {
    pub(crate) fn private(len: usize) -> Self {
        Self::Private(vec![0; len.div_ceil(8).max(1)].into_boxed_slice(), len)
    }

    pub(crate) fn shared(len: usize) -> Self {
        Self::Shared(SharedBuf::new(len.max(1)).expect("shared memory"))
    }

    pub(crate) fn span(&self) -> Span {
        match self {
            Self::Private(words, len) => Span { addr: words.as_ptr() as usize, len: *len },
            Self::Shared(buf) => buf.span(),
        }
    }

    pub(crate) fn part(&self, at: usize, len: usize) -> Span {
        let Span { addr, len: all } = self.span();
        assert!(at + len <= all, "a part");
        Span { addr: addr + at, len }
    }

    /// A copy of what is there. Whoever looks at bytes that are being written sees some of them as they were.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let Span { addr, len } = self.span();
        // SAFETY: the memory lives, and bytes have no invalid values; what is seen of a race is only compared.
        unsafe { std::slice::from_raw_parts(addr as *const u8, len) }.to_vec()
    }

    pub(crate) fn fill_with(&self, bytes: &[u8]) {
        let Span { addr, len } = self.span();
        assert_eq!(len, bytes.len());
        // SAFETY: the memory lives, is ours and as long.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), addr as *mut u8, len) };
    }

    pub(crate) fn fill(&self, byte: u8) {
        self.fill_with(&vec![byte; self.span().len]);
    }
}

/// A part of a region.
pub(crate) fn piece(region: &RemoteSpan, at: usize, len: usize) -> RemoteSpan {
    RemoteSpan { addr: region.addr + at as u64, len: len as u64, ..*region }
}

/// Bytes of which no two stretches are alike.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}
