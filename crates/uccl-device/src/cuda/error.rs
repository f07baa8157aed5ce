//! What a driver can answer.

use std::fmt;

/// An error code of the driver, in its own words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The number, `CUresult`.
    pub code: i32,
    /// Its name, such as `CUDA_ERROR_INVALID_VALUE`.
    pub name: &'static str,
    /// What the driver says about it.
    pub text: &'static str,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.name, self.code, self.text)
    }
}

/// Codes after which every call in the same context fails in the same way, until the process ends:
/// ECC and NVLink errors, contained faults, and what kernels die of.
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
pub enum Unusable {
    /// The driver's library is not there, or cannot be loaded; in the loader's words.
    #[error("{0}")]
    NoLibrary(String),
    /// The library is older than what is needed, or not a driver's.
    #[error("{library} cannot be used: {reason}")]
    Incomplete {
        /// Its name.
        library: String,
        /// What it lacks.
        reason: String,
    },
    /// The library is there, and the driver does not start.
    #[error("{library}: {failure}")]
    Refused {
        /// Its name.
        library: String,
        /// Its answer.
        failure: Failure,
        /// The CUDA version that it supports, as 1000 * major + 10 * minor; 0 if it does not say.
        version: i32,
    },
    /// The driver has started, and does not say what there is.
    #[error("{0}")]
    Unanswered(GpuError),
    /// Someone wants none.
    #[error("{0}")]
    Unwanted(String),
}

/// Why something with a GPU could not be done.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// No driver, or none that works.
    #[error("no GPU can be used: {reason}")]
    Unavailable {
        /// Why not.
        reason: String,
    },
    /// An ordinal that this process does not see.
    #[error("there is no GPU {ordinal}: this process sees {count}")]
    NoSuchDevice {
        /// What was asked for.
        ordinal: u32,
        /// How many there are; ordinals are below it.
        count: u32,
    },
    /// The driver refused.
    #[error("{doing}: {failure}")]
    Driver {
        /// What was being done.
        doing: String,
        /// The answer.
        failure: Failure,
    },
    /// The driver refused because the context is lost. Nothing succeeds on that GPU in this process any
    /// more, whatever is tried: it is the fault of some earlier work, by anyone in the process.
    #[error("{doing}: {failure}; this process has lost the GPU's context and must be restarted")]
    Poisoned {
        /// What was being done.
        doing: String,
        /// The answer.
        failure: Failure,
    },
    /// The driver is too old, or another vendor's.
    #[error("the driver has no {entry}")]
    Missing {
        /// The entry point's name.
        entry: &'static str,
    },
    /// Memory that no other process can be given; it can be reached by staging only.
    #[error("memory at {address:#x} cannot be shared with another process: {why}")]
    NotExportable {
        /// Where it is.
        address: u64,
        /// What stands in the way.
        why: String,
    },
    /// Two GPUs that cannot reach each other's memory.
    #[error("GPU {from} cannot reach the memory of GPU {to}")]
    NoPeerAccess {
        /// Who wants to reach it.
        from: u32,
        /// Whose memory it is.
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
    /// The system refused something that has no driver's code.
    #[error("{doing}: {reason}")]
    System {
        /// What was being done.
        doing: String,
        /// What the system said.
        reason: String,
    },
}

impl GpuError {
    /// The error for a code, told from what was being done.
    pub(crate) fn of(failure: Failure, doing: fmt::Arguments<'_>) -> Self {
        let doing = doing.to_string();
        match failure.is_sticky() {
            true => Self::Poisoned { doing, failure },
            false => Self::Driver { doing, failure },
        }
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
