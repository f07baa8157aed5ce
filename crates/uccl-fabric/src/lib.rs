//! Links: one trait family and its implementations (tcp, local, chaos).

pub mod mem;
pub mod pipe;
