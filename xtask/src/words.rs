//! Counts the lines of comments in which a pronoun of [`PRONOUNS`] stands for the thing.
//!
//! The tests fail if the share of such lines in a folder is above [`LIMIT`].

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result, ensure};

use crate::tree;

/// Pronouns that stand in place of a thing's name.
const PRONOUNS: [&str; 5] = ["what", "who", "whose", "whoever", "whatever"];
/// The largest share of a folder, in per cent.
const LIMIT: f64 = 2.0;
/// Folders with subfolders that are counted one by one.
const NESTED: [&str; 2] = ["crates", "python"];
/// Folders of the root that hold code.
const FOLDERS: [&str; 5] = ["bench", "examples", "kernels", "tests", "xtask"];

/// Comment lines of a folder.
#[derive(Default)]
struct Comments {
    count: usize,
    /// Position and text of each line with a pronoun.
    with_pronoun: Vec<(String, String)>,
}

impl Comments {
    fn per_cent(&self) -> f64 {
        100.0 * self.with_pronoun.len() as f64 / self.count.max(1) as f64
    }

    fn add(&mut self, name: &str, text: &str, language: Language) {
        for (number, line) in language.comments(text) {
            self.count += 1;
            if has_pronoun(line) {
                self.with_pronoun.push((format!("{name}:{number}"), line.trim().to_owned()));
            }
        }
    }
}

/// Fails if a folder is above its limit. Returns the counts as text.
pub(crate) fn check() -> Result<String> {
    let all = all()?;
    let over = all.iter().filter(|(_, comments)| is_above_limit(comments.per_cent()));
    let over: Vec<_> =
        over.map(|(name, comments)| format!("{name}: {:.1} %", comments.per_cent())).collect();
    ensure!(
        over.is_empty(),
        "over {LIMIT} % of comments with {}; `cargo xtask words FOLDER` lists them:\n{}",
        PRONOUNS.join(", "),
        over.join("\n")
    );
    let count: usize = all.values().map(|comments| comments.count).sum();
    let found: usize = all.values().map(|comments| comments.with_pronoun.len()).sum();
    Ok(format!("{found} of {count} lines of comments"))
}

/// Prints the share of each folder, or the lines of the named folders.
pub(crate) fn print(folders: &[String]) -> Result<()> {
    for (name, comments) in all()? {
        if folders.is_empty() {
            println!("{:5.1} %  {name}", comments.per_cent());
        } else if folders.contains(&name) {
            comments.with_pronoun.iter().for_each(|(at, line)| println!("{at}: {line}"));
        }
    }
    Ok(())
}

/// Whether a share is above the limit, rounded to one digit behind the point.
fn is_above_limit(per_cent: f64) -> bool {
    per_cent >= LIMIT + 0.05
}

fn all() -> Result<BTreeMap<String, Comments>> {
    let root = tree::root();
    let mut folders: Vec<String> = FOLDERS.map(str::to_owned).into();
    for nested in NESTED {
        for entry in fs::read_dir(root.join(nested))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if root.join(nested).join(&name).is_dir() {
                folders.push(format!("{nested}/{name}"));
            }
        }
    }
    folders.into_iter().map(|name| Ok((name.clone(), comments_in(&name)?))).collect()
}

fn comments_in(folder: &str) -> Result<Comments> {
    let mut comments = Comments::default();
    look(&tree::root().join(folder), folder, &mut comments)?;
    Ok(comments)
}

fn look(path: &Path, name: &str, comments: &mut Comments) -> Result<()> {
    let entries = fs::read_dir(path).with_context(|| path.display().to_string())?;
    let mut entries = entries.collect::<std::io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (path, file) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let name = format!("{name}/{file}");
        if path.is_dir() && !file.starts_with('.') && file != "results" {
            look(&path, &name, comments)?;
        } else if let Some(language) = Language::of(&file) {
            comments.add(&name, &fs::read_to_string(&path)?, language);
        }
    }
    Ok(())
}

fn has_pronoun(line: &str) -> bool {
    let words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.into_iter().any(|word| PRONOUNS.iter().any(|pronoun| word.eq_ignore_ascii_case(pronoun)))
}

/// The syntax of comments in a file.
#[derive(Clone, Copy)]
enum Language {
    /// `//`, as in Rust, C, C++ and CUDA.
    Slashes,
    Python,
}

impl Language {
    fn of(file: &str) -> Option<Self> {
        match Path::new(file).extension()?.to_str()? {
            "rs" | "c" | "h" | "cc" | "cpp" | "hpp" | "cu" | "cuh" => Some(Self::Slashes),
            "py" | "pyi" => Some(Self::Python),
            _ => None,
        }
    }

    /// Lines that are comments or parts of docstrings, with their numbers.
    fn comments(self, text: &str) -> impl Iterator<Item = (usize, &str)> {
        let mut is_inside = false;
        (1..).zip(text.lines()).filter(move |(_, line)| match self {
            Self::Slashes => line.trim_start().starts_with("//"),
            Self::Python => is_python_comment(line.trim(), &mut is_inside),
        })
    }
}

/// `is_inside`: whether a docstring has begun and not ended.
fn is_python_comment(line: &str, is_inside: &mut bool) -> bool {
    const QUOTES: &str = "\"\"\"";
    if *is_inside {
        *is_inside = !line.contains(QUOTES);
        return true;
    }
    let Some(rest) = line.strip_prefix(QUOTES) else { return line.starts_with('#') };
    *is_inside = !rest.contains(QUOTES);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str, language: Language) -> (usize, Vec<String>) {
        let mut comments = Comments::default();
        comments.add("file", text, language);
        (comments.count, comments.with_pronoun.into_iter().map(|(at, _)| at).collect())
    }

    #[test]
    fn a_riddle_is_found_and_a_sentence_is_not() {
        let text = "// What may take long to end.\n/// Drops its value.\nlet what = whose;\n";
        assert_eq!(found(text, Language::Slashes), (2, vec!["file:1".to_owned()]));
        let other = "    //! The whole of it, somewhat later, by `what_is`.\n";
        assert_eq!(found(other, Language::Slashes), (1, Vec::new()));
    }

    #[test]
    fn docstrings_are_comments_from_their_first_line_to_their_last() {
        let text = "def f():\n    \"\"\"Rows.\n\n    Whoever asks.\n    \"\"\"\n    x = 'who'  # whose\n    \
            # Who knows.\n    \"\"\"One line: who.\"\"\"\n    y = what\n";
        let (count, at) = found(text, Language::Python);
        assert_eq!((count, at), (6, ["file:4", "file:7", "file:8"].map(str::to_owned).to_vec()));
    }

    #[test]
    fn a_share_may_be_its_limit_and_no_more() {
        assert!([0.0, LIMIT, LIMIT + 0.04].iter().all(|share| !is_above_limit(*share)));
        assert!(is_above_limit(LIMIT + 0.06));
    }

    #[test]
    fn a_line_too_many_fails_the_check() {
        let mut comments = Comments::default();
        comments.add("file", &"// A noun.\n".repeat(49), Language::Slashes);
        assert!(!is_above_limit(comments.per_cent()));
        comments.add("file", "// What it is.\n", Language::Slashes);
        assert!(!is_above_limit(comments.per_cent()), "one of fifty");
        comments.add("file", "// Whoever has it.\n", Language::Slashes);
        assert!(is_above_limit(comments.per_cent()), "two of fifty-one");
    }
}
