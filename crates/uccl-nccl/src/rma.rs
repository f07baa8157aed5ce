//! NCCL's one-sided tables over `uccl-p2p`: a put is a write to a peer's region, and its signal a
//! strong one, which the engine applies once.
//!
//! ```text
//!   tables.rs    the tables                             engine.rs   the endpoint that all groups share
//!   entry.rs     functions that NCCL calls              group.rs    ranks that are joined, their regions
//!   context.rs   operations and their requests          joining.rs  connects of a group
//!   slots.rs     places of requests                     note.rs     messages between members
//! ```
//!
//! The engine carries them, and not flows: its writes land where the peer's advert says without the
//! peer's help, on every link, in GPU memory too, and its strong signals are applied once.

mod context;
mod engine;
mod entry;
mod group;
mod joining;
mod note;
mod slots;
pub mod tables;
