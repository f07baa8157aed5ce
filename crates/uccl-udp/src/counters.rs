//! Counts of datagrams.

/// Counts of a rail's datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UdpCounters {
    /// All that have come.
    pub received: u64,
    /// Of these: none of this protocol, or of no connection.
    pub unknown: u64,
    /// With a wrong code.
    pub forged: u64,
    /// Repeats: their number or their chunk had come before.
    pub repeated: u64,
    /// That were refused: their region does not admit them, or they break the protocol.
    pub refused: u64,
    /// All that were sent.
    pub sent: u64,
    /// Calls after which the kernel had not taken all datagrams.
    pub unsent: u64,
}
