//! Endpoint metadata: one process hands it to another, by any way it likes, so that it can connect.
//!
//! | form | bytes | length |
//! | --- | --- | --- |
//! | GPU by index | address (4 or 16), port (u16, big endian), index (i32, little endian) | 10 or 22 |
//! | GPU by PCI address | address (4 or 16), port (u16, big endian), length (u8), PCI address (ASCII) | 7 or 19, and the PCI address |
//! | text | `10.0.0.1:28100?0000:4a:00.0`, `[fe80::1]:28100?0` | |
//!
//! UCCL writes the index in the host's byte order; every host it runs on is little endian.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
};

use crate::cursor::{Reader, ShortInput};

/// Where an endpoint listens, and which GPU it serves.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub struct Metadata {
    /// The address that peers connect to.
    pub ip: IpAddr,
    /// The TCP port that peers connect to.
    pub port: u16,
    /// The GPU that the endpoint serves.
    pub device: Device,
}

/// How an endpoint's GPU is named.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub enum Device {
    /// By its index on its host, at most `i32::MAX`.
    Gpu(u32),
    /// By its PCI address, such as `0000:4a:00.0`; empty where there is no GPU.
    Bdf(String),
}

/// Why something is not endpoint metadata.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MetadataError {
    /// The bytes have the length of no form, or the part for the PCI address is not one.
    #[error("{len} bytes are no endpoint metadata")]
    Unrecognised {
        /// Bytes given.
        len: usize,
    },
    /// A GPU index beyond `i32::MAX`, which the layout calls negative.
    #[error("GPU index {index} is out of range (at most {})", i32::MAX)]
    GpuIndex {
        /// The index.
        index: u32,
    },
    /// Not a PCI address.
    #[error("{bdf:?} is not a PCI address, such as 0000:4a:00.0")]
    Bdf {
        /// The text in its place, at most its first 32 characters.
        bdf: String,
    },
    /// The text is not `ip:port?device`.
    #[error("{text:?} is not an endpoint's address, such as 10.0.0.1:28100?0000:4a:00.0")]
    Text {
        /// The text, at most its first 80 characters.
        text: String,
    },
}

impl From<ShortInput> for MetadataError {
    fn from(short: ShortInput) -> Self {
        Self::Unrecognised { len: short.at + short.have }
    }
}

impl Metadata {
    /// The bytes: by index for [`Device::Gpu`], by PCI address for [`Device::Bdf`].
    ///
    /// # Errors
    /// The index is out of range, or the PCI address is none.
    pub fn encode(&self) -> Result<Vec<u8>, MetadataError> {
        self.device.check()?;
        let mut out = Vec::with_capacity(35);
        match self.ip {
            IpAddr::V4(ip) => out.extend(ip.octets()),
            IpAddr::V6(ip) => out.extend(ip.octets()),
        }
        out.extend(self.port.to_be_bytes());
        match &self.device {
            Device::Gpu(index) => out.extend(index.to_le_bytes()),
            Device::Bdf(bdf) => {
                out.push(bdf.len() as u8);
                out.extend(bdf.as_bytes());
            }
        }
        Ok(out)
    }

    /// Reads either form.
    ///
    /// A PCI address never makes the bytes as long as a form with an index, so 10 and 22 bytes have
    /// an index; for the others the length in front of the PCI address tells IPv4 from IPv6.
    ///
    /// # Errors
    /// The bytes are neither, or the index is negative.
    pub fn decode(bytes: &[u8]) -> Result<Self, MetadataError> {
        match bytes.len() {
            10 => Self::decode_by_index(bytes, read_v4),
            22 => Self::decode_by_index(bytes, read_v6),
            _ => Self::decode_by_bdf(bytes, read_v4)
                .or_else(|_| Self::decode_by_bdf(bytes, read_v6))
                .map_err(|_| MetadataError::Unrecognised { len: bytes.len() }),
        }
    }

    fn decode_by_index(bytes: &[u8], read_ip: ReadIp) -> Result<Self, MetadataError> {
        let mut r = Reader::new(bytes);
        let (ip, port) = (read_ip(&mut r)?, r.u16_be()?);
        let device = Device::Gpu(r.u32_le()?);
        device.check()?;
        Ok(Self { ip, port, device })
    }

