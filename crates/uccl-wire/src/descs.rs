//! Descriptors of registered tensors, as `get_serialized_descs` hands them to another process.
//!
//! A u64 count; for each descriptor u64 address, u64 size, u64 number of keys n, u32 local
//! keys\[n\], u32 remote keys\[n\], u64 length of IPC info and its bytes. UCCL writes the host's
//! byte order; every host it runs on is little endian.

use crate::{
    advert::{ADVERT_RKEYS, Advert, AdvertError},
    cursor::{Reader, ShortInput},
};

/// Most descriptors in one list.
pub const MAX_DESCS: usize = 1 << 20;
/// Most local (and as many remote) keys of a descriptor.
pub const MAX_DESC_KEYS: usize = 64;
/// Most bytes of a descriptor's IPC info.
pub const MAX_DESC_IPC_LEN: usize = 4096;

/// Bytes of a descriptor without keys and IPC info.
const MIN_DESC_LEN: usize = 32;

/// A registered tensor, as another process sees it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct XferDesc {
    /// Address in the owner's process.
    pub addr: u64,
    /// Size in bytes.
    pub size: u64,
    /// Keys for the owner's own use.
    pub lkeys: Vec<u32>,
    /// Keys for its peers: as many as `lkeys`; see [`Advert::to_rkeys`].
    pub rkeys: Vec<u32>,
    /// [IPC info](crate::ipc_info); empty where there is none.
    pub ipc: Vec<u8>,
}

/// Why a list of descriptors cannot be written or read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DescsError {
    /// The bytes end too early.
    #[error("the descriptors are cut short: {0}")]
    Truncated(#[from] ShortInput),
    /// A count or length is beyond its limit.
    #[error("{what}: {got} is more than the {max} allowed")]
    TooMany {
        /// The counted items.
        what: &'static str,
        /// The count.
        got: u64,
        /// Its limit.
        max: usize,
    },
    /// More descriptors are announced than the bytes can hold.
    #[error("{count} descriptors do not fit the {have} bytes that are left")]
    CountBeyondBytes {
        /// The count.
        count: u64,
        /// Bytes behind it.
        have: usize,
    },
    /// There are bytes behind the last descriptor.
    #[error("{extra} bytes follow the last descriptor")]
    Trailing {
        /// How many.
        extra: usize,
    },
    /// The layout has one count for both kinds of keys.
    #[error("descriptor {index} has {lkeys} local and {rkeys} remote keys, not as many of each")]
    UnevenKeys {
        /// Which descriptor.
        index: usize,
        /// Its local keys.
        lkeys: usize,
        /// Its remote keys.
        rkeys: usize,
    },
}

impl XferDesc {
    /// The descriptor that carries an advert in its remote keys.
    pub fn of_advert(advert: &Advert) -> Self {
        Self {
            addr: advert.addr,
            size: advert.len,
            lkeys: vec![0; ADVERT_RKEYS],
            rkeys: advert.to_rkeys().to_vec(),
            ipc: Vec::new(),
        }
    }

    /// The advert that the remote keys carry.
    ///
    /// # Errors
    /// The remote keys are not an advert's, or the range overflows.
    pub fn advert(&self) -> Result<Advert, AdvertError> {
        Advert::from_rkeys(self.addr, self.size, &self.rkeys)
    }

    fn encoded_len(&self) -> usize {
        MIN_DESC_LEN + 4 * (self.lkeys.len() + self.rkeys.len()) + self.ipc.len()
    }

