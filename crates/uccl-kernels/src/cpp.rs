//! C++ of the structs and constants that kernels share with the crate that launches them.
//!
//! [`kernel_struct!`](crate::kernel_struct) defines a struct in Rust and describes it for C++, so
//! that each field is written once, with its comment. A compiler of CUDA checks that both languages
//! lay it out alike.

use std::fmt::Write;

/// The columns of a line in the header.
const WIDTH: usize = 100;

/// A type of fields, by the name of its elements in C++.
pub trait CppType {
    /// The name.
    const NAME: &'static str;
}

impl CppType for u32 {
    const NAME: &'static str = "u32";
}

impl CppType for u64 {
    const NAME: &'static str = "u64";
}

impl CppType for f32 {
    const NAME: &'static str = "float";
}

impl<T: CppType, const N: usize> CppType for [T; N] {
    const NAME: &'static str = T::NAME;
}

/// A field of a struct.
pub struct Field {
    /// The lines of its comment.
    pub doc: &'static [&'static str],
    /// The type of its elements in C++.
    pub element: &'static str,
    /// Its name in both languages.
    pub name: &'static str,
    /// The type as Rust's source has it.
    pub source: &'static str,
    /// Its offset in the struct.
    pub offset: usize,
}

/// A struct in C++.
pub struct Struct {
    /// The lines of its comment.
    pub doc: &'static [&'static str],
    /// Its name in C++.
    pub name: &'static str,
    /// Its fields, in their order.
    pub fields: &'static [Field],
    /// Its size in Rust.
    pub size: usize,
    /// Its alignment in Rust.
    pub align: usize,
}

/// A constant in C++.
pub struct Constant {
    /// The lines of its comment.
    pub doc: &'static [&'static str],
    /// Its name in C++.
    pub name: &'static str,
    /// Its value in Rust.
    pub value: u64,
}

/// A header of kernels.
pub struct Header {
    /// Its path below the folder of the kernels.
    pub path: &'static str,
    /// A sentence about it.
    pub about: &'static str,
    /// The source in Rust.
    pub source: &'static str,
    /// The begin of the names of all constants. The length of an array is named without it.
    pub prefix: &'static str,
    /// Its constants.
    pub constants: &'static [Constant],
    /// Its structs. A struct that is part of another one comes before that one.
    pub structs: &'static [Struct],
}

