//! Finds modules that need each other in a circle: such modules are one, in several files.
//!
//! A module needs another if it imports something from it, or if its part of a type's methods calls
//! a method of that type which the other module has (`self.method()`, `Self::method()`). Calls
//! inside macros are not seen. A module and its submodules may need each other. Tests are skipped:
//! they may import everything.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result, ensure};
use petgraph::{algo::tarjan_scc, graphmap::DiGraphMap};
use syn::{
    Expr, ExprCall, ExprMethodCall, File, ImplItem, Item, ItemImpl, ItemMod, ItemUse, Type,
    UseTree,
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
    ensure!(found.is_empty(), "modules need each other in a circle:\n{}", found.join("\n"));
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
    Ok(circles_among(&files))
}

fn circles_among(files: &BTreeMap<Module, File>) -> Vec<Vec<String>> {
    let modules: BTreeSet<&Module> = files.keys().collect();
    let mut graph = DiGraphMap::<&Module, ()>::new();
    let methods: BTreeMap<&Module, Methods> =
        files.iter().map(|(module, file)| (module, Methods::of(file))).collect();
    for (module, own) in &methods {
        // A method that the module has itself is the one that it calls.
        for called in own.called.difference(&own.defined) {
            let mut having = methods.iter().filter(|(_, other)| other.defined.contains(called));
            // Types of one name are not told apart: several modules may have such a method.
            if let (Some((target, _)), None) = (having.next(), having.next())
                && !target.starts_with(module)
                && !module.starts_with(target)
            {
                graph.add_edge(*module, *target, ());
            }
        }
    }
    for (module, file) in files {
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
    circles
}

/// A type and the name of a method of it.
type Method = (String, String);

/// The methods that a module has, and those of the same types that these call.
#[derive(Default)]
struct Methods {
    defined: BTreeSet<Method>,
    called: BTreeSet<Method>,
    /// The type whose methods are being read.
    of: Option<String>,
}

impl Methods {
    fn of(file: &File) -> Self {
        let mut methods = Self::default();
        methods.visit_file_mut(&mut file.clone());
        methods
    }

    fn note_call(&mut self, name: String) {
        self.called.extend(self.of.clone().map(|of| (of, name)));
    }
}

impl VisitMut for Methods {
    fn visit_item_mut(&mut self, item: &mut Item) {
        if !is_test(item) {
            visit_mut::visit_item_mut(self, item);
        }
    }

    fn visit_item_impl_mut(&mut self, item: &mut ItemImpl) {
        let Type::Path(path) = &*item.self_ty else { return };
        let outer = std::mem::replace(
            &mut self.of,
            path.path.segments.last().map(|segment| segment.ident.to_string()),
        );
        for method in &item.items {
            if let (ImplItem::Fn(method), Some(of)) = (method, &self.of) {
                self.defined.insert((of.clone(), method.sig.ident.to_string()));
            }
        }
        visit_mut::visit_item_impl_mut(self, item);
        self.of = outer;
    }

    fn visit_expr_method_call_mut(&mut self, call: &mut ExprMethodCall) {
        if matches!(&*call.receiver, Expr::Path(receiver) if receiver.path.is_ident("self")) {
            self.note_call(call.method.to_string());
        }
        visit_mut::visit_expr_method_call_mut(self, call);
    }

    fn visit_expr_call_mut(&mut self, call: &mut ExprCall) {
        if let Expr::Path(function) = &*call.func {
            let parts: Vec<_> = function.path.segments.iter().map(|part| &part.ident).collect();
            if let [of, name] = parts[..]
                && (of == "Self" || self.of.as_ref().is_some_and(|known| of == known))
            {
                self.note_call(name.to_string());
            }
        }
        visit_mut::visit_expr_call_mut(self, call);
    }
}

/// Whether an item is a module with a `cfg` attribute in the same file: such modules hold tests.
fn is_test(item: &Item) -> bool {
    let has_cfg = |module: &ItemMod| module.attrs.iter().any(|a| a.path().is_ident("cfg"));
    matches!(item, Item::Mod(module) if has_cfg(module))
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
        if !is_test(item) {
            visit_mut::visit_item_mut(self, item);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn circles(files: [(&str, &str); 2]) -> Vec<Vec<String>> {
        let parsed = files.map(|(name, text)| {
            (vec![name.to_owned()], syn::parse_file(text).expect("it is Rust"))
        });
        circles_among(&parsed.into_iter().collect())
    }

    const BACK: (&str, &str) = ("b", "impl T { fn back(&self) { self.front() } }");

    #[test]
    fn methods_of_one_type_that_call_each_other_across_modules_are_a_circle() {
        for calls in ["self.back()", "Self::back(self)", "T::back(self)", "(|| self.back())()"] {
            let front = format!("impl T {{ fn front(&self) {{ {calls} }} }}");
            assert_eq!(circles([("a", &front), BACK]), [["a", "b"]], "{calls}");
        }
        for alone in [
            "impl T { fn front(&self) { self.other.back() } }",
            "impl Other { fn front(&self) { self.back() } }",
            "impl T { fn front(&self) { self.back() } fn back(&self) {} }",
            "impl T { fn front(&self) {} }  #[cfg(test)] mod tests { impl T { fn t(&self) { self.back() } } }",
        ] {
            assert!(circles([("a", alone), BACK]).is_empty(), "{alone}");
        }
    }

    #[test]
    fn an_import_and_a_call_back_are_a_circle() {
        let importing = "use crate::b::Thing; impl T { fn front(&self) {} }";
        assert_eq!(circles([("a", importing), BACK]), [["a", "b"]]);
    }
}
