//! An agent's address and instance, as its metadata has them: `uccl/1 192.0.2.1:40123 00f1c2...`.

use std::{fmt, net::SocketAddr, str::FromStr};

use crate::status::Error;

const VERSION: &str = "uccl/1";
/// The address of a worker of UCX that has no device: a header of version 1 without flags, the
/// worker's 64 bits, and the mark of an empty list. UCX finds no path to it and returns an error.
/// This backend's text alone would end the process of UCX: it follows lengths in the text.
const UCX_WITHOUT_DEVICES: &[u8] = &[0, 255, 255, 255, 255, 255, 255, 255, 255, 255];

/// The address of an agent's endpoint, and its instance: an endpoint that took the port later has
/// another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ConnInfo {
    pub(crate) addr: SocketAddr,
    pub(crate) instance: u64,
}

impl ConnInfo {
    /// As metadata have it. Under UCX's name UCX itself may read it at the other end.
    pub(crate) fn as_bytes(self, instead_of_ucx: bool) -> Vec<u8> {
        let head = if instead_of_ucx { UCX_WITHOUT_DEVICES } else { &[] };
        [head, self.to_string().as_bytes()].concat()
    }

    /// That of another agent's metadata. UCX's own are bytes, which are not logged.
    pub(crate) fn of(info: &[u8]) -> Result<Self, Error> {
        let info = info.strip_prefix(UCX_WITHOUT_DEVICES).unwrap_or(info);
        match std::str::from_utf8(info) {
            Ok(text) => text.parse(),
            Err(_) => Err(Error::Invalid(format!(
                "{} bytes of connection info were not made by this backend: \
                 both agents need it, and the other one may have UCX itself",
                info.len()
            ))),
        }
    }
}

impl fmt::Display for ConnInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{VERSION} {} {:016x}", self.addr, self.instance)
    }
}

impl FromStr for ConnInfo {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let refused = |why: &str| Error::Invalid(format!("connection info {text:?}: {why}"));
        let parts: Vec<_> = text.split(' ').collect();
        let &[version, addr, instance] = parts.as_slice() else {
            return Err(refused("not made by this backend"));
        };
        if version != VERSION {
            return Err(refused("made by another version of this backend, or another backend"));
        }
        Ok(Self {
            addr: addr.parse().map_err(|_| refused("not an address"))?,
            instance: u64::from_str_radix(instance, 16).map_err(|_| refused("not an instance"))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_with_ipv4_and_ipv6() {
        for addr in ["192.0.2.1:40123", "[2001:db8::1]:1", "[fe80::1%3]:65535"] {
            let addr = addr.parse().expect("an address");
            let info = ConnInfo { addr, instance: 0xf1 };
            for instead_of_ucx in [false, true] {
                let bytes = info.as_bytes(instead_of_ucx);
                assert_eq!(bytes.starts_with(b"uccl/1 "), !instead_of_ucx);
                assert_eq!(ConnInfo::of(&bytes).expect("its own"), info);
            }
        }
    }

    #[test]
    fn those_of_ucx_itself_are_refused_in_words() {
        let refused = ConnInfo::of(&[0xff, 0, 0xfe]).expect_err("refused").to_string();
        assert!(refused.starts_with("3 bytes") && refused.contains("UCX itself"), "{refused}");
    }

    #[test]
    fn metadata_of_another_form_are_refused() {
        for text in [
            "",
            "uccl/1",
            "10.0.0.1:80?0",
            "uccl/2 10.0.0.1:80 1",
            "uccl/1 10.0.0.1 1",
            "uccl/1 a:1 1 1",
        ] {
            assert!(text.parse::<ConnInfo>().is_err(), "{text:?}");
        }
    }
}
