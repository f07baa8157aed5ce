use std::ffi::{CStr, c_char};

use uccl_p2p::Error;

/// The result of a call. Failures are negative; `uccl_last_error` has a text about them.
#[repr(i32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum uccl_status_t {
    /// Done.
    UCCL_OK = 0,
    /// The transfer or the connect is under way. No failure.
    UCCL_IN_PROGRESS = 1,
    /// An argument or a setting makes no sense: a NULL pointer, a list of the wrong length, a bad
    /// value.
    UCCL_INVALID_ARGUMENT = -1,
    /// No such endpoint, connection, region or transfer: never made, or gone.
    UCCL_UNKNOWN_ID = -2,
    /// A piece is not inside the region that was named for it, or is longer than its advert.
    UCCL_OUT_OF_RANGE = -3,
    /// The peer refused the access, or the advert is not from this peer: revoked, forged or
    /// outdated.
    UCCL_REFUSED = -4,
    /// The message is longer than the receive that met it. Nothing was written past the receive's
    /// end.
    UCCL_TRUNCATED = -5,
    /// Cancelled, here or by the peer. No byte of it lands any more, at the peer unless its
    /// connection was lost over it.
    UCCL_CANCELLED = -6,
    /// The time was up. No byte of the transfer lands any more, at the peer unless its connection
    /// was lost over it.
    UCCL_DEADLINE = -7,
    /// The connection could not be made: no endpoint listens there, or the peer refuses it.
    UCCL_CONNECT_FAILED = -8,
    /// The peer is gone or silent, or the connection was closed here.
    UCCL_CONNECTION_LOST = -9,
    /// The peer sent invalid data or speaks another version, or a checksum does not match.
    UCCL_PROTOCOL = -10,
    /// Too much is outstanding: wait for earlier transfers, then try again.
    UCCL_FULL = -11,
    /// The endpoint has been destroyed meanwhile, or belongs to the process that this one was
    /// forked from.
    UCCL_CLOSED = -12,
    /// The operating system refused something: an address, a socket, memory.
    UCCL_SYSTEM = -13,
    /// A GPU could not move the data, or cannot be reached on the path to this peer.
    UCCL_GPU = -14,
    /// A network device could not move the data.
    UCCL_DEVICE = -16,
    /// Memory cannot be given back yet: an access to it may still be under way. It has to stay
    /// allocated; the same call waits again.
    UCCL_STILL_TOUCHED = -17,
    /// A fault of this library. Please report it, with the text of `uccl_last_error`.
    UCCL_INTERNAL = -15,
}

impl uccl_status_t {
    /// The kind of an error of the engine.
    pub(crate) fn of(error: &Error) -> Self {
        match error {
            Error::Invalid(_) | Error::Config { .. } => Self::UCCL_INVALID_ARGUMENT,
            Error::UnknownConnection(_) | Error::UnknownRegion(_) | Error::UnknownTransfer(_) => {
                Self::UCCL_UNKNOWN_ID
            }
            Error::OutsideRegion { .. } | Error::OutsideAdvert { .. } => Self::UCCL_OUT_OF_RANGE,
            Error::ForeignAdvert { .. }
            | Error::NotPublished { .. }
            | Error::RemoteAccess { .. } => Self::UCCL_REFUSED,
            Error::Truncated { .. } => Self::UCCL_TRUNCATED,
            Error::Cancelled { .. } | Error::ContextFailed { .. } | Error::Interrupted => {
                Self::UCCL_CANCELLED
            }
            Error::DeadlineExceeded { .. } | Error::Timeout(_) => Self::UCCL_DEADLINE,
            Error::Connect { .. } => Self::UCCL_CONNECT_FAILED,
            Error::ConnectionLost { .. } => Self::UCCL_CONNECTION_LOST,
            Error::Protocol { .. } | Error::Checksum { .. } | Error::TooOld { .. } => {
                Self::UCCL_PROTOCOL
            }
            Error::Full { .. } => Self::UCCL_FULL,
            Error::Closed | Error::Forked { .. } => Self::UCCL_CLOSED,
            Error::Os { .. } | Error::LocalMemory(_) => Self::UCCL_SYSTEM,
            Error::Gpu { .. } => Self::UCCL_GPU,
            Error::Device { .. } => Self::UCCL_DEVICE,
            Error::StillTouched { .. } => Self::UCCL_STILL_TOUCHED,
            _ => Self::UCCL_INTERNAL,
        }
    }

    const fn name(status: i32) -> &'static CStr {
        match status {
            0 => c"ok",
            1 => c"in progress",
            -1 => c"invalid argument",
            -2 => c"unknown id",
            -3 => c"out of range",
            -4 => c"refused",
            -5 => c"truncated",
            -6 => c"cancelled",
            -7 => c"deadline exceeded",
            -8 => c"connect failed",
            -9 => c"connection lost",
            -10 => c"protocol error",
            -11 => c"full",
            -12 => c"closed",
            -13 => c"system error",
            -14 => c"GPU error",
            -15 => c"internal error",
            -16 => c"device error",
            -17 => c"still touched",
            _ => c"unknown status",
        }
    }
}

