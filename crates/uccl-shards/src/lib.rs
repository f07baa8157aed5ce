//! Shards that trainers publish and inference ranks read where they need them, planned once, many
//! to many.
//!
//! ```text
//!     exchange    publishers and readers: memory, marks, connections, a fetch
//!        |
//!      plan       the reads of every target: plain data; no I/O, lock, clock or thread
//! ```
//!
//! | question | place |
//! | --- | --- |
//! | a tensor, a slice of it, its place in a rank's memory | [`plan::layout`] |
//! | the bytes that a slice has in common with another | [`plan::area`] |
//! | whether readers read from readers, or all from sources | [`FanOut`] |
//! | the source of each byte: balance over replicas, trees | `plan::spread` |
//! | the reads of each target, and their order | [`plan`] |
//! | the description of a rank that others plan with | [`Manifest`] |
//! | whether bytes are a whole version | [`Mark`] |
//! | the side that writes weights, the side that reads them | [`Publisher`], [`Reader`] |

mod exchange;
pub mod plan;

pub use exchange::{
    error::{Error, Result},
    manifest::Manifest,
    mark::{MAX_VERSION, Mark},
    party::Party,
    publisher::Publisher,
    reader::{FetchOutcome, Reader},
    shard::{Shard, Span},
};
pub use plan::{FanOut, Options, Peer, Piece, Plan, PlanError, Read, Step, TargetPlan};
