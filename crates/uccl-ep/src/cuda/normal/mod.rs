//! Normal mode: each token goes once to each rank that has one of its experts, and one row of each comes back.
//!
//! It has the protocol of low latency mode, one round for a call, and other kernels (`kernels/ep_layout.cuh`,
//! `kernels/ep_parts.cuh`, `kernels/ep_normal_*.cuh`). Rows that arrive are in order of rank and token, as those of the CPU, one for
//! each token or, by expert, for each token and expert. The host waits only where
//! it asks how many there are.
//!
//! Counts are told at once, and rows go in parts, each with a mark of its own, so that one launch sends some while it takes, or sums,
//! others: it is enqueued when all of a call is known, by [`Dispatch::receive`] and [`Combine::finish`]. Where late ranks are left
//! out, or ranks reach each other by the host, there are no parts: a launch sends all, by [`Dispatch::begin`] and
//! [`Combine::begin`], and another takes or sums it.

mod combine;
mod dispatch;
mod in_place;
mod layout;
mod memory;
mod room;

pub use self::{
    combine::{Combine, Combined, Results},
    dispatch::{Counts, Dispatch, Handle, Tried},
    in_place::InPlace,
    layout::{LaidOut, Layout},
    memory::{ByExpert, Outputs, Ranks, Routed, ScalesIn, ScalesOut, Table, Tokens},
    room::Sizes,
};
