//! The optimization of release builds: as users have them, and as the tests have them.

use std::path::PathBuf;

use crate::{shell::Program, tree};

/// The audience of a release build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum For {
    /// The release profile as it is.
    Users,
    /// The release profile without link-time optimization, and without line tables, which wheels
    /// leave out too.
    ///
    /// Link-time optimization takes longer than all else, and makes cargo compile every dependency
    /// once for programs, once for libraries of C, and once for the wheel. Without it they share
    /// the compiled crates.
    Tests,
}

impl For {
    /// The folder that cargo builds in.
    fn target(self) -> PathBuf {
        match self {
            Self::Users => tree::target(),
            // A folder of its own: a measurement of target/release must not find the tests' build.
            Self::Tests => tree::target().join("tested"),
        }
    }

    /// The folder of the built programs and libraries.
    pub(crate) fn folder(self) -> PathBuf {
        self.target().join("release")
    }

    /// Sets cargo, or a program that calls it, up for this build.
    pub(crate) fn set_in(self, program: Program) -> Program {
        match self {
            Self::Users => program,
            Self::Tests => program
                .env("CARGO_TARGET_DIR", self.target())
                .env("CARGO_PROFILE_RELEASE_LTO", "off")
                .env("CARGO_PROFILE_RELEASE_DEBUG", "0"),
        }
    }
}
