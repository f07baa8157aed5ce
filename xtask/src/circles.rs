//! Finds modules that need each other in a circle: such modules are one, in several files.
//!
//! A module needs another if it imports something from it, or calls a method that the other module
//! has: of the `impl` block's own type (`self.method()`, `Self::method()`), or of a field, a
//! parameter or a variable, where the source names its type. Calls inside macros and on values of
//! other types are not seen. A module has its submodules without needing them, and they may need
//! it; so a module and its submodules are in a circle only if it goes through a module outside.
//! Tests are skipped: they may import everything.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result, ensure};
use petgraph::{algo::tarjan_scc, graphmap::DiGraphMap};
use syn::{
    Arm, Block, Expr, ExprCall, ExprClosure, ExprForLoop, ExprIf, ExprMethodCall, ExprWhile, File,
    FnArg, GenericArgument, ImplItem, ImplItemFn, Item, ItemFn, ItemImpl, ItemMod, ItemUse, Local,
    Member, Pat, PatIdent, PathArguments, ReturnType, Token, Type, UnOp, UseTree,
    punctuated::Punctuated,
    visit_mut::{self, VisitMut},
};

use crate::tree;

/// The path of a module in its crate.
type Module = Vec<String>;

/// Fails if a crate has a circle.
pub(crate) fn check() -> Result<()> {
    let mut found = Vec::new();
    for (name, needs) in all()? {
        let circles = needs.circles();
        found.extend(circles.iter().map(|circle| format!("{name}: {}", circle.join(" "))));
    }
    ensure!(found.is_empty(), "modules need each other in a circle:\n{}", found.join("\n"));
    Ok(())
}

pub(crate) fn print() -> Result<()> {
    for (name, needs) in all()? {
        let circles = needs.circles();
        println!("{name}: {}", if circles.is_empty() { "no circle" } else { "" });
        for circle in circles {
            println!("  {}: {}", circle.len(), circle.join(" "));
            needs.within(&circle).iter().for_each(|need| println!("    {need}"));
        }
    }
    Ok(())
}

/// The needs of each crate's modules.
fn all() -> Result<BTreeMap<String, Needs>> {
    let mut folders = vec![tree::root().join("xtask")];
    for entry in fs::read_dir(tree::root().join("crates"))? {
        folders.push(entry?.path());
    }
    let needs = |folder: &Path| {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut files = BTreeMap::new();
        read(&folder.join("src"), &mut Vec::new(), &mut files)?;
        Ok((name, Needs::among(files)))
    };
    folders.iter().map(|folder| needs(folder)).collect()
}

/// The pairs of modules of which the first needs the second, with the names that it uses of it.
#[derive(Default)]
struct Needs(BTreeMap<(Module, Module), BTreeSet<String>>);

