//! The errors of this crate. There are few, since a missing fact is unknown and not an error.

use std::{io, path::PathBuf};

/// Why a topology could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The root is not a folder that can be listed.
    #[error("cannot read {path}: {source}")]
    Root {
        /// The root that was given.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// A text that is not a PCI address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is not a PCI address; one looks like 0000:17:00.0")]
pub struct ParsePciAddressError(pub(crate) String);

/// A text that is not a list of CPUs.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is not a list of CPUs; one looks like 0-3,8")]
pub struct ParseCpuListError(pub(crate) String);

/// A text that is not a kind of memory.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is not a kind of memory: use host, pinned, cuda:N or managed:N")]
pub struct ParseMemoryKindError(pub(crate) String);
