//! What the driver says of the GPUs that this process sees, in plain values.

use serde::{Serialize, Serializer};

use crate::pci::PciAddress;

use super::{
    device::{Capability, Device, Gpus},
    uuid::GpuUuid,
};

/// How one GPU reaches another's memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum GpuLink {
    /// It is its own.
    Itself,
    /// Over NVLink, with or without switches. Told from atomic operations working on the other's memory,
    /// which PCIe does not carry between GPUs.
    Nvlink,
    /// Over PCIe.
    Pcie,
    /// Not at all: copies go through the host's memory.
    None,
}

/// A GPU as the driver shows it to this process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct VisibleGpu {
    /// Its number in this process.
    pub ordinal: u32,
    /// What names it in every process.
    pub uuid: GpuUuid,
    /// Where it is on the PCI bus.
    pub pci: PciAddress,
    /// What its maker calls it.
    pub name: String,
    /// All of its memory, in bytes.
    pub memory_bytes: usize,
    /// What it can execute.
    pub capability: Capability,
    /// How it reaches the memory of each GPU that this process sees, by their ordinals; `None` where the
    /// driver does not say.
    pub links: Vec<Option<GpuLink>>,
}

impl VisibleGpu {
    /// A GPU that reaches no other, of unknown make.
    pub fn new(ordinal: u32, uuid: GpuUuid, pci: PciAddress) -> Self {
        Self {
            ordinal,
            uuid,
            pci,
            name: String::new(),
            memory_bytes: 0,
            capability: Capability { major: 0, minor: 0 },
            links: Vec::new(),
        }
    }
}

impl Gpus {
    /// What the driver says of each. Asks it anew, some microseconds for each pair of GPUs.
    pub fn facts(&self) -> Vec<VisibleGpu> {
        self.devices().iter().map(|device| self.facts_of(device)).collect()
    }

    fn facts_of(&self, device: &Device) -> VisibleGpu {
        VisibleGpu {
            ordinal: device.ordinal(),
            uuid: device.uuid(),
            pci: device.pci(),
            name: device.name().to_owned(),
            memory_bytes: device.memory_bytes(),
            capability: device.capability(),
            links: self.devices().iter().map(|other| device.link_to(other).ok()).collect(),
        }
    }
}

impl Serialize for Capability {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
