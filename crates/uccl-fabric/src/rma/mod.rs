//! Links to devices that move memory one-sidedly: RDMA NICs, and what libfabric has providers for.
//!
//! A [`rail::Rail`] is a device, a [`rail::Channel`] is what two endpoints have over a pair of them.

pub mod rail;
