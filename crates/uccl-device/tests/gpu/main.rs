//! Tests that need a GPU. Without one each test names the missing part, and passes.
//!
//! The binary runs by itself: `gpu-<hash> --nocapture` on a machine with GPUs and no cargo.

mod classify;
mod context;
mod devices;
mod dmabuf;
mod gather;
mod support;
mod topology;
mod two_processes;
