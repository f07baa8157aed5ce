//! GPUs as the PCI bus shows them, with or without a driver.

use std::path::Path;

use serde::Serialize;

use crate::{
    cuda::GpuUuid,
    pci::{PciAddress, PciTree},
    source::Source,
};

/// Who made a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum GpuVendor {
    /// AMD.
    Amd,
    /// NVIDIA.
    Nvidia,
}

/// A GPU.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Gpu {
    /// Where it is on the PCI bus.
    pub pci: PciAddress,
    /// Who made it.
    pub vendor: GpuVendor,
    /// The vendor's number for the model.
    pub device_id: Option<u32>,
    /// The kernel driver bound to it.
    pub driver: Option<String>,
    /// The NUMA node it hangs off.
    pub numa_node: Option<u32>,
    /// What names it in every process, where NVIDIA's kernel driver says.
    pub uuid: Option<GpuUuid>,
    /// What its maker calls it, where NVIDIA's kernel driver says.
    pub model: Option<String>,
    /// Whether NVIDIA's kernel driver lists it to this process. A container's bus shows the machine's GPUs,
    /// and its driver those that it was given.
    pub in_driver: bool,
}

const CLASS_DISPLAY: u32 = 0x03;
/// "Processing accelerators": what AMD's Instinct cards without a display call themselves.
const CLASS_ACCELERATOR: u32 = 0x12;
const VENDOR_AMD: u32 = 0x1002;
const VENDOR_NVIDIA: u32 = 0x10de;

impl Gpu {
    pub(crate) fn read_all(source: &Source, pci: &PciTree) -> Vec<Self> {
        pci.addresses().filter_map(|address| Self::read(source, pci, address)).collect()
    }

    fn read(source: &Source, pci: &PciTree, address: PciAddress) -> Option<Self> {
        let folder = Path::new("sys/bus/pci/devices").join(address.to_string());
        let class = source.hex(folder.join("class"))? >> 16;
        let vendor = match (class, source.hex(folder.join("vendor"))?) {
            (CLASS_DISPLAY | CLASS_ACCELERATOR, VENDOR_AMD) => GpuVendor::Amd,
            (CLASS_DISPLAY, VENDOR_NVIDIA) => GpuVendor::Nvidia,
            _ => return None,
        };
        let listed = format!("proc/driver/nvidia/gpus/{address}");
        let information = source.text(format!("{listed}/information")).unwrap_or_default();
        let says = |what: &str| {
            let line = information.lines().find_map(|line| line.strip_prefix(what))?;
            Some(line.strip_prefix(':')?.trim().to_owned())
        };
        Some(Self {
            pci: address,
            // Question marks until the GPU is first used.
            uuid: says("GPU UUID").and_then(|uuid| uuid.parse().ok()),
            model: says("Model"),
            in_driver: source.path(listed).is_dir(),
            vendor,
            device_id: source.hex(folder.join("device")),
            driver: source.link_name(folder.join("driver")),
            numa_node: pci.numa_node(address),
        })
    }
}
