//! How much one end keeps for the other, as agreed between the two.

/// Longest send or notification with its data in the message, in bytes.
pub const EAGER_MAX: usize = 32 << 10;
/// Most iovs of a send with its data in the message.
pub const EAGER_IOVS: usize = 1024;
/// Most unanswered bytes that were sent inside messages. A sender counts sends and notifications
/// together; a receiver allows as much for each of the two.
pub const EAGER_WINDOW: usize = 1 << 20;
/// Most sends that may wait for their receives.
pub const MAX_UNEXPECTED: usize = 65_536;
/// Most iovs of these sends in all. Senders keep to it.
pub const MAX_PIECES: usize = 4 << 20;
/// Most notifications that may wait to be delivered. Senders keep to it.
pub const MAX_WAITING: usize = 65_536;
/// Most look-ups that may be unanswered. Senders keep to it, so that the answers which wait for a
/// slow reader stay few.
pub const MAX_LOOK_UPS: usize = 64;
/// Most signals that may be unanswered. Senders keep to it.
pub const MAX_SIGNALS: usize = 65_536;
