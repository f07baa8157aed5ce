//! Counts the lines of Rust that are longer than [`WIDTH`], and wraps comments.
//!
//! rustfmt wraps code, but not comments, texts and the inside of macros. Lines that cannot be
//! shorter do not count: those with a text, the rows of tables, and words without a blank. Each
//! folder may have as many of the others as `xtask/widths.toml` says.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::{limits::Limits, tree};

/// The most columns of a line.
const WIDTH: usize = 100;
/// The largest counts, by folder.
const LIMITS: &str = "xtask/widths.toml";

/// Lines of Rust that are too long: the count of each folder
#[derive(Args)]
pub(crate) struct WidthsArgs {
    /// List the lines of these folders
    folders: Vec<String>,
    /// Wrap the comments of the folders
    #[arg(long, requires = "folders")]
    wrap: bool,
}

pub(crate) fn run(args: &WidthsArgs) -> Result<()> {
    for (name, lines) in all()? {
        if args.folders.is_empty() {
            println!("{:5}  {name}", lines.len());
        } else if args.folders.contains(&name) && args.wrap {
            each_file(&tree::root().join(&name), &name, &mut |path, _| {
                let text = fs::read_to_string(path)?;
                let wrapped = wrapped(&text);
                if wrapped == text { Ok(()) } else { Ok(fs::write(path, wrapped)?) }
            })?;
        } else if args.folders.contains(&name) {
            lines.iter().for_each(|line| println!("{line}"));
        }
    }
    Ok(())
}

/// Fails if a folder has more long lines than it may have. Returns the count of all.
pub(crate) fn check() -> Result<String> {
    let (limits, all) = (Limits::read(LIMITS)?, all()?);
    let counts = all.into_iter().map(|(name, lines)| (name, lines.len())).collect();
    let over = limits.over(&counts);
    ensure!(
        over.is_empty(),
        "lines of more than {WIDTH} columns; `cargo xtask widths FOLDER` lists them, and `--wrap` \
         wraps comments:\n{}",
        over.join("\n")
    );
    Ok(format!("{} long lines{}", counts.values().sum::<usize>(), limits.note(&counts)))
}

/// The long lines of each folder.
fn all() -> Result<BTreeMap<String, Vec<String>>> {
    let mut folders = vec!["xtask".to_owned()];
    for entry in fs::read_dir(tree::root().join("crates"))? {
        folders.push(format!("crates/{}", entry?.file_name().to_string_lossy()));
    }
    let mut all = BTreeMap::new();
    for folder in folders {
        let mut lines = Vec::new();
        each_file(&tree::root().join(&folder), &folder, &mut |path, name| {
            let text = fs::read_to_string(path).with_context(|| name.to_owned())?;
            lines
                .extend(long_lines(&text).map(|(number, line)| format!("{name}:{number}: {line}")));
            Ok(())
        })?;
        all.insert(folder, lines);
    }
    Ok(all)
}

/// Calls `each` with every file of Rust in a folder.
fn each_file(
    folder: &Path,
    name: &str,
    each: &mut dyn FnMut(&Path, &str) -> Result<()>,
) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut entries = entries.collect::<std::io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let name = format!("{name}/{}", entry.file_name().to_string_lossy());
        if path.is_dir() {
            each_file(&path, &name, each)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            each(&path, &name)?;
        }
    }
    Ok(())
}

/// The lines that are too long and could be shorter, with their numbers.
fn long_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fence = Fence::default();
    (1..).zip(text.lines()).filter(move |(_, line)| fence.is_long(line))
}

/// Whether the lines of a comment are an example of code.
#[derive(Default)]
struct Fence(bool);

impl Fence {
    /// Whether the next line is too long and could be shorter.
    fn is_long(&mut self, line: &str) -> bool {
        self.0 = match Comment::of(line) {
            Some(comment) => self.0 ^ comment.text.starts_with("```"),
            None => false,
        };
        !self.0 && line.chars().count() > WIDTH && is_breakable(line)
    }
}

fn is_breakable(line: &str) -> bool {
    match Comment::of(line) {
        Some(comment) => !comment.is_table() && comment.text.contains(' '),
        None => !line.contains('"'),
    }
}

/// A line that is a comment.
#[derive(Clone, Copy)]
struct Comment<'a> {
    /// Blanks, slashes and blanks.
    head: &'a str,
    text: &'a str,
}

impl<'a> Comment<'a> {
    fn of(line: &'a str) -> Option<Self> {
        let after = line.trim_start().strip_prefix("//")?;
        let text = after.trim_start_matches(['/', '!']).trim_start();
        Some(Self { head: line.strip_suffix(text)?, text })
    }

    fn is_table(&self) -> bool {
        self.text.starts_with('|')
    }

    /// Whether the text begins a block of its own: an item, a heading, a row, a fence.
    fn begins_block(&self) -> bool {
        let numbered = self.text.split_once(". ").is_some_and(|(number, _)| {
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        });
        let marks = ["- ", "* ", "#", "|", "```", "SAFETY:", "["];
        numbered || marks.iter().any(|mark| self.text.starts_with(mark))
    }

