//! Reading fields one after another from a slice that may end too early.

/// The bytes ended before the field did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{need} bytes are needed at offset {at}, {have} are left")]
pub struct ShortInput {
    /// Where the field starts, counted from the start of the layout.
    pub at: usize,
    /// Bytes the field takes.
    pub need: u64,
    /// Bytes that are left.
    pub have: usize,
}

/// Takes fields from the front of a slice.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes, at: 0 }
    }

    /// Bytes not read yet.
    pub(crate) fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// Takes the next `len` bytes; a length from the wire may be any 64-bit number.
    pub(crate) fn take(&mut self, len: u64) -> Result<&'a [u8], ShortInput> {
        let short = ShortInput { at: self.at, need: len, have: self.rest.len() };
        let len = usize::try_from(len).map_err(|_| short)?;
        let (field, rest) = self.rest.split_at_checked(len).ok_or(short)?;
        self.rest = rest;
        self.at += len;
        Ok(field)
    }

    /// Takes the next `N` bytes as an array.
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], ShortInput> {
        let short = ShortInput { at: self.at, need: N as u64, have: self.rest.len() };
        let (field, rest) = self.rest.split_first_chunk::<N>().ok_or(short)?;
        self.rest = rest;
        self.at += N;
        Ok(*field)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, ShortInput> {
        self.array::<1>().map(|[b]| b)
    }

    pub(crate) fn u16_le(&mut self) -> Result<u16, ShortInput> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u16_be(&mut self) -> Result<u16, ShortInput> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn i32_le(&mut self) -> Result<i32, ShortInput> {
        self.array().map(i32::from_le_bytes)
    }

    pub(crate) fn u32_le(&mut self) -> Result<u32, ShortInput> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64_le(&mut self) -> Result<u64, ShortInput> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn u128_le(&mut self) -> Result<u128, ShortInput> {
        self.array().map(u128::from_le_bytes)
    }
}
