//! A buffer: a piece of this process's memory, its content, and its current user.

use std::ops::Range;

use uccl_p2p::{Iov, MrId, SharedBuf};

use crate::{
    content::Content,
    control::GrantId,
    history,
    pattern::{self, Pattern},
};

/// The current user of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    /// The buffer's worker alone; the buffer is not registered.
    Mine,
    /// The buffer's worker alone; the buffer is registered.
    Registered(MrId),
    /// The peer; the buffer is registered.
    Granted(MrId, GrantId),
    /// Transfers of this process; the buffer is registered.
    Flying(MrId),
    /// Unknown: a call could not rule out that somebody still writes it. The storm uses it no more.
    Kept,
}

impl Use {
    pub(crate) fn mr(self) -> Option<MrId> {
        match self {
            Self::Registered(mr) | Self::Granted(mr, _) | Self::Flying(mr) => Some(mr),
            Self::Mine | Self::Kept => None,
        }
    }
}

/// The memory of buffers. It is never freed, as peers may write kept buffers.
pub(crate) struct Arena {
    base: usize,
    len: usize,
    next: usize,
}

impl Arena {
    /// Memory of this process alone.
    pub(crate) fn private(len: usize) -> Self {
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        assert!(base != libc::MAP_FAILED, "no memory");
        Self { base: base as usize, len, next: 0 }
    }

    /// Memory that peers can map.
    pub(crate) fn shared(buf: SharedBuf) -> Self {
        let arena = Self { base: buf.as_ptr() as usize, len: buf.len(), next: 0 };
        std::mem::forget(buf);
        arena
    }

    /// The next `len` bytes, behind a gap.
    fn take(&mut self, len: usize, gap: usize) -> usize {
        let at = self.next + gap;
        assert!(at + len <= self.len, "too little memory");
        self.next = at + len;
        self.base + at
    }
}

pub(crate) struct Buffer {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    pub(crate) held: Use,
    pub(crate) content: Content,
    /// The latest use, for reports.
    pub(crate) last: String,
}

impl Buffer {
    pub(crate) fn new(arena: &mut Arena, len: usize, gap: usize) -> Self {
        let addr = arena.take(len, gap);
        let content = Content::new(len, None);
        Self { addr, len, held: Use::Mine, content, last: "new".into() }
    }

    pub(crate) fn iov(&self, mr: MrId, range: Range<usize>) -> Iov {
        Iov { mr, ptr: self.addr + range.start, len: range.len() }
    }

    /// Fills a range with a pattern and records it.
    pub(crate) fn fill(&mut self, range: Range<usize>, pattern: Pattern) {
        // SAFETY: the buffer lies in the arena, which is never freed, and this range is its
        // worker's.
        unsafe { pattern.fill(self.addr, range.start, range.len()) };
        self.content.set(range, Some(pattern));
    }

    /// The bytes at `at`, as they are now.
    pub(crate) fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        assert!(at + N <= self.len);
        // SAFETY: the bytes are inside the buffer.
        unsafe { ((self.addr + at) as *const [u8; N]).read_unaligned() }
    }

    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: the bytes are inside the buffer and are its worker's.
        unsafe { std::ptr::copy(bytes.as_ptr(), (self.addr + at) as *mut u8, bytes.len()) };
        self.content.set(at..at + bytes.len(), None);
    }

    /// Checks a range against the known content.
    pub(crate) fn check(&self, range: Range<usize>, when: &str) {
        self.check_against(&self.content, range, when);
    }

    pub(crate) fn check_against(&self, content: &Content, range: Range<usize>, when: &str) {
        // SAFETY: the buffer lies in the arena, which is never freed.
        if let Some(mismatch) = unsafe { content.compare(self.addr, range) } {
            history::broken(format!("{when}: {mismatch}; {self:?}"));
        }
    }

    /// Checks a buffer that was the peer's: peers write data, so no guard may lie in it.
    pub(crate) fn check_is_data(&self, when: &str) {
        // SAFETY: the buffer lies in the arena, which is never freed.
        if let Some((first, count)) = unsafe { pattern::guards_among(self.addr, self.len) } {
            history::broken(format!(
                "{when}: {count} bytes, from {first:#x} on, come from memory that had been given back; {self:?}"
            ));
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { addr, len, held, last, .. } = self;
        write!(f, "buffer of {len:#x} bytes at {addr:#x}, {held:?}, last: {last}")
    }
}
