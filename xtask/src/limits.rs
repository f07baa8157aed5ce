//! The largest counts of folders, in a file of the repository. A folder without an entry may have
//! none.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result};

use crate::tree;

pub(crate) struct Limits {
    file: &'static str,
    by_folder: BTreeMap<String, usize>,
}

impl Limits {
    pub(crate) fn read(file: &'static str) -> Result<Self> {
        let text = fs::read_to_string(tree::root().join(file)).context(file)?;
        Ok(Self { file, by_folder: toml::from_str(&text).context(file)? })
    }

    /// The folders with more than their limits, each with both numbers.
    pub(crate) fn over(&self, counts: &BTreeMap<String, usize>) -> Vec<String> {
        let limit = |name: &String| self.by_folder.get(name).copied().unwrap_or(0);
        let over = counts.iter().filter(|(name, count)| **count > limit(name));
        over.map(|(name, count)| format!("{name}: {count}, at most {}", limit(name))).collect()
    }

    /// Asks for lower limits, if folders have fewer than theirs.
    pub(crate) fn note(&self, counts: &BTreeMap<String, usize>) -> String {
        let count = |name: &String| counts.get(name).copied().unwrap_or(0);
        let lower = self.by_folder.iter().filter(|(name, limit)| count(name) < **limit);
        let lower: Vec<_> = lower.map(|(name, _)| name.as_str()).collect();
        match lower.is_empty() {
            true => String::new(),
            false => format!("; lower in {}: {}", self.file, lower.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(entries: &[(&str, usize)]) -> Limits {
        Limits { file: "limits.toml", by_folder: counts(entries) }
    }

    fn counts(entries: &[(&str, usize)]) -> BTreeMap<String, usize> {
        entries.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    #[test]
    fn a_folder_may_have_as_many_as_its_limit() {
        let counts = counts(&[("crates/a", 2), ("xtask", 0)]);
        assert!(limits(&[("crates/a", 2)]).over(&counts).is_empty());
        assert_eq!(limits(&[("crates/a", 1)]).over(&counts), ["crates/a: 2, at most 1"]);
        assert_eq!(limits(&[]).over(&counts), ["crates/a: 2, at most 0"]);
    }

    #[test]
    fn a_limit_that_can_be_lower_is_named() {
        let limits = limits(&[("crates/a", 2), ("crates/gone", 1)]);
        assert_eq!(limits.note(&counts(&[("crates/a", 2), ("crates/gone", 1)])), "");
        let note = limits.note(&counts(&[("crates/a", 1), ("crates/b", 0)]));
        assert_eq!(note, "; lower in limits.toml: crates/a, crates/gone");
    }
}
