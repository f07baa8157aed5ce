//! The dimensions of a benchmark, with their names on the command line.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use uccl_p2p::Transport;

/// The operation of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OpKind {
    /// One-sided, into the peer's memory.
    Write,
    /// One-sided, from the peer's memory.
    Read,
    /// Two-sided: a send that meets a receive.
    Send,
    /// Notifications: latency is half of a ping-pong.
    Notif,
    /// Writes that go back and forth: each side watches its memory for the other's, and latency is
    /// half of a round. A write's own latency is longer: it ends when its acknowledgement is here.
    Pingpong,
    /// Writes with a signal: a word of the peer's changes when their bytes are there.
    Signal,
}

impl OpKind {
    /// Whether its latency is half of a round that both sides take part in.
    pub(crate) fn goes_back_and_forth(self) -> bool {
        matches!(self, Self::Notif | Self::Pingpong)
    }

    /// Whether it needs adverts of the other side's memory.
    pub(crate) fn is_one_sided(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::Pingpong | Self::Signal)
    }
}

/// The direction of a point's transfers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Direction {
    /// This side's transfers alone.
    Uni,
    /// Both sides' transfers at once; the rate is their sum.
    Bi,
}

/// Which links may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TransportKind {
    /// The best that both sides have, or the value of UCCL_P2P_TRANSPORT.
    Auto,
    /// The same host's memory, or nothing.
    Local,
    /// TCP, even between processes of one host.
    Tcp,
    /// RDMA verbs, or nothing.
    Verbs,
    /// libfabric, with the provider of UCCL_LIBFABRIC_PROVIDER or the best, or nothing.
    Libfabric,
    /// libfabric's provider for HPE Slingshot, or nothing.
    Cxi,
    /// libfabric's provider for AWS EFA, or nothing.
    Efa,
    /// UDP, and TCP where it does not pass.
    Udp,
    /// Named pipes between processes of one host: the example of a link.
    Fifo,
}

impl TransportKind {
    /// The engine's setting; none leaves it to the environment.
    pub(crate) fn setting(self) -> Option<Transport> {
        match self {
            Self::Auto => None,
            Self::Local => Some(Transport::Local),
            Self::Tcp => Some(Transport::Tcp),
            Self::Verbs => Some(Transport::Verbs),
            Self::Libfabric => Some(Transport::Libfabric),
            Self::Cxi => Some(Transport::Cxi),
            Self::Efa => Some(Transport::Efa),
            Self::Udp => Some(Transport::Udp),
            Self::Fifo => Some(Transport::Fifo),
        }
    }

    /// Whether it is a device's, which the settings may keep to one interface.
    pub(crate) fn needs_devices(self) -> bool {
        self.setting().is_some_and(Transport::needs_rails)
    }
}

/// Where buffers come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Memory {
    /// The process's own allocator, as most callers' memory does.
    Heap,
    /// The endpoint's alloc: peers on this host can map it.
    Alloc,
}

/// The kind of memory that buffers lie in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DeviceKind {
    /// The host's, pageable: of the kind that --memory names.
    Cpu,
    /// A GPU's.
    Gpu,
    /// The host's, locked by the GPU's driver.
    Pinned,
}

/// When data carries a checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ChecksumMode {
    /// On links that cross a network.
    Auto,
    /// Wherever bytes pass through a stream.
    On,
    /// Never.
    Off,
}

macro_rules! display_as_on_the_command_line {
    ($($kind:ty),*) => {$(
        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.to_possible_value() {
                    Some(value) => f.write_str(value.get_name()),
                    None => Ok(()),
                }
            }
        }
    )*};
}
display_as_on_the_command_line!(DeviceKind, OpKind, Direction, TransportKind, Memory);
