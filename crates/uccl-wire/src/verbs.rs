//! The address of a verbs channel: one end of a set of queue pairs, as the other end needs it.
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u32 | magic (upper 24 bits) and version (lower 8) |
//! | 4 | u8 | link layer: 1 InfiniBand, 2 Ethernet |
//! | 5 | u8 | path MTU: 1 (256 bytes) to 5 (4096 bytes) |
//! | 6 | u16 | LID; 0 over Ethernet |
//! | 8 | 16 B | GID |
//! | 24 | u8 | RDMA reads that a queue pair answers at a time |
//! | 25 | u8 | reliable (RC) queue pairs, 1 to 16 |
//! | 26 | u8 | unreliable (UC) queue pairs, 0 to 16 |
//! | 27 | u8 | 0 |
//! | 28 | u32 | receives posted on each UC queue pair |
//! | 32 | 8 B each | queue pairs, RC ones first: number, first packet's number, as u32 of 24 bits |
//!
//! All numbers are little endian.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::cursor::{Reader, ShortInput};

/// Most queue pairs of a kind.
pub const MAX_QUEUE_PAIRS: usize = 16;

/// Bytes before the queue pairs.
const HEAD_LEN: usize = 32;
const QUEUE_PAIR_LEN: usize = 8;
const MAGIC: u32 = 0x5543_5600;
const VERSION: u8 = 1;
/// Queue pairs and packets are numbered with 24 bits.
const MAX_24_BIT: u32 = 0xff_ffff;

/// The network that a port belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LinkLayer {
    /// An InfiniBand subnet: peers are named by LID.
    InfiniBand,
    /// RoCE: peers are named by GID.
    Ethernet,
}

/// One queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueuePair {
    /// Its number.
    pub number: u32,
    /// The number of the first packet that it sends.
    pub first_packet: u32,
}

/// One end of a verbs channel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VerbsAddress {
    /// The network that the port belongs to.
    pub link_layer: LinkLayer,
    /// The longest packet of its port: 1 for 256 bytes, to 5 for 4096.
    pub mtu: u8,
    /// The port's LID; 0 over Ethernet.
    pub lid: u16,
    /// The port's GID.
    pub gid: [u8; 16],
    /// How many RDMA reads each of its queue pairs answers at a time.
    pub reads_answered: u8,
    /// Receives posted on each unreliable queue pair.
    pub receives: u32,
    /// Reliable queue pairs.
    pub reliable: Vec<QueuePair>,
    /// Unreliable queue pairs.
    pub unreliable: Vec<QueuePair>,
}

/// Why bytes are not a verbs channel's address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsAddressError {
    /// They end too early.
    #[error(transparent)]
    Truncated(#[from] ShortInput),
    /// More follows than was announced.
    #[error("{0} bytes follow the address")]
    TooLong(usize),
    /// The bytes are something else.
    #[error("not the address of a verbs channel: its magic is {0:#010x}")]
    WrongMagic(u32),
    /// An address of another version of this library.
    #[error("the address has version {0}, this library reads version {VERSION}")]
    WrongVersion(u8),
    /// A field has a value that it cannot have.
    #[error("{field} is {value}")]
    Field {
        /// Which field.
        field: &'static str,
        /// The field's value.
        value: u32,
    },
    /// No port has this GID.
    #[error("{0} is no port's GID")]
    Gid(Ipv6Addr),
}

