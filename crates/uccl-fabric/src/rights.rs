//! The rights of peers to memory, and the reasons to refuse an access.

use crate::mem::Access;

/// The accesses that peers may make to a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rights {
    /// Read it.
    pub read: bool,
    /// Write it.
    pub write: bool,
    /// Change words of it by signals.
    pub signal: bool,
}

impl Rights {
    /// All rights.
    pub const ALL: Self = Self { read: true, write: true, signal: true };
    /// No rights.
    pub const NONE: Self = Self { read: false, write: false, signal: false };
    /// Reading only.
    pub const READ: Self = Self { read: true, ..Self::NONE };
    /// Writing only.
    pub const WRITE: Self = Self { write: true, ..Self::NONE };
    /// Signals only.
    pub const SIGNAL: Self = Self { signal: true, ..Self::NONE };

    const READ_BIT: u64 = 1;
    const WRITE_BIT: u64 = 2;
    const SIGNAL_BIT: u64 = 32;

    /// The rights as bits of a word of the published table.
    #[inline(always)]
    pub fn to_bits(self) -> u64 {
        let bit = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
        bit(self.read, Self::READ_BIT)
            | bit(self.write, Self::WRITE_BIT)
            | bit(self.signal, Self::SIGNAL_BIT)
    }

    /// The rights in such a word. Its other bits mean something else.
    #[inline(always)]
    pub fn from_bits(bits: u64) -> Self {
        Self {
            read: bits & Self::READ_BIT != 0,
            write: bits & Self::WRITE_BIT != 0,
            signal: bits & Self::SIGNAL_BIT != 0,
        }
    }

    /// Checks that all the needed rights are there.
    ///
    /// # Errors
    /// [`AccessError::Denied`] when one is missing.
    #[inline(always)]
    pub fn admit(self, needed: impl Into<Self>) -> Result<(), AccessError> {
        let missing = needed.into().to_bits() & !self.to_bits();
        if missing == 0 { Ok(()) } else { Err(AccessError::Denied) }
    }
}

impl From<Access> for Rights {
    #[inline(always)]
    fn from(access: Access) -> Self {
        match access {
            Access::Read => Self::READ,
            Access::Write => Self::WRITE,
        }
    }
}

/// Where memory lies in a segment that peers can map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedBacking {
    /// The segment's id in its owner's process.
    pub id: u32,
    /// The offset of the memory in the segment, in bytes.
    pub offset: u64,
}

/// Why an access is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AccessError {
    /// No living region has this key: forged, or revoked.
    #[error("no region has this key (forged, or deregistered)")]
    UnknownKey,
    /// The range is not within the region.
    #[error("the range is not within the region")]
    OutOfBounds,
    /// The region may not be accessed in this way.
    #[error("the region does not allow this access")]
    Denied,
    /// The region is GPU memory, and the access is the CPU's.
    #[error("the region is GPU memory, which the CPU does not reach")]
    Device,
}

impl AccessError {
    /// The number that encodes it between processes; never 0.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::UnknownKey => 1,
            Self::OutOfBounds => 2,
            Self::Denied => 3,
            Self::Device => 4,
        }
    }

    /// The error that a number stands for.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::UnknownKey),
            2 => Some(Self::OutOfBounds),
            3 => Some(Self::Denied),
            4 => Some(Self::Device),
            _ => None,
        }
    }
}

/// The offset of `[addr, addr + len)` in the `size` bytes at `base`, if all of it lies there.
#[inline(always)]
pub fn offset_within(base: u64, size: u64, addr: u64, len: u64) -> Result<u64, AccessError> {
    let offset = addr.wrapping_sub(base);
    // Not `offset + len <= size`, which can overflow.
    if addr < base || offset > size || len > size - offset {
        return Err(AccessError::OutOfBounds);
    }
    Ok(offset)
}
