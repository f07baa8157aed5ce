//! The list of mutants.

use std::{collections::BTreeSet, fs};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::tree;

/// A guard, and its broken form.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Mutant {
    pub(super) id: String,
    /// The property that is lost without the guard.
    pub(super) protects: String,
    pub(super) file: String,
    /// Text that occurs once in the file.
    find: String,
    replace: String,
    /// The crate with the tests that notice.
    pub(super) package: String,
    /// The arguments of `cargo test` that choose the tests.
    pub(super) tests: Vec<String>,
    /// Whether the tests are built for loom.
    #[serde(default)]
    pub(super) loom: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    mutant: Vec<Mutant>,
}

pub(super) fn read() -> Result<Vec<Mutant>> {
    let file = tree::root().join("xtask/mutants.toml");
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let List { mutant: mutants } = toml::from_str(&text)?;
    let mut ids = BTreeSet::new();
    for mutant in &mutants {
        ensure!(ids.insert(&mutant.id), "there are two mutants called {}", mutant.id);
    }
    Ok(mutants)
}

impl Mutant {
    /// The key of a mutant's build: mutants with equal keys are built alike.
    pub(super) fn built(&self) -> (&str, bool, &[String]) {
        (&self.package, self.loom, &self.tests)
    }

    /// Whether both mutants have the same tests.
    pub(super) fn tests_are_those_of(&self, other: &Self) -> bool {
        self.built() == other.built()
    }

    /// Parts of the names of the tests that are to notice.
    pub(super) fn filters(&self) -> impl Iterator<Item = &str> {
        let mut names_program = false;
        let tests = self.tests.iter().map(String::as_str);
        tests.filter(move |arg| {
            let is_program = std::mem::replace(&mut names_program, *arg == "--test");
            !is_program && !arg.starts_with('-')
        })
    }

    /// Fails with the reason if the mutant no longer applies.
    pub(super) fn stale(&self) -> Result<(), String> {
        let text = fs::read_to_string(tree::root().join(&self.file));
        let text = text.map_err(|e| format!("mutant {}: {}: {e}", self.id, self.file))?;
        self.apply(&text).map(drop)
    }

    /// The file's text without the guard.
    pub(super) fn apply(&self, text: &str) -> Result<String, String> {
        let Self { id, file, find, replace, .. } = self;
        match text.matches(find.as_str()).count() {
            1 if find != replace => Ok(text.replacen(find.as_str(), replace, 1)),
            1 => Err(format!("mutant {id} changes nothing")),
            n => Err(format!("mutant {id}: its text is {n} times in {file}, not once: {find:?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutant(find: &str, replace: &str) -> Mutant {
        let text = |text: &str| text.to_owned();
        Mutant {
            id: text("id"),
            protects: text("p"),
            file: text("f"),
            find: text(find),
            replace: text(replace),
            package: text("p"),
            tests: vec![],
            loom: false,
        }
    }

    #[test]
    fn a_mutant_applies_where_its_text_is_once() {
        assert_eq!(mutant("b", "c").apply("abd").as_deref(), Ok("acd"));
        for (find, replace) in [("x", "c"), ("a", "c"), ("b", "b")] {
            assert!(mutant(find, replace).apply("abda").is_err(), "{find}");
        }
    }

    #[test]
    fn filters_are_told_from_programs() {
        let tests = ["--lib", "--test", "one", "--test", "two", "--", "some", "other"];
        let tests = tests.map(str::to_owned).to_vec();
        let mutant = Mutant { tests, ..mutant("a", "b") };
        assert_eq!(mutant.filters().collect::<Vec<_>>(), ["some", "other"]);
    }

    #[test]
    fn the_list_can_be_read() {
        assert!(!read().expect("a list").is_empty());
    }
}
