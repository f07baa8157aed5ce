//! Groups of the CPU and groups of GPUs make the same calls, and the same bytes. Ranks are threads.

#![allow(dead_code, unused_imports, reason = "each test binary uses a part")]

mod case;
mod few;
mod gpu;
mod masks;
mod normal;
mod ranks;
mod reference;
mod way;
mod window;

pub(crate) use self::{
    case::{Case, Kind, Lost},
    gpu::has_gpu,
    masks::Masks,
    normal::Normal,
    way::Way,
};
use self::{
    gpu::Gpu,
    ranks::{Ranks, world},
    reference::Reference,
};
