//! Large messages over many streams: which chunk goes over which stream, which goes again, which
//! stream is replaced. No I/O, no clock, no thread; times are microseconds of any clock.
//!
//! The [`Scheduler`] is the sender's side of all flows from one process to another. A stream asks
//! it for a chunk when it has room, so the choice is as late as it can be. The [`Inbox`] is the
//! receiving side of one flow: it says whether the next bytes of a chunk may land.
//!
//! # The rules of repair
//!
//! 1. A stream delivers in order. The receiver counts the chunks of each stream, and the count
//!    acknowledges them.
//! 2. A stream with chunks under way and without an acknowledgement for three round trips and 10 ms
//!    is late: it gets no chunk, and its chunks go again over others, the oldest first.
//! 3. After a second without any progress it is closed and made anew; so is one that has died. Its
//!    chunks go again.
//! 4. A stream without work takes a chunk again that has been under way elsewhere for four times as
//!    long as it needs itself.
//! 5. The receiver drops a chunk that it has, before it copies. It asks again before every piece
//!    that it reads, since the same chunk may have ended over another stream meanwhile. A message
//!    has ended when all its chunks have come and no piece of it is landing. Nothing lands after
//!    that.
//! 6. When nothing has moved for the limit while something is under way, all fails.
//!
//! # The number of streams
//!
//! A [`Scheduler`] begins with few streams, and tries more while that helps ([`width`]). Those
//! beyond the number rest: they stay open, and take the places of streams that have ended.
//!
//! # The own stream of a flow
//!
//! The sender keeps the bytes that its receiver may lack ([`History`]). A [`Watch`] has the
//! receiver asked, over the streams for chunks, when no confirmation comes. The stream is replaced
//! when it has died, or stands still while the receiver waits; the next one begins with the first
//! byte that the receiver lacks.

mod history;
mod inbox;
mod measure;
mod params;
mod paths;
mod queue;
mod scheduler;
mod streams;
#[cfg(test)]
mod tests;
mod watch;
mod width;

pub(crate) use history::History;
pub(crate) use inbox::{Inbox, Verdict};
pub(crate) use params::Params;
pub(crate) use paths::Paths;
pub(crate) use scheduler::{Action, Part, Scheduler};
pub(crate) use watch::{Step, Watch, WatchParams, WatchView};
pub(crate) use width::WidthParams;
