//! The address of an iWARP channel: one end of a set of connections over TCP.
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u32 | magic (upper 24 bits) and version (lower 8) |
//! | 4 | u8 | queue pairs, 1 to 16 |
//! | 5 | u8 | RDMA reads that a queue pair answers at a time |
//! | 6 | u16 | port on which it waits for connections; 0 if it makes them |
//! | 8 | 16 B | IP address; IPv4 as `::ffff:a.b.c.d` |
//! | 24 | 16 B | token that a connection brings along |
//! | 40 | u64 | address of 8 bytes that may be read |
//! | 48 | u32 | their key |
//! | 52 | u16 | port of plain TCP at the same IP address that answers as long as the end lives; 0: none |
//! | 54 | u16 | 0 |
//!
//! All numbers are little endian, but for the IP address.
//!
//! The end that is asked first says port 0. The other waits for connections, and its address tells where. A
//! request for one brings the token, and the queue pair's place as one byte: see [`Request`].

use std::net::{IpAddr, Ipv6Addr};

use crate::{
    cursor::{Reader, Truncated},
    verbs::MAX_QUEUE_PAIRS,
};

const MAGIC: u32 = 0x5543_4900;
const VERSION: u8 = 1;
const LEN: usize = 56;

/// Bytes of the token.
pub const TOKEN_LEN: usize = 16;

/// One end of an iWARP channel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IwarpAddress {
    /// Its queue pairs, 1 to [`MAX_QUEUE_PAIRS`].
    pub queue_pairs: u8,
    /// How many RDMA reads each of them answers at a time.
    pub reads_answered: u8,
    /// Its device's address.
    pub ip: IpAddr,
    /// Where it waits for connections; 0: it makes them.
    pub port: u16,
    /// What a connection to it must bring along.
    pub token: [u8; TOKEN_LEN],
    /// Where 8 bytes are that the peer may read, to learn that what it wrote before has arrived.
    pub fence_addr: u64,
    /// Their key.
    pub fence_key: u32,
    /// Where plain TCP answers as long as this end lives, so that whoever connects can first find out whether
    /// anybody is there; 0: nowhere.
    pub knock_port: u16,
}

/// Why bytes are not an iWARP channel's address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IwarpAddressError {
    /// They end too early.
    #[error(transparent)]
    Truncated(#[from] Truncated),
    /// More follows than there should be.
    #[error("{0} bytes follow the address")]
    TooLong(usize),
    /// The bytes are something else.
    #[error("not the address of an iWARP channel: its magic is {0:#010x}")]
    WrongMagic(u32),
    /// An address of another version of this library.
    #[error("the address has version {0}, this library reads version {VERSION}")]
    WrongVersion(u8),
    /// A field has a value that it cannot have.
    #[error("{field} is {value}")]
    Field {
        /// Which field.
        field: &'static str,
        /// What it says.
        value: u32,
    },
    /// No port has this IP address.
    #[error("{0} is no device's address")]
    Ip(IpAddr),
}

impl IwarpAddress {
    /// The address's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let ip = match self.ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let mut out = Vec::with_capacity(LEN);
        out.extend_from_slice(&(MAGIC | u32::from(VERSION)).to_le_bytes());
        out.extend([self.queue_pairs, self.reads_answered]);
        out.extend_from_slice(&self.port.to_le_bytes());
        out.extend_from_slice(&ip.octets());
        out.extend_from_slice(&self.token);
        out.extend_from_slice(&self.fence_addr.to_le_bytes());
        out.extend_from_slice(&self.fence_key.to_le_bytes());
        out.extend_from_slice(&self.knock_port.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        out
    }

    /// Reads an address.
    ///
    /// # Errors
    /// When the bytes are not one. Whether there is anybody at it is for the network to say.
    pub fn decode(bytes: &[u8]) -> Result<Self, IwarpAddressError> {
        let mut reader = Reader::new(bytes);
        let magic = reader.u32_le()?;
        if magic & !0xff != MAGIC {
            return Err(IwarpAddressError::WrongMagic(magic));
        }
        if magic as u8 != VERSION {
            return Err(IwarpAddressError::WrongVersion(magic as u8));
        }
        let queue_pairs = reader.u8()?;
        let reads_answered = reader.u8()?;
        let port = reader.u16_le()?;
        let ip = Ipv6Addr::from(reader.array::<16>()?).to_canonical();
        let token = reader.array()?;
        let fence_addr = reader.u64_le()?;
        let fence_key = reader.u32_le()?;
        let knock_port = reader.u16_le()?;
        let reserved = reader.u16_le()?;
        if !(1..=MAX_QUEUE_PAIRS as u8).contains(&queue_pairs) {
            return Err(wrong("the number of queue pairs", queue_pairs.into()));
        }
        if reads_answered == 0 {
            return Err(wrong("the number of reads that are answered", 0));
        }
        if reserved != 0 {
            return Err(wrong("a reserved field", reserved.into()));
        }
        if ip.is_unspecified() || ip.is_multicast() {
            return Err(IwarpAddressError::Ip(ip));
        }
        match reader.remaining() {
            0 => Ok(Self {
                queue_pairs,
                reads_answered,
                ip,
                port,
                token,
                fence_addr,
                fence_key,
                knock_port,
            }),
            more => Err(IwarpAddressError::TooLong(more)),
        }
    }
}

