//! Host memory whose pages exist before they are needed.

use std::{ffi::c_void, io};

use rustix::{
    io::Errno,
    mm::{Advice, madvise},
    param::page_size,
};

/// Bytes of one system call: the kernel looks for signals between two.
const STEP: usize = 64 << 20;

/// The accesses that the pages of memory are for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageAccess {
    /// Reads alone.
    Read,
    /// Reads and writes.
    Write,
}

/// Gives host memory its pages, as pinning does: the first access to a page would otherwise wait
/// until the kernel has found and cleared it. Contents stay. Without effect on kernels before 5.14,
/// and from a part on that may not be accessed so.
///
/// # Errors
/// There is not enough memory, or a part of the range is not mapped. Pages before that part have
/// been made.
pub fn make_resident(address: usize, len_bytes: usize, access: PageAccess) -> io::Result<()> {
    let advice = match access {
        PageAccess::Read => Advice::LinuxPopulateRead,
        PageAccess::Write => Advice::LinuxPopulateWrite,
    };
    let page = page_size();
    let begin = address - address % page;
    let end = address.saturating_add(len_bytes).checked_next_multiple_of(page);
    let end = end.ok_or(io::ErrorKind::InvalidInput)?;
    for from in (begin..end).step_by(STEP) {
        let len = STEP.min(end - from);
        // SAFETY: the advice changes no contents and unmaps nothing; the kernel checks the range.
        match unsafe { madvise(from as *mut c_void, len, advice) } {
            Err(Errno::INVAL) => return Ok(()),
            answer => answer?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    use super::{PageAccess::Write, *};
    use crate::numa::node_at;

    /// Maps pages, hands over their address, and unmaps them.
    fn with_pages<R>(pages: usize, rights: ProtFlags, test: impl FnOnce(usize) -> R) -> R {
        let len = pages * page_size();
        // SAFETY: the kernel chooses the place.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, rights, MapFlags::PRIVATE) };
        let base = base.expect("some pages");
        // The kernel would join them with their neighbours, and fill a large page at once. One that
        // has no large pages refuses.
        // SAFETY: mapped above.
        let _ = unsafe { madvise(base, len, Advice::LinuxNoHugepage) };
        let answer = test(base.addr());
        // SAFETY: mapped above, and the test has ended.
        unsafe { munmap(base, len) }.expect("they are mapped");
        answer
    }

    #[test]
    fn every_page_of_a_range_is_there_and_no_other() {
        let page = page_size();
        with_pages(4, ProtFlags::READ | ProtFlags::WRITE, |base| {
            assert_eq!(node_at(base + page), None, "nobody has touched it");
            make_resident(base + page + 8, page, Write).expect("it is mapped");
            let there: Vec<_> =
                (0..4).map(|number| node_at(base + number * page).is_some()).collect();
            assert_eq!(there, [false, true, true, false]);
        });
    }

    #[test]
    fn memory_that_nobody_may_write_stays_as_it_is() {
        with_pages(1, ProtFlags::READ, |base| {
            make_resident(base, page_size(), Write).expect("nothing to do");
            assert_eq!(node_at(base), None);
        });
    }

    #[test]
    fn a_range_without_memory_is_an_error() {
        assert!(
            make_resident(page_size(), page_size(), Write).is_err(),
            "nothing is mapped so low"
        );
        assert!(make_resident(usize::MAX - 8, 64, Write).is_err());
    }
}
