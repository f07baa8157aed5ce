//! A piece of memory that two processes can map: a sealed memfd and our mapping of it.

use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use uccl_device::{PageAccess, make_resident};

/// `TMPFS_MAGIC` of `linux/magic.h`: the file system of all memfds except those with huge pages.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The accesses that a mapping of a peer's segment allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MapMode {
    /// Loads only.
    ReadOnly,
    /// Loads and stores.
    ReadWrite,
}

/// Our mapping of a segment. Unmapped when dropped.
///
/// Its size cannot change (that is sealed, and [`of`](Self::of) insists on it), so an access within
/// its length never faults.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    mode: MapMode,
}

// SAFETY: the mapping belongs to the value, not to a thread; nothing is read or written through
// `Mapping` itself but by way of raw pointers and atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// A segment that was made here: our mapping of it, and the memfd that peers map.
#[derive(Debug)]
pub struct Segment {
    mapping: Arc<Mapping>,
    fd: OwnedFd,
}

impl Deref for Segment {
    type Target = Arc<Mapping>;

    fn deref(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}

impl Segment {
    /// Makes a zeroed segment of `len` bytes, sealed against any change of size. `name` shows in
    /// `/proc/PID/maps`.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when `len` is 0 or absurd, otherwise the system's error.
    pub fn create(name: &str, len: usize) -> io::Result<Self> {
        Self::make(name, len, SealFlags::empty())
    }

    /// Like [`create`](Self::create), but only this mapping can ever write: every later one, here
    /// or at a peer, is read-only.
    ///
    /// # Errors
    /// As for [`create`](Self::create).
    pub fn create_published(name: &str, len: usize) -> io::Result<Self> {
        Self::make(name, len, SealFlags::FUTURE_WRITE)
    }

    fn make(name: &str, len: usize, more: SealFlags) -> io::Result<Self> {
        if len == 0 || isize::try_from(len).is_err() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Newer kernels want a flag that forbids execution of the file; older ones do not know the
        // flag.
        let fd = rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| rustix::fs::memfd_create(name, flags))?;
        rustix::fs::ftruncate(&fd, len as u64)?;
        let mapping = Arc::new(Mapping::map(fd.as_fd(), len, MapMode::ReadWrite)?);
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL | more;
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        Ok(Self { mapping, fd })
    }

