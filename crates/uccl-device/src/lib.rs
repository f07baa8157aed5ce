//! The parts of this machine: memory kinds, CPUs, NUMA nodes, NICs, RDMA devices and GPUs.
//!
//! [`Topology::read`] reads `/sys` and `/proc` below a root that the caller names, so that a tree
//! of files can stand in for a machine. A fact that the kernel does not report is `None`, never an
//! error: a container that hides half of sysfs is still a machine that can move bytes.
//!
//! [`DemandThread`] is a thread for calls that may block, such as a driver's.
//!
//! Nothing here needs a driver, a library or a device. CUDA's driver is looked for at run time
//! ([`cuda`]); without it, only a GPU's PCI entry is known.

mod address;
pub mod affinity;
mod carriers;
mod cpu;
pub mod cuda;
mod demand_thread;
mod error;
mod gpu;
mod host;
mod kernel;
mod machine;
mod memory;
mod net;
mod nic;
pub mod numa;
mod pci;
mod process;
mod rdma;
mod resident;
mod route;
mod selection;
mod source;
mod topology;

pub use carriers::{carriers, usable_addresses};
pub use cpu::{CpuList, Cpus, NumaNode};
pub use demand_thread::DemandThread;
pub use error::{Error, ParseCpuListError, ParseMemoryKindError, ParsePciAddressError};
pub use gpu::{Gpu, GpuVendor};
pub use host::HostIdentity;
pub use kernel::{Congestion, KernelFacts, SharedMemory};
pub use machine::{DeviceOrder, MachineGpu};
pub use memory::MemoryKind;
pub use net::{Interface, InterfaceKind};
pub use nic::{NearNic, NicKind, NicState, Place};
pub use pci::{PciAddress, PciDistance};
pub use process::Process;
pub use rdma::{GidKind, RdmaDevice, RdmaGid, RdmaPort};
pub use resident::{PageAccess, make_resident};
pub use route::Route;
pub use selection::Selection;
pub use topology::Topology;