impl Needs {
    /// The needs of these modules. The visitors change no file.
    fn among(mut files: BTreeMap<Module, File>) -> Self {
        let mut needs = Self::default();
        let modules: BTreeSet<Module> = files.keys().cloned().collect();
        let known = TypeIndex::of(&mut files);
        for (module, file) in &mut files {
            let mut paths = Paths { module: module.clone(), found: Vec::new() };
            paths.visit_file_mut(file);
            for path in paths.found {
                // A path belongs to the longest module that it begins with.
                let mut named = (1..=path.len()).rev().map(|len| path[..len].to_vec());
                if let Some(target) = named.find(|name| modules.contains(name)) {
                    let used = path[target.len()..].join("::");
                    needs.0.entry((module.clone(), target)).or_default().insert(used);
                }
            }
        }
        let methods: Vec<(&Module, Methods<'_>)> =
            files.iter_mut().map(|(module, file)| (module, Methods::of(file, &known))).collect();
        let mut defined = BTreeMap::<&Method, Vec<&Module>>::new();
        for (module, own) in &methods {
            own.defined.iter().for_each(|method| defined.entry(method).or_default().push(module));
        }
        for (module, own) in &methods {
            // A method that the module has itself is the one that it calls.
            for method in own.called.difference(&own.defined) {
                // Types of one name are not told apart: several modules may have such a method.
                if let Some([target]) = defined.get(method).map(Vec::as_slice) {
                    let used = needs.0.entry(((*module).clone(), (*target).clone())).or_default();
                    used.insert(format!("{}::{}()", method.0, method.1));
                }
            }
        }
        needs
    }

    fn circles(&self) -> Vec<Vec<String>> {
        let mut graph = DiGraphMap::<&Module, ()>::new();
        for (module, target) in self.0.keys() {
            if !target.starts_with(module) {
                graph.add_edge(module, target, ());
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

    /// The needs between the modules of a circle: "a -> b: the names that it uses".
    fn within(&self, circle: &[String]) -> Vec<String> {
        let mut needs = BTreeMap::<(String, String), BTreeSet<&str>>::new();
        for ((module, target), used) in &self.0 {
            let pair = (module.join("::"), target.join("::"));
            let is_inside = circle.contains(&pair.0) && circle.contains(&pair.1);
            if is_inside && !target.starts_with(module) {
                needs.entry(pair).or_default().extend(used.iter().map(String::as_str));
            }
        }
        let line = |((module, target), used): ((String, String), BTreeSet<&str>)| {
            format!("{module} -> {target}: {}", used.into_iter().collect::<Vec<_>>().join(", "))
        };
        needs.into_iter().map(line).collect()
    }
}

/// A type and the name of a method of it.
type Method = (String, String);

/// The types of fields and of results that the sources of a crate name.
#[derive(Default)]
struct TypeIndex {
    /// The modules that define a type of this name.
    types: BTreeMap<String, BTreeSet<Module>>,
    /// The types of fields, by the type that has them.
    fields: BTreeMap<Method, Option<String>>,
    /// The types that methods return.
    returned: BTreeMap<Method, Option<String>>,
}

impl TypeIndex {
    fn of(files: &mut BTreeMap<Module, File>) -> Self {
        let mut known = Self::default();
        for (module, file) in files {
            KnownTypes { known: &mut known, module, of: None }.visit_file_mut(file);
        }
        known
    }

    /// Whether only one module defines a type of this name.
    fn is_one(&self, name: &str) -> bool {
        self.types.get(name).is_some_and(|modules| modules.len() == 1)
    }

    fn field(&self, of: String, name: String) -> Option<String> {
        self.fields.get(&(of, name)).cloned().flatten()
    }

    fn returned(&self, of: &str, method: &str) -> Option<String> {
        self.returned.get(&(of.to_owned(), method.to_owned())).cloned().flatten()
    }
}

/// Collects the types of a module.
struct KnownTypes<'a> {
    known: &'a mut TypeIndex,
    module: &'a Module,
    of: Option<String>,
}

impl KnownTypes<'_> {
    fn define(&mut self, name: &str) {
        let modules = self.known.types.entry(name.to_owned()).or_default();
        modules.insert(self.module.clone());
    }
}

impl VisitMut for KnownTypes<'_> {
    fn visit_item_mut(&mut self, item: &mut Item) {
        if is_test(item) {
            return;
        }
        match item {
            Item::Enum(item) => self.define(&item.ident.to_string()),
            Item::Struct(item) => {
                let name = item.ident.to_string();
                self.define(&name);
                for field in &item.fields {
                    if let Some(field_name) = &field.ident {
                        let key = (name.clone(), field_name.to_string());
                        insert_once(&mut self.known.fields, key, name_of(&field.ty, Some(&name)));
                    }
                }
            }
            _ => {}
        }
        visit_mut::visit_item_mut(self, item);
    }

    fn visit_item_impl_mut(&mut self, item: &mut ItemImpl) {
        let outer = std::mem::replace(&mut self.of, name_of(&item.self_ty, None));
        visit_mut::visit_item_impl_mut(self, item);
        self.of = outer;
    }

    fn visit_impl_item_fn_mut(&mut self, method: &mut ImplItemFn) {
        if let (Some(of), ReturnType::Type(_, returned)) = (&self.of, &method.sig.output) {
            let key = (of.clone(), method.sig.ident.to_string());
            insert_once(&mut self.known.returned, key, name_of(returned, Some(of)));
        }
    }
}

/// Keeps a type that is said once, or always alike.
fn insert_once(types: &mut BTreeMap<Method, Option<String>>, key: Method, name: Option<String>) {
    let said = types.entry(key).or_insert_with(|| name.clone());
    if *said != name {
        *said = None;
    }
}

/// Pointers: they have few methods, and lend those of the type that they point to.
const POINTERS: [&str; 3] = ["Arc", "Box", "Rc"];

/// The name of a type, seen through references and pointers.
fn name_of(ty: &Type, own: Option<&str>) -> Option<String> {
    match ty {
        Type::Reference(reference) => name_of(&reference.elem, own),
        Type::Paren(inner) => name_of(&inner.elem, own),
        Type::Path(path) if path.qself.is_none() => {
            let last = path.path.segments.last()?;
            let name = last.ident.to_string();
            match &last.arguments {
                PathArguments::AngleBracketed(arguments) if POINTERS.contains(&name.as_str()) => {
                    match arguments.args.first()? {
                        GenericArgument::Type(inner) => name_of(inner, own),
                        _ => None,
                    }
                }
                _ if name == "Self" => own.map(str::to_owned),
                _ => Some(name),
            }
        }
        _ => None,
    }
}

/// The methods that a module has, and those that it calls.
struct Methods<'a> {
    known: &'a TypeIndex,
    defined: BTreeSet<Method>,
    called: BTreeSet<Method>,
    /// The type of the `impl` block.
    of: Option<String>,
    /// The types of variables; none where it is not known.
    variables: BTreeMap<String, Option<String>>,
}