/// Defines a struct that a kernel takes or shares, `struct InRust = "InCpp"`. All its fields are
/// visible to the module above, or as the parentheses of `struct InRust = "InCpp" (pub)` say.
#[macro_export]
macro_rules! kernel_struct {
    (
        $(#[doc = $doc:literal])+
        $(#[derive($($derive:ident),+)])?
        $vis:vis struct $name:ident = $cpp:literal {
            $($fields:tt)+
        }
    ) => {
        $crate::kernel_struct! {
            $(#[doc = $doc])+
            $(#[derive($($derive),+)])?
            $vis struct $name = $cpp (pub(super)) { $($fields)+ }
        }
    };
    (
        $(#[doc = $doc:literal])+
        $(#[derive($($derive:ident),+)])?
        $vis:vis struct $name:ident = $cpp:literal ($field_vis:vis) {
            $( $(#[doc = $field_doc:literal])* $field:ident: $type:ty, )+
        }
    ) => {
        $(#[doc = $doc])+
        $(#[derive($($derive),+)])?
        #[repr(C)]
        $vis struct $name {
            $( $(#[doc = $field_doc])* $field_vis $field: $type, )+
        }

        impl $crate::cpp::CppType for $name {
            const NAME: &'static str = $cpp;
        }

        impl $name {
            const STRUCT: $crate::cpp::Struct = $crate::cpp::Struct {
                doc: &[$($doc),+],
                name: $cpp,
                fields: &[$($crate::cpp::Field {
                    doc: &[$($field_doc),*],
                    element: <$type as $crate::cpp::CppType>::NAME,
                    name: stringify!($field),
                    source: stringify!($type),
                    offset: ::core::mem::offset_of!($name, $field),
                }),+],
                size: ::core::mem::size_of::<$name>(),
                align: ::core::mem::align_of::<$name>(),
            };
        }
    };
}

/// Lists constants for C++, `NAME_IN_CPP = VALUE_IN_RUST`, with comments before some.
#[macro_export]
macro_rules! kernel_constants {
    [$( $(#[doc = $doc:literal])* $name:ident = $value:expr, )+] => {
        &[$($crate::cpp::Constant {
            doc: &[$($doc),*],
            name: stringify!($name),
            value: $value as u64,
        }),+]
    };
}

impl Header {
    /// Its text.
    ///
    /// # Panics
    /// The length of an array is neither a number nor one of the constants, nor the sum of some.
    #[must_use]
    pub fn text(&self) -> String {
        let made = format!("`cargo xtask headers` makes this file from {}.", self.source);
        let mut text = comment("", &[self.about, &made]);
        text += "// clang-format off\n#pragma once\n\n#include <machine.cuh>\n\n";
        for constant in self.constants {
            text += &comment("", constant.doc);
            text += &constant.to_cpp();
        }
        for described in self.structs {
            text += "\n";
            text += &comment("", described.doc);
            text += &described.to_cpp(self);
        }
        text
    }

    /// C++ that compiles only if the constants have these values and the structs this layout.
    #[must_use]
    pub fn assertions(&self) -> String {
        let mut text = format!("#include \"{}\"\n#include <stddef.h>\n", self.path);
        let mut same = |cpp: &str, rust: u64| {
            let _ = writeln!(text, "static_assert({cpp} == {rust}u, \"{cpp} is {rust} in Rust\");");
        };
        for Struct { name, fields, size, align, .. } in self.structs {
            same(&format!("sizeof({name})"), *size as u64);
            same(&format!("alignof({name})"), *align as u64);
            for field in *fields {
                same(&format!("offsetof({name}, {})", field.name), field.offset as u64);
            }
        }
        for Constant { name, value, .. } in self.constants {
            same(name, *value);
        }
        text
    }

    /// The lengths of an array's type in C++: `[2][UCCL_SLOTS]` for `[[u32; SLOTS]; 2]`.
    fn lengths_of(&self, source: &str) -> String {
        let mut lengths: Vec<_> =
            source.rsplit(';').map(|part| part.trim_matches([' ', ']'])).collect();
        // The type of the elements.
        lengths.pop();
        let length = |sum: &str| {
            let terms: Vec<_> = sum.split('+').map(|term| self.term_of(term.trim())).collect();
            format!("[{}]", terms.join(" + "))
        };
        lengths.into_iter().map(length).collect()
    }

    fn term_of(&self, term: &str) -> String {
        if term.parse::<usize>().is_ok() {
            return term.to_owned();
        }
        let name = format!("{}{term}", self.prefix);
        assert!(
            self.constants.iter().any(|constant| constant.name == name),
            "{name} is no constant"
        );
        name
    }
}

impl Constant {
    fn to_cpp(&self) -> String {
        let Self { name, value, .. } = self;
        match u32::try_from(*value) {
            Ok(value) => format!("constexpr u32 {name} = {value};\n"),
            Err(_) => format!("constexpr u64 {name} = {value:#x};\n"),
        }
    }
}

impl Struct {
    fn to_cpp(&self, header: &Header) -> String {
        let declared: Vec<_> = self.fields.iter().map(|field| field.to_cpp(header)).collect();
        let column = declared.iter().map(String::len).max().unwrap_or_default() + 2;
        let mut text = format!("struct {} {{\n", self.name);
        for (field, declared) in self.fields.iter().zip(declared) {
            let doc = words_of(field.doc).join(" ");
            if doc.is_empty() {
                text += &format!("{declared}\n");
            } else if column + "// ".len() + doc.len() <= WIDTH {
                text += &format!("{declared:column$}// {doc}\n");
            } else {
                text += &format!("{}{declared}\n", comment("  ", field.doc));
            }
        }
        text + "};\n"
    }
}

impl Field {
    fn to_cpp(&self, header: &Header) -> String {
        let lengths = header.lengths_of(self.source);
        format!("  {} {}{lengths};", self.element, self.name)
    }
}

fn words_of<'a>(lines: &[&'a str]) -> Vec<&'a str> {
    lines.iter().flat_map(|line| line.split_whitespace()).collect()
}

/// A comment on lines of its own.
fn comment(indent: &str, lines: &[&str]) -> String {
    let (mut text, mut line) = (String::new(), String::new());
    for word in words_of(lines) {
        if !line.is_empty() && line.len() + 1 + word.len() > WIDTH {
            text += &format!("{line}\n");
            line.clear();
        }
        if line.is_empty() {
            line = format!("{indent}//");
        }
        line += &format!(" {word}");
    }
    if !line.is_empty() {
        text += &format!("{line}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNT: usize = 3;

    kernel_struct! {
        /// Two fields.
        pub(super) struct Pair = "UcclPair" {
            /// One,
            /// and more.
            first: [[u32; COUNT]; 2],
            second: u64,
        }
    }

    kernel_struct! {
        /// Pairs.
        struct Pairs = "UcclPairs" (pub(self)) {
            pairs: [Pair; COUNT + 1],
        }
    }

    const CONSTANTS: &[Constant] = kernel_constants![
        /// A count.
        UCCL_COUNT = COUNT,
        UCCL_TOP = 1u64 << 63,
    ];

    const HEADER: Header = Header {
        path: "pair.cuh",
        about: "Pairs.",
        source: "pair.rs",
        prefix: "UCCL_",
        constants: CONSTANTS,
        structs: &[Pair::STRUCT, Pairs::STRUCT],
    };

    #[test]
    fn a_struct_is_described_as_rust_lays_it_out() {
        let pair = || Pair { first: [[0; COUNT]; 2], second: 0 };
        assert_eq!((pair().first.len(), pair().second), (2, 0));
        assert_eq!(Pairs { pairs: [pair(), pair(), pair(), pair()] }.pairs.len(), COUNT + 1);
        let text = HEADER.text();
        let wanted = "\
// Pairs. `cargo xtask headers` makes this file from pair.rs.
// clang-format off
#pragma once

#include <machine.cuh>

// A count.
constexpr u32 UCCL_COUNT = 3;
constexpr u64 UCCL_TOP = 0x8000000000000000;

// Two fields.
struct UcclPair {
  u32 first[2][UCCL_COUNT];  // One, and more.
  u64 second;
};

// Pairs.
struct UcclPairs {
  UcclPair pairs[UCCL_COUNT + 1];
};
";
        assert_eq!(text, wanted);
        let text = HEADER.assertions();
        for wanted in [
            "#include \"pair.cuh\"",
            "sizeof(UcclPair) == 32u",
            "alignof(UcclPair) == 8u",
            "offsetof(UcclPair, second) == 24u",
            "sizeof(UcclPairs) == 128u",
            "UCCL_COUNT == 3u",
        ] {
            assert!(text.contains(wanted), "{text}");
        }
    }

    #[test]
    #[should_panic(expected = "UCCL_COUNT is no constant")]
    fn a_length_needs_its_constant() {
        let _ = Header { constants: &[], ..HEADER }.text();
    }
}