    /// The memfd, to hand to a peer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Mapping {
    /// Maps a segment that a peer made, and closes its descriptor.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] when the file is not a memfd that cannot shrink, is empty, or
    /// is longer than `max_len`; otherwise the system's error.
    pub fn of(fd: OwnedFd, mode: MapMode, max_len: usize) -> io::Result<Self> {
        // An access to a huge page file can fault for want of free pages even within the file's
        // length, so such files are refused too.
        let plain = rustix::fs::fstatfs(&fd)?.f_type as i64 == TMPFS_MAGIC;
        let sealed = plain
            && rustix::fs::fcntl_get_seals(&fd)
                .is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let len = usize::try_from(rustix::fs::fstat(&fd)?.st_size).unwrap_or(0);
        if !sealed || len == 0 || len > max_len || isize::try_from(len).is_err() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the peer's shared segment is unsealed or has a wrong size",
            ));
        }
        Self::map(fd.as_fd(), len, mode)
    }

    fn map(fd: BorrowedFd<'_>, len: usize, mode: MapMode) -> io::Result<Self> {
        let prot = match mode {
            MapMode::ReadOnly => ProtFlags::READ,
            MapMode::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: a fresh mapping at an address that the kernel picks touches no memory of ours.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, mode })
    }

    /// Allocates all of its pages now, so that the first accesses do not fault one by one. Without
    /// effect on kernels before 5.14.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn populate(&self) -> io::Result<()> {
        let access = match self.mode {
            MapMode::ReadOnly => PageAccess::Read,
            MapMode::ReadWrite => PageAccess::Write,
        };
        make_resident(self.as_ptr().addr(), self.len, access)
    }

    /// Where it is mapped; the pointer is good while this lives.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Its length in bytes.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "nothing empty is mapped")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The accesses that the mapping allows.
    #[inline]
    pub fn mode(&self) -> MapMode {
        self.mode
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map`, and every holder of a pointer into it promised not
        // to outlive this.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// `count` atomic words in shared memory, kept mapped.
#[derive(Clone, Debug)]
pub struct Words {
    base: NonNull<AtomicU64>,
    count: usize,
    _mapping: Arc<Mapping>,
}

// SAFETY: it is a shared slice of atomics, which is `Send` and `Sync`.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// The `count` words at byte `offset`. Storing to them needs a writable mapping: the caller
    /// sees to that, or never stores.
    pub fn new(mapping: &Arc<Mapping>, offset: usize, count: usize) -> io::Result<Self> {
        let end = count.checked_mul(8).and_then(|len| len.checked_add(offset));
        if !offset.is_multiple_of(8) || end.is_none_or(|end| end > mapping.len()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: `offset` lies within the mapping, as just checked.
        let base = unsafe { mapping.base.add(offset).cast() };
        Ok(Self { base, count, _mapping: Arc::clone(mapping) })
    }

    /// The words.
    #[inline(always)]
    #[must_use]
    pub fn as_slice(&self) -> &[AtomicU64] {
        // SAFETY: `new` checked bounds and alignment, the mapping is held, shared memory is zeroed
        // or written by a peer, and any 64 bits are a valid word.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remap(segment: &Segment, mode: MapMode) -> io::Result<Mapping> {
        Mapping::of(segment.fd().try_clone_to_owned()?, mode, usize::MAX)
    }

    #[test]
    fn both_mappings_are_the_same_memory() {
        let ours = Segment::create("test", 10_000).unwrap();
        let theirs = remap(&ours, MapMode::ReadWrite).unwrap();
        ours.populate().unwrap();
        theirs.populate().unwrap();
        assert_eq!((theirs.len(), theirs.mode()), (10_000, MapMode::ReadWrite));
        // SAFETY: within both mappings.
        unsafe {
            assert_eq!(*theirs.as_ptr().add(9_999), 0);
            *ours.as_ptr().add(9_999) = 7;
            assert_eq!(*theirs.as_ptr().add(9_999), 7);
        }
    }

    #[test]
    fn its_size_cannot_change() {
        let segment = Segment::create("test", 8192).unwrap();
        for len in [0, 4096, 16384] {
            assert!(rustix::fs::ftruncate(segment.fd(), len).is_err());
        }
        assert!(rustix::fs::fcntl_add_seals(segment.fd(), SealFlags::WRITE).is_err());
    }

    #[test]
    fn a_published_one_is_read_only_to_others() {
        let ours = Segment::create_published("test", 4096).unwrap();
        assert!(remap(&ours, MapMode::ReadWrite).is_err());
        let theirs = remap(&ours, MapMode::ReadOnly).unwrap();
        theirs.populate().unwrap();
        let prot = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
        // SAFETY: the range is our mapping, and nothing writes through it.
        let raised = unsafe { rustix::mm::mprotect(theirs.as_ptr().cast(), 4096, prot) };
        assert_eq!(raised, Err(rustix::io::Errno::ACCESS));
        // SAFETY: within both mappings; ours is writable.
        unsafe {
            *ours.as_ptr() = 3;
            assert_eq!(*theirs.as_ptr(), 3);
        }
    }

    #[test]
    fn a_segment_that_could_shrink_or_is_too_long_is_refused() {
        let kind = |fd: OwnedFd, max| Mapping::of(fd, MapMode::ReadOnly, max).unwrap_err().kind();
        let unsealed = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, 4096).unwrap();
        assert_eq!(kind(unsealed, 4096), io::ErrorKind::InvalidData);
        let empty = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::fcntl_add_seals(&empty, SealFlags::SHRINK).unwrap();
        assert_eq!(kind(empty, 4096), io::ErrorKind::InvalidData);
        let fine = Segment::create("test", 4096).unwrap();
        assert_eq!(kind(fine.fd().try_clone_to_owned().unwrap(), 4095), io::ErrorKind::InvalidData);
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(kind(file.into(), usize::MAX), io::ErrorKind::InvalidData);
    }

    #[test]
    fn words_stay_within() {
        let segment = Segment::create("test", 4096).unwrap();
        assert_eq!(Words::new(&segment, 4088, 1).unwrap().as_slice().len(), 1);
        for (offset, count) in [(4088, 2), (4, 1), (4096, 1), (8, usize::MAX / 4)] {
            assert!(Words::new(&segment, offset, count).is_err());
        }
    }
}
