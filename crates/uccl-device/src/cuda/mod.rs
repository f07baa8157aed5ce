//! GPUs through the vendor's driver, which is loaded at run time.
//!
//! Nothing here is linked: [`Gpus::get`] looks for `libcuda.so.1` once, and a machine without one has no
//! GPUs and a reason for that. Each GPU has its primary context, the one that the CUDA runtime and so
//! every framework uses; it is retained on first use and kept until the process ends. No call leaves the
//! caller's current context changed.
//!
//! The driver counts in device addresses, which are plain numbers here (`u64`): they are never
//! dereferenced by the CPU. What hands such addresses to the GPU is `unsafe`, and its contract says what
//! must stay alive until when.
//!
//! After `fork` the driver does not work in the child: start processes that use GPUs anew.
//!
//! AMD's driver (`libamdhip64`) has the same entry points under other names. They are listed in the same
//! table and looked up by the same code; that code was never run on an AMD GPU, and [`Gpus::get`] does not
//! use it.

mod context;
mod copy;
mod device;
mod dmabuf;
mod driver;
mod error;
mod event;
mod facts;
pub mod gather;
mod ipc;
mod memory;
mod module;
mod pointer;
mod presence;
mod raw;
mod reaper;
mod signal;
mod stream;
mod uuid;
mod visible;
mod vmm;

pub use context::{Context, Current};
pub use copy::{BatchArrays, BatchCopy, Direction};
pub use device::{Capability, Device, Gpus};
pub use dmabuf::DmaBuf;
pub use error::{Failure, GpuError, Unusable};
pub use event::Event;
pub use facts::{GpuLink, VisibleGpu};
pub use ipc::{Exported, Exporter, FdExport, Importer, IpcHandle, LegacyExport, Mapping, PeerId};
pub use memory::{DeviceBuffer, HostRegistration, ManagedBuffer, PinnedBuffer, PoolBuffer};
pub use module::{Function, Grid, Module};
pub use pointer::{Allocation, Pointer, classify};
pub use reaper::wait_until_given_back;
pub use signal::Signal;
pub use stream::{Priority, Stream};
pub use uuid::{GpuUuid, ParseGpuUuidError};
pub use visible::{VisibleDevices, VisibleEntry};
pub use vmm::{AddressRange, Physical};
