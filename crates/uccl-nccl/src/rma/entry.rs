//! The functions of the one-sided tables.

pub(crate) mod operations;
pub(crate) mod setup;

use uccl_nccl_abi::NcclResult;

use crate::{entry::guarded, fault::Fault};

/// As [`guarded`] for calls of groups, which log their first failure themselves.
fn quiet(call: impl FnOnce() -> Result<(), Fault>) -> NcclResult {
    let mut result = NcclResult::SUCCESS;
    let done = guarded(|| match call() {
        Err(Fault::Rma(error)) => {
            result = error.result();
            Ok(())
        }
        other => other,
    });
    if done == NcclResult::SUCCESS { result } else { done }
}
