//! The parameters of the kernels that copy. `kernels/copy.cuh` is made from this file. Addresses
//! are those that the GPU reaches.

use uccl_kernels::{
    cpp::{Constant, Header},
    kernel_constants, kernel_struct,
};

kernel_struct! {
    /// One piece of a vector.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct Piece = "UcclPiece" (pub) {
        /// The destination address.
        destination: u64,
        /// The source address.
        source: u64,
        /// Its length in bytes.
        len_bytes: u64,
    }
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

kernel_struct! {
    /// The begin of a warp's share, where the previous warp's share ends.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub(crate) struct Cursor = "UcclCursor" (pub(crate)) {
        /// How many bytes of the piece belong to earlier shares.
        offset: u64,
        /// The piece's index.
        piece: u32,
        zero: u32,
    }
}

kernel_struct! {
    /// The parameters that all kernels have in common.
    #[derive(Clone, Copy, Debug, Default)]
    pub(crate) struct Head = "UcclHead" (pub(crate)) {
        /// Host memory to which the kernel writes the ticket once all is copied, or null.
        flag: u64,
        ticket: u64,
        /// A zeroed u32 in device memory, which only this launch uses.
        counter: u64,
        /// The word that the kernel changes once all is copied, or null.
        word: u64,
        /// The value to set the word to, or to add to it.
        value: u64,
        /// How many warps have work; there is one more cursor.
        warps: u32,
        /// 1: adds to the word; 0: sets it.
        adds: u32,
    }
}

kernel_struct! {
    /// The tables are in memory of their own.
    #[derive(Clone, Copy, Debug, Default)]
    pub(crate) struct CopyTable = "UcclCopyTable" (pub(crate)) {
        head: Head,
        pieces: u64,
        cursors: u64,
    }
}

/// Most threads of a block.
pub(crate) const MOST_THREADS: u32 = 256;
/// Threads that copy a piece together: one warp.
pub(crate) const LANES: u32 = 32;
pub(crate) const SMALL_PIECES: usize = 100;
pub(crate) const SMALL_WARPS: usize = 100;
pub(crate) const WIDE_PIECES: usize = 256;
pub(crate) const WIDE_WARPS: usize = 1056;

kernel_struct! {
    /// The tables are launch parameters, within the 4 KiB that every driver takes.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct CopySmall = "UcclCopySmall" (pub(crate)) {
        head: Head,
        pieces: [Piece; SMALL_PIECES],
        cursors: [Cursor; SMALL_WARPS + 1],
    }
}

kernel_struct! {
    /// The same within 32 KiB, which drivers of CUDA 12.1 and later take.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct CopyWide = "UcclCopyWide" (pub(crate)) {
        head: Head,
        pieces: [Piece; WIDE_PIECES],
        cursors: [Cursor; WIDE_WARPS + 1],
    }
}

const _: () = assert!(size_of::<CopySmall>() <= 4096 && size_of::<CopyWide>() <= 32764);

/// The parts of parameters that contain the tables.
pub(crate) struct Inline<'a> {
    pub(crate) head: &'a mut Head,
    pub(crate) pieces: &'a mut [Piece],
    pub(crate) cursors: &'a mut [Cursor],
}

/// Parameters of a kernel that contain the tables.
pub(crate) trait InlineTables {
    fn inline(&mut self) -> Inline<'_>;
}

macro_rules! inline {
    ($name:ident, $pieces:expr, $warps:expr) => {
        impl $name {
            pub(crate) fn new() -> Self {
                Self {
                    head: Head::default(),
                    pieces: [Piece::default(); $pieces],
                    cursors: [Cursor::default(); $warps + 1],
                }
            }
        }

        impl InlineTables for $name {
            fn inline(&mut self) -> Inline<'_> {
                let Self { head, pieces, cursors } = self;
                Inline { head, pieces, cursors }
            }
        }
    };
}

inline!(CopySmall, SMALL_PIECES, SMALL_WARPS);
inline!(CopyWide, WIDE_PIECES, WIDE_WARPS);

const CONSTANTS: &[Constant] = kernel_constants![
    /// Threads of a block; two blocks fit on a multiprocessor, however many registers they take.
    UCCL_MOST_THREADS = MOST_THREADS,
    UCCL_SMALL_PIECES = SMALL_PIECES,
    UCCL_SMALL_WARPS = SMALL_WARPS,
    UCCL_WIDE_PIECES = WIDE_PIECES,
    UCCL_WIDE_WARPS = WIDE_WARPS,
];

const HEADER: Header = Header {
    path: "copy.cuh",
    about: "Parameters of the kernels that copy.",
    source: "crates/uccl-device/src/cuda/gather/params.rs",
    prefix: "UCCL_",
    constants: CONSTANTS,
    structs: &[
        Piece::STRUCT,
        Cursor::STRUCT,
        Head::STRUCT,
        CopyTable::STRUCT,
        CopySmall::STRUCT,
        CopyWide::STRUCT,
    ],
};

/// The header `kernels/copy.cuh`.
#[must_use]
pub fn kernel_header() -> String {
    HEADER.text()
}

/// C++ that compiles only if the kernels' structs and constants match those of this build.
#[must_use]
pub fn layout_assertions() -> String {
    HEADER.assertions()
}
