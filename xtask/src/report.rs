//! Reads test output: the number of passed tests, and the left-out parts.

/// The part that a test reports as left out.
pub(crate) fn left_out(line: &str) -> Option<String> {
    Some(line.split_once("skipped: ")?.1.to_owned())
}

/// Number of passed tests, from the last line of a test binary.
pub(crate) fn passed_in(line: &str) -> Option<usize> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    counts.split_once(" passed")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_of_passed_tests_is_read() {
        let line = "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; finished in 0.1s";
        assert_eq!(passed_in(line), Some(12));
        assert_eq!(passed_in("test result: FAILED. 3 passed; 1 failed"), Some(3));
        assert_eq!(passed_in("running 12 tests"), None);
    }
}
