//! Low latency mode.

pub(super) mod combine;
pub(super) mod dispatch;

pub use self::{
    combine::Combine,
    dispatch::{Dispatch, Handle},
};
