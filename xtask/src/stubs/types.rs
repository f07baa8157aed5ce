//! Rust's types in Python's words.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use syn::{
    Fields, GenericArgument, ItemStruct, PathArguments, PathSegment, ReturnType, Type, TypePath,
};

/// Types of arguments that are any object in Rust, by their names.
const OBJECTS: &[(&str, &str)] = &[
    ("desc_list", "Iterable[XferDesc]"),
    ("exchange", "Callable[[bytes], list[bytes | None]]"),
    ("input", "_Tensor"),
    ("inputs", "_Tensor"),
    ("memory", "_DispatchMemory"),
    ("meta", "Buffer"),
    ("metadata", "Buffer"),
    ("metadata_bytes", "Buffer"),
    ("notif", "Buffer"),
    // Of a tuple; in a group's calls a stream is all that is an object there.
    ("options", "_Stream"),
    ("output", "_Tensor"),
    ("outputs", "_Tensor"),
    ("owners", "object"),
    ("payload", "Buffer"),
    ("ptr", "_Pointer"),
    ("serialized_bytes", "Buffer"),
    ("stream", "_Stream"),
    ("tensor", "_Tensor"),
    ("tensor_list", "Iterable[_Memory]"),
    ("xfer_handle", "int | tuple[bool, int] | XferHandle"),
];

/// Types of results that are any object in Rust, by the function's name.
const RESULTS: &[(&str, &str)] = &[
    // Their results depend on their forms, in crates/uccl-py/stubs.
    ("advertise", "object"),
    ("advertisev", "object"),
    ("connection", "dict[str, Any]"),
    ("parse_metadata", "int | str"),
    ("region_info", "dict[str, Any]"),
    ("stats", "dict[str, int]"),
];

/// Names of types in the sources.
#[derive(Default)]
pub(super) struct Types {
    /// Classes by their Rust names.
    pub(super) classes: BTreeMap<String, String>,
    /// `type A = B` by file and name.
    pub(super) aliases: BTreeMap<(usize, String), Type>,
    /// Types that are read from Python, with their files.
    pub(super) inputs: BTreeMap<String, (usize, ItemStruct)>,
}

/// The place of a type.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    /// The file of the type.
    pub(super) file: usize,
    /// The name of the argument, or of the function whose result it is.
    pub(super) name: &'a str,
    pub(super) is_argument: bool,
}

impl Types {
    pub(super) fn result(&self, output: &ReturnType, place: Place<'_>) -> Result<String> {
        match output {
            ReturnType::Default => Ok("None".to_owned()),
            ReturnType::Type(_, ty) => self.python(ty, place),
        }
    }

    /// The type in Python's words.
    pub(super) fn python(&self, ty: &Type, place: Place<'_>) -> Result<String> {
        match ty {
            Type::Reference(reference) => self.python(&reference.elem, place),
            Type::Tuple(tuple) if tuple.elems.is_empty() => Ok("None".to_owned()),
            Type::Tuple(tuple) => {
                let parts = tuple.elems.iter().map(|part| self.python(part, place));
                Ok(format!("tuple[{}]", parts.collect::<Result<Vec<_>>>()?.join(", ")))
            }
            Type::Path(path) => self.path(path, place),
            _ => bail!("{}: no type of Python for this type of Rust: {ty:?}", place.name),
        }
    }

    fn path(&self, path: &TypePath, place: Place<'_>) -> Result<String> {
        let Some(last) = path.path.segments.last() else { bail!("{}: no type", place.name) };
        let name = last.ident.to_string();
        let inner = |n: usize| match nth_argument(last, n) {
            Some(ty) => self.python(ty, place),
            None => bail!("{}: {name} without its type", place.name),
        };
        Ok(match name.as_str() {
            "u8" | "u16" | "u32" | "u64" | "usize" | "i8" | "i16" | "i32" | "i64" | "isize" => {
                "int".to_owned()
            }
            "f32" | "f64" => "float".to_owned(),
            "bool" => "bool".to_owned(),
            "str" | "String" => "str".to_owned(),
            "Self" => "Self".to_owned(),
            "PathBuf" if place.is_argument => "str | PathLike[str]".to_owned(),
            "PathBuf" => "Path".to_owned(),
            "PyBytes" => "bytes".to_owned(),
            "PyAny" => object(place)?.to_owned(),
            "Option" => format!("{} | None", inner(0)?),
            "Vec" if is_bytes(last) => "bytes".to_owned(),
            "Vec" if place.is_argument => format!("Sequence[{}]", inner(0)?),
            "Vec" => format!("list[{}]", inner(0)?),
            "PyResult" | "Result" | "Py" | "Bound" | "PyRef" => inner(0)?,
            _ => return self.named(&name, place),
        })
    }

    fn named(&self, name: &str, place: Place<'_>) -> Result<String> {
        if let Some(class) = self.classes.get(name) {
            return Ok(class.clone());
        }
        if let Some(ty) = self.aliases.get(&(place.file, name.to_owned())) {
            return self.python(ty, place);
        }
        if self.inputs.contains_key(name) {
            return Ok(input_name(name));
        }
        bail!("{}: no type of Python is known for Rust's {name} (xtask/src/stubs)", place.name)
    }

    /// The definitions of types that are read from Python: a tuple, or an object with attributes.
    pub(super) fn definitions(&self) -> Result<Vec<String>> {
        let define = |(name, (file, input)): (&String, &(usize, ItemStruct))| {
            let Fields::Named(fields) = &input.fields else {
                bail!("{name}: its fields need names");
            };
            let mut types = Vec::new();
            for field in &fields.named {
                let field_name = field.ident.as_ref().map(ToString::to_string).unwrap_or_default();
                let place = Place { file: *file, name: &field_name, is_argument: true };
                types.push((field_name.clone(), self.python(&field.ty, place)?));
            }
            let is_tuple = fields.named.iter().any(|field| {
                field.attrs.iter().any(|a| {
                    a.path().is_ident("pyo3")
                        && a.parse_args::<super::tokens::Options>()
                            .is_ok_and(|options| options.flags.iter().any(|f| f == "item"))
                })
            });
            let name = input_name(name);
            Ok(if is_tuple {
                let types: Vec<_> = types.iter().map(|(_, ty)| format!("    {ty},\n")).collect();
                format!("{name}: TypeAlias = tuple[\n{}]\n", types.concat())
            } else {
                let attributes = types.iter().map(|(name, ty)| {
                    format!("    @property\n    def {name}(self) -> {ty}: ...\n")
                });
                format!("class {name}(Protocol):\n{}", attributes.collect::<String>())
            })
        };
        self.inputs.iter().map(define).collect()
    }
}

fn input_name(name: &str) -> String {
    format!("_{name}")
}

/// The type of an object, which Rust does not say.
fn object(place: Place<'_>) -> Result<&'static str> {
    let known = if place.is_argument { OBJECTS } else { RESULTS };
    match known.iter().find(|(name, _)| *name == place.name) {
        Some((_, ty)) => Ok(ty),
        None => bail!("{}: any object in Rust; its type belongs into xtask/src/stubs", place.name),
    }
}

fn nth_argument(segment: &PathSegment, n: usize) -> Option<&Type> {
    let PathArguments::AngleBracketed(arguments) = &segment.arguments else { return None };
    let types = arguments.args.iter().filter_map(|argument| match argument {
        GenericArgument::Type(ty) => Some(ty),
        _ => None,
    });
    types.into_iter().nth(n)
}

fn is_bytes(vec: &PathSegment) -> bool {
    matches!(nth_argument(vec, 0), Some(Type::Path(path)) if path.path.is_ident("u8"))
}
