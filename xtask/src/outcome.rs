//! The outcome of a step of `cargo xtask test`.

use anyhow::Result;

/// The outcome of a step.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Nothing was run.
    skipped: bool,
    /// A short summary.
    pub(crate) detail: String,
    /// The left-out parts, each with the missing thing.
    pub(crate) absent: Vec<String>,
    /// The failed tests, each with its error where the output has it on one line.
    pub(crate) failed: Vec<String>,
    pub(crate) failure: Option<String>,
}

impl Outcome {
    pub(crate) fn with(detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), ..Self::default() }
    }

    /// The outcome of a step that left parts out.
    pub(crate) fn without(absent: Vec<String>) -> Self {
        Self { absent, ..Self::default() }
    }

    /// The outcome of a step that ran nothing because something is missing.
    pub(crate) fn skipped(reason: impl Into<String>) -> Self {
        Self { skipped: true, ..Self::with(reason) }
    }

    /// Keeps the findings of a watched program, and its failure if it failed.
    pub(crate) fn or_failed(mut self, result: Result<()>) -> Result<Self> {
        self.failure = result.err().map(|error| format!("{error:#}"));
        Ok(self)
    }

    pub(crate) fn verdict(&self) -> &'static str {
        match (&self.failure, self.skipped) {
            (Some(_), _) => "FAILED",
            (None, true) => "skipped",
            (None, false) => "passed",
        }
    }
}

impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_outweighs_the_results_before_it() {
        let seen = Outcome::with("2 passed").or_failed(Err(anyhow::anyhow!("exit status: 1")));
        assert_eq!(seen.expect("it is kept").verdict(), "FAILED");
        assert_eq!(Outcome::skipped("lacks a wheel").verdict(), "skipped");
    }
}
