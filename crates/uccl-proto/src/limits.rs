//! What the two ends have agreed on: how much one keeps for the other.

/// Longest send or notification that travels with its message, in bytes.
pub const EAGER_MAX: usize = 32 << 10;
/// Most iovs of a send that travels with its message.
pub const EAGER_IOVS: usize = 1024;
/// Bytes of sends, and again of notifications, that may have travelled with their messages and not be answered.
pub const EAGER_WINDOW: usize = 1 << 20;
/// Sends that may wait for their receives.
pub const MAX_UNEXPECTED: usize = 65_536;
/// Iovs of such sends, together. Senders know it, and go no further.
pub const MAX_PIECES: usize = 4 << 20;
/// Notifications that may wait to be delivered. Senders know it, and go no further.
pub const MAX_WAITING: usize = 65_536;
