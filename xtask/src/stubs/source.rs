//! The classes and functions of the extension module, from its sources.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use syn::{
    Attribute, Expr, FnArg, ImplItem, Item, ItemMacro, ItemStruct, Lit, Meta, Pat, Signature, Type,
};

use super::{
    tokens::{List, ListedParam, Options, Params, Signatures, Transfers},
    types::{Place, Types},
};

/// The extension module.
pub(super) struct Module {
    pub(super) classes: Vec<Class>,
    pub(super) functions: Vec<Function>,
    /// Definitions of the types of arguments.
    pub(super) definitions: Vec<String>,
    /// All names of parameters, by the methods whose signatures are in the table.
    pub(super) names: BTreeMap<String, Vec<String>>,
}

pub(super) struct Class {
    pub(super) name: String,
    pub(super) doc: String,
    /// Whether Python may derive a class from it.
    pub(super) is_base: bool,
    pub(super) methods: Vec<Function>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    New,
    Method,
    Static,
    Getter,
    Setter,
    Free,
}

pub(super) struct Function {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) doc: String,
    /// Parameters in Python's words, with defaults.
    pub(super) params: Vec<String>,
    pub(super) result: String,
}

/// The sources, read.
#[derive(Default)]
struct Sources {
    types: Types,
    /// The names and the type of each parameter.
    params: BTreeMap<String, (Vec<String>, String)>,
    signatures: BTreeMap<String, (String, List)>,
    structs: BTreeMap<String, (usize, ItemStruct)>,
    methods: BTreeMap<String, Vec<Function>>,
    functions: BTreeMap<String, Function>,
}

impl Module {
    /// The module of the sources in a folder.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let mut paths = Vec::new();
        find(folder, &mut paths)?;
        let read = |path: PathBuf| {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            Ok((path, text))
        };
        Self::of(&paths.into_iter().map(read).collect::<Result<Vec<_>>>()?)
    }

    /// The module of sources; `lib.rs` lists its classes and functions.
    fn of(texts: &[(PathBuf, String)]) -> Result<Self> {
        let mut sources = Sources::default();
        let mut files = Vec::new();
        for (number, (path, text)) in texts.iter().enumerate() {
            let mut read = || {
                let items = syn::parse_file(text)?.items;
                items.iter().try_for_each(|item| sources.name(number, item))?;
                Ok::<_, anyhow::Error>(items)
            };
            files.push(read().with_context(|| path.display().to_string())?);
        }
        for (number, items) in files.iter().enumerate() {
            let read = items.iter().try_for_each(|item| sources.read(number, item));
            read.with_context(|| texts[number].0.display().to_string())?;
        }
        let mut module = Self {
            classes: Vec::new(),
            functions: Vec::new(),
            definitions: sources.types.definitions()?,
            names: sources.names(),
        };
        let lib = texts.iter().find(|(path, _)| path.ends_with("lib.rs"));
        let (_, list) = lib.context("no lib.rs")?;
        for name in added(list, "add_class::<", ">()") {
            module.classes.push(sources.class(&name)?);
        }
        for name in added(list, "wrap_pyfunction!(", ",") {
            let function = sources.functions.remove(&name);
            module.functions.push(function.with_context(|| format!("no #[pyfunction] {name}"))?);
        }
        Ok(module)
    }
}

