//! A part of a tensor in this process's memory.

use serde::{Deserialize, Serialize};

use crate::plan::area::Area;

/// Memory of this process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Span {
    /// The address.
    pub ptr: usize,
    /// Length in bytes.
    pub len: usize,
}

/// A part of a tensor in this process's memory, in row-major order without gaps.
#[derive(Clone, Debug)]
pub struct Shard {
    /// The tensor's name, by which ranks find what they have in common.
    pub name: String,
    /// The type of the elements, under any name that all ranks give it.
    pub dtype: String,
    /// Bytes of an element.
    pub element_bytes: u64,
    /// The tensor's global shape.
    pub shape: Vec<u64>,
    /// The elements that this rank has.
    pub area: Area,
    /// The address of the first of them.
    pub ptr: usize,
    /// The allocation that they lie in, which is registered. Shards may share it.
    pub memory: Span,
}

/// A shard, and its place in a buffer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct ShardEntry {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) element_bytes: u64,
    pub(crate) shape: Vec<u64>,
    #[serde(flatten, with = "AreaText")]
    pub(crate) area: Area,
    pub(crate) buffer: usize,
    pub(crate) offset: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Area")]
struct AreaText {
    offsets: Vec<u64>,
    sizes: Vec<u64>,
}
