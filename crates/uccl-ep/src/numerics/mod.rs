//! The number formats that tokens travel in, bit by bit: what the kernels of every device must agree on.

pub mod bf16;
pub mod e2m1;
pub mod e4m3;
pub mod logfmt;
pub mod nvfp4;
pub mod quantise;
pub mod sum;
