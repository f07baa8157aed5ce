//! The number formats in which tokens travel. The kernels of every device agree on them bit by bit.

pub mod bf16;
pub mod e2m1;
pub mod e4m3;
pub mod logfmt;
pub mod nvfp4;
pub mod quantise;
pub mod sum;