fn wrong(field: &'static str, value: u32) -> IwarpAddressError {
    IwarpAddressError::Field { field, value }
}

/// What a request for a connection says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The token of whom it is for.
    pub token: [u8; TOKEN_LEN],
    /// Which of the channel's queue pairs, from 0.
    pub queue_pair: u8,
}

impl Request {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; TOKEN_LEN + 1] {
        let mut out = [self.queue_pair; TOKEN_LEN + 1];
        out[..TOKEN_LEN].copy_from_slice(&self.token);
        out
    }

    /// Reads one; devices may have added zeros. `None`: the bytes are something else.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (token, rest) = bytes.split_first_chunk()?;
        let (&queue_pair, padding) = rest.split_first()?;
        let is_padded = padding.iter().all(|&byte| byte == 0);
        is_padded.then_some(Self { token: *token, queue_pair })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address() -> IwarpAddress {
        IwarpAddress {
            queue_pairs: 4,
            reads_answered: 16,
            ip: IpAddr::from([10, 77, 0, 1]),
            port: 40001,
            token: [7; TOKEN_LEN],
            fence_addr: 0x7f00_0000_1000,
            fence_key: 0xabcd,
            knock_port: 40002,
        }
    }

    fn ips() -> impl Strategy<Value = IpAddr> {
        let ips = any::<u128>().prop_map(|bits| Ipv6Addr::from_bits(bits).to_canonical());
        let v4 = any::<u32>().prop_map(|bits| IpAddr::from(bits.to_be_bytes()));
        prop_oneof![ips, v4]
            .prop_filter("a device's", |ip| !ip.is_unspecified() && !ip.is_multicast())
    }

    proptest! {
        #[test]
        fn addresses_survive_the_wire(
            queue_pairs in 1u8..=16, reads_answered in 1u8.., ip in ips(), port: u16,
            token: [u8; TOKEN_LEN], fence_addr: u64, fence_key: u32, knock_port: u16,
        ) {
            let address = IwarpAddress {
                queue_pairs, reads_answered, ip, port, token, fence_addr, fence_key, knock_port,
            };
            prop_assert_eq!(IwarpAddress::decode(&address.encode()), Ok(address));
        }

        #[test]
        fn any_bytes_are_read_or_refused(
            at in 0usize..LEN, bytes in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut whole = address().encode();
            let end = (at + bytes.len()).min(whole.len());
            whole.splice(at.min(end)..end, bytes);
            if let Ok(address) = IwarpAddress::decode(&whole) {
                prop_assert_eq!(address.encode(), whole);
            }
        }

        #[test]
        fn requests_survive_the_wire(token: [u8; TOKEN_LEN], queue_pair: u8, padding in 0usize..9) {
            let request = Request { token, queue_pair };
            let mut bytes = request.encode().to_vec();
            bytes.resize(bytes.len() + padding, 0);
            prop_assert_eq!(Request::decode(&bytes), Some(request));
            prop_assert_eq!(Request::decode(&bytes[..TOKEN_LEN]), None);
            bytes.push(1);
            prop_assert_eq!(Request::decode(&bytes), None);
        }
    }

    #[test]
    fn what_is_no_address_is_refused() {
        let bytes = address().encode();
        assert_eq!(bytes.len(), LEN);
        for cut in 0..bytes.len() {
            assert!(IwarpAddress::decode(&bytes[..cut]).is_err(), "{cut} bytes");
        }
        let mut long = bytes.clone();
        long.push(0);
        assert_eq!(IwarpAddress::decode(&long), Err(IwarpAddressError::TooLong(1)));
        for (at, value) in [(0, 2), (1, 1), (4, 0), (4, 17), (5, 0), (54, 1), (20, 224)] {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            assert!(IwarpAddress::decode(&bytes).is_err(), "byte {at} is {value}");
        }
        let mut nowhere = bytes;
        nowhere[8..24].fill(0);
        assert!(matches!(IwarpAddress::decode(&nowhere), Err(IwarpAddressError::Ip(_))));
    }
}
