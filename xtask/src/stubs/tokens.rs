//! The grammar of attributes and macros in the extension module's sources.

use syn::{
    Expr, Ident, Lit, LitStr, Path, Result, Token, parenthesized,
    parse::{Parse, ParseStream},
    token::Paren,
};

/// A parameter as a signature lists it.
#[derive(Clone)]
pub(super) enum ListedParam {
    Name {
        name: String,
        default: Option<String>,
    },
    /// A lone star: the rest are keywords.
    Star,
    /// `*name`.
    Rest(String),
    /// `**name`.
    Keywords,
}

/// The parameters of a signature. Those behind a semicolon are not shown.
#[derive(Clone, Default)]
pub(super) struct List(pub(super) Vec<ListedParam>);

impl Parse for List {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut list = Vec::new();
        while !input.is_empty() {
            list.push(if input.peek(Token![*]) {
                input.parse::<Token![*]>()?;
                if input.peek(Token![*]) {
                    input.parse::<Token![*]>()?;
                    input.parse::<Ident>()?;
                    ListedParam::Keywords
                } else if input.peek(Ident) {
                    ListedParam::Rest(input.parse::<Ident>()?.to_string())
                } else {
                    ListedParam::Star
                }
            } else {
                let name = input.parse::<Ident>()?.to_string();
                let default = match input.parse::<Option<Token![=]>>()? {
                    Some(_) => Some(default_of(input)?),
                    None => None,
                };
                ListedParam::Name { name, default }
            });
            if input.peek(Token![;]) {
                input.parse::<rest::Rest>()?;
                break;
            }
            input.parse::<Option<Token![,]>>()?;
        }
        Ok(Self(list))
    }
}

/// Tokens that are read and dropped.
mod rest {
    use syn::{
        Result,
        parse::{Parse, ParseStream},
    };

    pub(super) struct Rest;

    impl Parse for Rest {
        fn parse(input: ParseStream<'_>) -> Result<Self> {
            while !input.is_empty() {
                input.step(|cursor| match cursor.token_tree() {
                    Some((_, rest)) => Ok(((), rest)),
                    None => Ok(((), *cursor)),
                })?;
            }
            Ok(Self)
        }
    }
}

/// A default value in Python's words, as PyO3 gives them: `...` for all but simple ones.
fn default_of(input: ParseStream<'_>) -> Result<String> {
    if input.peek(Ident) && !input.peek2(Token![::]) && !input.peek2(Paren) {
        return Ok(match input.parse::<Ident>()?.to_string().as_str() {
            known @ ("None" | "True" | "False") => known.to_owned(),
            _ => "...".to_owned(),
        });
    }
    Ok(python(&input.parse()?))
}

fn python(expr: &Expr) -> String {
    match expr {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Bool(b) => if b.value { "True" } else { "False" }.to_owned(),
            Lit::Int(n) => n.base10_digits().to_owned(),
            Lit::Float(n) => n.base10_digits().to_owned(),
            Lit::Str(text) => format!("{:?}", text.value()),
            _ => "...".to_owned(),
        },
        _ => "...".to_owned(),
    }
}

/// The arguments of `#[pyo3(...)]`, `#[pyclass(...)]` and `#[pyfunction(...)]`.
#[derive(Default)]
pub(super) struct Options {
    pub(super) name: Option<String>,
    pub(super) signature: Option<List>,
    /// Options without a value.
    pub(super) flags: Vec<String>,
}

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut options = Self::default();
        while !input.is_empty() {
            let option = input.parse::<Ident>()?.to_string();
            if input.peek(Paren) {
                let inside;
                parenthesized!(inside in input);
                inside.parse::<rest::Rest>()?;
                options.flags.push(option);
            } else if input.parse::<Option<Token![=]>>()?.is_none() {
                options.flags.push(option);
            } else if option == "signature" {
                let inside;
                parenthesized!(inside in input);
                options.signature = Some(inside.parse()?);
            } else {
                let value = input.parse::<Expr>()?;
                if let (Expr::Lit(value), "name") = (value, option.as_str())
                    && let Lit::Str(name) = value.lit
                {
                    options.name = Some(name.value());
                }
            }
            input.parse::<Option<Token![,]>>()?;
        }
        Ok(options)
    }
}

/// `params!`: the names and the type in Python of each parameter.
pub(super) struct Params(pub(super) Vec<(String, Vec<String>, String)>);

impl Parse for Params {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut params = Vec::new();
        while !input.is_empty() {
            let param = input.parse::<Ident>()?.to_string();
            input.parse::<Token![:]>()?;
            let mut names = vec![input.parse::<LitStr>()?.value()];
            while input.peek(LitStr) {
                names.push(input.parse::<LitStr>()?.value());
            }
            input.parse::<Token![=>]>()?;
            params.push((param, names, input.parse::<LitStr>()?.value()));
            input.parse::<Token![;]>()?;
        }
        Ok(Self(params))
    }
}

/// `signatures!`: identifier, name in Python and parameters of each.
pub(super) struct Signatures(pub(super) Vec<(String, String, List)>);

impl Parse for Signatures {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut signatures = Vec::new();
        while !input.is_empty() {
            input.parse::<Ident>()?;
            let mut names = Vec::new();
            loop {
                let id = input.parse::<Ident>()?.to_string();
                names.push((id, input.parse::<LitStr>()?.value()));
                if input.parse::<Option<Token![,]>>()?.is_none() {
                    break;
                }
            }
            input.parse::<Token![:]>()?;
            let inside;
            parenthesized!(inside in input);
            let list = inside.parse::<List>()?;
            input.parse::<Token![;]>()?;
            signatures.extend(names.into_iter().map(|(id, name)| (id, name, list.clone())));
        }
        Ok(Self(signatures))
    }
}

/// `transfers!`: of each pair of methods the documentation, and name and signature of both.
pub(super) struct Transfers(pub(super) Vec<(String, [(String, String); 2])>);

impl Parse for Transfers {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut transfers = Vec::new();
        while !input.is_empty() {
            let doc = input.parse::<LitStr>()?.value();
            let method = |input: ParseStream<'_>| {
                let name = input.parse::<Ident>()?.to_string();
                Ok::<_, syn::Error>((name, input.parse::<Ident>()?.to_string()))
            };
            let run = method(input)?;
            input.parse::<Token![,]>()?;
            let post = method(input)?;
            input.parse::<Token![=]>()?;
            input.parse::<Path>()?;
            let inside;
            parenthesized!(inside in input);
            inside.parse::<Ident>()?;
            input.parse::<Token![;]>()?;
            transfers.push((doc, [run, post]));
        }
        Ok(Self(transfers))
    }
}
