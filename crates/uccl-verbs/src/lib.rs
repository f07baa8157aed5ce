//! RDMA verbs: InfiniBand and RoCE devices, through libibverbs, which is loaded at run time.
//!
//! A [`VerbsRail`] is a port of a device. Each of its channels is a set of reliable queue pairs
//! that share a completion queue: the device retransmits, and reports when it gives up. If the
//! settings say so, writes go over unreliable queue pairs (UC) instead, and we retransmit. Two
//! channels are joined by exchanging the numbers of their queue pairs.
//!
//! Each kind of libibverbs object has a type and a file of its own (`context`, `pd`, `mr`, `cq`,
//! `qp`). Each holds the objects that it was made from, so that an object is destroyed before those
//! it depends on.

#[cfg(feature = "devices")]
mod channel;
#[cfg(feature = "devices")]
mod context;
#[cfg(feature = "devices")]
mod cq;
#[cfg(feature = "devices")]
mod devices;
#[cfg(feature = "devices")]
mod ffi;
#[cfg(feature = "devices")]
mod gid;
#[cfg(feature = "devices")]
mod mr;
#[cfg(feature = "devices")]
mod pd;
#[cfg(feature = "devices")]
mod qp;
#[cfg(feature = "devices")]
mod rail;
#[cfg(feature = "devices")]
mod registration;
mod settings;

#[cfg(feature = "devices")]
pub use devices::{Device, Port, list};
#[cfg(feature = "devices")]
pub use rail::{VerbsRail, open};
pub use settings::{
    DeviceName, ParseDeviceNameError, RelaxedOrdering, SettingError, VerbsSettings,
};
pub use uccl_wire::verbs::LinkLayer;