impl Sources {
    /// Reads the names of types, parameters and signatures.
    fn name(&mut self, file: usize, item: &Item) -> Result<()> {
        match item {
            Item::Type(alias) => {
                let key = (file, alias.ident.to_string());
                self.types.aliases.insert(key, (*alias.ty).clone());
            }
            Item::Struct(item) => {
                let name = item.ident.to_string();
                if let Some(options) = options(&item.attrs, "pyclass")? {
                    let python = options.name.unwrap_or_else(|| name.clone());
                    self.types.classes.insert(name.clone(), python);
                    self.structs.insert(name, (file, item.clone()));
                } else if derives_input(&item.attrs) {
                    self.types.inputs.insert(name, (file, item.clone()));
                }
            }
            Item::Macro(item) if item.mac.path.is_ident("params") => {
                let Params(params) = item.mac.parse_body()?;
                self.params.extend(params.into_iter().map(|(id, names, ty)| (id, (names, ty))));
            }
            Item::Macro(item) if item.mac.path.is_ident("signatures") => {
                let Signatures(signatures) = item.mac.parse_body()?;
                let signatures = signatures.into_iter().map(|(id, name, list)| (id, (name, list)));
                self.signatures.extend(signatures);
            }
            _ => {}
        }
        Ok(())
    }

    /// Reads methods and functions.
    fn read(&mut self, file: usize, item: &Item) -> Result<()> {
        match item {
            Item::Impl(item) if item.attrs.iter().any(|a| a.path().is_ident("pymethods")) => {
                let Type::Path(class) = &*item.self_ty else { return Ok(()) };
                let class = class.path.segments.last().map(|s| s.ident.to_string());
                let class = class.unwrap_or_default();
                let python = self.types.classes.get(&class).cloned().unwrap_or_default();
                for item in &item.items {
                    if let ImplItem::Fn(item) = item {
                        let mut method = self.function(file, &item.attrs, &item.sig, false)?;
                        if method.kind == Kind::Static && method.result == "Self" {
                            method.result.clone_from(&python);
                        }
                        self.methods.entry(class.clone()).or_default().push(method);
                    }
                }
            }
            Item::Fn(item) if item.attrs.iter().any(|a| a.path().is_ident("pyfunction")) => {
                let function = self.function(file, &item.attrs, &item.sig, true)?;
                self.functions.insert(item.sig.ident.to_string(), function);
            }
            Item::Macro(item) if item.mac.path.is_ident("transfers") => self.transfers(item)?,
            _ => {}
        }
        Ok(())
    }

    fn transfers(&mut self, item: &ItemMacro) -> Result<()> {
        let Transfers(transfers) = item.mac.parse_body()?;
        for (doc, [run, post]) in transfers {
            let later = format!("{doc}, without waiting: `(ok, transfer_id)`.");
            let pairs = [(run, format!("{doc}."), "bool"), (post, later, "tuple[bool, int]")];
            for ((name, signature), doc, result) in pairs {
                let params = self.listed(&signature, &name)?;
                let (kind, result) = (Kind::Method, result.to_owned());
                let method = Function { name, kind, doc, params, result };
                self.methods.entry("PyEndpoint".to_owned()).or_default().push(method);
            }
        }
        Ok(())
    }

    /// The names that each call of the table takes.
    fn names(&self) -> BTreeMap<String, Vec<String>> {
        let names = |listed: &ListedParam| match listed {
            ListedParam::Name { name, .. } => self.params.get(name).map(|(names, _)| names.clone()),
            _ => None,
        };
        let calls = self.signatures.values();
        calls
            .map(|(call, List(list))| {
                (call.clone(), list.iter().filter_map(names).flatten().collect())
            })
            .collect()
    }

    /// The parameters of a signature of the table.
    fn listed(&self, signature: &str, function: &str) -> Result<Vec<String>> {
        let found = self.signatures.get(signature);
        let (name, List(list)) = found.with_context(|| format!("no signature {signature}"))?;
        if name != function {
            bail!("{function} is documented with the signature of {name}");
        }
        let python = |listed: &ListedParam| match listed {
            ListedParam::Name { name, default } => {
                let found = self.params.get(name);
                let (names, ty) = found.with_context(|| format!("no parameter {name}"))?;
                Ok(parameter(&names[0], ty, default.as_deref()))
            }
            _ => Ok("*".to_owned()),
        };
        list.iter().map(python).collect()
    }

