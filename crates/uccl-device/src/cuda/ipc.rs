//! Sharing one process's GPU memory with another.
//!
//! There are two ways for memory of any maker: an IPC handle, 64 bytes that name a whole allocation
//! made by `cuMemAlloc` or `cudaMalloc`; and file descriptors, for memory made by `cuMemCreate`
//! ([`super::vmm`]). The kind of memory decides which one applies. Some memory has neither and must
//! be staged. Our own memory may have a fabric handle too, for other hosts ([`super::fabric`]).
//!
//! Memory that the owner frees stays mapped in the process that opened it: the driver keeps the
//! physical memory until the last mapping is gone. Bytes copied there after that are lost, and
//! nothing else happens.

use std::{
    collections::HashMap,
    fmt,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use crate::memory::MemoryKind;

use super::{
    device::Context,
    error::GpuError,
    fabric::{self, FabricExport},
    gpus::Gpus,
    pointer::{Allocation, Pointer, classify},
    raw::{IPC_LAZY_PEER_ACCESS, IpcMemHandle},
    reaper,
    vmm::{AddressRange, Physical},
};

/// The 64 bytes that name an allocation to other processes (`CUipcMemHandle`).
///
/// A process that has the handle can write to the memory, so it is as secret as the memory's
/// contents.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct IpcHandle(pub [u8; 64]);

impl fmt::Debug for IpcHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IpcHandle(..)")
    }
}

/// An allocation that another process can open by a handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LegacyExport {
    /// The handle.
    pub handle: IpcHandle,
    /// The allocation's address in its owner. The mapping in the other process begins with the same
    /// byte.
    pub base: u64,
    /// The allocation's length in bytes.
    pub len_bytes: usize,
}

/// A piece of memory that another process can map by a file descriptor.
#[derive(Debug)]
pub struct FdExport {
    /// The descriptor. The memory is not freed before it is closed: send it, then close it.
    pub fd: OwnedFd,
    /// The address at which the piece is mapped in its owner.
    pub base: u64,
    /// Its length in bytes.
    pub len_bytes: usize,
}

/// The means by which another process reaches some memory.
#[derive(Debug)]
pub enum MemoryExport {
    /// A handle to the allocation that contains the memory.
    Legacy(LegacyExport),
    /// The pieces that contain the memory, adjacent and in the order of their addresses.
    Descriptors(Vec<FdExport>),
}

/// Exports memory. Keeps the handle of each allocation for the next time.
#[derive(Debug, Default)]
pub struct Exporter {
    known: Mutex<HashMap<u64, (Allocation, IpcHandle)>>,
}

/// Most handles that are kept. Making one anew costs microseconds.
const MOST_KNOWN: usize = 4096;
/// More pieces than any sensible range has.
const MOST_PIECES: usize = 1 << 16;

impl Exporter {
    /// Makes the means by which another process reaches `len_bytes` at an address.
    ///
    /// A handle is made once. If the memory was freed and its address reused, a new handle is made.
    /// Descriptors are made each time, since a descriptor that is kept would keep the memory.
    ///
    /// # Errors
    /// [`GpuError::NotExportable`] if there is no way, [`GpuError::Driver`] if the driver refuses.
    pub fn export(&self, address: u64, len_bytes: usize) -> Result<MemoryExport, GpuError> {
        let pointer = classify(address)?;
        let MemoryKind::Cuda { device } = pointer.kind else {
            return Err(refused(address, format!("it is {} memory", pointer.kind)));
        };
        let context = Gpus::get().device(device)?.context()?;
        if pointer.legacy_ipc {
            let allocation = pointer.allocation.ok_or_else(|| no_range(address))?;
            within(&allocation, address, len_bytes)?;
            return self.by_handle(context, allocation).map(MemoryExport::Legacy);
        }
        Pieces { context, end: end_of(address, len_bytes)? }
            .export(address, pointer)
            .map(MemoryExport::Descriptors)
    }

    fn by_handle(
        &self,
        context: &'static Context,
        allocation: Allocation,
    ) -> Result<LegacyExport, GpuError> {
        let mut known = lock(&self.known);
        let (base, len_bytes) = (allocation.base, allocation.len_bytes);
        if let Some((same, handle)) = known.get(&base)
            && *same == allocation
        {
            return Ok(LegacyExport { handle: *handle, base, len_bytes });
        }
        let _current = context.make_current()?;
        let mut handle = IpcMemHandle([0; 64]);
        // SAFETY: the pointer is to a live handle; the address is looked up and not followed.
        let code = unsafe { (context.driver().ipc_export)(&raw mut handle, base) };
        context.check(code, format_args!("making an IPC handle for {base:#x}"))?;
        let handle = IpcHandle(handle.0);
        // Known allocations that overlap this one were freed, or this one could not have been
        // allocated.
        known.retain(|_, (old, _)| end(old) <= base || old.base >= base + len_bytes as u64);
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        known.insert(base, (allocation, handle));
        Ok(LegacyExport { handle, base, len_bytes })
    }

