//! IPC info: an advert for peers on the same host, in the shape that programs for UCCL carry it.
//!
//! | offset | type | field |
//! | --- | --- | --- |
//! | 0 | 64 B | handle: the [advert](crate::advert) |
//! | 64 | u64 | offset into the handle's range |
//! | 72 | u64 | size in bytes |
//! | 80 | u32 | operation |
//! | 84 | u8 | 1 where the memory is the host's |
//! | 88 | i32 | GPU index |
//! | 96 | u64 | address in the owner's process |
//!
//! That is the 104-byte form of the Python API. The C API has 128 bytes: handle, offset, size, GPU
//! index (i32, at 80), zeros. All numbers are little endian.

use crate::{
    advert::{ADVERT_LEN, Advert, AdvertError},
    cursor::{Reader, ShortInput},
};

/// Bytes of the form that the Python API carries.
pub const IPC_INFO_LEN: usize = 104;
/// Bytes of the form that the C API carries.
pub const IPC_INFO_C_LEN: usize = 128;

/// Lets a peer on the same host access memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpcInfo {
    /// Names the memory: an encoded advert.
    pub handle: [u8; ADVERT_LEN],
    /// Where the range starts, in bytes from the start of the handle's range.
    pub offset: u64,
    /// Length of the range in bytes.
    pub size: u64,
    /// Carried for programs that look at it; 0. Not in the C form.
    pub op: u32,
    /// Whether the memory is the host's. Not in the C form, where it reads as the sign of
    /// `gpu_idx`.
    pub is_host: bool,
    /// Index of the GPU that the memory is on; -1 for the host's.
    pub gpu_idx: i32,
    /// Address of the handle's range in the owner's process. Not in the C form.
    pub direct_addr: u64,
}

/// Why bytes are not IPC info, or name no range.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IpcInfoError {
    /// IPC info has one of two lengths.
    #[error("IPC info is {IPC_INFO_LEN} or {IPC_INFO_C_LEN} bytes long, not {len}")]
    WrongLength {
        /// Bytes given.
        len: usize,
    },
    /// A flag is neither 0 nor 1.
    #[error("the host flag of IPC info is {got}, not 0 or 1")]
    NotABool {
        /// The flag's value.
        got: u8,
    },
    /// The handle is not an advert.
    #[error("the handle of IPC info: {0}")]
    Handle(#[from] AdvertError),
    /// The range is not inside the handle's range.
    #[error("{size} bytes at offset {offset} do not fit the {advertised} bytes advertised")]
    OutsideAdvert {
        /// Start of the range in bytes.
        offset: u64,
        /// Length of the range in bytes.
        size: u64,
        /// Length of the handle's range, in bytes.
        advertised: u64,
    },
}

impl From<ShortInput> for IpcInfoError {
    fn from(short: ShortInput) -> Self {
        Self::WrongLength { len: short.at + short.have }
    }
}

impl IpcInfo {
    /// All of an advert of host memory, by the endpoint of GPU `gpu_idx`.
    pub fn of_host(advert: &Advert, gpu_idx: i32) -> Self {
        Self {
            handle: advert.encode(),
            offset: 0,
            size: advert.len,
            op: 0,
            is_host: true,
            gpu_idx,
            direct_addr: advert.addr,
        }
    }

    /// The advert of the range: the handle's, narrowed by offset and size, which callers may have
    /// changed.
    ///
    /// # Errors
    /// The handle is not an advert, or the range is not inside it.
    pub fn advert(&self) -> Result<Advert, IpcInfoError> {
        let whole = Advert::decode(&self.handle)?;
        whole.part(self.offset, self.size).ok_or(IpcInfoError::OutsideAdvert {
            offset: self.offset,
            size: self.size,
            advertised: whole.len,
        })
    }

    /// The 104 bytes that the Python API carries.
    pub fn encode(&self) -> [u8; IPC_INFO_LEN] {
        let mut out = [0; IPC_INFO_LEN];
        out[0..64].copy_from_slice(&self.handle);
        out[64..72].copy_from_slice(&self.offset.to_le_bytes());
        out[72..80].copy_from_slice(&self.size.to_le_bytes());
        out[80..84].copy_from_slice(&self.op.to_le_bytes());
        out[84] = self.is_host.into();
        out[88..92].copy_from_slice(&self.gpu_idx.to_le_bytes());
        out[96..104].copy_from_slice(&self.direct_addr.to_le_bytes());
        out
    }

    /// The 128 bytes that the C API carries.
    pub fn encode_c(&self) -> [u8; IPC_INFO_C_LEN] {
        let mut out = [0; IPC_INFO_C_LEN];
        out[0..64].copy_from_slice(&self.handle);
        out[64..72].copy_from_slice(&self.offset.to_le_bytes());
        out[72..80].copy_from_slice(&self.size.to_le_bytes());
        out[80..84].copy_from_slice(&self.gpu_idx.to_le_bytes());
        out
    }

