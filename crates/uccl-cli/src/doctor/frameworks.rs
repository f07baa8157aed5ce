//! The parts of this project that Python's frameworks would use: the Python package knows.

use std::{
    io,
    process::{Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use super::{Finding, Level};

/// Time for Python to start and to look at its packages, on a slow file system too.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(10);

/// Asks the Python that a shell finds.
pub(super) fn gather() -> Vec<Finding> {
    of("python3", &["-m", "uccl.frameworks", "--json"])
}

fn of(python: &str, arguments: &[&str]) -> Vec<Finding> {
    let unknown = |seen: String| {
        let remedy = "where frameworks are to use this project, install its wheel: pip install .";
        vec![Finding::new("frameworks", Level::Note, seen).remedy(remedy)]
    };
    let answer = match output_of(Command::new(python).args(arguments)) {
        Ok(answer) => answer,
        Err(error) => return unknown(format!("cannot ask {python}: {error}")),
    };
    if !answer.status.success() {
        let said = String::from_utf8_lossy(&answer.stderr);
        let said = said.lines().last().unwrap_or("it does not say why");
        return unknown(format!("{python} cannot name them: {said}"));
    }
    serde_json::from_slice(&answer.stdout)
        .unwrap_or_else(|error| unknown(format!("{python} answers in another form: {error}")))
}

/// As `Command::output`, but a command that does not end is ended. Its answer must fit into a pipe.
fn output_of(command: &mut Command) -> io::Result<Output> {
    let pipes = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = pipes.spawn()?;
    let end = Instant::now() + PATIENCE;
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it gave no answer"));
        }
        sleep(PAUSE);
    }
    child.wait_with_output()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_of_python_are_taken_as_they_are() {
        let json =
            r#"[{"about": "ray 2.60.0", "level": "note", "seen": "UCX itself", "remedy": "none"}]"#;
        let [found] = &of("echo", &[json])[..] else { panic!("one finding") };
        assert_eq!(found.about, "ray 2.60.0");
        assert_eq!(found.level, Level::Note);
        assert_eq!((found.seen.as_str(), found.cost.as_str()), ("UCX itself", ""));
        assert_eq!(found.remedy, "none");
    }

    #[test]
    fn a_python_that_does_not_answer_is_a_note() {
        for (python, argument, part) in [
            ("/nowhere/python3", "", "cannot ask"),
            ("false", "", "does not say why"),
            ("ls", "/nowhere", "/nowhere"),
            ("echo", "{", "another form"),
        ] {
            let [found] = &of(python, &[argument])[..] else { panic!("one finding") };
            assert_eq!(found.level, Level::Note);
            assert!(found.seen.contains(part), "{found:?}");
        }
    }
}
