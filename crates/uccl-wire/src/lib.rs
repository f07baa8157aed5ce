//! Every byte layout that leaves a process. No I/O, no unsafe; hostile bytes return an error.
#![forbid(unsafe_code)]

pub mod advert;
pub(crate) mod cursor;
pub mod frame;
pub mod handshake;
pub mod message;
