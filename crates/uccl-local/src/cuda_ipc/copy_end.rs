//! The other end of a GPU's copy.

/// The other end of a copy.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum CopyEnd {
    /// The GPU that copies, or the host.
    Near,
    /// Another GPU, by its UUID.
    Gpu([u8; 16]),
}
