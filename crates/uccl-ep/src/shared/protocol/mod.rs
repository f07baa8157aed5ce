//! The protocol of ranks in a call: the marks that they set, and the actions that follow. It is
//! plain data, without memory, clock, lock or thread.
//!
//! A call is a dispatch or a combine. In each, ranks send each other one or more *rounds* of data
//! over [`Stream`]s: every rank to every rank, or, with several nodes, to the ranks of its node and
//! to a *relay* on each other node, which passes rounds on. Two words tell how far a stream is, and
//! every rank has a pair of them for each of its streams and each of the calls that may be under
//! way:
//!
//! - `arrived`, which the sender sets at the receiver when a round's data is there;
//! - `taken`, which the receiver sets at the sender when it has taken a round out, so that the next
//!   one may be written. A relay has taken a round out when it has passed it on to all its
//!   receivers.
//!
//! Once a rank has taken all rounds of *all* streams, it tells all ranks that it has *ended* the
//! call.
//!
//! A call writes to a peer's place when this peer has ended the earlier calls that overlap it (see
//! [`places`](crate::places)). Nothing is ever reset, and no call needs a barrier: a word carries
//! the number of its call, and is set again only after the rank that sets it has heard of the end
//! of the call that used it before. So the changes of a word cannot overtake each other, on links
//! that keep no order either.

mod call;
mod mark;
#[cfg(test)]
mod simulation;
mod streams;

pub use self::{
    call::{Call, MissingMark, Participants, ReceiveMode, Step, Words},
    mark::Mark,
    streams::{RelayStreams, Stream, Streams, words_of},
};
