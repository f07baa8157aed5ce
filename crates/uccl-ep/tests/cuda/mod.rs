//! Groups of the CPU and groups of GPUs make the same calls, and the same bytes. Ranks are threads.

#![allow(dead_code, unused_imports, reason = "each test binary uses a part")]

mod case;
mod comers;
mod gpu;
mod masks;
mod normal;
mod plans;
mod ranks;
mod reference;
mod route;
mod small_batches;
mod window;

pub(crate) use self::{
    case::{Case, Format, Loss},
    gpu::has_gpu,
    masks::Masks,
    normal::Normal,
    plans::ways_of_a_plan,
    route::Route,
};
use self::{
    gpu::Gpu,
    ranks::{Ranks, world},
    reference::Reference,
};
