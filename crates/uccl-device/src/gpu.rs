//! GPUs as the PCI bus shows them, with or without a driver.

use std::path::Path;

use serde::Serialize;

use crate::{
    cuda::GpuUuid,
    pci::{PciAddress, PciTree},
    source::Source,
};

/// The vendor of a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum GpuVendor {
    /// AMD.
    Amd,
    /// NVIDIA.
    Nvidia,
}

/// A GPU, as the PCI bus shows it.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Gpu {
    /// Its PCI address.
    pub pci: PciAddress,
    /// Its vendor.
    pub vendor: GpuVendor,
    /// The vendor's number for the model.
    pub device_id: Option<u32>,
    /// The kernel driver bound to it.
    pub driver: Option<String>,
    /// The NUMA node it is attached to.
    pub numa_node: Option<u32>,
    /// Its UUID, the same in every process, if NVIDIA's kernel driver reports it.
    pub uuid: Option<GpuUuid>,
    /// The vendor's name for the model, if NVIDIA's kernel driver reports it.
    pub model: Option<String>,
    /// Whether NVIDIA's kernel driver lists it in this process. In a container the bus shows all
    /// GPUs of the machine, but the driver lists only those that the container was given.
    pub in_driver: bool,
}

const CLASS_DISPLAY: u32 = 0x03;
/// The PCI class "processing accelerators", which AMD's Instinct cards without a display report.
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
            // The file shows question marks until the GPU is first used.
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
