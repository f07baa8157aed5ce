//! Reliable delivery over paths that lose messages silently, as unreliable connected queue pairs (UC) do.
//!
//! The crate does no I/O, has no clock and starts no threads: its user posts, polls and waits, and says what
//! happened and when.
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
//! A message that was sent ends once: [`Event::Delivered`], it has landed; or [`Event::Lost`], it never lands.
//! Until then it may land at any moment, so its memory must be left alone on both sides. After `Lost` it may be
//! sent again, here or over another path, and is a new message with a new number. So there is at most one
//! attempt of a message on its way, ever: what the owner of its memory does after `Delivered` is not
//! overwritten by a second one, and the receiver sees each message once.
//!
//! What makes this provable is order. A path delivers in order of posting (up to [`Params::reorder`]), so when
//! number n has come, everything before n - `reorder` has come or never will. A timeout proves nothing: after
//! silence the sender does not repeat messages, it sends a **probe**, an empty write with a number, whose
//! acknowledgement settles all that was posted before it. A probe touches no memory, costs some bytes where a
//! message may be megabytes, and gets through where a long message would be lost once more. Unlike a message it
//! may be sent again under its number, as long as it is the last: silence does not use up numbers.
//!
//! A path that breaks this order breaks the promise, and shows it only afterwards: a number comes whose end may have been
//! told. [`Receiver::on_packet`] then fails with [`OutOfOrder`]: the path is of no more use, nor is another one over the same
//! network. So this protocol is for networks that keep the packets of a queue pair in order, as InfiniBand and Ethernet with one
//! route for each flow do; on others at most what was on its way before the first such number may land late.
//!
//! # Numbers
//!
//! Inside, numbers are 64 bits and begin at 0; the immediate has the lower 32 of number + [`Params::first`].
//! The sender has at most [`Params::window`] + `reorder` + 1 numbers unsettled, never more than an acknowledgement
//! tells of, so each acknowledgement tells all that all earlier ones told, and any of them may be lost, repeated or overtaken.
//! Both sides refuse numbers that the other cannot have meant.
//!
//! # Time
//!
//! [`Sender::next_timeout`] and [`Receiver::next_timeout`] say when to call `on_timeout` or `poll_ack`. The probe timeout
//! is QUIC's (RFC 9002): smoothed round trip, four times its variation, and the time that a receiver holds
//! acknowledgements back; doubled while there is silence. A path that is silent for [`Params::dead_after`] while something is on
//! its way is given up for good: [`Event::PathDead`]. What has not ended then is in [`Sender::unsettled`]; it may
//! still land until the queue pair has been torn down.
//!
//! # How much is on its way
//!
//! [`Congestion`] bounds it in bytes by delay, as Swift does: above a target the window shrinks in proportion to the
//! excess, below it grows by a constant each round trip. Loss counts little, since a path may lose messages for
//! other reasons. `tests/congestion.rs` measures what this gives.
#![forbid(unsafe_code)]

mod congestion;
mod loss;
mod params;
mod receiver;
mod rtt;
mod sender;

pub use congestion::Congestion;
pub use params::{Params, ParamsError};
pub use receiver::{OutOfOrder, Receiver, Verdict};
pub use sender::{Event, PacketNumber, Refused, SendError, Sender};
pub use uccl_wire::ack::Ack;
