//! C++ of the structs and constants that kernels share with this crate.
//!
//! [`kernel_struct!`] defines a struct in Rust and describes it for C++, so that each field is
//! written once, with its comment. A compiler of CUDA checks that both languages lay it out alike.

use std::fmt::Write;

/// The columns of a line in the header.
const WIDTH: usize = 100;

/// A type of fields, by the name of its elements in C++.
pub(super) trait CppType {
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
pub(super) struct Field {
    /// The lines of its comment.
    pub(super) doc: &'static [&'static str],
    /// The type of its elements in C++.
    pub(super) element: &'static str,
    pub(super) name: &'static str,
    /// The type as Rust's source has it.
    pub(super) source: &'static str,
    pub(super) offset: usize,
}

/// A struct in C++.
pub(super) struct Struct {
    pub(super) doc: &'static [&'static str],
    pub(super) name: &'static str,
    pub(super) fields: &'static [Field],
    pub(super) size: usize,
    pub(super) align: usize,
}

/// A constant in C++.
pub(super) struct Constant {
    pub(super) doc: &'static [&'static str],
    pub(super) name: &'static str,
    pub(super) value: u64,
}

/// Defines a struct that a kernel takes or shares, `struct InRust = "InCpp"`. All its fields are
/// visible to the module above.
macro_rules! kernel_struct {
    (
        $(#[doc = $doc:literal])+
        $(#[derive($($derive:ident),+)])?
        $vis:vis struct $name:ident = $cpp:literal {
            $( $(#[doc = $field_doc:literal])* $field:ident: $type:ty, )+
        }
    ) => {
        $(#[doc = $doc])+
        $(#[derive($($derive),+)])?
        #[repr(C)]
        $vis struct $name {
            $( $(#[doc = $field_doc])* pub(super) $field: $type, )+
        }

        impl $crate::cuda::cpp::CppType for $name {
            const NAME: &'static str = $cpp;
        }

        impl $name {
            const STRUCT: $crate::cuda::cpp::Struct = $crate::cuda::cpp::Struct {
                doc: &[$($doc),+],
                name: $cpp,
                fields: &[$($crate::cuda::cpp::Field {
                    doc: &[$($field_doc),*],
                    element: <$type as $crate::cuda::cpp::CppType>::NAME,
                    name: stringify!($field),
                    source: stringify!($type),
                    offset: std::mem::offset_of!($name, $field),
                }),+],
                size: size_of::<$name>(),
                align: align_of::<$name>(),
            };
        }
    };
}

/// Lists constants for C++, `NAME_IN_CPP = VALUE_IN_RUST`, with comments before some.
macro_rules! kernel_constants {
    [$( $(#[doc = $doc:literal])* $name:ident = $value:expr, )+] => {
        &[$($crate::cuda::cpp::Constant {
            doc: &[$($doc),*],
            name: stringify!($name),
            value: $value as u64,
        }),+]
    };
}

pub(super) use {kernel_constants, kernel_struct};

/// The begin of the header.
const HEAD: &str = "\
// Parameters of the kernels of expert parallelism. `cargo xtask headers` makes this file from
// crates/uccl-ep/src/cuda/params.rs.
// clang-format off
#pragma once

#include <machine.cuh>

";

/// A header with these constants and structs.
///
/// # Panics
/// The length of an array is neither a number nor one of the constants.
pub(super) fn header(constants: &[Constant], structs: &[Struct]) -> String {
    let mut text = HEAD.to_owned();
    for constant in constants {
        text += &comment("", constant.doc);
        text += &constant.to_cpp();
    }
    for described in structs {
        text += "\n";
        text += &comment("", described.doc);
        text += &described.to_cpp(constants);
    }
    text
}

/// C++ that compiles only if the constants have these values and the structs this layout.
pub(super) fn assertions(constants: &[Constant], structs: &[Struct]) -> String {
    let mut text = "#include \"ep/params.cuh\"\n#include <stddef.h>\n".to_owned();
    let mut same = |cpp: &str, rust: u64| {
        let _ = writeln!(text, "static_assert({cpp} == {rust}u, \"{cpp} is {rust} in Rust\");");
    };
    for Struct { name, fields, size, align, .. } in structs {
        same(&format!("sizeof({name})"), *size as u64);
        same(&format!("alignof({name})"), *align as u64);
        for field in *fields {
            same(&format!("offsetof({name}, {})", field.name), field.offset as u64);
        }
    }
    for Constant { name, value, .. } in constants {
        same(name, *value);
    }
    text
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
    fn to_cpp(&self, constants: &[Constant]) -> String {
        let declared: Vec<_> = self.fields.iter().map(|field| field.to_cpp(constants)).collect();
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
    fn to_cpp(&self, constants: &[Constant]) -> String {
        let lengths = lengths_of(self.source, constants);
        format!("  {} {}{lengths};", self.element, self.name)
    }
}

/// The lengths of an array's type in C++: `[2][UCCL_EP_SLOTS]` for `[[u32; SLOTS]; 2]`.
fn lengths_of(source: &str, constants: &[Constant]) -> String {
    let mut lengths: Vec<_> =
        source.rsplit(';').map(|part| part.trim_matches([' ', ']'])).collect();
    // The type of the elements.
    lengths.pop();
    let named = |length: &str| {
        if length.parse::<usize>().is_ok() {
            return format!("[{length}]");
        }
        let name = format!("UCCL_EP_{length}");
        assert!(constants.iter().any(|constant| constant.name == name), "{name} is no constant");
        format!("[{name}]")
    };
    lengths.into_iter().map(named).collect()
}

fn words_of(lines: &[&'static str]) -> Vec<&'static str> {
    lines.iter().flat_map(|line| line.split_whitespace()).collect()
}

/// A comment on lines of its own.
fn comment(indent: &str, lines: &[&'static str]) -> String {
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

    const CONSTANTS: &[Constant] = kernel_constants![
        /// A count.
        UCCL_EP_COUNT = COUNT,
        UCCL_EP_TOP = 1u64 << 63,
    ];

    #[test]
    fn a_struct_is_described_as_rust_lays_it_out() {
        let pair = Pair { first: [[0; COUNT]; 2], second: 0 };
        assert_eq!((pair.first.len(), pair.second), (2, 0));
        let text = header(CONSTANTS, &[Pair::STRUCT]);
        let wanted = "\
// A count.
constexpr u32 UCCL_EP_COUNT = 3;
constexpr u64 UCCL_EP_TOP = 0x8000000000000000;

// Two fields.
struct UcclPair {
  u32 first[2][UCCL_EP_COUNT];  // One, and more.
  u64 second;
};
";
        assert!(text.ends_with(wanted), "{text}");
        let text = assertions(CONSTANTS, &[Pair::STRUCT]);
        for wanted in [
            "sizeof(UcclPair) == 32u",
            "alignof(UcclPair) == 8u",
            "offsetof(UcclPair, second) == 24u",
            "UCCL_EP_COUNT == 3u",
        ] {
            assert!(text.contains(wanted), "{text}");
        }
    }

    #[test]
    #[should_panic(expected = "UCCL_EP_COUNT is no constant")]
    fn a_length_needs_its_constant() {
        header(&[], &[Pair::STRUCT]);
    }
}
