//! How a step of `cargo xtask test` ended.

use anyhow::Result;

/// How a step ended that did not fail.
#[derive(Default)]
pub(crate) struct Done {
    /// Nothing was run.
    skipped: bool,
    /// In a few words, what was found.
    pub(crate) detail: String,
    /// What was left out, and what was lacking for it.
    pub(crate) absent: Vec<String>,
    pub(crate) failure: Option<String>,
}

impl Done {
    pub(crate) fn with(detail: impl Into<String>) -> Self {
        Self { detail: detail.into(), ..Self::default() }
    }

    /// Some of it was left out.
    pub(crate) fn without(absent: Vec<String>) -> Self {
        Self { absent, ..Self::default() }
    }

    /// Nothing was run, because something is lacking.
    pub(crate) fn skipped(reason: impl Into<String>) -> Self {
        Self { skipped: true, ..Self::with(reason) }
    }

    /// Keeps what was seen when the program that was watched failed.
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

impl From<()> for Done {
    fn from((): ()) -> Self {
        Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_outweighs_what_was_seen() {
        let seen = Done::with("2 passed").or_failed(Err(anyhow::anyhow!("exit status: 1")));
        assert_eq!(seen.expect("it is kept").verdict(), "FAILED");
        assert_eq!(Done::skipped("lacks a wheel").verdict(), "skipped");
    }
}