impl<'a> Methods<'a> {
    fn of(file: &mut File, known: &'a TypeIndex) -> Self {
        let (defined, called) = Default::default();
        let variables = BTreeMap::new();
        let mut methods = Self { known, defined, called, of: None, variables };
        methods.visit_file_mut(file);
        methods
    }

    /// The name of an expression's type, if it can be told.
    fn type_of(&self, expr: &Expr) -> Option<String> {
        match expr {
            Expr::Path(path) => {
                let name = path.path.get_ident()?;
                if name == "self" { self.of.clone() } else { self.variable(&name.to_string()) }
            }
            Expr::Field(field) => match &field.member {
                Member::Named(name) => {
                    self.known.field(self.type_of(&field.base)?, name.to_string())
                }
                Member::Unnamed(_) => None,
            },
            Expr::Paren(inner) => self.type_of(&inner.expr),
            Expr::Reference(inner) => self.type_of(&inner.expr),
            Expr::Unary(inner) if matches!(inner.op, UnOp::Deref(_)) => self.type_of(&inner.expr),
            Expr::MethodCall(call) => {
                self.known.returned(&self.type_of(&call.receiver)?, &call.method.to_string())
            }
            Expr::Call(call) => {
                let (of, name) = self.function_of(call)?;
                // `Arc::clone(&x)` is as `x`.
                match (POINTERS.contains(&of.as_str()), call.args.first()) {
                    (true, Some(argument)) if name == "clone" || name == "new" => {
                        self.type_of(argument)
                    }
                    _ => self.known.returned(&of, &name),
                }
            }
            _ => None,
        }
    }

    fn variable(&self, name: &str) -> Option<String> {
        self.variables.get(name).cloned().flatten()
    }

    /// The type and the name in `Type::function(...)`.
    fn function_of(&self, call: &ExprCall) -> Option<Method> {
        let Expr::Path(function) = &*call.func else { return None };
        let parts: Vec<_> =
            function.path.segments.iter().map(|part| part.ident.to_string()).collect();
        let [.., of, name] = &parts[..] else { return None };
        let of = if of == "Self" { self.of.clone()? } else { of.clone() };
        Some((of, name.clone()))
    }

    fn note_call(&mut self, of: Option<String>, name: String) {
        let Some(of) = of else { return };
        if self.of.as_ref() == Some(&of) || self.known.is_one(&of) {
            self.called.insert((of, name));
        }
    }

    /// Reads a part of the code. Its variables end with it.
    fn scoped(&mut self, read: impl FnOnce(&mut Self)) {
        let outer = self.variables.clone();
        read(self);
        self.variables = outer;
    }

    fn declare(&mut self, inputs: &Punctuated<FnArg, Token![,]>) {
        for input in inputs {
            if let FnArg::Typed(typed) = input
                && let Pat::Ident(pattern) = &*typed.pat
            {
                let name = name_of(&typed.ty, self.of.as_deref());
                self.variables.insert(pattern.ident.to_string(), name);
            }
        }
    }
}

