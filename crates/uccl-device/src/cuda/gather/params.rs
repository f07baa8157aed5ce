//! The parameters of the kernels: `kernels/copy.cuh` in Rust.

use std::mem::{offset_of, size_of};

/// `UcclPiece`: one piece of a vector.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Piece {
    /// The destination address.
    pub destination: u64,
    /// The source address.
    pub source: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
}

/// A change to a word of 8 bytes, for its watchers: other GPUs and the CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WordChange {
    /// The word's address, a multiple of 8.
    pub address: u64,
    /// The value to set or to add.
    pub value: u64,
    /// Whether the value is added, in one atomic step; otherwise it is set.
    pub adds: bool,
}

/// `UcclCursor`: where a warp's share begins and the previous warp's share ends.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Cursor {
    /// How many bytes of the piece belong to earlier shares.
    pub(crate) offset: u64,
    /// The piece's index.
    pub(crate) piece: u32,
    pub(crate) zero: u32,
}

/// `UcclHead`: the parameters that all kernels have in common.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Head {
    /// The address of host memory to which the kernel writes the ticket once all is copied; 0 for
    /// none.
    pub(crate) flag: u64,
    pub(crate) ticket: u64,
    /// The address of a zeroed `u32` in device memory, which only this launch uses.
    pub(crate) counter: u64,
    /// The address of the word that the kernel changes once all is copied; 0 for none.
    pub(crate) word: u64,
    /// The value to set the word to, or to add to it.
    pub(crate) value: u64,
    /// How many warps have work.
    pub(crate) warps: u32,
    /// 1: adds to the word; 0: sets it.
    pub(crate) adds: u32,
}

/// `UcclCopyTable`: the addresses of tables that are not part of the parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CopyTable {
    pub(crate) head: Head,
    pub(crate) pieces: u64,
    pub(crate) cursors: u64,
}

/// Most threads of a block.
pub(crate) const MOST_THREADS: u32 = 256;
/// Threads that copy a piece together: one warp.
pub(crate) const LANES: u32 = 32;
pub(crate) const SMALL_PIECES: usize = 100;
pub(crate) const SMALL_WARPS: usize = 100;
pub(crate) const WIDE_PIECES: usize = 256;
pub(crate) const WIDE_WARPS: usize = 1056;

/// Parameters that contain the tables.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inline<const PIECES: usize, const CURSORS: usize> {
    pub(crate) head: Head,
    pub(crate) pieces: [Piece; PIECES],
    pub(crate) cursors: [Cursor; CURSORS],
}

impl<const PIECES: usize, const CURSORS: usize> Inline<PIECES, CURSORS> {
    pub(crate) fn new() -> Self {
        Self {
            head: Head::default(),
            pieces: [Piece::default(); PIECES],
            cursors: [Cursor::default(); CURSORS],
        }
    }
}

/// `UcclCopySmall`.
pub(crate) type CopySmall = Inline<SMALL_PIECES, { SMALL_WARPS + 1 }>;
/// `UcclCopyWide`.
pub(crate) type CopyWide = Inline<WIDE_PIECES, { WIDE_WARPS + 1 }>;

/// C++ that compiles only if the kernels' structs and constants match those of this build.
pub fn layout_assertions() -> String {
    let mut text = String::from("#include \"copy.cuh\"\n#include <stddef.h>\n");
    let mut same = |cuda: &str, rust: usize| {
        text += &format!("static_assert({cuda} == {rust}, \"{cuda} is {rust} in Rust\");\n");
    };
    macro_rules! layout {
        ($c:literal, $rust:ty, [$($field:ident as $name:literal),*]) => {
            same(concat!("sizeof(", $c, ")"), size_of::<$rust>());
            same(concat!("alignof(", $c, ")"), align_of::<$rust>());
            $( same(concat!("offsetof(", $c, ", ", $name, ")"), offset_of!($rust, $field)); )*
        };
    }
    layout!("UcclPiece", Piece, [destination as "dst", source as "src", len_bytes as "len"]);
    layout!("UcclCursor", Cursor, [offset as "offset", piece as "piece", zero as "zero"]);
    layout!("UcclHead", Head, [
        flag as "flag", ticket as "ticket", counter as "counter", word as "word", value as "value",
        warps as "warps", adds as "adds"
    ]);
    layout!("UcclCopyTable", CopyTable, [
        head as "head", pieces as "pieces", cursors as "cursors"
    ]);
    layout!("UcclCopySmall", CopySmall, [
        head as "head", pieces as "pieces", cursors as "cursors"
    ]);
    layout!("UcclCopyWide", CopyWide, [
        head as "head", pieces as "pieces", cursors as "cursors"
    ]);
    same("UCCL_MOST_THREADS", MOST_THREADS as usize);
    same("UCCL_SMALL_PIECES", SMALL_PIECES);
    same("UCCL_SMALL_WARPS", SMALL_WARPS);
    same("UCCL_WIDE_PIECES", WIDE_PIECES);
    same("UCCL_WIDE_WARPS", WIDE_WARPS);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_fit_the_size_that_drivers_take() {
        const { assert!(size_of::<CopySmall>() <= 4096) };
        const { assert!(size_of::<CopyWide>() <= 32764) };
        assert!(layout_assertions().contains("sizeof(UcclPiece) == 24"));
    }
}
