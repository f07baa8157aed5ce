//! The driver's report about the GPUs that this process sees, as plain values.

use serde::{Serialize, Serializer};

use crate::pci::PciAddress;

use super::{
    device::{Capability, Device},
    gpus::Gpus,
    link::GpuLink,
    uuid::GpuUuid,
};

/// A GPU, as the driver shows it to this process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct VisibleGpu {
    /// Its number in this process.
    pub ordinal: u32,
    /// Its UUID, the same in every process.
    pub uuid: GpuUuid,
    /// Its PCI address.
    pub pci: PciAddress,
    /// The vendor's name for the model.
    pub name: String,
    /// All of its memory, in bytes.
    pub memory_bytes: usize,
    /// Its compute capability.
    pub capability: Capability,
    /// How it reaches the memory of each GPU that this process sees, by ordinal; `None` if the
    /// driver does not report it.
    pub links: Vec<Option<GpuLink>>,
}

impl VisibleGpu {
    /// A GPU of an unknown model that reaches no other.
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
    /// The facts about each GPU. Asks the driver each time, which takes some microseconds for each
    /// pair of GPUs.
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
