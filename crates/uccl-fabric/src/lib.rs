//! Links: one trait family and its implementations (tcp, local, chaos).

pub mod alloc;
pub mod cma;
pub mod fdpass;
pub mod mem;
pub mod pipe;
pub mod region;
pub mod shm;
