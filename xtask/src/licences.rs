//! Licences and advisories of what the project depends on.

use std::{fs, time::Duration};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use spdx::{Expression, ParseMode};

use crate::{shell::Program, test::Done, tree};

/// The part of deny.toml that is read here.
#[derive(Deserialize)]
struct Policy {
    licenses: Licences,
}

#[derive(Deserialize)]
struct Licences {
    allow: Vec<String>,
    exceptions: Vec<Exceptions>,
}

/// What one dependency may have besides.
#[derive(Deserialize)]
struct Exceptions {
    #[serde(rename = "crate")]
    name: String,
    allow: Vec<String>,
}

impl Licences {
    fn allow(&self, package: &Package) -> Vec<&str> {
        let exceptions = self.exceptions.iter().filter(|exception| exception.name == package.name);
        let lists = exceptions.map(|exception| &exception.allow).chain([&self.allow]);
        lists.flatten().map(String::as_str).collect()
    }
}

/// The part of cargo's metadata that is read here.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
}

/// Checks every dependency's licence against the list in deny.toml.
pub(crate) fn check() -> Result<Done> {
    let text =
        fs::read_to_string(tree::root().join("deny.toml")).context("cannot read deny.toml")?;
    let policy: Policy = toml::from_str(&text).context("deny.toml")?;
    let program = Program::cargo(&["metadata", "--locked", "--all-features", "--format-version=1"]);
    let (well, said) = program.ask()?;
    if !well {
        bail!("cargo metadata: {said}");
    }
    let metadata: Metadata = serde_json::from_str(&said).context("cargo metadata")?;
    let refused: Vec<_> = metadata
        .packages
        .iter()
        .filter_map(|package| {
            let allow = policy.licenses.allow(package);
            let reason = refusal(package.license.as_deref(), &allow)?;
            Some(format!("{} {}: {reason}", package.name, package.version))
        })
        .collect();
    match refused.is_empty() {
        true => Ok(Done::with(format!("{} packages", metadata.packages.len()))),
        false => bail!("licences that deny.toml does not allow:\n  {}", refused.join("\n  ")),
    }
}

/// Why a licence is not allowed; none if it is.
fn refusal(licence: Option<&str>, allow: &[&str]) -> Option<String> {
    let Some(licence) = licence else { return Some("names no licence".into()) };
    // Older packages write MIT/Apache-2.0.
    match Expression::parse_mode(licence, ParseMode::LAX) {
        Err(error) => Some(format!("{licence:?} is not a licence: {}", error.reason)),
        Ok(expression) => {
            let allowed = expression.evaluate(|one| allow.contains(&one.to_string().as_str()));
            (!allowed).then(|| licence.to_owned())
        }
    }
}

/// Looks for known faults, where cargo-deny is installed and its database can be had.
pub(crate) fn advisories() -> Result<Done> {
    if !Program::cargo(&["deny", "--version"]).works() {
        return Ok(Done::skipped("lacks cargo-deny (cargo install --locked cargo-deny)"));
    }
    let (fetched, said) = Program::cargo(&["deny", "fetch", "db"]).ask()?;
    if !fetched {
        let reason = said.lines().last().unwrap_or_default();
        return Ok(Done::skipped(format!("lacks the database of advisories: {reason}")));
    }
    let program =
        Program::cargo(&["deny", "check", "--disable-fetch", "advisories", "bans", "sources"]);
    program.limit(Duration::from_secs(120)).run()?;
    Ok(Done::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences_are_read_as_expressions() {
        let allow = ["MIT", "Apache-2.0 WITH LLVM-exception"];
        for allowed in
            ["MIT", "MIT OR GPL-3.0-only", "GPL-3.0-only/MIT", "Apache-2.0 WITH LLVM-exception"]
        {
            assert_eq!(refusal(Some(allowed), &allow), None);
        }
        for refused in ["GPL-3.0-only", "MIT AND GPL-3.0-only", "Apache-2.0", "none of these"] {
            assert!(refusal(Some(refused), &allow).is_some(), "{refused}");
        }
        assert!(refusal(None, &allow).is_some());
    }

    #[test]
    fn an_exception_is_for_one_dependency() {
        let exception = Exceptions { name: "one".into(), allow: vec!["MPL-2.0".into()] };
        let licences = Licences { allow: vec!["MIT".into()], exceptions: vec![exception] };
        let package =
            |name: &str| Package { name: name.into(), version: "1".into(), license: None };
        assert_eq!(licences.allow(&package("one")), ["MPL-2.0", "MIT"]);
        assert_eq!(licences.allow(&package("two")), ["MIT"]);
    }
}
