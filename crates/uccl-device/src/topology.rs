//! All of it together.

use std::{fs, path::Path};

use serde::Serialize;

use crate::{
    cpu::{Cpus, NumaNode},
    error::Error,
    gpu::Gpu,
    host::HostIdentity,
    kernel::KernelFacts,
    net::Interface,
    pci::{PciAddress, PciDistance, PciTree},
    rdma::RdmaDevice,
    route::Route,
    source::Source,
};

/// What a machine has, read once.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Topology {
    /// Who this process is to others.
    pub host: HostIdentity,
    /// The processors.
    pub cpus: Cpus,
    /// Memory and the CPUs near it; empty where the kernel does not say.
    pub numa_nodes: Vec<NumaNode>,
    /// Network interfaces, by name.
    pub interfaces: Vec<Interface>,
    /// RDMA devices, by name.
    pub rdma: Vec<RdmaDevice>,
    /// IPv4 routes of the main table.
    pub routes: Vec<Route>,
    /// GPUs, by PCI address.
    pub gpus: Vec<Gpu>,
    /// Kernel settings that matter.
    pub kernel: KernelFacts,
    #[serde(skip)]
    pci: PciTree,
}

impl Topology {
    /// Reads the running machine.
    ///
    /// # Errors
    /// [`Error::Root`] if `/` cannot be listed.
    pub fn of_this_machine() -> Result<Self, Error> {
        Self::read(Path::new("/"))
    }

    /// Reads the machine whose `/sys`, `/proc` and `/dev/shm` lie below `root`. A file that is missing
    /// there is a fact that is unknown.
    ///
    /// # Errors
    /// [`Error::Root`] if `root` cannot be listed.
    pub fn read(root: &Path) -> Result<Self, Error> {
        fs::read_dir(root).map_err(|source| Error::Root { path: root.to_owned(), source })?;
        let source = Source::new(root);
        let pci = PciTree::read(&source);
        Ok(Self {
            host: HostIdentity::read(&source),
            cpus: Cpus::read(&source),
            numa_nodes: NumaNode::read_all(&source),
            interfaces: Interface::read_all(&source, &pci),
            rdma: RdmaDevice::read_all(&source, &pci),
            routes: Route::read_all(&source),
            gpus: Gpu::read_all(&source, &pci),
            kernel: KernelFacts::read(&source),
            pci,
        })
    }

    /// How far apart two PCI devices are; `None` if either is not on this machine.
    ///
    /// Devices below different host bridges whose NUMA nodes the kernel does not name are taken for
    /// far apart, unless the machine has but one node.
    pub fn distance(&self, a: PciAddress, b: PciAddress) -> Option<PciDistance> {
        self.pci.distance(a, b, self.numa_nodes.len() <= 1)
    }

    pub(crate) fn pci(&self) -> &PciTree {
        &self.pci
    }
}