    /// Forgets the handle of the allocation that contains an address, once no process is to reach
    /// it any more. Without this call for freed memory, the change is noticed when its address is
    /// exported again.
    pub fn forget(&self, address: u64) {
        lock(&self.known).retain(|_, (old, _)| address < old.base || end(old) <= address);
    }

    /// How many handles are known.
    pub fn len(&self) -> usize {
        lock(&self.known).len()
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Exports memory piece by piece.
struct Pieces {
    context: &'static Context,
    end: u64,
}

impl Pieces {
    fn export(&self, address: u64, first: Pointer) -> Result<Vec<FdExport>, GpuError> {
        let mut pieces = vec![self.piece(address, first)?];
        while let Some(next) = pieces.last().map(|last| last.base + last.len_bytes as u64)
            && next < self.end
        {
            if pieces.len() == MOST_PIECES {
                return Err(refused(address, format!("it has more than {MOST_PIECES} pieces")));
            }
            pieces.push(self.piece(next, classify(next)?)?);
        }
        Ok(pieces)
    }

    fn piece(&self, address: u64, pointer: Pointer) -> Result<FdExport, GpuError> {
        if pointer.pooled {
            return Err(refused(address, "it comes from a memory pool".to_owned()));
        }
        let Allocation { base, len_bytes, .. } =
            pointer.allocation.ok_or_else(|| no_range(address))?;
        let physical = Physical::at(self.context, base).map_err(|error| match error.code() {
            Some(_) => {
                refused(address, format!("no IPC handle can name it, nor a descriptor ({error})"))
            }
            None => error,
        })?;
        if !physical.shares_descriptor()? {
            let why = "it was made without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR (cuMemCreate)";
            return Err(refused(address, why.to_owned()));
        }
        Ok(FdExport { fd: physical.export()?, base, len_bytes })
    }
}

fn refused(address: u64, why: String) -> GpuError {
    GpuError::NotExportable { address, why }
}

fn no_range(address: u64) -> GpuError {
    refused(address, "the driver does not say what allocation it is part of".to_owned())
}

fn end(allocation: &Allocation) -> u64 {
    allocation.base.saturating_add(allocation.len_bytes as u64)
}

fn end_of(address: u64, len_bytes: usize) -> Result<u64, GpuError> {
    (address.checked_add(len_bytes as u64))
        .ok_or_else(|| refused(address, format!("{len_bytes} bytes from there have no end")))
}

fn within(allocation: &Allocation, address: u64, len_bytes: usize) -> Result<(), GpuError> {
    if end_of(address, len_bytes)? <= end(allocation) {
        return Ok(());
    }
    let left = end(allocation).saturating_sub(address);
    Err(refused(address, format!("its allocation ends after {left} of {len_bytes} bytes")))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process that memory belongs to. The importer's owner chooses the numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PeerId(pub u64);

/// Opens other processes' memory. Each handle is opened once for each GPU that is to reach it.
#[derive(Debug, Default)]
pub struct Importer {
    open: Mutex<HashMap<(PeerId, u32, IpcHandle), Weak<Mapping>>>,
}

impl Importer {
    /// Opens a handle for the GPU of a context, or returns the mapping that is open already. It is
    /// closed when its last user drops it.
    ///
    /// # Errors
    /// [`GpuError::Driver`] for a handle that is forged, stale or of this same process, or if this
    /// GPU cannot reach the memory.
    pub fn open(
        &self,
        context: &'static Context,
        peer: PeerId,
        handle: IpcHandle,
    ) -> Result<Arc<Mapping>, GpuError> {
        let key = (peer, context.device().ordinal(), handle);
        let mut open = lock(&self.open);
        if let Some(mapping) = open.get(&key).and_then(Weak::upgrade) {
            return Ok(mapping);
        }
        let mapping = Arc::new(Mapping::by_handle(context, handle)?);
        open.retain(|_, mapping| mapping.strong_count() > 0);
        open.insert(key, Arc::downgrade(&mapping));
        Ok(mapping)
    }

    /// Maps pieces side by side, in the given order, for the GPU of a context. The descriptors are
    /// not needed afterwards.
    ///
    /// # Errors
    /// [`GpuError::Driver`] for a descriptor of something else or a wrong length,
    /// [`GpuError::System`] if there are none.
    pub fn map<F: AsFd>(
        context: &'static Context,
        pieces: &[(F, usize)],
    ) -> Result<Arc<Mapping>, GpuError> {
        Mapping::by_descriptors(context, pieces).map(Arc::new)
    }

    /// Maps memory with a fabric handle for the GPU of a context. It is unmapped when its last user
    /// has dropped it and the GPU's work has ended.
    ///
    /// # Errors
    /// [`GpuError::Driver`] for a handle that is forged, stale or of another NVLink domain, or for
    /// a wrong length.
    pub fn map_fabric(
        context: &'static Context,
        export: FabricExport,
    ) -> Result<Arc<Mapping>, GpuError> {
        Mapping::by_fabric_handle(context, export).map(Arc::new)
    }

    /// How many handles are open.
    pub fn len(&self) -> usize {
        lock(&self.open).values().filter(|mapping| mapping.strong_count() > 0).count()
    }

    /// Whether none is open.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Another process's memory, as a GPU of this one reaches it.
#[derive(Debug)]
pub struct Mapping {
    context: &'static Context,
    address: u64,
    len_bytes: usize,
    /// The range that unmaps it when dropped, if it was not opened by an IPC handle.
    range: Option<AddressRange>,
    /// Whether the GPU's work is waited for before that.
    waits_for_work: bool,
}

impl Mapping {
    fn by_handle(context: &'static Context, handle: IpcHandle) -> Result<Self, GpuError> {
        let _current = context.make_current()?;
        let driver = context.driver();
        let mut address = 0;
        let raw = IpcMemHandle(handle.0);
        // SAFETY: the pointer is to a live address; the driver checks the handle.
        let code = unsafe { (driver.ipc_open)(&raw mut address, raw, IPC_LAZY_PEER_ACCESS) };
        context.check(code, format_args!("opening another process's memory"))?;
        let mut mapping =
            Self { context, address, len_bytes: 0, range: None, waits_for_work: false };
        let (mut base, mut len) = (0, 0);
        // SAFETY: both pointers are to live values.
        let code = unsafe { (driver.address_range)(&raw mut base, &raw mut len, address) };
        context.check(code, format_args!("asking how long another process's memory is"))?;
        mapping.len_bytes = (base + len as u64).saturating_sub(address) as usize;
        Ok(mapping)
    }

    fn by_descriptors<F: AsFd>(
        context: &'static Context,
        pieces: &[(F, usize)],
    ) -> Result<Self, GpuError> {
        let wrong = |reason: &str| GpuError::System {
            doing: format!("mapping {} pieces of another process's memory", pieces.len()),
            reason: reason.to_owned(),
        };
        let total = (pieces.iter().try_fold(0_usize, |sum, (_, len)| sum.checked_add(*len)))
            .filter(|total| *total > 0)
            .ok_or_else(|| wrong("their lengths make no sense"))?;
        let mut range = AddressRange::reserve(context, total)?;
        let mut offset = 0;
        for (fd, len_bytes) in pieces {
            range.map(offset, *len_bytes, &Physical::import(context, fd.as_fd())?)?;
            offset += len_bytes;
        }
        Ok(Self::of_range(context, range, false))
    }

    fn by_fabric_handle(context: &'static Context, export: FabricExport) -> Result<Self, GpuError> {
        Ok(Self::of_range(context, fabric::map(context, export)?, true))
    }

    fn of_range(context: &'static Context, range: AddressRange, waits_for_work: bool) -> Self {
        let (address, len_bytes) = (range.address(), range.len_bytes());
        Self { context, address, len_bytes, range: Some(range), waits_for_work }
    }

    /// Its address in this process. It begins with the first byte of the owner's allocation, or of
    /// the first piece.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Lets another GPU reach it. This does nothing for memory opened by a handle, which is opened
    /// separately for each GPU.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if that GPU cannot reach it.
    pub fn allow_peer(&self, peer: &'static Context) -> Result<(), GpuError> {
        self.range.as_ref().map_or(Ok(()), |range| range.allow_peer(peer))
    }

    /// Its length in bytes, as this process's driver reports it.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The context for which it was opened.
    pub fn context(&self) -> &'static Context {
        self.context
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.waits_for_work {
            if let Some(range) = self.range.take() {
                reaper::later_than_work(self.context, range);
            }
        } else if self.range.is_none() {
            let address = self.address;
            // SAFETY: opened by this, and the driver counts openings; users of the memory promise
            // to have ended.
            reaper::later(self.context, move |driver| unsafe { (driver.ipc_close)(address) }, None);
        }
    }
}
