//! Addresses of channel ends and keys of memory that peers exchange to use libfabric.
//!
//! An address:
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u32 | magic, "UFAB" |
//! | 4 | u8 | version, 1 |
//! | 5 | u8 | length of the provider's name, 1 to 64 |
//! | 6 | u16 | length of the endpoint's name, 1 to 512 |
//! | 8 | u32 | format of the endpoint's name, in libfabric's numbers |
//! | 12 | u64 | where the probe word is, in the terms of its key |
//! | 20 | u8 | length of the probe word's key, at most 128 |
//! | 21 | | provider's name (ASCII), endpoint's name, key of the probe word |
//!
//! A key is one of
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u8 | 1: a plain key |
//! | 1 | u64 | the key |
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u8 | 2: a raw key |
//! | 1 | u64 | the base that belongs to it |
//! | 9 | 1 to 119 B | the key, in the provider's layout |
//!
//! All numbers are little endian.

use crate::cursor::{Reader, ShortInput};

const MAGIC: u32 = u32::from_le_bytes(*b"UFAB");
const VERSION: u8 = 1;
const PLAIN: u8 = 1;
const RAW: u8 = 2;

/// Longest name of a provider, in bytes.
pub const MAX_PROVIDER: usize = 64;
/// Longest name of an endpoint, in bytes.
pub const MAX_NAME: usize = 512;
/// Longest key, in bytes.
pub const MAX_KEY: usize = 128;
/// Longest raw key, without its tag and base.
pub const MAX_RAW_KEY: usize = MAX_KEY - 9;

/// Where a channel's end is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FabricAddress<'a> {
    /// The provider's name: only ends of one provider can be joined.
    pub provider: &'a str,
    /// The format of the endpoint's name, in libfabric's numbers.
    pub format: u32,
    /// The endpoint's name, as the provider has it.
    pub name: &'a [u8],
    /// Where the word is that peers write to find out whether the way works, in the terms of its
    /// key.
    pub probe_addr: u64,
    /// That word's key.
    pub probe_key: &'a [u8],
}

/// The name of registered memory for a peer's device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FabricKey<'a> {
    /// A number that requests carry as it is.
    Plain(u64),
    /// Bytes that the peer's library must first make a number of.
    Raw {
        /// The base address that belongs to the key.
        base: u64,
        /// The key, in the provider's layout.
        bytes: &'a [u8],
    },
}

/// Why bytes are not an address or a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// They end too early.
    #[error(transparent)]
    Truncated(#[from] ShortInput),
    /// Something else than an address.
    #[error("not the address of a libfabric channel: it starts with {0:#010x}")]
    Magic(u32),
    /// An address of another version.
    #[error("a libfabric address of version {0}; this is version {VERSION}")]
    Version(u8),
    /// A part is missing or longer than it may be.
    #[error("the {what} has {len} bytes, at most {max} are taken")]
    Length {
        /// Which part.
        what: &'static str,
        /// Its length.
        len: usize,
        /// The longest that is taken; there must be at least one byte of names and raw keys.
        max: usize,
    },
    /// The provider's name is not printable ASCII.
    #[error("the provider's name is not printable ASCII")]
    Provider,
    /// Neither kind of key.
    #[error("a key of kind {0}; there are {PLAIN} and {RAW}")]
    Kind(u8),
    /// More follows than there should be.
    #[error("{0} bytes too many")]
    TooLong(usize),
}

impl<'a> FabricAddress<'a> {
    /// The address's bytes.
    ///
    /// # Errors
    /// When a part is empty or too long.
    pub fn encode(&self) -> Result<Vec<u8>, FabricError> {
        self.check()?;
        let mut out = Vec::with_capacity(21 + MAX_PROVIDER + self.name.len());
        out.extend(MAGIC.to_le_bytes());
        out.extend([VERSION, self.provider.len() as u8]);
        out.extend((self.name.len() as u16).to_le_bytes());
        out.extend(self.format.to_le_bytes());
        out.extend(self.probe_addr.to_le_bytes());
        out.push(self.probe_key.len() as u8);
        out.extend(self.provider.as_bytes());
        out.extend(self.name);
        out.extend(self.probe_key);
        Ok(out)
    }

    /// Reads an address.
    ///
    /// # Errors
    /// The bytes are not an address. The endpoint's name is not checked: that is for the provider's
    /// user.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, FabricError> {
        let mut reader = Reader::new(bytes);
        let magic = reader.u32_le()?;
        if magic != MAGIC {
            return Err(FabricError::Magic(magic));
        }
        let version = reader.u8()?;
        if version != VERSION {
            return Err(FabricError::Version(version));
        }
        let (provider_len, name_len) = (reader.u8()?, reader.u16_le()?);
        let format = reader.u32_le()?;
        let probe_addr = reader.u64_le()?;
        let key_len = reader.u8()?;
        let provider = reader.take(provider_len.into())?;
        let provider = str::from_utf8(provider).map_err(|_| FabricError::Provider)?;
        let name = reader.take(name_len.into())?;
        let probe_key = reader.take(key_len.into())?;
        if reader.remaining() > 0 {
            return Err(FabricError::TooLong(reader.remaining()));
        }
        let address = Self { provider, format, name, probe_addr, probe_key };
        address.check()?;
        Ok(address)
    }

    fn check(&self) -> Result<(), FabricError> {
        within("provider's name", self.provider.len(), 1, MAX_PROVIDER)?;
        within("endpoint's name", self.name.len(), 1, MAX_NAME)?;
        within("probe word's key", self.probe_key.len(), 0, MAX_KEY)?;
        let printable = self.provider.bytes().all(|byte| byte.is_ascii_graphic());
        printable.then_some(()).ok_or(FabricError::Provider)
    }
}

