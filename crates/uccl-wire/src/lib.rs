//! Every byte layout that leaves a process. No I/O, no unsafe; hostile bytes return an error.
//!
//! Encoders return bytes, decoders take them; a documented limit and the input's length bound a
//! decoder's allocations, never a number in the input.
#![forbid(unsafe_code)]

pub mod ack;
pub mod advert;
pub mod checked;
pub(crate) mod cursor;
pub mod datagram;
pub mod descs;
pub mod ep_card;
pub mod ep_gpu_card;
pub mod flow;
pub mod frame;
pub mod gpu_offer;
pub mod group;
pub mod handshake;
pub mod ipc_info;
pub mod libfabric;
pub mod message;
pub mod metadata;
pub mod named;
pub mod rails;
pub mod record;
pub mod signal;
pub mod verbs;

pub use cursor::ShortInput;