impl VerbsAddress {
    /// The address's bytes. Of each kind of queue pair the first [`MAX_QUEUE_PAIRS`] count.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let reliable = &self.reliable[..self.reliable.len().min(MAX_QUEUE_PAIRS)];
        let unreliable = &self.unreliable[..self.unreliable.len().min(MAX_QUEUE_PAIRS)];
        let pairs = reliable.len() + unreliable.len();
        let mut out = Vec::with_capacity(HEAD_LEN + QUEUE_PAIR_LEN * pairs);
        out.extend_from_slice(&(MAGIC | u32::from(VERSION)).to_le_bytes());
        out.push(match self.link_layer {
            LinkLayer::InfiniBand => 1,
            LinkLayer::Ethernet => 2,
        });
        out.push(self.mtu);
        out.extend_from_slice(&self.lid.to_le_bytes());
        out.extend_from_slice(&self.gid);
        out.extend([self.reads_answered, reliable.len() as u8, unreliable.len() as u8, 0]);
        out.extend_from_slice(&self.receives.to_le_bytes());
        for pair in reliable.iter().chain(unreliable) {
            out.extend_from_slice(&pair.number.to_le_bytes());
            out.extend_from_slice(&pair.first_packet.to_le_bytes());
        }
        out
    }

    /// Reads an address.
    ///
    /// # Errors
    /// The bytes are not an address. Every field of a result has a value that a device takes; only
    /// the network shows whether such a port exists.
    pub fn decode(bytes: &[u8]) -> Result<Self, VerbsAddressError> {
        let mut reader = Reader::new(bytes);
        let magic = reader.u32_le()?;
        if magic & !0xff != MAGIC {
            return Err(VerbsAddressError::WrongMagic(magic));
        }
        if magic as u8 != VERSION {
            return Err(VerbsAddressError::WrongVersion(magic as u8));
        }
        let link_layer = match reader.u8()? {
            1 => LinkLayer::InfiniBand,
            2 => LinkLayer::Ethernet,
            other => return Err(wrong("the link layer", other)),
        };
        let mtu = within("the MTU", reader.u8()?, 1, 5)?;
        let lid = reader.u16_le()?;
        let gid = port_gid(reader.array()?)?;
        let reads_answered = reader.u8()?;
        let most = MAX_QUEUE_PAIRS as u8;
        let reliable = within("the number of RC queue pairs", reader.u8()?, 1, most)?;
        let unreliable = within("the number of UC queue pairs", reader.u8()?, 0, most)?;
        within("a reserved byte", reader.u8()?, 0, 0)?;
        let receives = reader.u32_le()?;
        let reliable = queue_pairs(&mut reader, reliable)?;
        let unreliable = queue_pairs(&mut reader, unreliable)?;
        match reader.remaining() {
            0 => Ok(Self {
                link_layer,
                mtu,
                lid,
                gid,
                reads_answered,
                receives,
                reliable,
                unreliable,
            }),
            more => Err(VerbsAddressError::TooLong(more)),
        }
    }
}

/// A port's GID is one of a kind: no device could be joined with the others.
fn port_gid(gid: [u8; 16]) -> Result<[u8; 16], VerbsAddressError> {
    let whole = Ipv6Addr::from(gid);
    let ip = whole.to_canonical();
    let is_broadcast = ip == IpAddr::V4(Ipv4Addr::BROADCAST);
    if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || is_broadcast {
        return Err(VerbsAddressError::Gid(whole));
    }
    Ok(gid)
}

fn queue_pairs(reader: &mut Reader<'_>, count: u8) -> Result<Vec<QueuePair>, VerbsAddressError> {
    let mut read = |field| match reader.u32_le()? {
        value if value <= MAX_24_BIT => Ok(value),
        value => Err(VerbsAddressError::Field { field, value }),
    };
    (0..count)
        .map(|_| {
            let number = read("a queue pair's number")?;
            Ok(QueuePair { number, first_packet: read("a packet's number")? })
        })
        .collect()
}

fn within(field: &'static str, value: u8, least: u8, most: u8) -> Result<u8, VerbsAddressError> {
    if (least..=most).contains(&value) { Ok(value) } else { Err(wrong(field, value)) }
}