    fn function(
        &self,
        file: usize,
        attributes: &[Attribute],
        sig: &Signature,
        is_free: bool,
    ) -> Result<Function> {
        let has = |name: &str| attributes.iter().any(|a| a.path().is_ident(name));
        let kind = match () {
            () if is_free => Kind::Free,
            () if has("new") => Kind::New,
            () if has("staticmethod") => Kind::Static,
            () if has("getter") => Kind::Getter,
            () if has("setter") => Kind::Setter,
            () => Kind::Method,
        };
        let mut all = options(attributes, "pyfunction")?.unwrap_or_default();
        if let Some(more) = options(attributes, "pyo3")? {
            all.name = more.name.or(all.name);
            all.signature = more.signature;
        }
        let rust = sig.ident.to_string();
        let stripped = match kind {
            Kind::New => "__new__",
            Kind::Getter => rust.strip_prefix("get_").unwrap_or(&rust),
            Kind::Setter => rust.strip_prefix("set_").unwrap_or(&rust),
            _ => &rust,
        };
        let name = all.name.unwrap_or_else(|| stripped.to_owned());
        let params = match (kind, signature_named(attributes)) {
            (Kind::New, _) if self.takes_all(&all.signature) => self.listed("NEW", "Endpoint")?,
            (_, Some(signature)) => self.listed(&signature, &name)?,
            _ => self.of_arguments(file, sig, all.signature)?,
        };
        let result = match kind {
            Kind::New => "Self".to_owned(),
            _ => {
                let place = Place { file, name: &name, is_argument: false };
                self.types.result(&sig.output, place)?
            }
        };
        let doc = doc_of(attributes);
        Ok(Function { name, kind, doc, params, result })
    }

    /// Whether a method takes any arguments, which a signature of the table binds.
    fn takes_all(&self, signature: &Option<List>) -> bool {
        let list = signature.as_ref().map_or(&[][..], |List(list)| list);
        matches!(list, [ListedParam::Rest(_), ListedParam::Keywords])
    }

    /// The parameters of a function that PyO3 binds.
    fn of_arguments(
        &self,
        file: usize,
        sig: &Signature,
        signature: Option<List>,
    ) -> Result<Vec<String>> {
        let mut types = Vec::new();
        for argument in &sig.inputs {
            let FnArg::Typed(argument) = argument else { continue };
            let Pat::Ident(name) = &*argument.pat else {
                bail!("{}: an argument without a name", sig.ident);
            };
            let name = name.ident.to_string();
            if !is_python(&argument.ty) && !is_receiver(&name) {
                types.push((name, &*argument.ty));
            }
        }
        let listed = match signature {
            Some(List(listed)) => listed,
            None => {
                let listed = types
                    .iter()
                    .map(|(name, _)| ListedParam::Name { name: name.clone(), default: None });
                listed.collect()
            }
        };
        let python = |listed: ListedParam| match listed {
            ListedParam::Star => Ok("*".to_owned()),
            ListedParam::Rest(name) => Ok(format!("*{name}: object")),
            ListedParam::Keywords => bail!("{}: keywords of any name", sig.ident),
            ListedParam::Name { name, default } => {
                let found = types.iter().find(|(other, _)| *other == name);
                let (_, ty) = found.with_context(|| format!("no argument {name}"))?;
                let place = Place { file, name: &name, is_argument: true };
                Ok(parameter(&name, &self.types.python(ty, place)?, default.as_deref()))
            }
        };
        listed.into_iter().map(python).collect()
    }

    fn class(&mut self, rust: &str) -> Result<Class> {
        let (file, item) =
            self.structs.get(rust).with_context(|| format!("no #[pyclass] {rust}"))?;
        let options = options(&item.attrs, "pyclass")?.unwrap_or_default();
        let has = |flag: &str| options.flags.iter().any(|f| f == flag);
        let mut methods = self.fields(*file, item, has("get_all"))?;
        methods.extend(self.methods.remove(rust).unwrap_or_default());
        // The constructor first; a setter follows its getter.
        methods.sort_by_key(|method| method.kind != Kind::New);
        let name = options.name.unwrap_or_else(|| rust.to_owned());
        let doc = doc_of(&item.attrs);
        Ok(Class { name, doc, is_base: has("subclass"), methods })
    }

