//! Where a side's buffers lie, and the GPU that this takes.

use std::fmt;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use uccl_device::cuda::{Context, Gpus};

use super::{
    kinds::{DeviceKind, Memory},
    role::Role,
};

/// Where buffers of one side lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Place {
    /// The process's own allocator.
    Heap,
    /// The endpoint's alloc.
    Alloc,
    /// The memory of the GPU with this ordinal.
    Gpu(u32),
    /// Locked host memory, taken from the driver through this GPU.
    Pinned(u32),
}

impl Place {
    pub(crate) fn of(device: DeviceKind, memory: Memory, gpu: u32) -> Self {
        match (device, memory) {
            (DeviceKind::Cpu, Memory::Heap) => Self::Heap,
            (DeviceKind::Cpu, Memory::Alloc) => Self::Alloc,
            (DeviceKind::Gpu, _) => Self::Gpu(gpu),
            (DeviceKind::Pinned, _) => Self::Pinned(gpu),
        }
    }

    /// The GPU that such memory is on, or is locked through.
    pub(crate) fn gpu(self) -> Option<u32> {
        match self {
            Self::Heap | Self::Alloc => None,
            Self::Gpu(gpu) | Self::Pinned(gpu) => Some(gpu),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Heap => f.write_str("heap"),
            Self::Alloc => f.write_str("alloc"),
            Self::Gpu(gpu) => write!(f, "gpu:{gpu}"),
            Self::Pinned(gpu) => write!(f, "pinned:{gpu}"),
        }
    }
}

/// Where buffers of both sides lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Places {
    pub(crate) lead: Place,
    pub(crate) serve: Place,
}

impl Places {
    pub(crate) fn of(self, role: Role) -> Place {
        match role {
            Role::Lead => self.lead,
            Role::Serve => self.serve,
        }
    }
}

/// The context of a GPU of this process; the error names the missing part.
pub(crate) fn context(ordinal: u32) -> Result<&'static Context> {
    let gpus = Gpus::get();
    if let Some(reason) = gpus.why_none() {
        bail!("GPU and pinned memory need an NVIDIA GPU and its driver: {reason}");
    }
    Ok(gpus.device(ordinal)?.context()?)
}

/// How a report names a GPU.
pub(crate) fn name(ordinal: u32) -> Result<String> {
    let device = context(ordinal)?.device();
    Ok(format!("gpu:{ordinal}, {} at {}", device.name(), device.pci()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_named_as_reports_have_them() {
        let named = [
            (Place::of(DeviceKind::Cpu, Memory::Heap, 3), "heap"),
            (Place::of(DeviceKind::Cpu, Memory::Alloc, 3), "alloc"),
            (Place::of(DeviceKind::Gpu, Memory::Heap, 3), "gpu:3"),
            (Place::of(DeviceKind::Pinned, Memory::Heap, 3), "pinned:3"),
        ];
        for (place, name) in named {
            assert_eq!(place.to_string(), name);
            assert_eq!(place.gpu(), name.contains(':').then_some(3));
        }
    }

    #[test]
    fn the_error_for_a_missing_gpu_names_the_reason() {
        // An ordinal that no machine has: without a GPU the reason, with some their number.
        let error = context(u32::MAX).expect_err("no such GPU").to_string();
        match Gpus::get().why_none() {
            Some(reason) => assert!(error.contains(reason), "{error}"),
            None => assert!(error.contains("GPU"), "{error}"),
        }
    }
}
