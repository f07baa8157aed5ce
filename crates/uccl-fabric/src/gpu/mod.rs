//! Shared by all links that copy GPU memory: the copiers, and the locked host memory that stages
//! the bytes of a GPU where a link reaches host memory only.

mod copier;
mod cuda;
mod engine;
mod glance;
mod piece_table;
mod pinned;
mod put;
mod share;
mod staging;
mod word;
mod words;

pub(crate) use self::words::begin_change;
pub use self::{
    copier::{CopyBackend, CopyBy, CopyQueue},
    engine::{Engine, Mark, Route},
    glance::WordReader,
    piece_table::PieceTable,
    pinned::{CHUNK, Chunk, Slab, prepare_chunks},
    put::put,
    share::GpuShare,
    staging::{PATIENCE, Staging, StepEnd},
    words::{WordChange, advance_words, prepare_words},
};
