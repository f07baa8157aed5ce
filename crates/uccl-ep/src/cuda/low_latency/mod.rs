//! Low latency mode, for small batches: a rank has room for all tokens that the others may send.
//!
//! A token goes once to each rank that has one of its experts, quantised on the way if the caller
//! asks for it, and is copied there to the rows of its experts. A combine takes a row from each
//! expert. No call waits on the host. A call of up to 512 tokens can be one launch; then each
//! record, and each piece of a row, has a ready flag.

mod combine;
mod dispatch;
mod memory;

pub use self::{
    combine::Combine,
    dispatch::{Dispatch, Handle},
    memory::{
        CombineInput, CombineOutput, DispatchInput, DispatchOutput, RowTables, ScalesOut,
        WorkspaceLayout, records_len,
    },
};
