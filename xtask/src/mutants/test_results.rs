//! The output of `cargo test`.

use std::collections::BTreeSet;

/// The results of a run of tests, from its output.
#[derive(Default, Debug, PartialEq, Eq)]
pub(super) struct TestResults {
    /// Number of passed tests of each program.
    pub(super) passed: Vec<usize>,
    /// Tests that have ended, well or not.
    pub(super) ended: BTreeSet<String>,
    pub(super) failed: BTreeSet<String>,
    /// The signal that ended a program before all its tests had ended.
    pub(super) signal: Option<String>,
}

impl TestResults {
    pub(super) fn of<S: AsRef<str>>(lines: &[S]) -> Self {
        let mut results = Self::default();
        let mut in_list = false;
        for line in lines.iter().map(AsRef::as_ref) {
            if let Some((name, end)) = result_of(line) {
                results.ended.insert(name.to_owned());
                if end == "FAILED" {
                    results.failed.insert(name.to_owned());
                }
            }
            if let Some(count) = passed(line) {
                results.passed.push(count);
            }
            if let Some((_, signal)) = line.split_once("(signal: ") {
                results.signal = Some(signal.trim_end_matches(')').to_owned());
            }
            // The list at the end has each name on a line of its own. The output of failed tests
            // has a heading too.
            if let Some(name) = line.strip_prefix("    ").filter(|_| in_list) {
                results.failed.insert(name.to_owned());
            } else {
                in_list = line == "failures:";
            }
        }
        results
    }
}

/// The test that a line reports as ended, and its result.
fn result_of(line: &str) -> Option<(&str, &str)> {
    let (name, end) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let name = name.strip_suffix(" - should panic").unwrap_or(name);
    ["ok", "FAILED"].into_iter().find(|known| end.ends_with(known)).map(|end| (name, end))
}

/// Number of passed tests of a program, from its last line.
fn passed(line: &str) -> Option<usize> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    counts.split_once(" passed")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn failed_tests_are_named() {
        let said = "
running 3 tests
test a::good ... ok
test a::bad ... FAILED
test a::other - should panic ... ok

failures:

---- a::bad stdout ----
thread 'a::bad' panicked at x.rs:1:1:
failures:
no name

failures:
    a::bad

test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 5 filtered out; finished in 0.01s

running 0 tests

test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out; finished in 0.00s";
        let results = TestResults::of(&said.lines().collect::<Vec<_>>());
        let want = TestResults {
            passed: vec![2, 0],
            ended: names(&["a::bad", "a::good", "a::other"]),
            failed: names(&["a::bad"]),
            signal: None,
        };
        assert_eq!(results, want);
    }

    #[test]
    fn a_program_that_was_ended_names_the_tests_that_it_had_run() {
        let said = [
            "running 2 tests",
            "test a::good ... ok",
            "error: test failed, to rerun pass `--lib`",
            "  process didn't exit successfully: `t` (signal: 11, SIGSEGV: invalid memory reference)",
        ];
        let results = TestResults::of(&said);
        assert_eq!((results.passed.len(), results.ended), (0, names(&["a::good"])));
        assert_eq!(results.signal.as_deref(), Some("11, SIGSEGV: invalid memory reference"));
    }
}