    /// The fields that Python reads and writes.
    fn fields(&self, file: usize, item: &ItemStruct, all: bool) -> Result<Vec<Function>> {
        let mut functions = Vec::new();
        for field in &item.fields {
            let name = field.ident.as_ref().map(ToString::to_string).unwrap_or_default();
            let options = options(&field.attrs, "pyo3")?.unwrap_or_default();
            let has = |flag: &str| options.flags.iter().any(|f| f == flag);
            let place = Place { file, name: &name, is_argument: false };
            if all || has("get") {
                let result = self.types.python(&field.ty, place)?;
                functions.push(Function {
                    name: name.clone(),
                    kind: Kind::Getter,
                    doc: doc_of(&field.attrs),
                    params: Vec::new(),
                    result,
                });
            }
            if has("set") {
                let place = Place { is_argument: true, ..place };
                functions.push(Function {
                    name: name.clone(),
                    kind: Kind::Setter,
                    doc: String::new(),
                    params: vec![parameter(&name, &self.types.python(&field.ty, place)?, None)],
                    result: "None".to_owned(),
                });
            }
        }
        Ok(functions)
    }
}

/// A parameter in Python's words.
fn parameter(name: &str, ty: &str, default: Option<&str>) -> String {
    match default {
        None => format!("{name}: {ty}"),
        Some("None") if !ty.ends_with("| None") => format!("{name}: {ty} | None = None"),
        Some(default) => format!("{name}: {ty} = {default}"),
    }
}

