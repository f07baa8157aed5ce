//! The consequence of a failed request for itself and for its channel.

use uccl_fabric::rail::{RailError, RequestError};

use super::raw;

/// The consequence of a failed request.
#[derive(Debug)]
pub(super) enum Failure {
    /// Only the request failed; the channel still works.
    Request(RequestError),
    /// The channel is of no more use.
    Channel(RailError),
}

/// A provider's report about a failed request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Report<'a> {
    /// The library's error number, positive.
    pub(super) errno: i32,
    /// The provider's own number.
    pub(super) provider_errno: i32,
    /// The provider's name.
    pub(super) provider: &'a str,
    /// The error message.
    pub(super) words: &'a str,
}

/// `IBV_WC_LOC_PROT_ERR` and `IBV_WC_REM_ACCESS_ERR` of verbs.h.
const VERBS_LOCAL_PROTECTION: i32 = 4;
const VERBS_REMOTE_ACCESS: i32 = 10;
/// The numbers of `C_RC_PTLTE_NOT_FOUND` to `C_RC_PERM_VIOLATION` in Slingshot's driver are not
/// public. So `cxi`'s errors about keys and ranges are recognised by these words in the message.
const CXI_ACCESS: &[&str] = &["PTLTE", "ENTRY_NOT_FOUND", "NO_MATCH", "PERM", "BOUNDS", "TRUNC"];

pub(super) fn judge(report: Report<'_>) -> Failure {
    let Report { errno, provider_errno, provider, words } = report;
    let failed = |error| Failure::Request(error);
    match errno {
        libc::EACCES | libc::EPERM | libc::EKEYREJECTED | raw::FI_ENOKEY => {
            failed(RequestError::Access)
        }
        libc::EFAULT => failed(RequestError::Local),
        _ if provider.starts_with("verbs") && provider_errno == VERBS_REMOTE_ACCESS => {
            failed(RequestError::Access)
        }
        _ if provider.starts_with("verbs") && provider_errno == VERBS_LOCAL_PROTECTION => {
            failed(RequestError::Local)
        }
        _ if provider == "cxi" && CXI_ACCESS.iter().any(|word| words.contains(word)) => {
            failed(RequestError::Access)
        }
        // These providers report so that the owner's side found no such key or range.
        libc::EINVAL if matches!(provider, "shm" | "sm2") => failed(RequestError::Access),
        // `sockets` reports so that the peer's port is closed.
        libc::ENOENT if provider == "sockets" => {
            Failure::Channel(RailError::Lost(said(words, errno)))
        }
        libc::ENODEV | libc::ENXIO => Failure::Channel(RailError::Gone(said(words, errno))),
        libc::ECONNRESET
        | libc::ECONNREFUSED
        | libc::ECONNABORTED
        | libc::ENOTCONN
        | libc::ESHUTDOWN
        | libc::EPIPE
        | libc::ETIMEDOUT
        | libc::EHOSTUNREACH
        | libc::EHOSTDOWN
        | libc::ENETUNREACH
        | libc::ENETDOWN
        | libc::ENETRESET
        | libc::ECANCELED
        | libc::EIO
        | libc::EREMOTEIO => Failure::Channel(RailError::Lost(said(words, errno))),
        _ => failed(RequestError::Failed(said(words, errno))),
    }
}

fn said(words: &str, errno: i32) -> String {
    format!("{words} ({errno})")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(provider: &str, errno: i32, provider_errno: i32, words: &str) -> Failure {
        judge(Report { errno, provider_errno, provider, words })
    }

    #[test]
    fn access_is_the_requests_and_a_lost_way_the_channels() {
        use RequestError::{Access, Failed};
        let requests = [
            (of("sockets", libc::EACCES, 0, "x"), Access),
            (of("shm", libc::EINVAL, 0, "x"), Access),
            (of("verbs;ofi_rxm", libc::EIO, 10, "x"), Access),
            (of("cxi", libc::EIO, 7, "PTLTE_NOT_FOUND"), Access),
            (of("tcp", libc::EINVAL, 0, "odd"), Failed("odd (22)".into())),
        ];
        for (failure, expected) in requests {
            let Failure::Request(error) = &failure else { panic!("{failure:?}") };
            assert_eq!(*error, expected);
        }
        for errno in [libc::ECONNRESET, libc::ENOTCONN, libc::ECANCELED, libc::EIO] {
            let lost = of("tcp", errno, 0, "x");
            assert!(matches!(lost, Failure::Channel(RailError::Lost(_))), "{errno}");
        }
        let lost = of("sockets", libc::ENOENT, 0, "x");
        assert!(matches!(lost, Failure::Channel(RailError::Lost(_))));
        let gone = of("efa", libc::ENODEV, 0, "x");
        assert!(matches!(gone, Failure::Channel(RailError::Gone(_))));
    }
}
