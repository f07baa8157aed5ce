//! Virtual memory management: physical pieces of memory, and the addresses at which they are
//! mapped.
//!
//! `cuMemCreate` and allocators above it (for example torch's `expandable_segments`) make memory
//! that plain IPC handles cannot name. A piece can be given to another process as a file descriptor
//! if its creator asked for that. Torch's segments are many such pieces side by side in one range
//! of addresses.

use std::{
    ffi::c_void,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use super::{
    device::Context,
    driver::Driver,
    error::GpuError,
    raw::{
        ACCESS_READ_WRITE, AllocationHandle, GRANULARITY_MINIMUM, HANDLE_TYPE_FD, HANDLE_TYPE_NONE,
        LOCATION_DEVICE, MemAccessDesc, MemAllocationProp, MemLocation,
    },
};

/// A piece of physical memory. It exists as long as this, a mapping of it, or a descriptor of it in
/// any process.
#[derive(Debug)]
pub struct Physical {
    context: &'static Context,
    raw: AllocationHandle,
}

impl Physical {
    /// Allocates memory of a GPU. The length must be a multiple of [`Self::granularity`].
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses, [`GpuError::Missing`] if it is too old.
    pub fn new(
        context: &'static Context,
        len_bytes: usize,
        shareable: bool,
    ) -> Result<Self, GpuError> {
        Self::with_types(context, len_bytes, types_of(shareable))
    }

    /// As [`Self::new`], for memory with handles of these types.
    pub(super) fn with_types(
        context: &'static Context,
        len_bytes: usize,
        handle_types: i32,
    ) -> Result<Self, GpuError> {
        let create = Driver::need(context.driver().vmm_create, "cuMemCreate")?;
        let properties = properties(context, handle_types);
        let _current = context.make_current()?;
        let mut raw = 0;
        // SAFETY: both pointers are to live values.
        let code = unsafe { create(&raw mut raw, len_bytes, &raw const properties, 0) };
        context.check(code, format_args!("taking {len_bytes} bytes of physical memory"))?;
        Ok(Self { context, raw })
    }

    /// The granularity of a GPU's memory: lengths must be multiples of this, in bytes.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn granularity(context: &'static Context) -> Result<usize, GpuError> {
        Self::granularity_of(context, HANDLE_TYPE_FD)
    }

    /// As [`Self::granularity`], for memory with handles of these types.
    pub(super) fn granularity_of(
        context: &'static Context,
        handle_types: i32,
    ) -> Result<usize, GpuError> {
        let ask = Driver::need(context.driver().vmm_granularity, "cuMemGetAllocationGranularity")?;
        let properties = properties(context, handle_types);
        let _current = context.make_current()?;
        let mut bytes = 0;
        // SAFETY: both pointers are to live values.
        let code = unsafe { ask(&raw mut bytes, &raw const properties, GRANULARITY_MINIMUM) };
        context.check(code, format_args!("asking for the granularity of memory"))?;
        Ok(bytes)
    }

    /// The piece that is mapped at an address.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if it is not memory of this kind.
    pub fn at(context: &'static Context, address: u64) -> Result<Self, GpuError> {
        let retain = Driver::need(context.driver().vmm_retain, "cuMemRetainAllocationHandle")?;
        let _current = context.make_current()?;
        let mut raw = 0;
        // SAFETY: the pointer is to a live handle; the address is looked up and not followed.
        let code = unsafe { retain(&raw mut raw, address as usize as *mut c_void) };
        context.check(code, format_args!("asking for the physical memory at {address:#x}"))?;
        Ok(Self { context, raw })
    }

    /// Whether it was made to be shared as a file descriptor.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver does not answer.
    pub fn shares_descriptor(&self) -> Result<bool, GpuError> {
        let name = "cuMemGetAllocationPropertiesFromHandle";
        let ask = Driver::need(self.context.driver().vmm_properties, name)?;
        let mut properties = properties(self.context, HANDLE_TYPE_NONE);
        let _current = self.context.make_current()?;
        // SAFETY: the pointer is to live properties, and the handle lives.
        let code = unsafe { ask(&raw mut properties, self.raw) };
        self.context.check(code, format_args!("asking how physical memory can be shared"))?;
        Ok(properties.requested_handle_types & HANDLE_TYPE_FD != 0)
    }

    /// Makes a descriptor of it for another process. The memory is not freed before the descriptor
    /// is closed: send it, then close it.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if it was not made to be shared.
    pub fn export(&self) -> Result<OwnedFd, GpuError> {
        let mut fd: RawFd = -1;
        let place = (&raw mut fd).cast::<c_void>();
        // SAFETY: for this type of handle the driver writes a descriptor, an int.
        unsafe { self.export_to(place, HANDLE_TYPE_FD) }?;
        // SAFETY: a new descriptor without another owner.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Writes a handle of one type to a place.
    ///
    /// # Safety
    /// The place has room for such a handle.
    pub(super) unsafe fn export_to(
        &self,
        place: *mut c_void,
        handle_type: i32,
    ) -> Result<(), GpuError> {
        let export =
            Driver::need(self.context.driver().vmm_export, "cuMemExportToShareableHandle")?;
        let _current = self.context.make_current()?;
        // SAFETY: the caller's promise; the piece lives.
        let code = unsafe { export(place, self.raw, handle_type, 0) };
        self.context.check(code, format_args!("sharing physical memory by {}", named(handle_type)))
    }

    /// The memory behind another process's descriptor.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the descriptor is of something else.
    pub fn import(context: &'static Context, fd: BorrowedFd<'_>) -> Result<Self, GpuError> {
        // The driver takes the number of the descriptor as the value of a pointer.
        let number = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: the descriptor is open.
        unsafe { Self::import_from(context, number, HANDLE_TYPE_FD) }
    }

    /// The memory behind a handle of one type.
    ///
    /// # Safety
    /// The place has such a handle, or is the number of an open descriptor.
    pub(super) unsafe fn import_from(
        context: &'static Context,
        place: *mut c_void,
        handle_type: i32,
    ) -> Result<Self, GpuError> {
        let name = "cuMemImportFromShareableHandle";
        let import = Driver::need(context.driver().vmm_import, name)?;
        let _current = context.make_current()?;
        let mut raw = 0;
        // SAFETY: the pointer is to a live handle; for the rest, the caller's promise.
        let code = unsafe { import(&raw mut raw, place, handle_type) };
        context.check(code, format_args!("taking physical memory by {}", named(handle_type)))?;
        Ok(Self { context, raw })
    }
}

/// The name of a handle's type, in messages.
fn named(handle_type: i32) -> &'static str {
    if handle_type == HANDLE_TYPE_FD { "a file descriptor" } else { "a fabric handle" }
}

