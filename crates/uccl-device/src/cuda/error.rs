//! The errors of GPU drivers.

use std::fmt;

/// An error code of the driver, in its own words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The number, `CUresult`.
    pub code: i32,
    /// Its name, such as `CUDA_ERROR_INVALID_VALUE`.
    pub name: &'static str,
    /// The driver's description of it.
    pub text: &'static str,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.name, self.code, self.text)
    }
}

/// Codes after which every call in the same context fails in the same way until the process ends:
/// ECC and NVLink errors, contained faults, and the errors that kill kernels.
const STICKY: &[i32] = &[214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721];

impl Failure {
    /// Whether the context in which it happened is lost with all its work.
    pub fn is_sticky(&self) -> bool {
        STICKY.contains(&self.code)
    }
}

/// Why no GPU can be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The driver's library does not exist or cannot be loaded. The text is the loader's message.
    #[error("{0}")]
    NoLibrary(String),
    /// The library is too old, or not a driver's.
    #[error("{library} cannot be used: {reason}")]
    Incomplete {
        /// The library's name.
        library: String,
        /// The missing part.
        reason: String,
    },
    /// The library was loaded, but the driver does not start.
    #[error("{library}: {failure}")]
    Refused {
        /// The library's name.
        library: String,
        /// The driver's error.
        failure: Failure,
        /// The CUDA version that it supports, as 1000 * major + 10 * minor; 0 if it does not report
        /// it.
        version: i32,
    },
    /// The driver has started, but does not list its GPUs.
    #[error("{0}")]
    Unanswered(GpuError),
    /// GPUs were switched off, for the reason given.
    #[error("{0}")]
    Unwanted(String),
}

/// Why an operation on a GPU failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// No driver, or none that works.
    #[error("no GPU can be used: {reason}")]
    Unavailable {
        /// The reason.
        reason: String,
    },
    /// This process sees no GPU with this ordinal.
    #[error("there is no GPU {ordinal}: this process sees {count}")]
    NoSuchDevice {
        /// The ordinal that was asked for.
        ordinal: u32,
        /// How many there are; ordinals are below it.
        count: u32,
    },
    /// The driver refused.
    #[error("{doing}: {failure}")]
    Driver {
        /// The action that failed.
        doing: String,
        /// The driver's error.
        failure: Failure,
    },
    /// The driver refused because the context is lost. From then on every call on that GPU fails in
    /// this process. The cause is some earlier work, by any code of the process.
    #[error("{doing}: {failure}; this process has lost the GPU's context and must be restarted")]
    Poisoned {
        /// The action that failed.
        doing: String,
        /// The driver's error.
        failure: Failure,
    },
    /// The driver is too old, or another vendor's.
    #[error("the driver has no {entry}")]
    Missing {
        /// The entry point's name.
        entry: &'static str,
    },
    /// The memory cannot be shared with another process, which can reach it only by staging.
    #[error("memory at {address:#x} cannot be shared with another process: {why}")]
    NotExportable {
        /// The memory's address.
        address: u64,
        /// Why it cannot be shared.
        why: String,
    },
    /// Two GPUs that cannot reach each other's memory.
    #[error("GPU {from} cannot reach the memory of GPU {to}")]
    NoPeerAccess {
        /// The ordinal of the GPU that is to reach the memory.
        from: u32,
        /// The ordinal of the GPU that the memory is on.
        to: u32,
    },
    /// Every descriptor slot is in use by a launch that has not ended.
    #[error("all {slots} descriptor slots are in use")]
    Busy {
        /// How many there are.
        slots: usize,
    },
    /// More pieces than one launch takes.
    #[error("{count} pieces in one launch; at most {most} are possible")]
    TooManyIovs {
        /// How many were given.
        count: usize,
        /// How many are taken.
        most: usize,
    },
    /// Something other than a driver call failed.
    #[error("{doing}: {reason}")]
    System {
        /// The action that failed.
        doing: String,
        /// Why it failed.
        reason: String,
    },
}

impl GpuError {
    /// The error for a driver's code and the action that failed.
    pub(crate) fn of(failure: Failure, doing: fmt::Arguments<'_>) -> Self {
        let doing = doing.to_string();
        match failure.is_sticky() {
            true => Self::Poisoned { doing, failure },
            false => Self::Driver { doing, failure },
        }
    }

    /// Whether a launch has more blocks than may begin together.
    pub fn is_too_large(&self) -> bool {
        const COOPERATIVE_LAUNCH_TOO_LARGE: i32 = 720;
        self.code() == Some(COOPERATIVE_LAUNCH_TOO_LARGE)
    }

    /// The driver's code, if it was the driver that refused.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Driver { failure, .. } | Self::Poisoned { failure, .. } => Some(failure.code),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_context_is_told_apart() {
        let failure = |code| Failure { code, name: "NAME", text: "text" };
        let lost = GpuError::of(failure(700), format_args!("copying"));
        assert!(matches!(&lost, GpuError::Poisoned { failure, .. } if failure.code == 700));
        assert!(lost.to_string().starts_with("copying: NAME (700): text; "), "{lost}");
        let refused = GpuError::of(failure(1), format_args!("copying"));
        assert_eq!(refused.to_string(), "copying: NAME (1): text");
        assert_eq!((lost.code(), refused.code()), (Some(700), Some(1)));
    }
}