    /// Blanks and slashes of the lines behind this one.
    fn next_head(&self) -> String {
        let item = match self.text.split_once(' ') {
            Some((mark, _)) if matches!(mark, "-" | "*") || self.begins_numbered() => {
                " ".repeat(mark.len() + 1)
            }
            _ => String::new(),
        };
        format!("{}{item}", self.head)
    }

    fn begins_numbered(&self) -> bool {
        self.text.split_once(". ").is_some_and(|(number, _)| number.parse::<u32>().is_ok())
    }
}

/// The text with its long comments wrapped, each with the rest of its paragraph.
fn wrapped(text: &str) -> String {
    let mut lines = text.lines().peekable();
    let mut out = String::with_capacity(text.len());
    let mut fence = Fence::default();
    while let Some(line) = lines.next() {
        let is_long = fence.is_long(line);
        let Some(comment) = Comment::of(line).filter(|_| is_long) else {
            out.push_str(line);
            out.push('\n');
            continue;
        };
        let head = comment.next_head();
        let mut words: Vec<&str> = comment.text.split(' ').collect();
        while let Some(next) = lines.peek().copied().and_then(Comment::of) {
            if next.head != head || next.text.is_empty() || next.begins_block() {
                break;
            }
            words.extend(next.text.split(' '));
            lines.next();
        }
        fill(&mut out, comment.head, &head, &words);
    }
    out
}

/// Writes words into lines. A mark stays behind its word.
fn fill(out: &mut String, first: &str, head: &str, words: &[&str]) {
    let mut line = first.to_owned();
    let mut is_new = true;
    for (number, word) in words.iter().enumerate() {
        let marks = words[number + 1..].iter().take_while(|word| is_mark(word));
        let len = word.chars().count() + marks.map(|mark| 1 + mark.chars().count()).sum::<usize>();
        let fits = line.chars().count() + 1 + len <= WIDTH;
        if !is_new && !fits && !is_mark(word) {
            out.push_str(&line);
            out.push('\n');
            line = head.to_owned();
            is_new = true;
        }
        if !is_new {
            line.push(' ');
        }
        line.push_str(word);
        is_new = false;
    }
    out.push_str(&line);
    out.push('\n');
}

/// Whether a word at the start of a line would begin a block in Markdown.
fn is_mark(word: &str) -> bool {
    let is_number = word.strip_suffix('.').is_some_and(|number| number.parse::<u32>().is_ok());
    is_number || matches!(word, "-" | "*" | "+") || word.starts_with(['#', '>', '|'])
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: &str = "a word of many words that make a line which is longer than it may be, for \
                        there are more than a hundred columns";

    #[test]
    fn lines_that_cannot_be_shorter_do_not_count() {
        let path = "x".repeat(WIDTH);
        for line in
            [format!("/// | {LONG} |"), format!("let x = \"{LONG}\";"), format!("// {path}")]
        {
            assert_eq!(long_lines(&line).count(), 0, "{line}");
        }
        for line in [format!("/// {LONG}"), format!("    // {LONG}"), format!("f({path})")] {
            assert_eq!(long_lines(&line).count(), 1, "{line}");
        }
        assert_eq!(long_lines(&format!("//{}", " x".repeat(WIDTH / 2 - 1))).count(), 0);
    }

    #[test]
    fn a_long_comment_is_wrapped_with_the_rest_of_its_paragraph() {
        let text = format!("    /// {LONG}\n    /// and the rest.\n    ///\n    /// More.\nf();\n");
        let wrapped = wrapped(&text);
        assert!(wrapped.lines().all(|line| line.len() <= WIDTH && !line.ends_with(' ')));
        assert!(
            wrapped.contains("columns and the rest.\n    ///\n    /// More.\nf();\n"),
            "{wrapped}"
        );
        let words = |text: &str| text.replace("///", "").split_whitespace().collect::<String>();
        assert_eq!(words(&wrapped), words(&text));
    }

    #[test]
    fn items_stay_items_and_code_stays_code() {
        let text = format!("/// - {LONG}\n/// - next\n");
        let lines: Vec<_> = wrapped(&text).lines().map(str::to_owned).collect();
        assert!(lines[1].starts_with("///   ") && lines[2] == "/// - next", "{lines:?}");
        for mark in ["-", "+", "7.", "#1"] {
            for room in 1..8 {
                let text = format!("// {} yy {mark} {LONG}\n", "x".repeat(WIDTH - 3 - room));
                let wrapped = wrapped(&text);
                assert!(!wrapped.contains(&format!("// {mark}")), "{wrapped}");
                assert!(wrapped.lines().all(|line| line.len() <= WIDTH), "{wrapped}");
            }
        }
        let code = format!("/// ```\n/// {LONG}\n/// ```\n/// | {LONG} |\n");
        assert_eq!(wrapped(&code), code);
        assert_eq!(long_lines(&code).count(), 0);
    }
}