    /// Reads either form; padding is ignored. Fields that the C form lacks are 0 (and `is_host` is
    /// derived from a negative `gpu_idx`).
    ///
    /// # Errors
    /// The length is neither form's, or the host flag is no flag. The handle is read by
    /// [`Self::advert`] only.
    pub fn decode(bytes: &[u8]) -> Result<Self, IpcInfoError> {
        let mut r = Reader::new(bytes);
        match bytes.len() {
            IPC_INFO_LEN => {
                let (handle, offset, size, op) =
                    (r.array()?, r.u64_le()?, r.u64_le()?, r.u32_le()?);
                let is_host = match r.array()? {
                    [0, _, _, _] => false,
                    [1, _, _, _] => true,
                    [got, _, _, _] => return Err(IpcInfoError::NotABool { got }),
                };
                let gpu_idx = r.i32_le()?;
                r.take(4)?;
                let direct_addr = r.u64_le()?;
                Ok(Self { handle, offset, size, op, is_host, gpu_idx, direct_addr })
            }
            IPC_INFO_C_LEN => {
                let (handle, offset, size) = (r.array()?, r.u64_le()?, r.u64_le()?);
                let gpu_idx = r.i32_le()?;
                let (op, is_host, direct_addr) = (0, gpu_idx < 0, 0);
                Ok(Self { handle, offset, size, op, is_host, gpu_idx, direct_addr })
            }
            len => Err(IpcInfoError::WrongLength { len }),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn advert() -> Advert {
        Advert { addr: 0x7000, len: 4096, key: 0x1_0000_0002, slot: 3, instance: 4 }
    }

    proptest! {
        #[test]
        fn round_trips(
            half: [u8; 32], offset: u64, size: u64, op: u32, is_host: bool, gpu_idx: i32, direct_addr: u64,
        ) {
            let mut handle = [7; 64];
            handle[..32].copy_from_slice(&half);
            let info = IpcInfo { handle, offset, size, op, is_host, gpu_idx, direct_addr };
            prop_assert_eq!(IpcInfo::decode(&info.encode()), Ok(info));
            let c = IpcInfo { op: 0, is_host: gpu_idx < 0, direct_addr: 0, ..info };
            prop_assert_eq!(IpcInfo::decode(&info.encode_c()), Ok(c));
        }

        #[test]
        fn a_changed_range_counts_if_it_fits(
            offset in prop_oneof![0u64..5000, any::<u64>()],
            size in prop_oneof![0u64..5000, any::<u64>()],
        ) {
            let info = IpcInfo { offset, size, ..IpcInfo::of_host(&advert(), 0) };
            let want = if u128::from(offset) + u128::from(size) <= 4096 {
                Ok(Advert { addr: 0x7000 + offset, len: size, ..advert() })
            } else {
                Err(IpcInfoError::OutsideAdvert { offset, size, advertised: 4096 })
            };
            prop_assert_eq!(info.advert(), want);
        }

        #[test]
        fn any_bytes_never_panic(
            short in proptest::collection::vec(any::<u8>(), 0..140),
            right in proptest::collection::vec(any::<u8>(), IPC_INFO_LEN),
        ) {
            for bytes in [short, right] {
                if let Ok(info) = IpcInfo::decode(&bytes) {
                    let _ = info.advert();
                }
            }
        }

        #[test]
        fn other_lengths_are_refused(len in 0usize..200) {
            prop_assume!(len != IPC_INFO_LEN && len != IPC_INFO_C_LEN);
            prop_assert_eq!(IpcInfo::decode(&vec![0; len]), Err(IpcInfoError::WrongLength { len }));
        }
    }

    #[test]
    fn layout() {
        let info = IpcInfo::of_host(&advert(), 5);
        let bytes = info.encode();
        assert_eq!(bytes[..64], advert().encode());
        assert_eq!(bytes[72..80], 4096u64.to_le_bytes());
        assert_eq!(bytes[84], 1);
        assert_eq!(bytes[88..92], 5i32.to_le_bytes());
        assert_eq!(bytes[96..104], 0x7000u64.to_le_bytes());
        assert_eq!(info.advert(), Ok(advert()));
        let mut bad = bytes;
        bad[84] = 2;
        assert_eq!(IpcInfo::decode(&bad), Err(IpcInfoError::NotABool { got: 2 }));
        bad[84] = 1;
        bad[53] ^= 1;
        let info = IpcInfo::decode(&bad).unwrap();
        assert!(matches!(info.advert(), Err(IpcInfoError::Handle(AdvertError::WrongMagic { .. }))));
    }
}
