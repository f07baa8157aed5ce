//! The topology of a machine: everything that this crate reads.

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

/// The parts of a machine that matter to transfers, read once.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Topology {
    /// The host and the namespaces of this process.
    pub host: HostIdentity,
    /// The processors.
    pub cpus: Cpus,
    /// The NUMA nodes; empty if the kernel does not list them.
    pub numa_nodes: Vec<NumaNode>,
    /// Network interfaces, by name.
    pub interfaces: Vec<Interface>,
    /// RDMA devices, by name.
    pub rdma: Vec<RdmaDevice>,
    /// IPv4 routes of the main table.
    pub routes: Vec<Route>,
    /// GPUs, by PCI address.
    pub gpus: Vec<Gpu>,
    /// Kernel settings that matter to transfers.
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

    /// Reads the machine from `/sys`, `/proc` and `/dev/shm` below `root`. A fact without its file
    /// is unknown.
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
    /// Devices below different host bridges count as far apart if the kernel does not name their
    /// NUMA nodes, unless the machine has only one node.
    pub fn distance(&self, a: PciAddress, b: PciAddress) -> Option<PciDistance> {
        self.pci.distance(a, b, self.numa_nodes.len() <= 1)
    }

    pub(crate) fn pci(&self) -> &PciTree {
        &self.pci
    }
}
