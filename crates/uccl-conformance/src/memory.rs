//! Memory that checks read while a lane may be writing it.

use std::sync::Arc;

use uccl_device::cuda::{Context, DeviceBuffer, Direction, Priority, Stream};
use uccl_fabric::{
    alloc::SharedBuf,
    mem::{RemoteSpan, Span},
};

/// Memory of one end: private, mappable by the peer, or a GPU's.
pub(crate) enum Memory {
    Private(Box<[u64]>, usize),
    Shared(Arc<SharedBuf>),
    Gpu(DeviceBuffer, usize),
}

impl Memory {
    pub(crate) fn private(len: usize) -> Self {
        Self::Private(vec![0; len.div_ceil(8).max(1)].into_boxed_slice(), len)
    }

    pub(crate) fn shared(len: usize) -> Self {
        Self::Shared(SharedBuf::new(len.max(1)).expect("shared memory"))
    }

    pub(crate) fn of_gpu(context: &'static Context, len: usize) -> Self {
        let buf = DeviceBuffer::new(context, len.max(1)).expect("memory of a GPU");
        let memory = Self::Gpu(buf, len);
        memory.fill(0);
        memory
    }

    pub(crate) fn span(&self) -> Span {
        match self {
            Self::Private(words, len) => Span { addr: words.as_ptr() as usize, len: *len },
            Self::Shared(buf) => buf.span(),
            Self::Gpu(buf, len) => Span { addr: buf.address() as usize, len: *len },
        }
    }

    pub(crate) fn part(&self, at: usize, len: usize) -> Span {
        let Span { addr, len: all } = self.span();
        assert!(at + len <= all, "a part");
        Span { addr: addr + at, len }
    }

    /// A copy of the bytes. During a write, some of them may still have their old values.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.bytes_of(0, self.span().len)
    }

    pub(crate) fn bytes_of(&self, at: usize, len: usize) -> Vec<u8> {
        let addr = self.part(at, len).addr;
        if let Self::Gpu(buf, _) = self {
            let mut bytes = vec![0; len];
            let to = bytes.as_mut_ptr() as u64;
            copy(buf.context(), (to, addr as u64, len), Direction::DeviceToHost);
            return bytes;
        }
        // SAFETY: the memory lives, and bytes have no invalid values. Values from a race are only
        // compared.
        unsafe { std::slice::from_raw_parts(addr as *const u8, len) }.to_vec()
    }

    pub(crate) fn fill_with(&self, bytes: &[u8]) {
        let Span { addr, len } = self.span();
        assert_eq!(len, bytes.len());
        if let Self::Gpu(buf, _) = self {
            let from = bytes.as_ptr() as u64;
            return copy(buf.context(), (addr as u64, from, len), Direction::HostToDevice);
        }
        // SAFETY: the memory lives, is this check's to write, and has `len` bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), addr as *mut u8, len) };
    }

    pub(crate) fn fill(&self, byte: u8) {
        self.fill_with(&vec![byte; self.span().len]);
    }
}

/// Copies `len` bytes between a GPU and the host, and waits for the copy.
fn copy(context: &'static Context, (to, from, len): (u64, u64, usize), direction: Direction) {
    let stream = Stream::new(context, Priority::Normal).expect("a stream");
    // SAFETY: both sides live until the stream is synchronized.
    unsafe { stream.copy(to, from, len, direction) }.expect("a copy");
    stream.synchronize().expect("a copy");
}

/// A part of a region.
pub(crate) fn piece(region: &RemoteSpan, at: usize, len: usize) -> RemoteSpan {
    RemoteSpan { addr: region.addr + at as u64, len: len as u64, ..*region }
}

/// Random bytes, of which no two stretches are alike.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}
