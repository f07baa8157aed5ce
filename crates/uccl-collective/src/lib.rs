//! Groups of ranks that exchange tensors over [`uccl_p2p`], without NCCL.
//!
//! ```text
//!     group      the calls of a rank: messages, collectives, barrier, a smaller group
//!       |
//!     mesh       connections for each pair of ranks         work     the messages of a call
//!       |                                                     |
//!     shared     connections, lost ranks, notices           memory   regions of a call, or longer
//!
//!     plan       the messages of a collective: plain data   relayer  a thread that passes bytes on
//! ```
//!
//! | question | place |
//! | --- | --- |
//! | the messages of a collective, and their order | [`plan`] |
//! | the region of a buffer | `memory` |
//! | the end of a call, the reason of its failure | [`Work`] |
//! | bytes that a rank receives and passes on | [`plan::relayed_broadcast`], `relays` |
//! | a rank that is lost, and the word of it to the others | `shared` |
//!
//! Messages of a pair of ranks meet in the order in which each side posts them. A collective is a
//! set of messages, so all ranks call collectives in the same order.

mod error;
mod group;
mod inbox;
mod ledger;
mod memory;
mod mesh;
mod part;
pub mod plan;
mod relayer;
mod relays;
mod shared;
mod work;

pub use error::{Error, Result};
pub use group::{Group, GroupRequest};
pub use inbox::Inbox;
pub use memory::{Buffer, Keep};
pub use part::CallOptions;
pub use plan::{Direction, Message, Piece};
pub use work::Work;
