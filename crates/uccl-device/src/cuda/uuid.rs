//! A GPU's UUID.

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};

/// A GPU's UUID: the same in every process of a machine, whichever GPUs the process can see.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GpuUuid(pub [u8; 16]);

/// A text that is not a GPU's UUID.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is not a GPU's UUID; one looks like GPU-01234567-89ab-cdef-0123-456789abcdef")]
pub struct ParseGpuUuidError(String);

/// Bytes in each group of digits.
const GROUPS: [usize; 5] = [4, 2, 2, 2, 6];

impl fmt::Display for GpuUuid {
    /// As `nvidia-smi -L` writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        let mut bytes = self.0.iter();
        for group in GROUPS {
            f.write_str("-")?;
            bytes.by_ref().take(group).try_for_each(|byte| write!(f, "{byte:02x}"))?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for GpuUuid {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for GpuUuid {
    type Err = ParseGpuUuidError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| ParseGpuUuidError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<GpuUuid> {
    let mut bytes = [0; 16];
    let mut rest = text.strip_prefix("GPU-")?;
    let mut filled = 0;
    for (index, group) in GROUPS.into_iter().enumerate() {
        if index > 0 {
            rest = rest.strip_prefix('-')?;
        }
        for byte in bytes.get_mut(filled..filled + group)? {
            let digits = rest.get(..2).filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()))?;
            *byte = u8::from_str_radix(digits, 16).ok()?;
            rest = rest.get(2..)?;
        }
        filled += group;
    }
    rest.is_empty().then_some(GpuUuid(bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn uuids_are_read_back(bytes: [u8; 16]) {
            let uuid = GpuUuid(bytes);
            prop_assert_eq!(uuid.to_string().parse(), Ok(uuid));
            prop_assert_eq!(uuid.to_string().to_uppercase().parse(), Ok(uuid));
        }

        #[test]
        fn nothing_else_is_a_uuid(text in "(GPU-)?[0-9a-fA-F+é-]{0,40}") {
            if let Ok(uuid) = text.parse::<GpuUuid>() {
                prop_assert_eq!(uuid.to_string(), text.to_lowercase().replace("gpu", "GPU"));
            }
        }
    }

    #[test]
    fn it_is_written_as_nvidia_smi_does() {
        let uuid: [u8; 16] = std::array::from_fn(|index| index as u8 * 0x11);
        let text = "GPU-00112233-4455-6677-8899-aabbccddeeff";
        assert_eq!(GpuUuid(uuid).to_string(), text);
        for wrong in ["", "GPU-", &text[4..], &text[..39], &format!("{text}0"), "MIG-0011"] {
            assert!(wrong.parse::<GpuUuid>().is_err(), "{wrong:?}");
        }
    }
}
