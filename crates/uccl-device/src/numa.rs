//! Allocates memory on a NUMA node, and finds the node that memory is on.

use std::{
    ffi::{c_int, c_long, c_ulong, c_void},
    io,
    ptr::{self, NonNull},
};

use rustix::{
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap},
    param::page_size,
};

use crate::{
    affinity,
    cpu::{CpuList, NumaNode},
    source::Source,
};

/// `MPOL_PREFERRED` of linux/mempolicy.h: take memory from this node if it has some, else from
/// others.
const PREFERRED: c_int = 1;
/// How many nodes a mask has room for: the kernel's own limit.
const MOST_NODES: usize = 1024;
const BITS: usize = c_ulong::BITS as usize;

/// Private, zeroed, page-aligned memory, from a NUMA node if possible.
///
/// All pages are present already, so touching them allocates nothing.
#[derive(Debug)]
pub struct NodeMemory {
    start: NonNull<u8>,
    mapped_bytes: usize,
    len_bytes: usize,
}

// SAFETY: it owns plain memory, reached through raw pointers.
unsafe impl Send for NodeMemory {}
// SAFETY: as above.
unsafe impl Sync for NodeMemory {}

impl NodeMemory {
    /// Allocates memory. If the kernel does not let this process choose a node, as in many
    /// containers, the pages are touched from a CPU of that node instead. If that is not possible
    /// either, or no node is named, the system decides where they come from.
    ///
    /// # Errors
    /// The kernel's error if there is no memory; `InvalidInput` for 0 bytes.
    pub fn new(len_bytes: usize, node: Option<u32>) -> io::Result<Self> {
        let page = page_size();
        let mapped_bytes = len_bytes.checked_next_multiple_of(page).filter(|bytes| *bytes > 0);
        let mapped_bytes =
            mapped_bytes.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: the kernel chooses an unused address.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), mapped_bytes, rights, flags)? };
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let memory = Self { start, mapped_bytes, len_bytes };
        // Fewer pages to lock and to walk; without them it works as well.
        // SAFETY: this mapping, of which nothing has been touched.
        let _ = unsafe { madvise(start.as_ptr().cast(), mapped_bytes, Advice::LinuxHugepage) };
        match node {
            Some(node) if !memory.prefer(node) => memory.touch_near(node),
            _ => memory.touch(),
        }
        Ok(memory)
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Its length in whole pages.
    pub(crate) fn mapped_bytes(&self) -> usize {
        self.mapped_bytes
    }

    /// A pointer to its first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Its length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Makes pages that are not present yet come from a node. False if the kernel refuses.
    fn prefer(&self, node: u32) -> bool {
        let mut mask = [0 as c_ulong; MOST_NODES / BITS];
        let node = node as usize;
        let Some(word) = mask.get_mut(node / BITS) else { return false };
        *word = 1 << (node % BITS);
        // SAFETY: the mapping is this one, and the mask has as many bits as the call names (the
        // kernel takes one for itself).
        let code = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start.as_ptr(),
                self.mapped_bytes,
                PREFERRED,
                mask.as_ptr(),
                MOST_NODES as c_ulong,
                0 as c_ulong,
            )
        };
        code == 0
    }

    /// Touches all pages from a CPU of the node, if this thread may run on one.
    fn touch_near(&self, node: u32) {
        let before = affinity::allowed_cpus();
        let near = affinity::keep_on(&cpus_of(node));
        self.touch();
        if let (Some(before), Ok(_)) = (before, near) {
            // These CPUs were allowed a moment ago. If they no longer are, the thread keeps those
            // that it has now.
            let _ = affinity::set(&before);
        }
    }

    fn touch(&self) {
        for offset in (0..self.mapped_bytes).step_by(page_size()) {
            // SAFETY: inside the mapping, which is this one's alone.
            unsafe { self.start.add(offset).write_volatile(0) };
        }
    }
}

impl Drop for NodeMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by this, and borrowed by nobody any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
    }
}

/// The NUMA nodes of the running machine; empty if the kernel does not report them.
pub fn online_nodes() -> CpuList {
    Source::new("/".as_ref()).value("sys/devices/system/node/online").unwrap_or_default()
}

fn cpus_of(node: u32) -> CpuList {
    let nodes = NumaNode::read_all(&Source::new("/".as_ref()));
    nodes.into_iter().find(|known| known.id == node).map(|node| node.cpus).unwrap_or_default()
}

/// The NUMA node of the page at an address of this process. `None` if the page does not exist or
/// was never touched, or if the kernel does not report it. Touches nothing.
pub fn node_at(address: usize) -> Option<u32> {
    let page = (address & !(page_size() - 1)) as *const c_void;
    let mut status: c_int = -1;
    // SAFETY: one page of this process, which is looked up and not touched or moved, since no nodes
    // are named; the answer goes into a live integer.
    let code: c_long = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0 as c_int,
            1 as c_ulong,
            &raw const page,
            ptr::null::<c_int>(),
            &raw mut status,
            0 as c_int,
        )
    };
    (code == 0).then(|| u32::try_from(status).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes() -> Vec<NumaNode> {
        NumaNode::read_all(&Source::new("/".as_ref()))
    }

    #[test]
    fn memory_is_on_the_node_that_was_named() {
        let memories = nodes().into_iter().filter(|node| node.memory_bytes.is_some_and(|b| b > 0));
        let mut tried = false;
        for node in memories {
            let memory = NodeMemory::new(3 * page_size() + 1, Some(node.id)).expect("memory");
            let last = memory.as_ptr() as usize + memory.len_bytes() - 1;
            let Some(on) = node_at(last) else { break };
            tried = true;
            assert_eq!(on, node.id);
        }
        if !tried {
            eprintln!(
                "skipped: memory_is_on_the_node_that_was_named: lacks NUMA nodes, or move_pages"
            );
        }
    }

    #[test]
    fn memory_without_a_node_or_with_an_impossible_one_is_memory() {
        let before = affinity::allowed_cpus();
        for node in [None, Some(MOST_NODES as u32 - 1), Some(u32::MAX)] {
            let memory = NodeMemory::new(5000, node).expect("memory");
            assert_eq!((memory.len_bytes(), memory.as_ptr() as usize % page_size()), (5000, 0));
            // SAFETY: memory of this length that nobody else has.
            let bytes = unsafe { std::slice::from_raw_parts_mut(memory.as_ptr(), 5000) };
            assert!(bytes.iter().all(|byte| *byte == 0));
            bytes.fill(7);
        }
        assert_eq!(affinity::allowed_cpus(), before);
        assert!(NodeMemory::new(0, None).is_err() && NodeMemory::new(usize::MAX, None).is_err());
    }

    #[test]
    fn touching_from_a_cpu_of_the_node_leaves_the_thread_as_it_was() {
        let before = affinity::allowed_cpus();
        let node = nodes().first().map_or(0, |node| node.id);
        NodeMemory::new(1, None).expect("memory").touch_near(node);
        assert_eq!(affinity::allowed_cpus(), before);
    }

    #[test]
    fn an_address_that_is_not_mapped_is_on_no_node() {
        assert_eq!(node_at(0), None);
    }
}
