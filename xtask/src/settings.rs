//! `cargo xtask config-table`: the settings, as docs/settings.md lists them.

use std::fs;

use anyhow::{Context, Result, bail};

use crate::{built, shell::Program, tree};

/// The document's marks before and after the table.
const MARKS: (&str, &str) = ("<!-- settings -->\n", "<!-- /settings -->");

/// The document with the table.
const DOCUMENT: &str = "docs/settings.md";

pub(crate) fn print() -> Result<()> {
    // An example prints the table, so that these commands need not be built with the engine.
    let example = ["run", "--quiet", "--locked", "--package=xtask", "--example=settings"];
    println!("{}", table(Program::cargo(&example))?);
    Ok(())
}

/// Fails if the document does not list the current settings.
pub(crate) fn check() -> Result<()> {
    let document = fs::read_to_string(tree::root().join(DOCUMENT))?;
    let no_table = || format!("{DOCUMENT} has no table of settings");
    let listed = between(&document, MARKS).with_context(no_table)?;
    let table = table(Program::new(built::examples()?.executable("settings")?))?;
    if listed.trim() != table {
        bail!(
            "{DOCUMENT} does not list the settings as they are; between its marks belongs\n{table}"
        );
    }
    Ok(())
}

fn table(program: Program) -> Result<String> {
    match program.ask()? {
        (true, table) => Ok(table),
        (false, said) => bail!("the table of settings: {said}"),
    }
}

fn between<'a>(text: &'a str, (start, end): (&str, &str)) -> Option<&'a str> {
    Some(text.split_once(start)?.1.split_once(end)?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_between_marks_is_found() {
        assert_eq!(between("a[b]c", ("[", "]")), Some("b"));
        assert_eq!(between("a[bc", ("[", "]")), None);
    }
}
