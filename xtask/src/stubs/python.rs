//! The stub's text, as ruff formats it.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

use super::source::{Class, Function, Kind, Module};

/// The longest line.
const WIDTH: usize = 100;

/// Forms of calls that one signature cannot say: the overloads in stubs/forms.pyi, by method.
pub(super) struct Forms(BTreeMap<String, Vec<String>>);

impl Forms {
    pub(super) fn read(text: &str) -> Result<Self> {
        const MARK: &str = "    @overload\n";
        let mut forms = BTreeMap::<_, Vec<String>>::new();
        for form in text.split(MARK).skip(1) {
            let name = form.trim_start().strip_prefix("def ").and_then(|f| f.split_once('('));
            ensure!(name.is_some(), "a form without its def:\n{form}");
            let (name, _) = name.unwrap_or_default();
            let form = format!("{MARK}{}\n", form.trim_end());
            forms.entry(name.to_owned()).or_default().push(form);
        }
        Ok(Self(forms))
    }
}

/// Fails unless all parameters of forms are those of the method, under any of their names.
pub(super) fn check_forms(Forms(forms): &Forms, module: &Module) -> Result<()> {
    for (method, forms) in forms {
        let known = module.names.get(method).map_or(&[][..], Vec::as_slice);
        let in_parentheses = |form: &str| {
            let inside = form.split_once('(')?.1.rsplit_once(") ->")?.0.to_owned();
            Some(inside)
        };
        for form in forms {
            let params = in_parentheses(form).unwrap_or_default();
            let names = params.split(',').filter_map(|param| Some(param.split_once(':')?.0.trim()));
            for name in names {
                ensure!(
                    known.iter().any(|known| known == name),
                    "{method} has no parameter {name}; crates/uccl-py/stubs/forms.pyi says so"
                );
            }
        }
    }
    Ok(())
}

/// The whole stub.
pub(super) fn module(head: &str, module: &Module, forms: &Forms) -> String {
    let mut names: Vec<_> = module.classes.iter().map(|class| class.name.as_str()).collect();
    // PyO3's `__all__` has names with an underscore, too.
    names.extend(module.functions.iter().map(|function| function.name.as_str()));
    names.push("__version__");
    names.sort_unstable();
    let names: Vec<_> = names.iter().map(|name| format!("    \"{name}\",\n")).collect();
    let names = format!("__all__ = [\n{}]\n__version__: str\n", names.concat());
    let mut parts = vec![head.trim_end().replace("__all__ = []", names.trim_end()) + "\n"];
    parts.extend(module.definitions.iter().cloned());
    parts.extend(module.classes.iter().map(|class| of_class(class, forms)));
    parts.extend(module.functions.iter().map(|function| of_function(function, "")));
    parts.join("\n")
}

fn of_class(class: &Class, forms: &Forms) -> String {
    let decorator = if class.is_base { "@disjoint_base" } else { "@final" };
    let mut text = format!("{decorator}\nclass {}:\n", class.name);
    text.push_str(&docstring(&class.doc, "    "));
    for method in &class.methods {
        if method.name == "__repr__" {
            continue;
        }
        // A method with documentation, or the class's own, is set apart from the next.
        if !text.ends_with("...\n") {
            text.push('\n');
        }
        match forms.0.get(&method.name) {
            Some(forms) => text.push_str(&of_forms(forms, &method.doc)),
            None => text.push_str(&of_function(method, "    ")),
        }
    }
    text
}

/// Overloads; the first has the documentation.
fn of_forms(forms: &[String], doc: &str) -> String {
    let mut forms = forms.to_vec();
    if let Some(first) = forms.first_mut() {
        let head = first.trim_end().trim_end_matches(" ...");
        *first = format!("{head}\n{}\n", docstring(doc, "        "));
    }
    forms.concat()
}

fn of_function(function: &Function, indent: &str) -> String {
    let Function { name, kind, doc, params, result } = function;
    let decorator = match kind {
        Kind::Static => Some("@staticmethod".to_owned()),
        Kind::Getter => Some("@property".to_owned()),
        Kind::Setter => Some(format!("@{name}.setter")),
        Kind::New | Kind::Method | Kind::Free => None,
    };
    let receiver = match kind {
        Kind::New => Some("cls"),
        Kind::Method | Kind::Getter | Kind::Setter => Some("self"),
        Kind::Static | Kind::Free => None,
    };
    let params: Vec<_> = receiver.into_iter().chain(params.iter().map(String::as_str)).collect();
    let decorator = decorator.map(|decorator| format!("{indent}{decorator}\n")).unwrap_or_default();
    let end = if doc.is_empty() { " ..." } else { "" };
    let one = format!("{indent}def {name}({}) -> {result}:{end}", params.join(", "));
    let result = match result.strip_suffix(']').and_then(|result| result.split_once('[')) {
        Some((of, parts)) if indent.len() + result.len() + 6 > WIDTH => {
            format!("{of}[\n{indent}    {parts}\n{indent}]")
        }
        _ => result.clone(),
    };
    let inside = format!("{indent}    {}", params.join(", "));
    let head = if one.len() <= WIDTH || params.is_empty() {
        one
    } else if inside.len() <= WIDTH {
        format!("{indent}def {name}(\n{inside}\n{indent}) -> {result}:{end}")
    } else {
        let lines: Vec<_> = params.iter().map(|param| format!("{indent}    {param},\n")).collect();
        format!("{indent}def {name}(\n{}{indent}) -> {result}:{end}", lines.concat())
    };
    format!("{decorator}{head}\n{}", docstring(doc, &format!("{indent}    ")))
}

