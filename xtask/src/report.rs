//! Reads test output: the number of passed tests, the failed ones, and the left-out parts.

/// The part that a test reports as left out.
pub(crate) fn left_out(line: &str) -> Option<String> {
    Some(line.split_once("skipped: ")?.1.to_owned())
}

/// Number of passed tests, from the last line of a test binary.
pub(crate) fn passed_in(line: &str) -> Option<usize> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    counts.split_once(" passed")?.0.parse().ok()
}

/// The name of a failed test, from a line of a test binary.
pub(crate) fn failed_in(line: &str) -> Option<String> {
    Some(line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?.to_owned())
}

/// The failed tests of nextest's report in JUnit's format, each with its error.
pub(crate) fn failed_of_report(report: &str) -> Vec<String> {
    let mut test = String::new();
    let mut failed = Vec::new();
    for line in report.lines() {
        if let Some(name) = attribute(line, "<testcase ", "name") {
            let package = attribute(line, "<testcase ", "classname").unwrap_or_default();
            test = format!("{package} {name}");
        } else if line.trim_start().starts_with("<failure ") {
            let error = attribute(line, "<failure ", "message").unwrap_or_default();
            failed.push(format!("{test}: {error}"));
        }
    }
    failed
}

/// The value of an attribute of an element that begins in a line.
fn attribute(line: &str, element: &str, name: &str) -> Option<String> {
    let (_, value) = line.trim_start().strip_prefix(element)?.split_once(&format!("{name}=\""))?;
    let (value, _) = value.split_once('"').unwrap_or((value, ""));
    let plain = [("&apos;", "'"), ("&quot;", "\""), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")];
    Some(plain.iter().fold(value.to_owned(), |text, (coded, sign)| text.replace(coded, sign)))
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

    #[test]
    fn failed_tests_have_their_names() {
        assert_eq!(failed_in("test a::b ... FAILED").as_deref(), Some("a::b"));
        assert_eq!(failed_in("test result: FAILED. 3 passed; 1 failed"), None);
        let report = r#"
        <testcase name="a::b" classname="uccl-ep::emulated" time="0.005">
            <failure message="thread &apos;a::b&apos; panicked at c.rs:3:5: 1 &lt; 0" type="test failure">thread
        <testcase name="fine" classname="uccl-ep" time="0.1">
            <system-out>"#;
        let said = "uccl-ep::emulated a::b: thread 'a::b' panicked at c.rs:3:5: 1 < 0";
        assert_eq!(failed_of_report(report), [said]);
    }
}
