//! Counts the lines of comments and the names of functions in which a pronoun of [`PRONOUNS`]
//! stands for the thing, and the types that are named by a participle.
//!
//! The tests fail if the share of such lines in a folder is above [`LIMIT`], or if a folder has
//! more such functions than `xtask/words.toml` says, or more such types than
//! `xtask/type-names.toml` says.

mod participles;

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result, ensure};

use crate::{limits::Limits, tree};

/// Pronouns that stand in place of a thing's name.
const PRONOUNS: [&str; 5] = ["what", "who", "whose", "whoever", "whatever"];
/// The largest share of a folder, in per cent.
const LIMIT: f64 = 2.0;
/// The largest counts of functions, by folder.
const LIMITS: &str = "xtask/words.toml";
/// The largest counts of types that are named by a participle, by folder.
const TYPE_LIMITS: &str = "xtask/type-names.toml";
/// Words that may come before the keyword of a function.
const MODIFIERS: [&str; 8] = ["async", "C", "const", "crate", "extern", "pub", "super", "unsafe"];
/// Folders with subfolders that are counted one by one.
const NESTED: [&str; 2] = ["crates", "python"];
/// Folders of the root that hold code.
const FOLDERS: [&str; 5] = ["bench", "examples", "kernels", "tests", "xtask"];

/// A line: its position and its text.
type Line = (String, String);

/// The comments, functions and types of a folder.
#[derive(Default)]
struct Wording {
    /// The number of comment lines.
    comments: usize,
    /// Comment lines with a pronoun.
    with_pronoun: Vec<Line>,
    /// Functions with a pronoun in their names.
    functions: Vec<Line>,
    /// Types of Rust that are named by a participle.
    types: Vec<Line>,
}

impl Wording {
    fn per_cent(&self) -> f64 {
        100.0 * self.with_pronoun.len() as f64 / self.comments.max(1) as f64
    }

    fn add(&mut self, name: &str, text: &str, language: Language) {
        let at = |number: usize, line: &str| (format!("{name}:{number}"), line.trim().to_owned());
        for (number, line) in language.comments(text) {
            self.comments += 1;
            if has_pronoun(line) {
                self.with_pronoun.push(at(number, line));
            }
        }
        let functions = (1..).zip(text.lines()).filter(|(_, line)| is_named_by_pronoun(line));
        self.functions.extend(functions.map(|(number, line)| at(number, line)));
        if name.ends_with(".rs") {
            let types = (1..).zip(text.lines()).filter(|(_, line)| participles::names_a_type(line));
            self.types.extend(types.map(|(number, line)| at(number, line)));
        }
    }
}

/// Fails if a folder is above its limits. Returns the counts as text.
pub(crate) fn check() -> Result<String> {
    let all = all()?;
    let over = all.iter().filter(|(_, wording)| is_above_limit(wording.per_cent()));
    let over: Vec<_> =
        over.map(|(name, wording)| format!("{name}: {:.1} %", wording.per_cent())).collect();
    let pronouns = PRONOUNS.join(", ");
    ensure!(
        over.is_empty(),
        "over {LIMIT} % of comments with {pronouns}; `cargo xtask words FOLDER` lists them:\n{}",
        over.join("\n")
    );
    let comments: usize = all.values().map(|wording| wording.comments).sum();
    let found: usize = all.values().map(|wording| wording.with_pronoun.len()).sum();
    let counts = |count: fn(&Wording) -> usize| {
        all.iter().map(|(name, wording)| (name.clone(), count(wording))).collect()
    };
    let functions = counts(|wording| wording.functions.len());
    let functions = within(LIMITS, &functions, &format!("functions named with {pronouns}"))?;
    let types = counts(|wording| wording.types.len());
    let types = within(TYPE_LIMITS, &types, "types named by a participle")?;
    Ok(format!("{found} of {comments} lines of comments, {functions} functions, {types} types"))
}

/// The sum of the counts, with a note if limits are too high. Fails if a folder is above its limit.
fn within(limits: &'static str, counts: &BTreeMap<String, usize>, kind: &str) -> Result<String> {
    let limits = Limits::read(limits)?;
    let over = limits.over(counts).join("\n");
    ensure!(over.is_empty(), "{kind}; `cargo xtask words FOLDER` lists them:\n{over}");
    let sum: usize = counts.values().sum();
    Ok(format!("{sum}{}", limits.note(counts)))
}

