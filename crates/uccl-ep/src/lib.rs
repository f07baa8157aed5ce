//! Expert parallelism: the tokens of every rank go to the ranks of the experts that they chose
//! (dispatch); the experts' rows come back and are summed (combine).
//!
//! Each folder of `src` is a room, and a room uses the rooms below it:
//!
//! ```text
//!     cuda          calls of ranks with GPUs: a group, low latency and normal mode
//!       |
//!     host          calls of ranks without GPUs: a group, its window, dispatch, combine, barrier
//!     /  \
//!   far   numerics  ranks of other nodes, and the proxy that writes to them | formats, sums
//!     \  /
//!    shared         protocol, routing, layout of records and windows, nodes, errors
//! ```
//!
//! | question | place |
//! | --- | --- |
//! | which ranks a token goes to, and its slot there | [`routing`] |
//! | bytes of a record, an area, a row | [`record`] |
//! | the place of a call in the windows | [`places`] |
//! | the words between ranks, and the next step of a call | [`protocol`]: plain data, run under any schedule by its tests |
//! | the groups of ranks on nodes | [`nodes`] |
//! | a set of ranks, the most ranks of a group | [`RankSet`], [`MAX_RANKS`] |
//! | number formats, the order of sums | [`numerics`] |
//! | a rank's end of a group, on the CPU and on a GPU | [`Group`], [`cuda::Group`] |
//! | a call on the CPU | [`dispatch`], [`combine`] |
//! | a call on a GPU | [`cuda::low_latency`], [`cuda::normal`] |
//! | memory that peers read in place | [`Block`] |

pub mod cuda;
mod far;
mod host;
pub mod numerics;
pub mod settings;
mod shared;

pub use far::ProxyStats;
pub use host::{
    blocks::Block,
    combine, dispatch,
    dropped_blocks::release_block,
    group::{Config, Group, InterruptCheck},
};
pub use shared::{
    error::{Error, Phase, Result},
    join::{EndpointMaker, Exchange},
    nodes, places, protocol,
    rank_set::{MAX_RANKS, RankSet},
    record, routing,
    view::control_len,
};
