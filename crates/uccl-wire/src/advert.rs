//! The advert: a peer's right and means to access a region one-sidedly.
//!
//! Callers carry it as 64 bytes laid out like UCCL's `FifoItem`, so that programs which patch the
//! address and the size in place (to reach a part of the advertised range) keep working. All
//! numbers are little endian.
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | u64 | address |
//! | 8 | u32 | length in bytes; `u32::MAX` where it is that or more |
//! | 12 | u32 | low half of the key |
//! | 16 | u32 | 1 (messages) |
//! | 20 | u32 | slot |
//! | 24 | u64 | 0 (index) |
//! | 32 | u64 | key |
//! | 40 | u64 | length in bytes, all 64 bits |
//! | 48 | u32 | instance |
//! | 52 | u32 | magic (upper 24 bits) and version (lower 8) |
//! | 56 | 8 B | 0 |

/// Bytes of an advert as callers carry it (a FifoItem).
pub const ADVERT_LEN: usize = 64;

/// Remote keys that a descriptor carries for one advert; see [`Advert::to_rkeys`].
pub const ADVERT_RKEYS: usize = 4;

const MAGIC: u32 = 0x5543_4100;
const VERSION: u8 = 1;
/// In the 32-bit size field: the 64-bit length counts.
const SIZE_IS_64_BIT: u32 = u32::MAX;

/// Lets a peer access `len` bytes at `addr`. The key is good for all of the region that they lie
/// in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Advert {
    /// Address in the owner's process.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// The region's random key.
    pub key: u64,
    /// The region's slot in the owner's table.
    pub slot: u32,
    /// The low half of the owner's instance: a restarted owner has another.
    pub instance: u32,
}

/// Why bytes are not an advert.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdvertError {
    /// An advert is exactly [`ADVERT_LEN`] bytes.
    #[error("an advert is {ADVERT_LEN} bytes long, not {len}")]
    WrongLength {
        /// Bytes given.
        len: usize,
    },
    /// The bytes are something else.
    #[error("not an advert: its magic is {got:#010x}")]
    WrongMagic {
        /// The magic and version word found.
        got: u32,
    },
    /// An advert of another version of this library.
    #[error("the advert has version {got}, this library reads version {VERSION}")]
    WrongVersion {
        /// The version found.
        got: u8,
    },
    /// The range ends past the end of the address space.
    #[error("{len} bytes at {addr:#x} end past the address space")]
    Overflow {
        /// Start of the range.
        addr: u64,
        /// Length of the range in bytes.
        len: u64,
    },
    /// A descriptor's remote keys are not an advert's.
    #[error("an advert has {ADVERT_RKEYS} remote keys, not {len}")]
    WrongKeyCount {
        /// Remote keys given.
        len: usize,
    },
}

/// The bytes of a field; a vector call reads thousands of adverts, and this is one load.
#[inline]
fn field<const AT: usize, const LEN: usize>(bytes: &[u8; ADVERT_LEN]) -> [u8; LEN] {
    const { assert!(AT + LEN <= ADVERT_LEN) };
    // Always there, as the line above has it.
    bytes[AT..].first_chunk().copied().unwrap_or([0; LEN])
}

impl Advert {
    /// The 64 bytes that callers carry.
    pub fn encode(&self) -> [u8; ADVERT_LEN] {
        let size = u32::try_from(self.len).unwrap_or(SIZE_IS_64_BIT);
        let mut out = [0; ADVERT_LEN];
        out[0..8].copy_from_slice(&self.addr.to_le_bytes());
        out[8..12].copy_from_slice(&size.to_le_bytes());
        out[12..16].copy_from_slice(&(self.key as u32).to_le_bytes());
        out[16..20].copy_from_slice(&1u32.to_le_bytes());
        out[20..24].copy_from_slice(&self.slot.to_le_bytes());
        out[32..40].copy_from_slice(&self.key.to_le_bytes());
        out[40..48].copy_from_slice(&self.len.to_le_bytes());
        out[48..52].copy_from_slice(&self.instance.to_le_bytes());
        out[52..56].copy_from_slice(&(MAGIC | u32::from(VERSION)).to_le_bytes());
        out
    }

    /// Reads an advert. A caller may have patched its address and 32-bit size to a part of the
    /// region.
    ///
    /// The 32-bit size is the length unless it is `u32::MAX`; then the 64-bit length counts.
    /// Whether the range lies in the region is for the region's owner to check.
    ///
    /// # Errors
    /// The length is not [`ADVERT_LEN`], magic or version are not ours, or the range overflows.
    #[inline]
    pub fn decode(bytes: &[u8]) -> Result<Self, AdvertError> {
        let Ok(bytes) = <&[u8; ADVERT_LEN]>::try_from(bytes) else {
            return Err(AdvertError::WrongLength { len: bytes.len() });
        };
        let addr = u64::from_le_bytes(field::<0, 8>(bytes));
        let size = u32::from_le_bytes(field::<8, 4>(bytes));
        let slot = u32::from_le_bytes(field::<20, 4>(bytes));
        let key = u64::from_le_bytes(field::<32, 8>(bytes));
        let len = u64::from_le_bytes(field::<40, 8>(bytes));
        let instance = u32::from_le_bytes(field::<48, 4>(bytes));
        let magic = u32::from_le_bytes(field::<52, 4>(bytes));
        if magic & !0xff != MAGIC {
            return Err(AdvertError::WrongMagic { got: magic });
        }
        if magic as u8 != VERSION {
            return Err(AdvertError::WrongVersion { got: magic as u8 });
        }
        let len = if size == SIZE_IS_64_BIT { len } else { u64::from(size) };
        Self { addr, len, key, slot, instance }.checked()
    }

