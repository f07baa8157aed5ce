//! Rails through libfabric: HPE Slingshot (`cxi`), AWS's Elastic Fabric Adapter (`efa`), and every
//! other network with a provider that has reliable datagrams (`FI_EP_RDM`) and one-sided access
//! (`FI_RMA`).
//!
//! ```text
//!   discover.rs    the library's offers; the choice of rails             settings.rs
//!   rail.rs        a rail: domain.rs (the opened domain), memory.rs (registrations)
//!   channel.rs     a channel: endpoint.rs, queue.rs (completions), slots.rs (requests in flight)
//!   failure.rs     consequences of a failed request   providers.rs   facts that fi_info leaves out
//!   library.rs     dlopen       info.rs   fi_info     object.rs      fids      raw.rs   structs
//!   signals.rs     restores the process's signals after loading
//! ```
//!
//! The library is loaded at run time; everything else works without it. Differences between
//! providers are read from the providers' reports: see [`offers`].
//!
//! - **A write ends when its bytes are in the peer's memory** (`FI_DELIVERY_COMPLETE`). A provider
//!   without that is refused.
//! - **Progress:** if the provider makes none by itself, the caller must poll. A peer that nobody
//!   polls answers nothing.
//! - **A bad key** fails only its request with `sockets`, and should with `efa` and `cxi`. `tcp`
//!   cuts the connection when it sees one, so with `tcp` and `tcp;ofi_rxm` the channel dies; with
//!   `verbs;ofi_rxm` the channel dies after the request was reported as failed. `shm` never answers
//!   such a request, so the channel dies of silence.
//! - **A peer that goes away** ends the channel: at once with `tcp` and `verbs`; with the others,
//!   or if the peer is only stopped, after [`LibfabricSettings::silence`].
//! - **`shm`** is used only if the settings name it, and is for trying things out. Its peer carries
//!   out our requests on our memory, even after the channel was dropped (a drop waits a second for
//!   that). Two ends in one process do not survive that one is dropped with requests in flight.
//!   Version 1.17 crashes over the name of an end that is gone. The two ends lock each other's
//!   memory: if a process is killed or stopped at that moment, the other spins forever.
//! - **Caches.** `efa` caches no registrations if it demands `FI_MR_LOCAL`, which it does. `cxi`
//!   caches none without `FI_MR_PROV_KEY`, which we do not allow it. `verbs` caches them in any
//!   case, and is refused unless `FI_MR_CACHE_MAX_COUNT=0` or `FI_MR_CACHE_MONITOR=disabled` is
//!   set. The others have no cache.
//! - **`verbs;ofi_rxm` touches freed memory** when a connection ends, unless connections share the
//!   buffers that they receive into, so it is refused unless `FI_OFI_RXM_USE_SRX=1` is set. Those
//!   are 4096 of 16 KiB for each channel, or as many as `FI_OFI_RXM_MSG_RX_SIZE` says: 128 will do,
//!   as nothing is sent but one-sided requests.
//!
//! - **`tcp` and `net` before 1.18 end a read twice** if its answer is arriving when their endpoint
//!   is closed, and crash the process. A channel of `tcp;ofi_rxm` therefore waits, when it is
//!   dropped, until its reads have ended. If its peer stands still, the channel stays open until
//!   the process ends, which keeps some 90 MB and a dozen descriptors, and says so. `net` is
//!   refused.
//!
//! Run with libfabric 1.17, 1.21 and 2.1: `tcp;ofi_rxm`, `tcp`, `sockets`, `shm`, and
//! `verbs;ofi_rxm` on soft-RoCE (which needs `FI_UNIVERSE_SIZE=64`, as its completion queues would
//! be too long). `cxi` and `efa` were never run.

#[cfg(feature = "devices")]
mod channel;
#[cfg(feature = "devices")]
mod discover;
#[cfg(feature = "devices")]
mod domain;
#[cfg(feature = "devices")]
mod endpoint;
#[cfg(feature = "devices")]
mod failure;
#[cfg(feature = "devices")]
mod info;
#[cfg(feature = "devices")]
mod library;
#[cfg(feature = "devices")]
mod memory;
#[cfg(feature = "devices")]
mod object;
#[cfg(feature = "devices")]
mod providers;
#[cfg(feature = "devices")]
mod queue;
#[cfg(feature = "devices")]
mod rail;
#[cfg(feature = "devices")]
mod raw;
mod settings;
#[cfg(feature = "devices")]
mod signals;
#[cfg(feature = "devices")]
mod slots;

#[cfg(all(test, feature = "devices"))]
mod layout_tests;

pub use self::settings::{Devices, LibfabricSettings, Threading};
#[cfg(feature = "devices")]
pub use self::{
    discover::{Listing, Offer, offers},
    rail::LibfabricRail,
};