    fn encode(&self, index: usize, out: &mut Vec<u8>) -> Result<(), DescsError> {
        let (lkeys, rkeys) = (self.lkeys.len(), self.rkeys.len());
        if lkeys != rkeys {
            return Err(DescsError::UnevenKeys { index, lkeys, rkeys });
        }
        let keys = bounded("keys", lkeys as u64, MAX_DESC_KEYS)?;
        let ipc_len = bounded("IPC info bytes", self.ipc.len() as u64, MAX_DESC_IPC_LEN)?;
        for number in [self.addr, self.size, keys] {
            out.extend(number.to_le_bytes());
        }
        for key in self.lkeys.iter().chain(&self.rkeys) {
            out.extend(key.to_le_bytes());
        }
        out.extend(ipc_len.to_le_bytes());
        out.extend(&self.ipc);
        Ok(())
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self, DescsError> {
        let (addr, size) = (r.u64_le()?, r.u64_le()?);
        let keys = bounded("keys", r.u64_le()?, MAX_DESC_KEYS)?;
        let (lkeys, rkeys) = (read_keys(r, keys)?, read_keys(r, keys)?);
        let ipc_len = bounded("IPC info bytes", r.u64_le()?, MAX_DESC_IPC_LEN)?;
        Ok(Self { addr, size, lkeys, rkeys, ipc: r.take(ipc_len)?.to_vec() })
    }
}

/// The bytes of a list of descriptors.
///
/// # Errors
/// A limit is passed, or a descriptor has not as many local as remote keys.
pub fn encode_descs(descs: &[XferDesc]) -> Result<Vec<u8>, DescsError> {
    let count = bounded("descriptors", descs.len() as u64, MAX_DESCS)?;
    let len = descs.iter().map(XferDesc::encoded_len).sum::<usize>();
    let mut out = Vec::with_capacity(8 + len);
    out.extend(count.to_le_bytes());
    for (index, desc) in descs.iter().enumerate() {
        desc.encode(index, &mut out)?;
    }
    Ok(out)
}

/// Reads a list of descriptors. Takes memory in proportion to the bytes, not to counts in them.
///
/// # Errors
/// A limit is passed, the bytes end too early, or some are left.
pub fn decode_descs(bytes: &[u8]) -> Result<Vec<XferDesc>, DescsError> {
    let mut r = Reader::new(bytes);
    let count = bounded("descriptors", r.u64_le()?, MAX_DESCS)?;
    if count > (r.remaining() / MIN_DESC_LEN) as u64 {
        return Err(DescsError::CountBeyondBytes { count, have: r.remaining() });
    }
    let descs = (0..count).map(|_| XferDesc::decode(&mut r)).collect::<Result<Vec<_>, _>>()?;
    match r.remaining() {
        0 => Ok(descs),
        extra => Err(DescsError::Trailing { extra }),
    }
}

fn bounded(what: &'static str, got: u64, max: usize) -> Result<u64, DescsError> {
    if got > max as u64 {
        return Err(DescsError::TooMany { what, got, max });
    }
    Ok(got)
}

fn read_keys(r: &mut Reader<'_>, count: u64) -> Result<Vec<u32>, ShortInput> {
    let bytes = r.take(4 * count)?;
    let (keys, _) = bytes.as_chunks::<4>();
    Ok(keys.iter().map(|key| u32::from_le_bytes(*key)).collect())
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    prop_compose! {
        fn descs()(
            addr: u64,
            size: u64,
            keys in vec(any::<(u32, u32)>(), 0..=MAX_DESC_KEYS),
            ipc in vec(any::<u8>(), 0..200),
        ) -> XferDesc {
            let (lkeys, rkeys) = keys.into_iter().unzip();
            XferDesc { addr, size, lkeys, rkeys, ipc }
        }
    }

    proptest! {
        #[test]
        fn round_trips(descs in vec(descs(), 0..5)) {
            prop_assert_eq!(decode_descs(&encode_descs(&descs).unwrap()), Ok(descs));
        }

        #[test]
        fn cut_or_longer_bytes_are_refused(descs in vec(descs(), 0..3), cut: prop::sample::Index) {
            let mut bytes = encode_descs(&descs).unwrap();
            prop_assert!(decode_descs(&bytes[..cut.index(bytes.len())]).is_err());
            bytes.push(0);
            prop_assert_eq!(decode_descs(&bytes), Err(DescsError::Trailing { extra: 1 }));
        }

        #[test]
        fn flipped_bits_are_read_as_written_or_refused(
            descs in vec(descs(), 1..3), at: prop::sample::Index, mask in 1u8..,
        ) {
            let mut bytes = encode_descs(&descs).unwrap();
            let at = at.index(bytes.len());
            bytes[at] ^= mask;
            if let Ok(other) = decode_descs(&bytes) {
                prop_assert_eq!(encode_descs(&other).unwrap(), bytes);
            }
        }

        #[test]
        fn any_bytes_never_panic(count in 0u64..4, rest in vec(prop_oneof![Just(0u8), any::<u8>()], 0..300)) {
            let _ = decode_descs(&rest);
            let _ = decode_descs(&[&count.to_le_bytes()[..], &rest].concat());
        }

        #[test]
        fn adverts_travel(addr: u64, len: u64, key: u64, slot: u32, instance: u32) {
            let advert = Advert { addr, len: len.min(u64::MAX - addr), key, slot, instance };
            let sent = encode_descs(&[XferDesc::of_advert(&advert)]).unwrap();
            prop_assert_eq!(decode_descs(&sent).unwrap()[0].advert(), Ok(advert));
        }
    }

    #[test]
    fn layout() {
        let desc = XferDesc { addr: 1, size: 2, lkeys: vec![3], rkeys: vec![4], ipc: vec![5, 6] };
        let want = [
            &1u64.to_le_bytes()[..],
            &1u64.to_le_bytes(),
            &2u64.to_le_bytes(),
            &1u64.to_le_bytes(),
            &3u32.to_le_bytes(),
            &4u32.to_le_bytes(),
            &2u64.to_le_bytes(),
            &[5, 6],
        ]
        .concat();
        assert_eq!(encode_descs(&[desc]).unwrap(), want);
    }

    #[test]
    fn limits_hold() {
        let uneven = XferDesc { lkeys: vec![1], ..XferDesc::default() };
        let refused = DescsError::UnevenKeys { index: 0, lkeys: 1, rkeys: 0 };
        assert_eq!(encode_descs(&[uneven]), Err(refused));
        let many = vec![0; MAX_DESC_KEYS + 1];
        let many = XferDesc { lkeys: many.clone(), rkeys: many, ..XferDesc::default() };
        assert!(matches!(encode_descs(&[many]), Err(DescsError::TooMany { what: "keys", .. })));
        let long = XferDesc { ipc: vec![0; MAX_DESC_IPC_LEN + 1], ..XferDesc::default() };
        assert!(matches!(encode_descs(&[long]), Err(DescsError::TooMany { .. })));
        let count = (MAX_DESCS as u64 + 1).to_le_bytes();
        assert!(matches!(decode_descs(&count), Err(DescsError::TooMany { .. })));
        let count = (MAX_DESCS as u64).to_le_bytes();
        let refused = DescsError::CountBeyondBytes { count: MAX_DESCS as u64, have: 0 };
        assert_eq!(decode_descs(&count), Err(refused));
        // One descriptor announces more keys, then more IPC info, than the bytes hold.
        let keys = |n: u64| [1, 0, 0, n].map(u64::to_le_bytes).concat();
        assert!(matches!(
            decode_descs(&[keys(u64::MAX), vec![0; 8]].concat()),
            Err(DescsError::TooMany { what: "keys", got: u64::MAX, .. })
        ));
        assert!(matches!(
            decode_descs(&[keys(64), vec![0; 8]].concat()),
            Err(DescsError::Truncated(ShortInput { at: 32, need: 256, have: 8 }))
        ));
    }
}
