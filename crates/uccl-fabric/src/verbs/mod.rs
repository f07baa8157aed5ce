//! RDMA verbs: InfiniBand, RoCE and iWARP devices, through libibverbs, which is found at run time.
//!
//! A [`VerbsRail`] is a port of a device. Its channels are reliable queue pairs that share a completion
//! queue; the device retransmits, and says when it gives up. InfiniBand's and RoCE's are joined by telling each other
//! their numbers, iWARP's by the connection manager (`cm`), through librdmacm.
//!
//! Objects of libibverbs have one type and file each (`context`, `pd`, `mr`, `cq`, `qp`); each holds what it
//! was made from, so that nothing is given back before what depends on it.

mod channel;
mod cm;
mod context;
mod cq;
mod devices;
mod ffi;
mod gid;
mod mr;
mod pd;
mod qp;
mod rail;
mod registration;
mod settings;

pub use devices::{Device, Port, list};
pub use rail::{VerbsRail, open};
pub use settings::{
    DeviceName, ParseDeviceNameError, RelaxedOrdering, SettingError, VerbsSettings,
};
pub use uccl_wire::verbs::LinkLayer;
