//! The meaning of a completion's status.

use uccl_fabric::rail::RequestError;

use crate::ffi::abi::{Wc, wc_status as status};

/// Why a request did not succeed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Failure {
    /// The request itself failed. Its queue pair is dead too.
    Request(RequestError),
    /// It is not known whether the request was carried out. Its queue pair is dead.
    Lost,
}

/// Like `LOC_PROT_ERR`, on the responder's side.
const LOC_ACCESS_ERR: u32 = 8;
/// A malformed request, or (older soft-RoCE) one that names unknown memory. Ours are well formed.
const LOC_QP_OP_ERR: u32 = 2;

/// Classifies a completion with an error.
pub(super) fn classify(wc: &Wc) -> Failure {
    match wc.status {
        status::REM_ACCESS_ERR => Failure::Request(RequestError::Access),
        // Our requests are valid. So the two ends disagree about packet numbers, as soft-RoCE's do
        // when packets overtake each other.
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

/// An explanation for users, where libibverbs's own words are not enough.
pub(super) fn hint(wc: &Wc) -> &'static str {
    match wc.status {
        status::RETRY_EXC_ERR => {
            ": the peer did not answer; its end is gone, a port is down, or packets do not get through"
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
            assert_eq!(classify(&wc(status)), expected, "status {status}");
        }
        assert!(matches!(classify(&wc(11)), Failure::Request(RequestError::Failed(_))));
        assert!(hint(&wc(status::RETRY_EXC_ERR)).contains("did not answer"));
    }
}