/// A status in two or three words. The text is constant.
#[unsafe(no_mangle)]
pub extern "C" fn uccl_status_name(status: i32) -> *const c_char {
    uccl_status_t::name(status).as_ptr()
}

#[cfg(test)]
mod tests {
    use std::{io, time::Duration};

    use uccl_p2p::{ConnId, MrId, TransferId};

    use super::*;

    /// One error of each kind that the engine has; the tests in C cause most of them.
    #[test]
    fn every_error_has_its_kind() {
        let addr = ([127, 0, 0, 1], 1).into();
        let (peer, reason) = (|| "them".into(), String::new);
        let (ptr, len, mr) = (1, 2, MrId(3));
        for (error, status) in [
            (Error::Invalid(reason()), uccl_status_t::UCCL_INVALID_ARGUMENT),
            (
                Error::Config { name: "X", value: reason(), reason: reason() },
                uccl_status_t::UCCL_INVALID_ARGUMENT,
            ),
            (Error::UnknownConnection(ConnId(1)), uccl_status_t::UCCL_UNKNOWN_ID),
            (Error::UnknownRegion(mr), uccl_status_t::UCCL_UNKNOWN_ID),
            (Error::UnknownTransfer(TransferId(1)), uccl_status_t::UCCL_UNKNOWN_ID),
            (
                Error::OutsideRegion { iov: 0, ptr, len, mr, region_ptr: ptr, region_len: len },
                uccl_status_t::UCCL_OUT_OF_RANGE,
            ),
            (Error::OutsideAdvert { iov: 0, len, advertised: 1 }, uccl_status_t::UCCL_OUT_OF_RANGE),
            (Error::ForeignAdvert { iov: 0 }, uccl_status_t::UCCL_REFUSED),
            (Error::RemoteAccess { peer: peer(), reason: reason() }, uccl_status_t::UCCL_REFUSED),
            (
                Error::NotPublished { peer: peer(), addr: 1, len: 2, reason: "" },
                uccl_status_t::UCCL_REFUSED,
            ),
            (Error::Truncated { sent: 2, capacity: 1 }, uccl_status_t::UCCL_TRUNCATED),
            (Error::Cancelled { by: peer() }, uccl_status_t::UCCL_CANCELLED),
            (Error::Interrupted, uccl_status_t::UCCL_CANCELLED),
            (Error::ContextFailed { context: 1 }, uccl_status_t::UCCL_CANCELLED),
            (
                Error::DeadlineExceeded { after: Duration::ZERO, peer: None },
                uccl_status_t::UCCL_DEADLINE,
            ),
            (Error::Timeout(Duration::ZERO), uccl_status_t::UCCL_DEADLINE),
            (Error::Connect { addr, reason: reason() }, uccl_status_t::UCCL_CONNECT_FAILED),
            (
                Error::ConnectionLost { peer: peer(), reason: reason() },
                uccl_status_t::UCCL_CONNECTION_LOST,
            ),
            (Error::Protocol { peer: peer(), reason: reason() }, uccl_status_t::UCCL_PROTOCOL),
            (Error::Checksum { peer: peer() }, uccl_status_t::UCCL_PROTOCOL),
            (Error::Full { what: "it", limit: 1 }, uccl_status_t::UCCL_FULL),
            (Error::Closed, uccl_status_t::UCCL_CLOSED),
            (Error::Forked { owner: 1 }, uccl_status_t::UCCL_CLOSED),
            (Error::os("it", io::Error::from_raw_os_error(1)), uccl_status_t::UCCL_SYSTEM),
            (Error::LocalMemory(reason()), uccl_status_t::UCCL_SYSTEM),
            (Error::Gpu { peer: peer(), reason: reason() }, uccl_status_t::UCCL_GPU),
            (Error::Device { peer: peer(), reason: reason() }, uccl_status_t::UCCL_DEVICE),
            (
                Error::StillTouched { regions: [mr].into(), by: peer(), reason: "".into() },
                uccl_status_t::UCCL_STILL_TOUCHED,
            ),
            (Error::Panicked(peer()), uccl_status_t::UCCL_INTERNAL),
        ] {
            assert_eq!(uccl_status_t::of(&error), status, "{error}");
        }
    }

    #[test]
    fn every_status_has_a_name_of_its_own() {
        let names: std::collections::HashSet<_> = (-17..=1).map(uccl_status_t::name).collect();
        assert_eq!(names.len(), 19);
        assert!(!names.contains(c"unknown status"));
        assert_eq!([-18, 2].map(uccl_status_t::name), [c"unknown status"; 2]);
    }
}
