//! The machine's GPUs, combined from the bus and the driver.

use std::env;

use serde::Serialize;

use crate::{
    cpu::CpuList,
    cuda::{Capability, GpuLink, GpuUuid, Gpus, VisibleDevices, VisibleGpu},
    gpu::{Gpu, GpuVendor},
    nic::{NearNic, NicKind, Place},
    pci::PciAddress,
    topology::Topology,
};

/// How CUDA numbers the GPUs of a machine (`CUDA_DEVICE_ORDER`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DeviceOrder {
    /// The fastest first; equally fast ones in the order of the PCI bus. This is CUDA's default.
    #[default]
    FastestFirst,
    /// In the order of the PCI bus.
    PciBus,
}

impl DeviceOrder {
    /// The order in this process's environment.
    pub fn of_this_process() -> Self {
        match env::var("CUDA_DEVICE_ORDER").as_deref() {
            Ok("PCI_BUS_ID") => Self::PciBus,
            _ => Self::FastestFirst,
        }
    }
}

/// A GPU of the machine: its PCI address, the driver's report about it if this process sees it, and
/// the devices near it.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct MachineGpu {
    /// Its PCI address.
    pub pci: PciAddress,
    /// Its number in this process, if this process sees it.
    pub ordinal: Option<u32>,
    /// Its UUID, the same in every process, if the driver reports it.
    pub uuid: Option<GpuUuid>,
    /// The vendor's name for the model, if the driver reports it.
    pub name: Option<String>,
    /// All of its memory, in bytes, if this process sees it.
    pub memory_bytes: Option<usize>,
    /// Its compute capability, if this process sees it.
    pub capability: Option<Capability>,
    /// How it reaches the memory of each GPU that this process sees, by their ordinals.
    pub links: Vec<Option<GpuLink>>,
    /// The NUMA node that it is attached to. On a machine with a single node, it is that node.
    pub numa_node: Option<u32>,
    /// The CPUs near it; empty if the kernel does not report them.
    pub cpus: CpuList,
    /// RDMA devices, in the order in which it should use them.
    pub rdma: Vec<NearNic>,
    /// Network interfaces, in the order in which it should use them.
    pub interfaces: Vec<NearNic>,
}

impl Topology {
    /// Every GPU that the bus or the driver shows: first those that this process sees, by their
    /// ordinals, then the others by their PCI addresses. `visible` is the result of
    /// [`Gpus::facts`].
    pub fn machine_gpus(&self, visible: &[VisibleGpu]) -> Vec<MachineGpu> {
        let hidden = self.gpus.iter().filter(|gpu| visible.iter().all(|seen| seen.pci != gpu.pci));
        let seen = visible.iter().map(|seen| self.machine_gpu(seen.pci, Some(seen)));
        seen.chain(hidden.map(|gpu| self.machine_gpu(gpu.pci, None))).collect()
    }

    fn machine_gpu(&self, pci: PciAddress, seen: Option<&VisibleGpu>) -> MachineGpu {
        let on_bus = self.gpus.iter().find(|gpu| gpu.pci == pci);
        let place = Place::Device(pci);
        MachineGpu {
            pci,
            ordinal: seen.map(|seen| seen.ordinal),
            uuid: seen.map(|seen| seen.uuid).or_else(|| on_bus?.uuid),
            name: seen.map(|seen| seen.name.clone()).or_else(|| on_bus?.model.clone()),
            memory_bytes: seen.map(|seen| seen.memory_bytes),
            capability: seen.map(|seen| seen.capability),
            links: seen.map(|seen| seen.links.clone()).unwrap_or_default(),
            numa_node: self.node_of(place),
            cpus: self.cpus_near(place),
            rdma: self.nics_near(place, NicKind::Rdma),
            interfaces: self.nics_near(place, NicKind::Interface),
        }
    }

    /// The CPUs of the NUMA node that a place is on; empty if that is not known.
    pub fn cpus_near(&self, place: Place) -> CpuList {
        let node = self.node_of(place);
        let node = self.numa_nodes.iter().find(|known| Some(known.id) == node);
        node.map(|node| node.cpus.clone()).unwrap_or_default()
    }

    /// The GPUs that CUDA would number in a process, in CUDA's order. The driver is not asked.
    ///
    /// `None` if the order is unknown: with several models of GPUs, only CUDA knows which is the
    /// fastest.
    pub fn cuda_order(&self, visible: &VisibleDevices, order: DeviceOrder) -> Option<Vec<&Gpu>> {
        let nvidia = || self.gpus.iter().filter(|gpu| gpu.vendor == GpuVendor::Nvidia);
        // A container may be given some of a machine's GPUs, while its bus shows all.
        let given: Vec<_> = nvidia().filter(|gpu| gpu.in_driver).collect();
        let machine = if given.is_empty() { nvidia().collect() } else { given };
        let alike = machine.iter().all(|gpu| gpu.device_id == machine[0].device_id);
        if order == DeviceOrder::FastestFirst && !alike {
            return None;
        }
        let uuids: Vec<_> = machine.iter().map(|gpu| gpu.uuid).collect();
        let places = visible.resolve(&uuids);
        Some(places.into_iter().filter_map(|place| machine.get(place).copied()).collect())
    }

    /// The PCI address of the GPU with this ordinal in this process. The driver is asked only if
    /// this process uses it already; otherwise the answer comes from the bus and the environment.
    pub fn gpu_address(&self, ordinal: u32) -> Option<PciAddress> {
        if let Some(gpus) = Gpus::in_use() {
            return gpus.device(ordinal).ok().map(|device| device.pci());
        }
        let order = DeviceOrder::of_this_process();
        let gpus = self.cuda_order(&VisibleDevices::of_this_process(), order)?;
        gpus.get(usize::try_from(ordinal).ok()?).map(|gpu| gpu.pci)
    }
}
