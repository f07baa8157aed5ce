//! What the end of a request means.

use crate::{
    rma::rail::RequestError,
    verbs::ffi::abi::{Wc, wc_status as status},
};

/// Why a request did not succeed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Failure {
    /// It is this request's fault, though its queue pair dies of it.
    Request(RequestError),
    /// It is not known what became of it: its queue pair is dead.
    Lost,
}

/// As `LOC_PROT_ERR`, on the side that answers.
const LOC_ACCESS_ERR: u32 = 8;
/// A malformed request, or (older soft-RoCE) one that names unknown memory. Ours are well formed.
const LOC_QP_OP_ERR: u32 = 2;

/// Of a completion that is no success.
pub(super) fn classify(wc: &Wc, is_iwarp: bool) -> Failure {
    match wc.status {
        // What siw says of a request that it was sending when the connection was lost.
        LOC_QP_OP_ERR if is_iwarp => Failure::Lost,
        status::REM_ACCESS_ERR => Failure::Request(RequestError::Access),
        // Ours are valid: the two ends disagree on where they are, as soft-RoCE's do when packets overtake each other.
        status::REM_INV_REQ_ERR => Failure::Lost,
        status::LOC_PROT_ERR | status::LOC_LEN_ERR | LOC_ACCESS_ERR | LOC_QP_OP_ERR => {
            Failure::Request(RequestError::Local)
        }
        status::REM_OP_ERR => Failure::Request(RequestError::Failed(
            "the peer's device could not carry it out".to_owned(),
        )),
        _ => Failure::Lost,
    }
}

/// What it means for people, where libibverbs's own words would leave them wondering.
pub(super) fn hint(wc: &Wc, is_iwarp: bool) -> &'static str {
    match wc.status {
        status::RETRY_EXC_ERR => {
            ": the peer did not answer; its end is gone, a port is down, or packets do not get through"
        }
        // It never says which request the peer's device refused.
        status::WR_FLUSH_ERR if is_iwarp => {
            ": the peer's end was closed, or its device refused an earlier request"
        }
        status::WR_FLUSH_ERR => ": an earlier request ended the queue pair",
        status::RNR_RETRY_EXC_ERR => ": the peer was not ready",
        status::FATAL_ERR => ": the device failed",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wc(status: u32) -> Wc {
        Wc { status, ..Wc::default() }
    }

    #[test]
    fn each_status_has_a_meaning() {
        for status in 1..=24 {
            let expected = match status {
                10 => Failure::Request(RequestError::Access),
                1 | 2 | 4 | 8 => Failure::Request(RequestError::Local),
                11 => continue,
                _ => Failure::Lost,
            };
            assert_eq!(classify(&wc(status), false), expected, "status {status}");
            let over_iwarp = if status == 2 { Failure::Lost } else { expected };
            assert_eq!(classify(&wc(status), true), over_iwarp, "status {status}");
        }
        assert!(matches!(classify(&wc(11), false), Failure::Request(RequestError::Failed(_))));
        assert!(hint(&wc(status::RETRY_EXC_ERR), false).contains("did not answer"));
    }
}
