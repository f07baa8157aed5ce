//! The C API. `include/uccl.h` declares it; `cargo xtask headers` makes that header from these
//! files.
//!
//! Comments here are the header's. Types and values have the names that C gives them.
#![allow(non_camel_case_types)]
// The top of the header states the safety rules for all functions.
#![allow(clippy::missing_safety_doc)]

mod address;
mod config;
mod endpoint;
mod library;
mod memory;
mod notif;
mod prepared;
pub(crate) mod status;
mod transfer;

use std::time::Duration;

pub use self::{
    address::*, config::*, endpoint::*, library::*, memory::*, notif::*, prepared::*, status::*,
    transfer::*,
};
use crate::failure::{Answer, Failure, run};

/// The status of a call that has no other answer.
fn call(work: impl FnOnce() -> Answer) -> uccl_status_t {
    call_for(|| work().map(|()| uccl_status_t::UCCL_OK))
}

/// The status of a call that may also answer UCCL_IN_PROGRESS.
fn call_for(work: impl FnOnce() -> Answer<uccl_status_t>) -> uccl_status_t {
    run(work).unwrap_or_else(|status| status)
}

/// The time until a call or a transfer fails, for the engine: `None` is the endpoint's time, and
/// zero is no limit.
fn deadline(timeout_ms: i64) -> Answer<Option<Duration>> {
    match timeout_ms {
        UCCL_TIMEOUT_DEFAULT => Ok(None),
        UCCL_TIMEOUT_NEVER => Ok(Some(Duration::ZERO)),
        ms => match u64::try_from(ms) {
            Ok(0) => Err(Failure::invalid(
                "a timeout of 0 ms leaves no time: use UCCL_TIMEOUT_DEFAULT or UCCL_TIMEOUT_NEVER",
            )),
            Ok(ms) => Ok(Some(Duration::from_millis(ms))),
            Err(_) => Err(no_timeout(ms)),
        },
    }
}

/// How long a call waits for something to happen; `None` is no limit.
fn patience(timeout_ms: i64) -> Answer<Option<Duration>> {
    match timeout_ms {
        UCCL_TIMEOUT_DEFAULT | UCCL_TIMEOUT_NEVER => Ok(None),
        ms => {
            u64::try_from(ms).map(|ms| Some(Duration::from_millis(ms))).map_err(|_| no_timeout(ms))
        }
    }
}

fn no_timeout(ms: i64) -> Failure {
    Failure::invalid(format!("{ms} ms is no timeout"))
}