/// Prints the share and the count of each folder, or the lines of the named folders.
pub(crate) fn print(folders: &[String]) -> Result<()> {
    for (name, wording) in all()? {
        if folders.is_empty() {
            let (functions, types) = (wording.functions.len(), wording.types.len());
            println!("{:5.1} %  {functions:3}  {types:3}  {name}", wording.per_cent());
        } else if folders.contains(&name) {
            let lines = wording.with_pronoun.iter().chain(&wording.functions);
            let lines = lines.chain(&wording.types);
            lines.for_each(|(at, line)| println!("{at}: {line}"));
        }
    }
    Ok(())
}

/// Whether a share is above the limit, rounded to one digit behind the point.
fn is_above_limit(per_cent: f64) -> bool {
    per_cent >= LIMIT + 0.05
}

fn all() -> Result<BTreeMap<String, Wording>> {
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
    folders.into_iter().map(|name| Ok((name.clone(), wording_of(&name)?))).collect()
}

fn wording_of(folder: &str) -> Result<Wording> {
    let mut wording = Wording::default();
    look(&tree::root().join(folder), folder, &mut wording)?;
    Ok(wording)
}

fn look(path: &Path, name: &str, wording: &mut Wording) -> Result<()> {
    let entries = fs::read_dir(path).with_context(|| path.display().to_string())?;
    let mut entries = entries.collect::<std::io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (path, file) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let name = format!("{name}/{file}");
        if path.is_dir() && !file.starts_with('.') && file != "results" {
            look(&path, &name, wording)?;
        } else if let Some(language) = Language::of(&file) {
            wording.add(&name, &fs::read_to_string(&path)?, language);
        }
    }
    Ok(())
}

fn has_pronoun(line: &str) -> bool {
    words(line).any(is_pronoun)
}

/// Whether a line begins a function of Rust or Python with a pronoun in its name.
fn is_named_by_pronoun(line: &str) -> bool {
    if !line.trim_start().starts_with(|c: char| c.is_ascii_lowercase()) {
        return false;
    }
    let mut words = words(line).skip_while(|word| MODIFIERS.contains(word));
    let is_function = words.next().is_some_and(|word| matches!(word, "fn" | "def"));
    is_function && words.next().is_some_and(|name| name.split('_').any(is_pronoun))
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

fn is_pronoun(word: &str) -> bool {
    PRONOUNS.iter().any(|pronoun| word.eq_ignore_ascii_case(pronoun))
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
        let mut wording = Wording::default();
        wording.add("file", text, language);
        (wording.comments, wording.with_pronoun.into_iter().map(|(at, _)| at).collect())
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
    fn a_function_named_by_a_pronoun_is_found() {
        let functions = |text: &str, language| {
            let mut wording = Wording::default();
            wording.add("file", text, language);
            wording.functions
        };
        let named = "fn what_comes() {}\n    pub(crate) async fn told_who(a: u8) {\n";
        let found = functions(named, Language::Slashes);
        assert_eq!(found[0], ("file:1".to_owned(), "fn what_comes() {}".to_owned()));
        assert_eq!((found.len(), found[1].0.as_str()), (2, "file:2"));
        assert_eq!(functions("    def test_whose(self):\n", Language::Python).len(), 1);
        let sound = "fn somewhat_later(what: u8) {}\n// fn what_was()\nlet what = \"fn who\";\n";
        assert!(functions(sound, Language::Slashes).is_empty());
    }

    #[test]
    fn a_share_may_be_its_limit_and_no_more() {
        assert!([0.0, LIMIT, LIMIT + 0.04].iter().all(|share| !is_above_limit(*share)));
        assert!(is_above_limit(LIMIT + 0.06));
    }

    #[test]
    fn a_line_too_many_fails_the_check() {
        let mut wording = Wording::default();
        wording.add("file", &"// A noun.\n".repeat(49), Language::Slashes);
        assert!(!is_above_limit(wording.per_cent()));
        wording.add("file", "// What it is.\n", Language::Slashes);
        assert!(!is_above_limit(wording.per_cent()), "one of fifty");
        wording.add("file", "// Whoever has it.\n", Language::Slashes);
        assert!(is_above_limit(wording.per_cent()), "two of fifty-one");
    }
}
