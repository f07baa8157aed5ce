//! Expert parallelism: the tokens of every rank go to the ranks of the experts that they chose (dispatch), and what the
//! experts made of them comes back and is summed (combine).
//!
//! The parts, from the ground up: [`numerics`], the formats that tokens travel in; [`routing`], which tokens go where;
//! [`record`], how they lie in memory; [`placing`], where in the ranks' windows a call's data goes; [`protocol`], what
//! ranks say to each other; [`Block`], memory that peers read where it is; [`Group`], one rank's end of all that;
//! [`dispatch`] and [`combine`], what callers ask of it; [`cuda`], the same for few tokens of ranks that have GPUs.

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