    fn decode_by_bdf(bytes: &[u8], read_ip: ReadIp) -> Result<Self, MetadataError> {
        let mut r = Reader::new(bytes);
        let (ip, port) = (read_ip(&mut r)?, r.u16_be()?);
        let len = r.u8()?;
        let bdf = r.take(len.into())?;
        if r.remaining() > 0 {
            return Err(MetadataError::Unrecognised { len: bytes.len() });
        }
        Ok(Self { ip, port, device: Device::bdf(&String::from_utf8_lossy(bdf))? })
    }
}

type ReadIp = fn(&mut Reader<'_>) -> Result<IpAddr, ShortInput>;

fn read_v4(r: &mut Reader<'_>) -> Result<IpAddr, ShortInput> {
    r.array::<4>().map(|octets| Ipv4Addr::from(octets).into())
}

fn read_v6(r: &mut Reader<'_>) -> Result<IpAddr, ShortInput> {
    r.array::<16>().map(|octets| Ipv6Addr::from(octets).into())
}

impl Device {
    fn bdf(bdf: &str) -> Result<Self, MetadataError> {
        if !bdf.is_empty() && !is_bdf(bdf) {
            return Err(MetadataError::Bdf { bdf: bdf.chars().take(32).collect() });
        }
        Ok(Self::Bdf(bdf.to_owned()))
    }

    fn check(&self) -> Result<(), MetadataError> {
        match self {
            Self::Gpu(index) if i32::try_from(*index).is_err() => {
                Err(MetadataError::GpuIndex { index: *index })
            }
            Self::Gpu(_) => Ok(()),
            Self::Bdf(bdf) => Self::bdf(bdf).map(drop),
        }
    }
}

/// Whether this is `domain:bus:device.function` in hex. Domains have four digits, five behind a VMD
/// controller, and eight in the output of NVIDIA's tools.
fn is_bdf(text: &str) -> bool {
    let Some((domain, rest)) = text.split_once(':') else { return false };
    let Some((bus, rest)) = rest.split_once(':') else { return false };
    let Some((device, function)) = rest.split_once('.') else { return false };
    let hex = |part: &str| part.bytes().all(|b| b.is_ascii_hexdigit());
    matches!(domain.len(), 4 | 5 | 8)
        && (bus.len(), device.len(), function.len()) == (2, 2, 1)
        && [domain, bus, device, function].into_iter().all(hex)
}

impl fmt::Display for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addr = SocketAddr::new(self.ip, self.port);
        match &self.device {
            Device::Gpu(index) => write!(f, "{addr}?{index}"),
            Device::Bdf(bdf) => write!(f, "{addr}?{bdf}"),
        }
    }
}

impl FromStr for Metadata {
    type Err = MetadataError;

    fn from_str(text: &str) -> Result<Self, MetadataError> {
        let refused = || MetadataError::Text { text: text.chars().take(80).collect() };
        let (addr, device) = text.split_once('?').ok_or_else(refused)?;
        let (ip, port) = split_addr(addr).ok_or_else(refused)?;
        let device = if !device.is_empty() && device.bytes().all(|b| b.is_ascii_digit()) {
            Device::Gpu(device.parse().map_err(|_| refused())?)
        } else {
            Device::bdf(device)?
        };
        device.check()?;
        Ok(Self { ip, port, device })
    }
}

