//! What links that copy GPU memory have in common: what copies, and the locked host memory that bytes of a
//! GPU pass through where a link reaches host memory only.

mod copier;
mod engine;
mod pinned;

use std::sync::Arc;

use uccl_device::cuda::GpuError;

pub use self::copier::CopyBy;
pub(crate) use self::{
    copier::{Copier, Copying},
    engine::{Engine, Route},
    pinned::{CHUNK, Chunk, Slab},
};
use crate::lane::OpError;

/// How a GPU's refusal reaches the operation that it ends.
pub(crate) fn op_error(e: GpuError) -> OpError {
    OpError::Gpu(Arc::new(e))
}
