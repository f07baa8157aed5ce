//! How what users install is optimized: as they have it, and as the tests have it.

use std::path::PathBuf;

use crate::{shell::Program, tree};

/// Whom a release build is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum For {
    /// As the release profile says.
    Users,
    /// The same without link-time optimization, and without line tables, which wheels leave out too.
    ///
    /// That optimization takes longer than all else, and has cargo compile every dependency once for programs, once
    /// for libraries of C, and once for the wheel. Without it they share what is compiled.
    Tests,
}

impl For {
    /// Where cargo builds.
    fn target(self) -> PathBuf {
        match self {
            Self::Users => tree::target(),
            // Of its own: whoever measures what is in target/release must not find that of the tests.
            Self::Tests => tree::target().join("tested"),
        }
    }

    /// Where cargo puts what it was asked for.
    pub(crate) fn folder(self) -> PathBuf {
        self.target().join("release")
    }

    /// Has cargo build so, or what calls cargo.
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
