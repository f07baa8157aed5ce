//! Publishers and readers: the execution of a plan.
//!
//! Each rank has a mark, a version and the number of steps whose bytes are there, which peers read
//! one-sidedly. A publisher's mark says *whole* from [`publish`](publisher::Publisher::publish)
//! until [`begin`](publisher::Publisher::begin), before it changes a byte. A reader looks at a
//! peer's mark before it reads the peer's bytes, and again after they have come. If both marks have
//! the version, the bytes are of that version: a publisher never publishes a version twice, and a
//! reader passes bytes on only when it has checked them itself.

mod bounds;
mod catalogue;
mod links;
mod memory;
mod words;

pub(crate) mod error;
pub(crate) mod manifest;
pub(crate) mod mark;
pub(crate) mod party;
pub(crate) mod publisher;
pub(crate) mod reader;
pub(crate) mod shard;
