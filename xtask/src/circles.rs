//! Finds modules that import each other in a circle: such modules are one, in several files.
//!
//! A module and its submodules may import each other. Tests are skipped: they may import
//! everything.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result, ensure};
use petgraph::{algo::tarjan_scc, graphmap::DiGraphMap};
use syn::{
    File, Item, ItemMod, ItemUse, UseTree,
    visit_mut::{self, VisitMut},
};

use crate::tree;

/// The path of a module in its crate.
type Module = Vec<String>;

/// Fails if a crate has a circle.
pub(crate) fn check() -> Result<()> {
    let mut found = Vec::new();
    for (name, circles) in all()? {
        found.extend(circles.iter().map(|circle| format!("{name}: {}", circle.join(" "))));
    }
    ensure!(found.is_empty(), "modules import each other in a circle:\n{}", found.join("\n"));
    Ok(())
}

pub(crate) fn print() -> Result<()> {
    for (name, circles) in all()? {
        println!("{name}: {}", if circles.is_empty() { "no circle" } else { "" });
        circles.iter().for_each(|circle| println!("  {}: {}", circle.len(), circle.join(" ")));
    }
    Ok(())
}

/// The circles of each crate.
fn all() -> Result<BTreeMap<String, Vec<Vec<String>>>> {
    let mut folders = vec![tree::root().join("xtask")];
    for entry in fs::read_dir(tree::root().join("crates"))? {
        folders.push(entry?.path());
    }
    let circles = |folder: &Path| {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok((name, circles_of(&folder.join("src"))?))
    };
    folders.iter().map(|folder| circles(folder)).collect()
}

fn circles_of(src: &Path) -> Result<Vec<Vec<String>>> {
    let mut files = BTreeMap::new();
    read(src, &mut Vec::new(), &mut files)?;
    let modules: BTreeSet<&Module> = files.keys().collect();
    let mut graph = DiGraphMap::<&Module, ()>::new();
    for (module, file) in &files {
        let mut paths = Paths { module: module.clone(), found: Vec::new() };
        paths.visit_file_mut(&mut file.clone());
        for path in paths.found {
            // A path belongs to the longest module that it begins with.
            let named = (1..=path.len()).rev().map(|len| path[..len].to_vec());
            let Some(target) = named.filter_map(|name| modules.get(&name).copied()).next() else {
                continue;
            };
            if !target.starts_with(module) && !module.starts_with(target) {
                graph.add_edge(module, target, ());
            }
        }
    }
    let circles = tarjan_scc(&graph).into_iter().filter(|circle| circle.len() > 1);
    let mut circles: Vec<Vec<String>> = circles
        .map(|circle| circle.into_iter().map(|module| module.join("::")).collect())
        .collect();
    circles.iter_mut().for_each(|circle| circle.sort());
    circles.sort();
    Ok(circles)
}

/// Reads the files of a folder, which are modules inside `inside`.
fn read(folder: &Path, inside: &mut Module, files: &mut BTreeMap<Module, File>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with("tests") {
            continue;
        }
        inside.push(name.clone());
        if path.is_dir() {
            read(&path, inside, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path)?;
            let file = syn::parse_file(&text).with_context(|| path.display().to_string())?;
            let is_folders = ["mod", "lib", "main"].contains(&name.as_str());
            let module = if is_folders { &inside[..inside.len() - 1] } else { &inside[..] };
            files.insert(module.to_vec(), file);
        }
        inside.pop();
    }
    Ok(())
}

/// The paths in a module that begin with `crate`, `self` or `super`, from the crate's root.
struct Paths {
    module: Module,
    found: Vec<Module>,
}

impl Paths {
    fn note(&mut self, path: &[String]) {
        let (mut base, mut rest) = (self.module.clone(), path);
        match path.first().map(String::as_str) {
            Some("crate") => (base, rest) = (Vec::new(), &path[1..]),
            Some("self") => rest = &path[1..],
            Some("super") => {
                while rest.first().is_some_and(|part| part == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            _ => return,
        }
        base.extend_from_slice(rest);
        self.found.push(base);
    }

    fn note_use(&mut self, tree: &UseTree, path: &mut Vec<String>) {
        match tree {
            UseTree::Path(part) => {
                path.push(part.ident.to_string());
                self.note_use(&part.tree, path);
                path.pop();
            }
            UseTree::Group(group) => {
                group.items.iter().for_each(|item| self.note_use(item, path));
            }
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                let named: Vec<_> = path.iter().cloned().chain([name]).collect();
                self.note(named.strip_suffix(&["self".into()]).unwrap_or(&named));
            }
            UseTree::Rename(name) => {
                let named: Vec<_> = path.iter().cloned().chain([name.ident.to_string()]).collect();
                self.note(named.strip_suffix(&["self".into()]).unwrap_or(&named));
            }
            UseTree::Glob(_) => self.note(path),
        }
    }
}

impl VisitMut for Paths {
    fn visit_item_mut(&mut self, item: &mut Item) {
        let is_test = |module: &ItemMod| module.attrs.iter().any(|a| a.path().is_ident("cfg"));
        match item {
            // A module with a `cfg` attribute in the same file holds tests.
            Item::Mod(module) if is_test(module) => {}
            _ => visit_mut::visit_item_mut(self, item),
        }
    }

    fn visit_item_use_mut(&mut self, item: &mut ItemUse) {
        self.note_use(&item.tree, &mut Vec::new());
    }

    fn visit_path_mut(&mut self, path: &mut syn::Path) {
        let parts: Vec<_> = path.segments.iter().map(|part| part.ident.to_string()).collect();
        self.note(&parts);
        visit_mut::visit_path_mut(self, path);
    }
}
