//! What ranks say to each other in a call, and what follows from it: plain data, no memory, clock, lock or thread.
//!
//! A call is a dispatch or a combine. In each, every rank sends every rank one or more *rounds* of data. Two words tell how far
//! they are, and every rank has a pair of them for each peer and each of the calls that may be under way:
//!
//! - `arrived`, which the sender sets at the receiver when a round's data is there;
//! - `taken`, which the receiver sets at the sender when it has taken a round out, so that the next one may be written,
//!   and, once it has taken all rounds of *all* ranks, to say that it has *ended* the call.
//!
//! A call writes to a peer's place when this peer has ended the earlier calls that overlap it (see
//! [`placing`](crate::placing)). Nothing is ever reset, and no call needs a barrier: a word carries the number of its
//! call, and is set again only after the rank that sets it has heard of the end of the call that used it before. So the changes
//! of a word cannot overtake each other, on links that keep no order either.

mod call;
mod mark;
#[cfg(test)]
mod simulation;

pub use self::{
    call::{Awaited, Call, Step, Takes, Words},
    mark::Mark,
};