fn find(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut entries = entries.collect::<std::io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for path in entries.iter().map(fs::DirEntry::path) {
        if path.is_dir() {
            find(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// The last words of the paths between two marks, in order.
fn added(text: &str, before: &str, after: &str) -> Vec<String> {
    let parts = text.split(before).skip(1).filter_map(|rest| Some(rest.split_once(after)?.0));
    parts.map(|path| path.rsplit("::").next().unwrap_or(path).to_owned()).collect()
}

/// The options of an attribute, if the item has it.
fn options(attributes: &[Attribute], name: &str) -> Result<Option<Options>> {
    let Some(attribute) = attributes.iter().find(|a| a.path().is_ident(name)) else {
        return Ok(None);
    };
    Ok(Some(match &attribute.meta {
        Meta::List(list) => list.parse_args()?,
        _ => Options::default(),
    }))
}

fn derives_input(attributes: &[Attribute]) -> bool {
    let is_input = |attribute: &Attribute| {
        let mut found = false;
        let read = attribute.parse_nested_meta(|meta| {
            found |= meta.path.is_ident("FromPyObject");
            Ok(())
        });
        read.is_ok() && found
    };
    attributes.iter().filter(|a| a.path().is_ident("derive")).any(is_input)
}

/// The signature of the table that an item is documented with.
fn signature_named(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().filter(|a| a.path().is_ident("doc")).find_map(|attribute| {
        let Meta::NameValue(doc) = &attribute.meta else { return None };
        let Expr::Macro(doc) = &doc.value else { return None };
        doc.mac.path.is_ident("signature").then(|| doc.mac.tokens.to_string())
    })
}

/// The documentation that is written in the sources.
fn doc_of(attributes: &[Attribute]) -> String {
    let line = |attribute: &Attribute| {
        let Meta::NameValue(doc) = &attribute.meta else { return None };
        let Expr::Lit(doc) = &doc.value else { return None };
        let Lit::Str(line) = &doc.lit else { return None };
        let line = line.value();
        Some(line.strip_prefix(' ').unwrap_or(&line).to_owned())
    };
    let lines = attributes.iter().filter(|a| a.path().is_ident("doc")).filter_map(line);
    lines.collect::<Vec<_>>().join("\n").trim().to_owned()
}

fn last_name(ty: &Type) -> String {
    match ty {
        Type::Path(path) => path.path.segments.last().map(|s| s.ident.to_string()),
        _ => None,
    }
    .unwrap_or_default()
}

fn is_python(ty: &Type) -> bool {
    last_name(ty) == "Python"
}

/// Whether an argument is the object whose method it is.
fn is_receiver(name: &str) -> bool {
    matches!(name, "slf" | "this")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIB: &str = r#"
        params! { Conn: "conn_id" "connection" => "int"; Stream: "stream" => "_Stream"; }
        signatures! { method SEND "send", SEND_ASYNC "send_async": (Conn, *, Stream = None; Conn); }
        transfers! { "Sends" send SEND, send_async SEND_ASYNC = call::two_sided(Send); }

        type Counts = (Vec<u32>, Option<f64>);

        /// A group.
        #[pyclass(name = "Group", frozen)]
        struct PyGroup {
            #[pyo3(get)]
            rank: u32,
        }

        #[pymethods]
        impl PyGroup {
            #[new]
            #[pyo3(signature = (ranks=Vec::new(), *, is_new=false))]
            fn new(py: Python<'_>, ranks: Vec<u32>, is_new: bool) -> PyResult<Self> {}

            /// Counts.
            fn counts(&self, of: &PyGroup, len: usize) -> PyResult<Counts> {}
        }

        #[pyclass(name = "Endpoint", subclass)]
        struct PyEndpoint;

        #[pymethods]
        impl PyEndpoint {
            #[doc = signature!(SEND)]
            fn other(&self, args: Args<'_, '_>) {}
        }

        fn _core(m: &Bound<'_, PyModule>) {
            m.add_class::<PyGroup>();
            m.add_class::<endpoint::PyEndpoint>();
        }
    "#;

    fn of(text: &str) -> Result<Module> {
        Module::of(&[(PathBuf::from("src/lib.rs"), text.to_owned())])
    }

    #[test]
    fn a_method_has_the_names_types_and_defaults_of_its_source() -> Result<()> {
        let module = of(&LIB.replace("fn other", "fn send"))?;
        let [group, endpoint] = &module.classes[..] else { bail!("two classes") };
        assert_eq!(
            (group.name.as_str(), group.doc.as_str(), group.is_base),
            ("Group", "A group.", false)
        );
        let [new, rank, counts] = &group.methods[..] else { bail!("three methods") };
        assert_eq!(new.params, ["ranks: Sequence[int] = ...", "*", "is_new: bool = False"]);
        assert!(rank.kind == Kind::Getter && rank.result == "int");
        assert_eq!(counts.params, ["of: Group", "len: int"]);
        assert_eq!(counts.result, "tuple[list[int], float | None]");
        assert!(endpoint.is_base);
        let send: Vec<_> = endpoint.methods.iter().map(|m| (m.name.as_str(), &*m.doc)).collect();
        let later = "Sends, without waiting: `(ok, transfer_id)`.";
        assert_eq!(send, [("send", "Sends."), ("send_async", later), ("send", "")]);
        let params = ["conn_id: int", "*", "stream: _Stream | None = None"];
        assert!(endpoint.methods.iter().all(|method| method.params == params));
        Ok(())
    }

    #[test]
    fn a_signature_of_another_name_and_an_unknown_type_are_errors() {
        let error = |text: &str| of(text).err().map(|e| format!("{e:#}")).unwrap_or_default();
        assert!(error(LIB).contains("other is documented with the signature of send"));
        let unknown = LIB.replace("fn other", "fn send").replace("len: usize", "len: Length");
        assert!(error(&unknown).contains("no type of Python is known for Rust's Length"));
    }
}
