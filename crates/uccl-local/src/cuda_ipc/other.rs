//! The GPU at the other end of a copy, in the order in which GPUs take their turns.

/// The other GPU of a copy: how far behind the one that copies it comes in the order of all GPUs, which is the same
/// in every process. So the GPUs of a machine that all begin with the next one each begin with a different one. 0 is
/// the GPU itself, and the host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(super) struct Other(u128);

impl Other {
    /// Between a GPU that copies and a GPU, each by its UUID.
    pub(super) fn between(own: [u8; 16], there: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(there).wrapping_sub(u128::from_be_bytes(own)))
    }
}
