//! A rail over UDP: a device in software, which reads and writes its peers' memory.
//!
//! ```text
//!   UdpChannel --post--> Connection: uccl-tran's many paths --> Outlet --> socket 0 --> port 0
//!                             ^                                        \-> socket 1 --> port 1
//!   memory of this process <--+-- code, region, number <------ Inlet <-- sockets (GRO)
//! ```
//!
//! A rail has one socket for each path, and all of its channels share these. Its thread receives,
//! acknowledges, repeats and answers reads, also while nobody polls; a caller that polls does the
//! same. Source ports are the entropy by which networks spread flows over their links.
//!
//! A message (a write, the answer to a read) is cut into chunks, a datagram each, with its final
//! place in its head ([`uccl_wire::datagram`]). [`uccl_tran::multipath`] chooses the path of each,
//! finds losses and repeats. The receiver places a chunk once, wherever it comes from.
//!
//! # Access to memory
//!
//! A datagram is dropped, in this order, unless its connection lives, its code is right (by a key
//! of the connection where there is a pre-shared key), its region is registered and admits the
//! whole message, and its number and its chunk are new. All of that and the copy is done under one
//! lock. The end of a registration or a channel takes the same lock: when it has returned, nothing
//! that comes later touches memory. A request that the peer refuses is fenced there before the
//! refusal is sent.
//!
//! # Length of datagrams
//!
//! The first attempt to make a channel uses datagrams as long as both interfaces take, without
//! fragments. Its probe is a whole datagram in each direction. After each attempt that fails,
//! [`Rail::open_first`](uccl_fabric::rail::Rail::open_first) offers a shorter length.
//!
//! # Limits
//!
//! A pre-shared key authenticates; nothing is encrypted, as over TCP. Only host memory is taken. A
//! channel ends after about 2^32 datagrams of a path, since an old acknowledgement could then be
//! taken for a new one; the lane makes another.

mod channel;
mod connection;
mod counters;
mod device;
mod inlet;
mod lengths;
mod memory;
mod outbox;
mod outlet;
mod rail;
mod room;
mod settings;
mod socket;

pub use counters::UdpCounters;
pub use rail::UdpRail;
pub use settings::UdpSettings;
