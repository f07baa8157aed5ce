//! The kinds of memory.

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};

use crate::error::ParseMemoryKindError;

/// The kind of a piece of memory: the kind decides which devices can access it and how it is
/// copied.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
#[non_exhaustive]
pub enum MemoryKind {
    /// A CUDA device's memory.
    Cuda {
        /// The device's ordinal in this process.
        device: u32,
    },
    /// CUDA's managed memory, which moves between host and devices when one of them touches it.
    Managed {
        /// The ordinal of the device that it prefers or is on.
        device: u32,
    },
    /// Pageable host memory.
    #[default]
    Host,
    /// Host memory that is locked and that devices can address.
    Pinned,
}

impl MemoryKind {
    /// The ordinal of the device that the memory is on; managed memory counts as its device's.
    pub fn device(self) -> Option<u32> {
        match self {
            Self::Cuda { device } | Self::Managed { device } => Some(device),
            Self::Host | Self::Pinned => None,
        }
    }

    /// The ordinal of the device if only the device can access it; none if the CPU can load and
    /// store it.
    pub fn device_only(self) -> Option<u32> {
        match self {
            Self::Cuda { device } => Some(device),
            Self::Host | Self::Pinned | Self::Managed { .. } => None,
        }
    }

    /// Whether the CPU can load and store it.
    pub fn is_host_accessible(self) -> bool {
        self.device_only().is_none()
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda { device } => write!(f, "cuda:{device}"),
            Self::Managed { device } => write!(f, "managed:{device}"),
            Self::Host => f.write_str("host"),
            Self::Pinned => f.write_str("pinned"),
        }
    }
}

impl Serialize for MemoryKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for MemoryKind {
    type Err = ParseMemoryKindError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseMemoryKindError(text.to_owned());
        match text {
            "host" => Ok(Self::Host),
            "pinned" => Ok(Self::Pinned),
            _ => {
                let (kind, device) = text.split_once(':').ok_or_else(error)?;
                let device = device.parse().map_err(|_| error())?;
                match kind {
                    "cuda" => Ok(Self::Cuda { device }),
                    "managed" => Ok(Self::Managed { device }),
                    _ => Err(error()),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        let devices = [MemoryKind::Cuda { device: 7 }, MemoryKind::Managed { device: 1 }];
        for kind in [MemoryKind::Host, MemoryKind::Pinned].into_iter().chain(devices) {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        for wrong in ["", "cuda", "cuda:", "cuda:x", "cuda:-1", "HOST", "host:1"] {
            assert!(wrong.parse::<MemoryKind>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn only_device_memory_is_out_of_the_cpus_reach() {
        assert!(MemoryKind::Host.is_host_accessible());
        assert!(MemoryKind::Pinned.is_host_accessible());
        assert!(MemoryKind::Managed { device: 0 }.is_host_accessible());
        assert!(!MemoryKind::Cuda { device: 0 }.is_host_accessible());
    }
}