fn types_of(shareable: bool) -> i32 {
    if shareable { HANDLE_TYPE_FD } else { HANDLE_TYPE_NONE }
}

fn properties(context: &Context, handle_types: i32) -> MemAllocationProp {
    MemAllocationProp::on_device(context.device().id(), handle_types)
}

impl Drop for Physical {
    fn drop(&mut self) {
        self.context.quietly(|driver| match driver.vmm_release {
            // SAFETY: held by this.
            Some(release) => unsafe { release(self.raw) },
            None => 0,
        });
    }
}

/// A range of addresses at which physical memory can be mapped.
#[derive(Debug)]
pub struct AddressRange {
    context: &'static Context,
    base: u64,
    len_bytes: usize,
    mapped: Vec<(u64, usize)>,
}

impl AddressRange {
    /// Reserves a range of addresses. The length must be a multiple of [`Physical::granularity`].
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver refuses, [`GpuError::Missing`] if it is too old.
    pub fn reserve(context: &'static Context, len_bytes: usize) -> Result<Self, GpuError> {
        let driver = context.driver();
        let reserve = Driver::need(driver.vmm_reserve, "cuMemAddressReserve")?;
        Driver::need(driver.vmm_unreserve, "cuMemAddressFree")?;
        Driver::need(driver.vmm_unmap, "cuMemUnmap")?;
        let _current = context.make_current()?;
        let mut base = 0;
        // SAFETY: the pointer is to a live address.
        let code = unsafe { reserve(&raw mut base, len_bytes, 0, 0, 0) };
        context.check(code, format_args!("reserving {len_bytes} bytes of addresses"))?;
        Ok(Self { context, base, len_bytes, mapped: Vec::new() })
    }

    /// Its first address.
    pub fn address(&self) -> u64 {
        self.base
    }

    /// Its length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Maps a whole piece of length `len_bytes` at an offset. The GPU of this context can then read
    /// and write it.
    ///
    /// # Errors
    /// [`GpuError::System`] if it does not lie in the range; [`GpuError::Driver`] if the driver
    /// refuses, for example because the length is not the piece's.
    pub fn map(
        &mut self,
        offset: usize,
        len_bytes: usize,
        piece: &Physical,
    ) -> Result<(), GpuError> {
        if offset.checked_add(len_bytes).is_none_or(|end| end > self.len_bytes) {
            return Err(GpuError::System {
                doing: format!("mapping {len_bytes} bytes at offset {offset}"),
                reason: format!("only {} bytes are reserved", self.len_bytes),
            });
        }
        let map = Driver::need(self.context.driver().vmm_map, "cuMemMap")?;
        let address = self.base + offset as u64;
        let current = self.context.make_current()?;
        // SAFETY: the addresses are in this range, and the driver refuses any that are mapped
        // already; the piece lives.
        let code = unsafe { map(address, len_bytes, 0, piece.raw, 0) };
        self.context.check(code, format_args!("mapping {len_bytes} bytes at {address:#x}"))?;
        self.mapped.push((address, len_bytes));
        drop(current);
        self.allow(self.context, address, len_bytes)
    }

    /// Lets another GPU read and write all that is mapped.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if that GPU cannot reach it.
    pub fn allow_peer(&self, peer: &'static Context) -> Result<(), GpuError> {
        self.mapped.iter().try_for_each(|(address, len)| self.allow(peer, *address, *len))
    }

    fn allow(&self, who: &Context, address: u64, len_bytes: usize) -> Result<(), GpuError> {
        let set = Driver::need(self.context.driver().vmm_set_access, "cuMemSetAccess")?;
        let location = MemLocation { kind: LOCATION_DEVICE, id: who.device().id() };
        let access = MemAccessDesc { location, flags: ACCESS_READ_WRITE };
        let _current = self.context.make_current()?;
        // SAFETY: mapped by this; one description.
        let code = unsafe { set(address, len_bytes, &raw const access, 1) };
        let ordinal = who.device().ordinal();
        self.context.check(code, format_args!("letting GPU {ordinal} reach {address:#x}"))
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        self.context.quietly(|driver| {
            if let Some(unmap) = driver.vmm_unmap {
                for (address, len) in &self.mapped {
                    // SAFETY: mapped by this; users of the memory promise to have ended.
                    unsafe { unmap(*address, *len) };
                }
            }
            match driver.vmm_unreserve {
                // SAFETY: reserved by this, and nothing is mapped any more.
                Some(unreserve) => unsafe { unreserve(self.base, self.len_bytes) },
                None => 0,
            }
        });
    }
}
