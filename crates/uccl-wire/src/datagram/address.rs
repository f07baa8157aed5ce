//! The address of a channel's end over UDP, which the two ends tell each other over TCP.
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u32 | magic, "UUDP" |
//! | 4 | u8 | version, 1 |
//! | 5 | u8 | family of the IP address: 4 or 6 |
//! | 6 | u8 | 1 if datagrams have codes by a pre-shared key, else 0 |
//! | 7 | u8 | paths, 1 to 64 |
//! | 8 | u64 | connection |
//! | 16 | 16 B | nonce |
//! | 32 | u32 | bytes that each socket has room for |
//! | 36 | u32 | bytes of the longest datagram, 576 to 65,507 |
//! | 40 | 16 B | IP address; one of IPv4 is followed by zeros |
//! | 56 | u16 each | the paths' ports |
//!
//! All numbers are little endian, but the IP address is in network order.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::cursor::{Reader, ShortInput};

/// Most paths.
pub const MAX_PATHS: usize = 64;
/// Every network takes datagrams of so many bytes (RFC 1122, section 3.3.2).
pub const MIN_DATAGRAM: u32 = 576;
/// Bytes of the longest datagram that IPv4 has.
const MAX_DATAGRAM: u32 = 65_507;
const MAGIC: u32 = u32::from_le_bytes(*b"UUDP");
const VERSION: u8 = 1;

/// The address of a channel's end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UdpAddress {
    /// The connection's name at this end. Datagrams for it carry this.
    pub connection: u64,
    /// Random bytes of this end.
    pub nonce: [u8; 16],
    /// Whether datagrams have codes by a pre-shared key.
    pub has_key: bool,
    /// Bytes that each socket has room for.
    pub room: u32,
    /// Bytes of the longest datagram that this end's interface takes.
    pub datagram: u32,
    /// The IP address.
    pub ip: IpAddr,
    /// The ports, one for each path.
    pub ports: Vec<u16>,
}

/// Why bytes are no such address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UdpAddressError {
    /// They end too early.
    #[error(transparent)]
    Truncated(#[from] ShortInput),
    /// Something else.
    #[error("not the address of a channel over UDP: it starts with {0:#010x}")]
    Magic(u32),
    /// An address of another version.
    #[error("an address of version {0}; this is version {VERSION}")]
    Version(u8),
    /// A field has a value that it must not have.
    #[error("an address with {0}")]
    Field(&'static str),
    /// More follows.
    #[error("{0} bytes follow the address")]
    TooLong(usize),
}

impl UdpAddress {
    /// Its bytes. Of more than [`MAX_PATHS`] ports the rest is left out.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let ports = &self.ports[..self.ports.len().min(MAX_PATHS)];
        let (family, ip) = match self.ip {
            IpAddr::V4(ip) => {
                let mut bytes = [0; 16];
                bytes[..4].copy_from_slice(&ip.octets());
                (4, bytes)
            }
            IpAddr::V6(ip) => (6, ip.octets()),
        };
        let mut out = MAGIC.to_le_bytes().to_vec();
        out.extend([VERSION, family, self.has_key.into(), ports.len() as u8]);
        out.extend(self.connection.to_le_bytes());
        out.extend(self.nonce);
        out.extend(self.room.to_le_bytes());
        out.extend(self.datagram.to_le_bytes());
        out.extend(ip);
        out.extend(ports.iter().flat_map(|port| port.to_le_bytes()));
        out
    }

    /// Reads an address.
    ///
    /// # Errors
    /// The bytes are not exactly one.
    pub fn decode(bytes: &[u8]) -> Result<Self, UdpAddressError> {
        let mut reader = Reader::new(bytes);
        let magic = reader.u32_le()?;
        if magic != MAGIC {
            return Err(UdpAddressError::Magic(magic));
        }
        let version = reader.u8()?;
        if version != VERSION {
            return Err(UdpAddressError::Version(version));
        }
        let (family, has_key, paths) = (reader.u8()?, reader.u8()?, reader.u8()?);
        let (connection, nonce) = (reader.u64_le()?, reader.array()?);
        let (room, datagram) = (reader.u32_le()?, reader.u32_le()?);
        let ip: [u8; 16] = reader.array()?;
        let ip = match (family, ip) {
            (4, [a, b, c, d, rest @ ..]) if rest == [0; 12] => Ipv4Addr::new(a, b, c, d).into(),
            (6, octets) => Ipv6Addr::from(octets).into(),
            _ => return Err(UdpAddressError::Field("no IP address")),
        };
        match () {
            () if has_key > 1 => return Err(UdpAddressError::Field("an unknown flag")),
            () if !(1..=MAX_PATHS).contains(&paths.into()) => {
                return Err(UdpAddressError::Field("a wrong number of paths"));
            }
            () if !(MIN_DATAGRAM..=MAX_DATAGRAM).contains(&datagram) => {
                return Err(UdpAddressError::Field("a wrong length of datagrams"));
            }
            () => {}
        }
        let ports: Result<_, _> = (0..paths).map(|_| reader.u16_le()).collect();
        let (has_key, ports) = (has_key == 1, ports?);
        match reader.remaining() {
            0 => Ok(Self { connection, nonce, has_key, room, datagram, ip, ports }),
            more => Err(UdpAddressError::TooLong(more)),
        }
    }
}
