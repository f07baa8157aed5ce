//! Values from Python.

use pyo3::{prelude::*, types::PyBytes};
use uccl_shards::{FanOut, Manifest, Options, Party, Shard, Span, plan::area::Area};

use super::exception;

/// A part of a tensor in memory.
#[derive(FromPyObject)]
pub(crate) struct WeightShard {
    name: String,
    dtype: String,
    element_bytes: u64,
    shape: Vec<u64>,
    offsets: Vec<u64>,
    sizes: Vec<u64>,
    ptr: usize,
    memory_ptr: usize,
    memory_len: usize,
}

impl From<WeightShard> for Shard {
    fn from(shard: WeightShard) -> Self {
        let WeightShard { name, dtype, element_bytes, shape, offsets, sizes, ptr, .. } = shard;
        let memory = Span { ptr: shard.memory_ptr, len: shard.memory_len };
        Self { name, dtype, element_bytes, shape, area: Area { offsets, sizes }, ptr, memory }
    }
}

/// The choices of a plan; None is the default.
#[derive(FromPyObject)]
pub(crate) struct PlanOptions {
    fan_out: Option<usize>,
    waves: Option<usize>,
    cut_bytes: Option<u64>,
}

impl From<PlanOptions> for Options {
    fn from(given: PlanOptions) -> Self {
        let default = Self::default();
        Self {
            fan_out: given.fan_out.map_or(default.fan_out, FanOut::AtMost),
            waves: given.waves.unwrap_or(default.waves),
            cut_bytes: given.cut_bytes.unwrap_or(default.cut_bytes),
        }
    }
}

/// The ranks of an exchange.
pub(super) fn party(
    sources: &[Bound<'_, PyBytes>],
    targets: &[Bound<'_, PyBytes>],
    options: Option<PlanOptions>,
) -> PyResult<Party> {
    let manifests = |list: &[Bound<'_, PyBytes>]| -> PyResult<Vec<Manifest>> {
        let decode = |bytes: &Bound<'_, PyBytes>| Manifest::decode(bytes.as_bytes());
        list.iter().map(decode).collect::<Result<_, _>>().map_err(|e| exception(&e))
    };
    let options = options.map(Options::from).unwrap_or_default();
    Ok(Party { sources: manifests(sources)?, targets: manifests(targets)?, options })
}
