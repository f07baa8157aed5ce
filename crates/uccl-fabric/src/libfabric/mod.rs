//! Rails of libfabric: HPE Slingshot (`cxi`), AWS's Elastic Fabric Adapter (`efa`), and whatever else has a
//! provider with reliable datagrams (`FI_EP_RDM`) and one-sided access (`FI_RMA`).
//!
//! ```text
//!   discover.rs    what the library offers; which domains become rails      settings.rs
//!   rail.rs        a rail: domain.rs (the opened domain), memory.rs (registrations)
//!   channel.rs     a channel: endpoint.rs, queue.rs (completions), slots.rs (what is in flight)
//!   failure.rs     what a failed request means        providers.rs   what fi_info does not say
//!   library.rs     dlopen       info.rs   fi_info     object.rs      fids      raw.rs   structs
//!   signals.rs     what loading it does to the process's signals, undone
//! ```
//!
//! The library is loaded at run time; without it nothing else changes. What differs between providers is read from
//! what they say of themselves: see [`offers`].
//!
//! - **A write has ended when its bytes are in the peer's memory** (`FI_DELIVERY_COMPLETE`); a provider that has not
//!   got that is not taken.
//! - **Progress** is the caller's where the provider has none of its own: a peer that nobody polls answers nothing.
//! - **A bad key** fails its request alone with `sockets`, and should with `efa` and `cxi`. `tcp` cuts the connection
//!   when it sees one, so with `tcp` and `tcp;ofi_rxm` the channel dies of it; with `verbs;ofi_rxm` it dies after the
//!   request was told. `shm` never answers such a request, so the channel dies of silence.
//! - **A peer that goes away** ends the channel: with `tcp` and `verbs` at once, with the others, or when it is merely
//!   stopped, after [`LibfabricSettings::silence`].
//! - **`shm`** is taken only where it is asked for by name, and is for trying things out: its peer carries out our
//!   requests on our memory, dropped channel or not (a drop waits a second for that), two ends in one process do
//!   not survive that one is dropped with requests in flight, and 1.17 crashes over the name of an end that is gone.
//!   Its ends lock each other's memory: a process that is killed or stopped at that moment leaves the other spinning.
//! - **Caches.** `efa` caches no registrations where it demands `FI_MR_LOCAL`, which it does; `cxi` none without
//!   `FI_MR_PROV_KEY`, which it is not offered; `verbs` caches them however it is asked, and is refused unless
//!   `FI_MR_CACHE_MAX_COUNT=0` is set; the others have no cache.
//!
//! Run with libfabric 1.17, 1.21 and 2.1: `tcp;ofi_rxm`, `tcp`, `sockets`, `shm`, and `verbs;ofi_rxm` on soft-RoCE
//! (which needs `FI_UNIVERSE_SIZE=64`, as its completion queues would be too long). `cxi` and `efa` were never run.

mod channel;
mod discover;
mod domain;
mod endpoint;
mod failure;
mod info;
mod library;
mod memory;
mod object;
mod providers;
mod queue;
mod rail;
mod raw;
mod settings;
mod signals;
mod slots;

#[cfg(test)]
mod layout_tests;

pub use self::{
    discover::{Listing, Offer, offers},
    rail::LibfabricRail,
    settings::{Devices, LibfabricSettings, Threading},
};