/// A docstring, its paragraphs wrapped.
fn docstring(doc: &str, indent: &str) -> String {
    if doc.is_empty() {
        return String::new();
    }
    let doc = doc.replace('\\', "\\\\").replace("\"\"\"", "'''");
    let wrap = |width| {
        let parts: Vec<_> = doc.split("\n\n").map(|part| wrapped(part, indent, width)).collect();
        parts.join("\n\n").trim_start().to_owned()
    };
    let mut text = wrap(WIDTH);
    // One line ends with quotes, which need room too.
    if !text.contains('\n') {
        text = wrap(WIDTH - 3);
    }
    match text.contains('\n') {
        false => format!("{indent}\"\"\"{text}\"\"\"\n"),
        true => format!("{indent}\"\"\"{text}\n{indent}\"\"\"\n"),
    }
}

fn wrapped(paragraph: &str, indent: &str, width: usize) -> String {
    let mut lines = Vec::new();
    // The quotes stand before the first line.
    let mut line = format!("{indent}   ");
    let mut is_new = true;
    for word in paragraph.split_whitespace() {
        if !is_new && line.len() + 1 + word.len() > width {
            lines.push(std::mem::replace(&mut line, indent.to_owned()));
            is_new = true;
        }
        if !is_new {
            line.push(' ');
        }
        line.push_str(word);
        is_new = false;
    }
    lines.push(line);
    let text = lines.join("\n");
    format!("{indent}{}", text.trim_start())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(params: &[&str], doc: &str) -> String {
        let function = Function {
            name: "send".into(),
            kind: Kind::Method,
            doc: doc.into(),
            params: params.iter().map(|param| (*param).to_owned()).collect(),
            result: "bool".into(),
        };
        of_function(&function, "    ")
    }

    #[test]
    fn a_method_is_laid_out_by_its_length() {
        assert_eq!(function(&["a: int"], ""), "    def send(self, a: int) -> bool: ...\n");
        let long = "a: int | None = None";
        let text = function(&[long; 4], "Sends.");
        let inside = [long; 4].join(", ");
        assert_eq!(
            text,
            format!(
                "    def send(\n        self, {inside}\n    ) -> bool:\n        \"\"\"Sends.\"\"\"\n"
            )
        );
        let text = function(&[long; 5], "Sends.");
        assert!(text.starts_with(&format!("    def send(\n        self,\n        {long},\n")));
    }

    #[test]
    fn documentation_is_wrapped_by_paragraphs() {
        let text = docstring(&format!("{}\n\nMore.", "word ".repeat(30)), "    ");
        assert!(text.starts_with("    \"\"\"word word"));
        assert!(text.lines().all(|line| line.len() <= WIDTH));
        assert!(text.ends_with("word\n\n    More.\n    \"\"\"\n"), "{text}");
        let as_long_as = |len| docstring(&format!("a {}", "b".repeat(len - 2)), "    ");
        assert_eq!(as_long_as(WIDTH - 10).lines().count(), 1);
        assert_eq!(as_long_as(WIDTH - 9).lines().count(), 3, "no room for the quotes");
    }

    #[test]
    fn forms_have_the_methods_parameters() -> Result<()> {
        let names = [("reg".to_owned(), vec!["ptr".to_owned(), "src".to_owned()])];
        let module = Module {
            classes: Vec::new(),
            functions: Vec::new(),
            definitions: Vec::new(),
            names: names.into(),
        };
        let form = |name| format!("    @overload\n    def reg(self, *, {name}: int) -> int: ...\n");
        check_forms(&Forms::read(&form("src"))?, &module)?;
        assert!(check_forms(&Forms::read(&form("source"))?, &module).is_err());
        Ok(())
    }

    #[test]
    fn forms_are_found_by_their_methods() -> Result<()> {
        let text = "class Endpoint:\n    @overload\n    def reg(self) -> int: ...\n    @overload\n    \
            def reg(\n        self, a: int\n    ) -> int: ...\n";
        let Forms(forms) = Forms::read(text)?;
        assert_eq!(forms["reg"].len(), 2);
        assert!(Forms::read("    @overload\n    x = 1\n").is_err());
        let text = of_forms(&forms["reg"], "Registers.");
        assert!(text.contains("def reg(self) -> int:\n        \"\"\"Registers.\"\"\"\n"), "{text}");
        Ok(())
    }
}
