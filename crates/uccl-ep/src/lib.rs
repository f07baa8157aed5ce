//! Expert parallelism: the tokens of every rank go to the ranks of the experts that they chose
//! (dispatch); the experts' rows come back and are summed (combine).
//!
//! The modules, from the ground up: [`numerics`], formats of tokens in transit; [`routing`], the
//! ranks and places of tokens; [`record`], the layout of tokens in memory; [`placing`], the places
//! of calls in the ranks' windows; [`protocol`], the words between ranks; [`Block`], memory that
//! peers read in place; [`Group`], one rank's end of a group; [`dispatch`] and [`combine`], the
//! calls; [`cuda`], the calls of ranks that have GPUs.

mod barrier;
mod blocks;
pub mod combine;
pub mod cuda;
pub mod dispatch;
mod error;
mod far;
mod group;
mod header;
mod joining;
mod leaving;
pub mod nodes;
pub mod numerics;
mod patience;
pub mod placing;
pub mod protocol;
pub mod record;
pub mod routing;
mod scratch;
pub mod settings;
mod streaming;
mod view;
mod waits;
mod window;

pub use blocks::Block;
pub use error::{Error, Phase, Result};
pub use far::ProxyStats;
pub use group::{Config, Group, Interrupted};
pub use joining::{Exchange, MakeEndpoint};
pub use leaving::let_go;
pub use view::control_len;
