//! Reliable delivery over paths that lose messages silently, as unreliable connected queue pairs
//! (UC) do.
//!
//! The crate does no I/O, has no clock and starts no threads. Its user posts, polls and waits, and
//! passes it each event with its time.
//!
//! ```text
//!   user of memory        Sender                       path                        Receiver
//!        |   send(item)      |                           |                            |
//!        |------------------>| number 7 -- WRITE, imm 7 ---------------------------->| 7 New
//!        |------------------>| number 8 -- WRITE, imm 8 --------X lost               |
//!        |------------------>| number 9 -- WRITE, imm 9 ---------------------------->| 9 New: a gap,
//!        |                   |<--------------------- Ack { largest 9, before: 7 } ----|   so at once
//!        |  Delivered(7)     | 7, 9 have come. 8 was posted before 9 and has not: it
//!        |  Lost(8)          | never will.
//!        |  Delivered(9)     |
//!        |------------------>| number 10 -- the item of 8 again, imm 10 ------------>| 10 New
//!        |                   |                X lost -- Ack { largest 10 } ----------|
//!        |                   | ... silence for a probe timeout ...
//!        |     Probe(11)     | number 11 -- empty WRITE, imm 11 -------------------->| 11: a probe,
//!        |                   |<------------- Ack { largest 11, before: 10, 9, 7 } ----|   so at once
//!        |  Delivered(10's)  |
//! ```
//!
//! # The promise
//!
//! Every message that was sent ends exactly once: with [`Event::Delivered`], when it has landed, or
//! with [`Event::Lost`], when it can never land. Until then it may land at any moment, so its
//! memory must not be touched on either side. After `Lost` it may be sent once more, over this or
//! another path, as a new message with a new number. So at most one attempt of a message is under
//! way at any time: no late attempt overwrites the memory that its owner reuses after `Delivered`,
//! and the receiver sees each message once.
//!
//! Order makes this provable. A path delivers in the order of posting (up to [`Params::reorder`]),
//! so when number n has come, everything before n - `reorder` has come or never will. A timeout
//! proves nothing, so after a silence the sender does not repeat messages. It sends a **probe**, an
//! empty write with a number; the acknowledgement of the probe settles everything that was posted
//! before it. A probe touches no memory, costs some bytes where a message may be megabytes, and
//! gets through where a long message would be lost once more. Unlike a message, a probe may be sent
//! again under the same number, as long as that is the last number. So silence does not use up
//! numbers.
//!
//! A path that does not keep this order breaks the promise, and that shows only afterwards: a
//! number arrives after its end may have been reported. [`Receiver::on_packet`] then fails with
//! [`OutOfOrder`]. The path must not be used any more, nor any other path over the same network. So
//! this protocol is for networks that keep the packets of a queue pair in order, as InfiniBand and
//! Ethernet with one route for each flow do. On other networks, at most the messages that were
//! under way before the first such number may land late.
//!
//! # Numbers
//!
//! Internally, numbers have 64 bits and begin at 0; the immediate holds the lower 32 bits of
//! number +
//! [`Params::first`]. The sender has at most [`Params::window`] + `reorder` + 1 numbers unsettled,
//! never more than an acknowledgement covers. So each acknowledgement repeats all earlier ones, and
//! any of them may be lost, repeated or overtaken. Both sides refuse numbers that the other cannot
//! have meant.
//!
//! # Time
//!
//! [`Sender::next_timeout`] and [`Receiver::next_timeout`] give the time to call `on_timeout` or
//! `poll_ack`. The probe timeout is QUIC's (RFC 9002): the smoothed round trip, plus four times its
//! variation, plus the longest time for which a receiver holds acknowledgements back; it doubles
//! while there is silence. If a path is silent for [`Params::dead_after`] while something is under
//! way, it is given up for good: [`Event::PathDead`]. [`Sender::unsettled`] lists the messages that
//! have not ended then. They may still land until the queue pair has been torn down.
//!
//! # How much is under way
//!
//! [`Congestion`] limits the bytes under way according to delay, as Swift does: above a target
//! delay the window shrinks in proportion to the excess; below it, the window grows by a constant
//! each round trip. Loss counts little, since a path may lose messages for other reasons.
//! `tests/congestion.rs` measures the result.
//!
//! # Many paths
//!
//! [`multipath`] cuts messages into chunks for many paths, with exchangeable parts: [`choice`] of
//! the path, [`recovery`] from loss, [`control`] of congestion. `uccl-sim` runs them over networks
//! in virtual time.
#![forbid(unsafe_code)]

pub mod choice;
mod congestion;
pub mod control;
mod loss;
pub mod multipath;
mod number_set;
mod params;
mod receiver;
pub mod recovery;
mod rtt;
mod sender;

pub use congestion::Congestion;
pub use number_set::NumberSet;
pub use params::{Params, ParamsError};
pub use receiver::{OutOfOrder, Receiver, Verdict};
pub use sender::{AckError, Event, PacketNumber, SendError, Sender};
pub use uccl_wire::ack::Ack;
