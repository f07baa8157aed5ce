//! Runs the examples in the documents, and the example programs in Python.

use std::{fs, time::Duration};

use anyhow::{Result, ensure};

use crate::{built, outcome::Outcome, python, shell::Program, tree};

/// The programs in `examples/python` that need only the wheel and NumPy. They check the data that
/// they move.
const PROGRAMS: [&str; 3] = ["prefill_decode", "trainer_to_inference", "embedding_on_demand"];

/// Documents with examples in Python.
const DOCUMENTS: [&str; 3] = ["README.md", "docs/python.md", "python/README.md"];

/// Documents with examples in Rust.
const RUST_DOCUMENTS: [&str; 2] = ["README.md", "docs/new-binding.md"];

/// The Rust examples, as documentation tests.
pub(crate) fn rust() -> Result<Outcome> {
    let built = built::examples()?;
    let p2p = built.library("uccl_p2p")?;
    let rustdoc = std::env::var_os("RUSTDOC").unwrap_or_else(|| "rustdoc".into());
    let mut count = 0;
    for document in RUST_DOCUMENTS {
        let examples = blocks(&fs::read_to_string(tree::root().join(document))?, "rust").len();
        ensure!(examples > 0, "{document} has no example in Rust");
        count += examples;
        Program::new(&rustdoc)
            .args(["--edition=2024", "--test", document])
            .args(["--extern".into(), format!("uccl_p2p={}", p2p.display())])
            .args(["-L".into(), format!("dependency={}", p2p.with_file_name("").display())])
            .limit(Duration::from_secs(300))
            .run()?;
    }
    Ok(Outcome::with(format!("{count} examples")))
}

/// The Python examples, each as a program of its own, with the wheel.
pub(crate) fn python() -> Result<Outcome> {
    if let Some(reason) = python::lacking() {
        return Ok(Outcome::skipped(reason));
    }
    let interpreter = python::with_wheel()?;
    let mut count = PROGRAMS.len();
    for document in DOCUMENTS {
        let text = fs::read_to_string(tree::root().join(document))?;
        let examples = blocks(&text, "python");
        ensure!(!examples.is_empty(), "{document} has no example in Python");
        count += examples.len();
        for (number, example) in examples.iter().enumerate() {
            let stem = document.replace('/', "-");
            let file = tree::scratch().join(format!("{stem}-{number}.py"));
            fs::write(&file, example)?;
            let program = Program::new(&interpreter).args([&file]).without_env("PYTHONPATH");
            program.limit(Duration::from_secs(60)).run()?;
        }
    }
    // The picture is of the table in README.md.
    Program::new(&interpreter).args(["bench/speed_picture.py", "--check"]).run()?;
    Program::new(&interpreter).args(["-m", "bench.record", "index", "--check"]).run()?;
    for program in PROGRAMS {
        let file = tree::root().join("examples/python").join(program).with_extension("py");
        let program = Program::new(&interpreter).args([&file]).without_env("PYTHONPATH");
        program.limit(Duration::from_secs(120)).run()?;
    }
    Ok(Outcome::with(format!("{count} examples")))
}

/// The fenced blocks of one language.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    let starts = text.split(fence.as_str()).skip(1);
    starts.filter_map(|rest| rest.split_once("\n```").map(|(block, _)| block)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_one_language_are_found() {
        let text = "a\n```python\none\ntwo\n```\n```sh\nthree\n```\n```python\nfour\n```\n";
        assert_eq!(blocks(text, "python"), ["one\ntwo", "four"]);
        assert!(blocks(text, "rust").is_empty());
    }
}
