//! GPUs through the vendor's driver, which is loaded at run time.
//!
//! Nothing here is linked with CUDA: [`Gpus::get`] looks for `libcuda.so.1` once. A machine without
//! that library has no GPUs, and a reason why. Each GPU has a primary context, the one that the
//! CUDA runtime and so every framework uses. It is retained on first use and kept until the process
//! ends. No call leaves the caller's current context changed.
//!
//! Device addresses are plain numbers here (`u64`), which the CPU never dereferences. Functions
//! that hand such addresses to the GPU are `unsafe`; their contract names the memory that must stay
//! alive, and until when.
//!
//! After `fork` the driver does not work in the child: start processes that use GPUs as new
//! programs (`exec`).
//!
//! AMD's driver (`libamdhip64`) has the same entry points under other names. They are listed in the
//! same table and looked up by the same code; that code was never run on an AMD GPU, and
//! [`Gpus::get`] does not use it.

mod copy;
mod device;
mod dmabuf;
mod driver;
mod error;
mod event;
mod fabric;
mod facts;
mod flush;
pub mod gather;
mod gpus;
mod ipc;
mod link;
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

pub use copy::{BatchArrays, BatchCopy, Direction};
pub use device::{Capability, Context, Current, Device};
pub use dmabuf::DmaBuf;
pub use error::{DriverError, Failure, GpuError};
pub use event::Event;
pub use fabric::{FabricExport, FabricHandle};
pub use facts::VisibleGpu;
pub use flush::{expect_writes_to, flush_writes, flush_writes_of};
pub use gpus::Gpus;
pub use ipc::{
    Exporter, FdExport, Importer, IpcHandle, LegacyExport, Mapping, MemoryExport, PeerId,
};
pub use link::GpuLink;
pub use memory::{DeviceBuffer, HostRegistration, ManagedBuffer, PinnedBuffer, PoolBuffer};
pub use module::{Function, Grid, Module};
pub use pointer::{Allocation, Pointer, classify};
pub use reaper::wait_until_given_back;
pub use signal::{Signal, WordWait};
pub use stream::{Priority, Stream, has_few_queues};
pub use uuid::{GpuUuid, ParseGpuUuidError};
pub use visible::{VisibleDevices, VisibleEntry};
pub use vmm::{AddressRange, Physical};