fn wrong(field: &'static str, value: u8) -> VerbsAddressError {
    VerbsAddressError::Field { field, value: value.into() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address() -> VerbsAddress {
        VerbsAddress {
            link_layer: LinkLayer::Ethernet,
            mtu: 5,
            lid: 0,
            gid: [0xfe; 16],
            reads_answered: 16,
            receives: 0,
            reliable: vec![QueuePair { number: 17, first_packet: 0xabcdef }; 4],
            unreliable: vec![QueuePair { number: 21, first_packet: 1 }],
        }
    }

    fn pairs(least: usize) -> impl Strategy<Value = Vec<QueuePair>> {
        let pair = (0..=MAX_24_BIT, 0..=MAX_24_BIT);
        let pair = pair.prop_map(|(number, first_packet)| QueuePair { number, first_packet });
        prop::collection::vec(pair, least..=MAX_QUEUE_PAIRS)
    }

    fn gids() -> impl Strategy<Value = [u8; 16]> {
        any::<[u8; 16]>().prop_filter("no port's", |gid| port_gid(*gid).is_ok())
    }

    proptest! {
        #[test]
        fn addresses_survive_the_wire(
            mtu in 1u8..=5, lid: u16, gid in gids(), reads_answered: u8, receives: u32,
            reliable in pairs(1), unreliable in pairs(0), ib: bool,
        ) {
            let link_layer = if ib { LinkLayer::InfiniBand } else { LinkLayer::Ethernet };
            let address = VerbsAddress {
                link_layer, mtu, lid, gid, reads_answered, receives, reliable, unreliable,
            };
            prop_assert_eq!(VerbsAddress::decode(&address.encode()), Ok(address));
        }

        #[test]
        fn any_bytes_are_read_or_refused(
            at in 0usize..72, bytes in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut whole = address().encode();
            let end = (at + bytes.len()).min(whole.len());
            whole.splice(at.min(end)..end, bytes);
            if let Ok(address) = VerbsAddress::decode(&whole) {
                prop_assert_eq!(address.encode(), whole);
            }
        }
    }

    #[test]
    fn a_gid_that_no_port_has_is_refused() {
        let with = |text: &str| {
            let gid: Ipv6Addr = text.parse().expect("an address");
            (gid, VerbsAddress::decode(&VerbsAddress { gid: gid.octets(), ..address() }.encode()))
        };
        for text in ["::", "::1", "::ffff:0.0.0.0", "::ffff:127.0.0.1", "::ffff:127.9.9.9"]
            .into_iter()
            .chain(["ff02::1", "ff0e::7", "::ffff:224.0.0.1", "::ffff:255.255.255.255"])
        {
            let (gid, read) = with(text);
            assert_eq!(read, Err(VerbsAddressError::Gid(gid)), "{text}");
        }
        for text in ["fe80::1", "fec0::1", "::ffff:10.0.0.1", "2001:db8::1"] {
            assert!(with(text).1.is_ok(), "{text}");
        }
    }

    #[test]
    fn an_address_that_no_device_takes_is_refused() {
        let bytes = address().encode();
        for cut in 0..bytes.len() {
            assert!(VerbsAddress::decode(&bytes[..cut]).is_err(), "{cut} bytes");
        }
        let mut long = bytes.clone();
        long.push(0);
        assert_eq!(VerbsAddress::decode(&long), Err(VerbsAddressError::TooLong(1)));
        for (at, value) in
            [(0, 2), (1, 0), (4, 0), (4, 3), (5, 0), (5, 6), (25, 0), (27, 1), (35, 1)]
        {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            assert!(VerbsAddress::decode(&bytes).is_err(), "byte {at} is {value}");
        }
        let mut many = address();
        many.reliable = vec![many.reliable[0]; 17];
        many.unreliable.clear();
        let mut bytes = many.encode();
        assert_eq!(VerbsAddress::decode(&bytes).map(|read| read.reliable.len()), Ok(16));
        bytes[25] = 17;
        assert!(VerbsAddress::decode(&bytes).is_err());
    }
}