    /// The advert of `len` bytes that begin `offset` bytes into it; `None` if they are not inside.
    pub fn part(&self, offset: u64, len: u64) -> Option<Self> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        let addr = self.addr.checked_add(offset)?;
        fits.then_some(Self { addr, len, ..*self })
    }

    /// The advert's names for a descriptor: low and high half of the key, slot, instance.
    pub fn to_rkeys(&self) -> [u32; ADVERT_RKEYS] {
        [self.key as u32, (self.key >> 32) as u32, self.slot, self.instance]
    }

    /// The advert for `len` bytes at `addr` of a descriptor with these remote keys.
    ///
    /// # Errors
    /// The keys are not [`ADVERT_RKEYS`] in number, or the range overflows.
    pub fn from_rkeys(addr: u64, len: u64, rkeys: &[u32]) -> Result<Self, AdvertError> {
        let &[low, high, slot, instance] = rkeys else {
            return Err(AdvertError::WrongKeyCount { len: rkeys.len() });
        };
        let key = u64::from(low) | u64::from(high) << 32;
        Self { addr, len, key, slot, instance }.checked()
    }

    #[inline]
    fn checked(self) -> Result<Self, AdvertError> {
        match self.addr.checked_add(self.len) {
            Some(_) => Ok(self),
            None => Err(AdvertError::Overflow { addr: self.addr, len: self.len }),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    prop_compose! {
        fn adverts()(
            addr: u64,
            len in prop_oneof![0..=u64::from(u32::MAX) + 2, any::<u64>()],
            key: u64,
            slot: u32,
            instance: u32,
        ) -> Advert {
            Advert { addr, len: len.min(u64::MAX - addr), key, slot, instance }
        }
    }

    proptest! {
        #[test]
        fn round_trips(advert in adverts()) {
            prop_assert_eq!(Advert::decode(&advert.encode()), Ok(advert));
            let (addr, len) = (advert.addr, advert.len);
            prop_assert_eq!(Advert::from_rkeys(addr, len, &advert.to_rkeys()), Ok(advert));
        }

        #[test]
        fn patched_address_and_size_count(advert in adverts(), addr: u64, size in 0..u32::MAX) {
            let mut bytes = advert.encode();
            bytes[0..8].copy_from_slice(&addr.to_le_bytes());
            bytes[8..12].copy_from_slice(&size.to_le_bytes());
            let len = u64::from(size);
            let want = match addr.checked_add(len) {
                Some(_) => Ok(Advert { addr, len, ..advert }),
                None => Err(AdvertError::Overflow { addr, len }),
            };
            prop_assert_eq!(Advert::decode(&bytes), want);
        }

        #[test]
        fn other_lengths_are_refused(advert in adverts(), len in 0usize..200) {
            prop_assume!(len != ADVERT_LEN);
            let mut bytes = advert.encode().to_vec();
            bytes.resize(len, 0);
            prop_assert_eq!(Advert::decode(&bytes), Err(AdvertError::WrongLength { len }));
        }

        #[test]
        fn a_flipped_bit_is_refused_or_read_as_written(advert in adverts(), bit in 0usize..512) {
            let mut bytes = advert.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            match Advert::decode(&bytes) {
                Ok(_) => prop_assert!(!(52..56).contains(&(bit / 8))),
                Err(AdvertError::WrongMagic { .. } | AdvertError::WrongVersion { .. }) => {
                    prop_assert!((52..56).contains(&(bit / 8)));
                }
                Err(AdvertError::Overflow { addr, len }) => {
                    prop_assert!(addr.checked_add(len).is_none());
                }
                Err(other) => prop_assert!(false, "{}", other),
            }
        }

        #[test]
        fn any_bytes_never_panic(bytes: Vec<u8>, block: [u8; 32], keys: Vec<u32>) {
            let _ = Advert::decode(&bytes);
            let _ = Advert::decode(&[block, block].concat());
            let _ = Advert::from_rkeys(0, 0, &keys);
        }
    }

    #[test]
    fn layout_is_a_fifo_item() {
        let advert = Advert {
            addr: 0x1122_3344_5566_7788,
            len: 0x1_0000_0001,
            key: 0xa1a2_a3a4_b1b2_b3b4,
            slot: 7,
            instance: 9,
        };
        let bytes = advert.encode();
        assert_eq!(bytes[0..8], 0x1122_3344_5566_7788u64.to_le_bytes());
        assert_eq!(bytes[8..12], [0xff; 4]);
        assert_eq!(bytes[12..16], 0xb1b2_b3b4u32.to_le_bytes());
        assert_eq!(bytes[16..20], [1, 0, 0, 0]);
        assert_eq!(bytes[20..24], [7, 0, 0, 0]);
        assert_eq!(bytes[24..32], [0; 8]);
        assert_eq!(bytes[32..40], advert.key.to_le_bytes());
        assert_eq!(bytes[40..48], advert.len.to_le_bytes());
        assert_eq!(bytes[48..52], [9, 0, 0, 0]);
        assert_eq!(bytes[52..56], [1, b'A', b'C', b'U']);
        assert_eq!(bytes[56..64], [0; 8]);
    }
}