impl VisitMut for Methods<'_> {
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

    fn visit_item_fn_mut(&mut self, function: &mut ItemFn) {
        self.scoped(|this| {
            this.variables.clear();
            this.declare(&function.sig.inputs);
            this.visit_block_mut(&mut function.block);
        });
    }

    fn visit_impl_item_fn_mut(&mut self, method: &mut ImplItemFn) {
        self.scoped(|this| {
            this.variables.clear();
            this.declare(&method.sig.inputs);
            this.visit_block_mut(&mut method.block);
        });
    }

    fn visit_block_mut(&mut self, block: &mut Block) {
        self.scoped(|this| visit_mut::visit_block_mut(this, block));
    }

    fn visit_arm_mut(&mut self, arm: &mut Arm) {
        self.scoped(|this| visit_mut::visit_arm_mut(this, arm));
    }

    fn visit_expr_closure_mut(&mut self, closure: &mut ExprClosure) {
        self.scoped(|this| visit_mut::visit_expr_closure_mut(this, closure));
    }

    fn visit_expr_if_mut(&mut self, branch: &mut ExprIf) {
        self.scoped(|this| visit_mut::visit_expr_if_mut(this, branch));
    }

    fn visit_expr_while_mut(&mut self, repeated: &mut ExprWhile) {
        self.scoped(|this| visit_mut::visit_expr_while_mut(this, repeated));
    }

    fn visit_expr_for_loop_mut(&mut self, repeated: &mut ExprForLoop) {
        self.scoped(|this| visit_mut::visit_expr_for_loop_mut(this, repeated));
    }

    fn visit_local_mut(&mut self, local: &mut Local) {
        // The old variables are those of the value.
        if let Some(init) = &mut local.init {
            self.visit_local_init_mut(init);
        }
        self.visit_pat_mut(&mut local.pat);
        let value = local.init.as_ref().filter(|init| init.diverge.is_none());
        let (name, known) = match &local.pat {
            Pat::Ident(pattern) => (pattern, value.and_then(|init| self.type_of(&init.expr))),
            Pat::Type(typed) => match &*typed.pat {
                Pat::Ident(pattern) => (pattern, name_of(&typed.ty, self.of.as_deref())),
                _ => return,
            },
            _ => return,
        };
        self.variables.insert(name.ident.to_string(), known);
    }

    /// A name in a pattern hides the variable of this name.
    fn visit_pat_ident_mut(&mut self, pattern: &mut PatIdent) {
        self.variables.insert(pattern.ident.to_string(), None);
        visit_mut::visit_pat_ident_mut(self, pattern);
    }

    fn visit_expr_method_call_mut(&mut self, call: &mut ExprMethodCall) {
        let of = self.type_of(&call.receiver);
        self.note_call(of, call.method.to_string());
        visit_mut::visit_expr_method_call_mut(self, call);
    }

    fn visit_expr_call_mut(&mut self, call: &mut ExprCall) {
        if let Some((of, name)) = self.function_of(call) {
            self.note_call(Some(of), name);
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

    fn needs<const N: usize>(files: [(&str, &str); N]) -> Needs {
        let parsed = files.map(|(name, text)| {
            let module = name.split("::").map(str::to_owned).collect();
            (module, syn::parse_file(text).expect("it is Rust"))
        });
        Needs::among(parsed.into_iter().collect())
    }

    fn circles<const N: usize>(files: [(&str, &str); N]) -> Vec<Vec<String>> {
        needs(files).circles()
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

    #[test]
    fn the_needs_within_a_circle_are_told_with_the_names_that_are_used() {
        let front = "use crate::b::{Thing, other}; impl T { fn front(&self) { self.back() } }";
        let outside = ("c", "use crate::b::Thing;");
        let needs = needs([("a", front), BACK, outside]);
        let circles = needs.circles();
        let told = ["a -> b: T::back(), Thing, other", "b -> a: T::front()"];
        assert_eq!(needs.within(&circles[0]), told);
    }

    #[test]
    fn a_circle_through_a_module_its_outside_and_its_submodule_is_found() {
        let parent = ("a", "use crate::b::Outside; pub struct Thing;");
        let outside = ("b", "use crate::a::child::Part; pub struct Outside;");
        let child = |text| ("a::child", text);
        let all = [["a", "a::child", "b"]];
        assert_eq!(circles([parent, outside, child("use super::Thing; pub struct Part;")]), all);
        assert!(circles([parent, outside, child("pub struct Part;")]).is_empty());
        // Without a module outside, a module and its submodules are one.
        let inner = [("a", "use self::child::Part; pub struct Thing;"), child("use super::Thing;")];
        assert!(circles(inner).is_empty());
    }

    /// The call back of a type's method from the type that it uses.
    #[test]
    fn calls_of_fields_parameters_and_variables_are_seen_where_their_type_is_named() {
        let back = ("b", "use crate::a::U; impl T { fn back(&self) {} }");
        let found = |text: &str| {
            let front = format!("pub struct U {{ t: Arc<T>, u: Box<U> }} {text}");
            let files = [("a", front.as_str()), back, ("c", "pub struct T {}")];
            circles(files) == [["a", "b"]]
        };
        for seen in [
            "impl U { fn f(&self) { self.t.back() } }",
            "impl U { fn f(&self) { self.u.t.back() } }",
            "impl U { fn f(&self, t: &T) { t.back() } }",
            "fn f(t: Arc<T>) { let again = Arc::clone(&t); again.back() }",
            "impl U { fn t(&self) -> &T { &self.t } fn f(&self) { let t = self.t(); t.back() } }",
            "fn f(u: U) { if true { let u = 1; } u.t.back() }",
            "fn f(t: &T) { T::back(t) }",
        ] {
            assert!(found(seen), "{seen}");
        }
        for unseen in [
            "fn f(t: &T, all: Vec<V>) { for t in all { t.back() } }",
            "fn f(t: &T) { let t = other(); t.back() }",
            "fn f(t: &T) { (|t: V| t.back())(V) }",
            "fn f(t: Option<T>) { t.back() }",
            "fn f<X>(x: X) { x.back() }",
        ] {
            assert!(!found(unseen), "{unseen}");
        }
        // Two types of this name cannot be told apart.
        let front = "pub struct U { t: T } impl U { fn f(&self) { self.t.back() } }";
        let twice = [("a", front), back, ("c", "pub struct T;"), ("d", "pub struct T;")];
        assert!(circles(twice).is_empty());
    }
}
