//! What needs a GPU. Without one each test says what it lacks, and passes.
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