/// `ip:port` or `[ip6]:port`. A scope (`%eth0`) means nothing on another host and is refused.
fn split_addr(text: &str) -> Option<(IpAddr, u16)> {
    let (ip, port) = text.rsplit_once(':')?;
    let ip = match ip.strip_prefix('[').and_then(|ip| ip.strip_suffix(']')) {
        Some(ip) => ip.parse::<Ipv6Addr>().ok()?.into(),
        None => ip.parse::<Ipv4Addr>().ok()?.into(),
    };
    Some((ip, port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn devices() -> impl Strategy<Value = Device> {
        prop_oneof![
            (0..=i32::MAX as u32).prop_map(Device::Gpu),
            "([0-9a-f]{4,5}|[0-9A-F]{8}):[0-9a-f]{2}:[0-9a-f]{2}\\.[0-7]".prop_map(Device::Bdf),
            Just(Device::Bdf(String::new())),
        ]
    }

    prop_compose! {
        fn metadata()(ip: IpAddr, port: u16, device in devices()) -> Metadata {
            Metadata { ip, port, device }
        }
    }

    proptest! {
        #[test]
        fn bytes_round_trip(meta in metadata()) {
            prop_assert_eq!(Metadata::decode(&meta.encode().unwrap()), Ok(meta));
        }

        /// Lengths and digits inside an address must not make it look like another form.
        #[test]
        fn confusing_addresses_round_trip(
            octets in proptest::array::uniform16(prop_oneof![Just(0u8), Just(3), Just(12), Just(15), Just(24), b'0'..=b':']),
            port: u16,
            device in devices(),
        ) {
            let meta = Metadata { ip: IpAddr::from(octets), port, device };
            prop_assert_eq!(Metadata::decode(&meta.encode().unwrap()), Ok(meta));
        }

        #[test]
        fn text_round_trips(meta in metadata()) {
            prop_assert_eq!(meta.to_string().parse(), Ok(meta));
        }

        #[test]
        fn cut_bytes_are_refused_or_another_form(meta in metadata(), cut in 1usize..12) {
            let bytes = meta.encode().unwrap();
            let short = &bytes[..bytes.len() - cut.min(bytes.len())];
            if let Ok(other) = Metadata::decode(short) {
                prop_assert_eq!(other.encode().unwrap(), short);
            }
        }

        #[test]
        fn any_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(meta) = Metadata::decode(&bytes) {
                prop_assert_eq!(meta.encode().unwrap(), bytes);
            }
        }

        #[test]
        fn any_text_never_panics(text in "[\\[\\]?:.0-9a-f%\\PC]{0,60}") {
            if let Ok(meta) = text.parse::<Metadata>() {
                prop_assert_eq!(meta.to_string().parse(), Ok(meta));
            }
        }
    }

    #[test]
    fn layouts() {
        let ip = IpAddr::from([10, 0, 0, 1]);
        let by_index = Metadata { ip, port: 0x6dc4, device: Device::Gpu(3) };
        assert_eq!(by_index.encode().unwrap(), [10, 0, 0, 1, 0x6d, 0xc4, 3, 0, 0, 0]);
        assert_eq!(Metadata::decode(&by_index.encode().unwrap()), Ok(by_index.clone()));
        let by_bdf = Metadata { device: Device::Bdf("0000:4a:00.0".into()), ..by_index };
        assert_eq!(by_bdf.encode().unwrap(), b"\x0a\x00\x00\x01\x6d\xc4\x0c0000:4a:00.0");
        assert_eq!(by_bdf.to_string(), "10.0.0.1:28100?0000:4a:00.0");
        let v6 = Metadata { ip: Ipv6Addr::LOCALHOST.into(), ..by_bdf };
        assert_eq!(v6.encode().unwrap().len(), 31);
        assert_eq!(v6.to_string(), "[::1]:28100?0000:4a:00.0");
        assert_eq!(Metadata { device: Device::Gpu(0), ..v6 }.encode().unwrap().len(), 22);
    }

    #[test]
    fn nonsense_is_refused() {
        let negative = [10, 0, 0, 1, 1, 1, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(Metadata::decode(&negative), Err(MetadataError::GpuIndex { index: u32::MAX }));
        assert_eq!(
            Metadata::decode(b"\x0a\x00\x00\x01\x6d\xc4\x0c0000:4a:00.x"),
            Err(MetadataError::Unrecognised { len: 19 })
        );
        for text in
            ["", "10.0.0.1:1", "10.0.0.1?0", "::1:80?0", "[::1]?0", "a:1?0", "1.2.3.4:65536?0"]
        {
            assert_eq!(text.parse::<Metadata>(), Err(MetadataError::Text { text: text.into() }),);
        }
        let device = Device::Gpu(1 << 31);
        let meta = Metadata { ip: IpAddr::from([1, 2, 3, 4]), port: 1, device };
        assert_eq!(meta.encode(), Err(MetadataError::GpuIndex { index: 1 << 31 }));
        let meta = Metadata { device: Device::Bdf("x".repeat(300)), ..meta };
        assert_eq!(meta.encode(), Err(MetadataError::Bdf { bdf: "x".repeat(32) }));
    }
}
