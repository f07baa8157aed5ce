//! Memory that GPUs of other hosts reach over NVLink, in racks where it joins them (MNNVL).
//!
//! Such memory has a fabric handle, 64 bytes as those of an IPC handle. Any process of the same
//! NVLink domain can open it: on this host, or on another one. The driver refuses it to all others.
//! Making such memory takes a channel of NVIDIA's IMEX service (`/dev/nvidia-caps-imex-channels`).

use std::{ffi::c_void, fmt};

use super::{
    device::Context,
    error::GpuError,
    raw::{HANDLE_TYPE_FABRIC, HANDLE_TYPE_FD},
    vmm::{AddressRange, Physical},
};

/// The 64 bytes that name memory to the GPUs of an NVLink domain (`CUmemFabricHandle`).
///
/// A process that has the handle can write to the memory, so it is as secret as the memory's
/// contents.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct FabricHandle(pub [u8; 64]);

impl fmt::Debug for FabricHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FabricHandle(..)")
    }
}

/// Memory that a process of the same NVLink domain can open by a handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FabricExport {
    /// The handle.
    pub handle: FabricHandle,
    /// The length of the physical memory in bytes: all of it has to be mapped.
    pub len_bytes: usize,
}

/// Physical memory with a fabric handle, mapped for its GPU.
#[derive(Debug)]
pub(super) struct FabricMemory {
    range: AddressRange,
    export: FabricExport,
    /// Kept with its mapping, so that the handle stays valid.
    _physical: Physical,
}

impl FabricMemory {
    /// Allocates `len_bytes`, rounded up to the GPU's granularity.
    ///
    /// # Errors
    /// [`GpuError::System`] if this GPU's driver has no fabric handles; [`GpuError::Driver`] if it
    /// refuses, as it does without a channel of the IMEX service.
    pub(super) fn new(context: &'static Context, len_bytes: usize) -> Result<Self, GpuError> {
        let wrong = |reason: String| GpuError::System {
            doing: format!("taking {len_bytes} bytes with a fabric handle"),
            reason,
        };
        let device = context.device();
        if !device.exports_fabric_handles() {
            let ordinal = device.ordinal();
            return Err(wrong(format!("GPU {ordinal} and its driver have no fabric handles")));
        }
        // With a descriptor too, other processes of this host open it as any memory of this kind.
        let types = match device.exports_descriptors() {
            true => HANDLE_TYPE_FABRIC | HANDLE_TYPE_FD,
            false => HANDLE_TYPE_FABRIC,
        };
        let granularity = Physical::granularity_of(context, types)?.max(1);
        let len_bytes = (len_bytes.checked_next_multiple_of(granularity))
            .filter(|len| *len > 0)
            .ok_or_else(|| wrong("the length makes no sense".to_owned()))?;
        let physical = Physical::with_types(context, len_bytes, types)?;
        let export = FabricExport { handle: handle_of(&physical)?, len_bytes };
        let mut range = AddressRange::reserve(context, len_bytes)?;
        range.map(0, len_bytes, &physical)?;
        Ok(Self { range, export, _physical: physical })
    }

    /// Its address in this process.
    pub(super) fn address(&self) -> u64 {
        self.range.address()
    }

    /// The means by which other processes open it.
    pub(super) fn export(&self) -> FabricExport {
        self.export
    }

    /// Lets another GPU of this process reach it.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if that GPU cannot.
    pub(super) fn allow_peer(&self, peer: &'static Context) -> Result<(), GpuError> {
        self.range.allow_peer(peer)
    }
}

fn handle_of(physical: &Physical) -> Result<FabricHandle, GpuError> {
    let mut handle = FabricHandle([0; 64]);
    let place = handle.0.as_mut_ptr().cast::<c_void>();
    // SAFETY: a fabric handle is 64 bytes.
    unsafe { physical.export_to(place, HANDLE_TYPE_FABRIC) }?;
    Ok(handle)
}

/// Maps another process's memory for the GPU of a context.
///
/// # Errors
/// [`GpuError::Driver`] for a handle that is forged or of another NVLink domain, or for a wrong
/// length.
pub(super) fn map(
    context: &'static Context,
    export: FabricExport,
) -> Result<AddressRange, GpuError> {
    let mut handle = export.handle;
    let place = handle.0.as_mut_ptr().cast::<c_void>();
    // SAFETY: a fabric handle is 64 bytes; the driver checks them.
    let physical = unsafe { Physical::import_from(context, place, HANDLE_TYPE_FABRIC) }?;
    let mut range = AddressRange::reserve(context, export.len_bytes)?;
    range.map(0, export.len_bytes, &physical)?;
    Ok(range)
}
