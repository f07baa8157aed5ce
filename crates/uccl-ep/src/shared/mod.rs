//! Layouts, words and times that the calls of hosts and of GPUs share.

pub(crate) mod backoff;
pub(crate) mod error;
pub(crate) mod header;
pub(crate) mod join;
pub mod nodes;
pub mod places;
pub mod protocol;
pub(crate) mod rank_set;
pub mod record;
pub mod routing;
pub(crate) mod streaming;
pub(crate) mod view;
