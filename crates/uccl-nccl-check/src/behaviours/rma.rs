//! One-sided tables.

mod closing;
mod faults;
mod lifecycle;
mod order;
mod puts;
mod regions;
mod streams;
mod strong;

pub(super) use closing::{close, close_dead, close_stopped};
pub(super) use faults::{cut, join, killed};
pub(super) use lifecycle::{ends, layout};
pub(super) use order::order;
pub(super) use puts::{get, put, signals};
pub(super) use regions::regions;
pub(super) use streams::streams;
pub(super) use strong::strong;