impl<'a> FabricKey<'a> {
    /// Appends the key's bytes.
    ///
    /// # Errors
    /// When a raw key is empty or too long.
    pub fn encode_to(&self, out: &mut impl Extend<u8>) -> Result<(), FabricError> {
        match self {
            Self::Plain(key) => {
                out.extend([PLAIN]);
                out.extend(key.to_le_bytes());
            }
            Self::Raw { base, bytes } => {
                within("raw key", bytes.len(), 1, MAX_RAW_KEY)?;
                out.extend([RAW]);
                out.extend(base.to_le_bytes());
                out.extend(bytes.iter().copied());
            }
        }
        Ok(())
    }

    /// Reads a key.
    ///
    /// # Errors
    /// When the bytes are not one.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, FabricError> {
        let mut reader = Reader::new(bytes);
        let kind = reader.u8()?;
        let number = match kind {
            PLAIN | RAW => reader.u64_le()?,
            _ => return Err(FabricError::Kind(kind)),
        };
        let rest = reader.remaining();
        if kind == PLAIN {
            let exact = rest == 0;
            return exact.then_some(Self::Plain(number)).ok_or(FabricError::TooLong(rest));
        }
        within("raw key", rest, 1, MAX_RAW_KEY)?;
        Ok(Self::Raw { base: number, bytes: reader.take(rest as u64)? })
    }
}

fn within(what: &'static str, len: usize, min: usize, max: usize) -> Result<(), FabricError> {
    (min..=max).contains(&len).then_some(()).ok_or(FabricError::Length { what, len, max })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ADDRESS: FabricAddress<'_> = FabricAddress {
        provider: "tcp;ofi_rxm",
        format: 2,
        name: &[2, 0, 0x6d, 0xc4, 127, 0, 0, 1],
        probe_addr: 0x0102_0304_0506_0708,
        probe_key: &[1, 9, 0, 0, 0, 0, 0, 0, 0],
    };

    proptest! {
        #[test]
        fn addresses_survive_the_wire(
            provider in "[!-~]{1,64}", format: u32, probe_addr: u64,
            name in prop::collection::vec(any::<u8>(), 1..=MAX_NAME),
            probe_key in prop::collection::vec(any::<u8>(), 0..=MAX_KEY),
        ) {
            let (name, probe_key) = (&name[..], &probe_key[..]);
            let address = FabricAddress { provider: &provider, format, name, probe_addr, probe_key };
            let bytes = address.encode().unwrap();
            prop_assert_eq!(FabricAddress::decode(&bytes), Ok(address));
            prop_assert!(FabricAddress::decode(&bytes[..bytes.len() - 1]).is_err());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(address) = FabricAddress::decode(&bytes) {
                prop_assert_eq!(address.encode(), Ok(bytes.clone()));
            }
            if let Ok(key) = FabricKey::decode(&bytes) {
                let mut again = Vec::new();
                key.encode_to(&mut again).unwrap();
                prop_assert_eq!(again, bytes);
            }
        }
    }

    #[test]
    fn layout() {
        let bytes = ADDRESS.encode().unwrap();
        assert_eq!(bytes[..12], *b"UFAB\x01\x0b\x08\0\x02\0\0\0");
        assert_eq!(bytes[12..21], *b"\x08\x07\x06\x05\x04\x03\x02\x01\x09");
        assert_eq!(bytes[21..32], *b"tcp;ofi_rxm");
        assert_eq!(bytes[32..40], *ADDRESS.name);
        assert_eq!(bytes[40..], *ADDRESS.probe_key);
        let mut key = Vec::new();
        FabricKey::Raw { base: 3, bytes: b"ab" }.encode_to(&mut key).unwrap();
        assert_eq!(key, *b"\x02\x03\0\0\0\0\0\0\0ab");
    }

    #[test]
    fn bytes_that_are_no_address_are_refused() {
        let whole = ADDRESS.encode().unwrap();
        let refused = |at: usize, value: u8| {
            let mut bytes = whole.clone();
            bytes[at] = value;
            FabricAddress::decode(&bytes).map(|_| ()).unwrap_err()
        };
        assert!(matches!(refused(0, 0), FabricError::Magic(_)));
        assert_eq!(refused(4, 2), FabricError::Version(2));
        assert!(matches!(refused(5, 12), FabricError::Truncated(_)));
        assert_eq!(refused(5, 10), FabricError::TooLong(1));
        assert_eq!(refused(21, b' '), FabricError::Provider);
        assert_eq!(refused(21, 0xff), FabricError::Provider);
        assert!(FabricAddress { name: &[], ..ADDRESS }.encode().is_err());
        assert!(FabricAddress { probe_key: &[0; MAX_KEY + 1], ..ADDRESS }.encode().is_err());
    }

    #[test]
    fn bytes_that_are_no_key_are_refused() {
        assert_eq!(FabricKey::decode(&[3, 0]), Err(FabricError::Kind(3)));
        assert_eq!(FabricKey::decode(&[1; 10]), Err(FabricError::TooLong(1)));
        assert!(matches!(FabricKey::decode(&[1; 8]), Err(FabricError::Truncated(_))));
        assert!(matches!(FabricKey::decode(&[2; 9]), Err(FabricError::Length { len: 0, .. })));
        let long = [2; MAX_KEY + 1];
        assert!(matches!(FabricKey::decode(&long), Err(FabricError::Length { .. })));
    }
}
