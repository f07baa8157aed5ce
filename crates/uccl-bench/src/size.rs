//! Sizes as people write them: `64`, `4K`, `1MiB`, `1M..64M`.

use std::{fmt, str::FromStr};

/// Bytes, written with a binary suffix.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Size(pub(crate) u64);

const SUFFIXES: [(&str, u32); 4] = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let error = || format!("{text:?} is not a size: write 64, 4K, 1M or 2GiB");
        let upper = text.trim().to_ascii_uppercase();
        let plain = upper.strip_suffix("IB").or_else(|| upper.strip_suffix('B')).unwrap_or(&upper);
        let (digits, shift) = SUFFIXES
            .iter()
            .find_map(|(suffix, shift)| Some((plain.strip_suffix(suffix)?, *shift)))
            .unwrap_or((plain, 0));
        if upper.ends_with("IB") && shift == 0 {
            return Err(error());
        }
        let number: u64 = digits.trim_end().parse().map_err(|_| error())?;
        match number.checked_mul(1 << shift) {
            Some(0) => Err("a size must be at least one byte".into()),
            Some(bytes) => Ok(Self(bytes)),
            None => Err(error()),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact =
            SUFFIXES.iter().find(|(_, shift)| self.0 != 0 && self.0.is_multiple_of(1 << shift));
        let text = match exact {
            Some((suffix, shift)) => format!("{} {suffix}iB", self.0 >> shift),
            None => format!("{} B", self.0),
        };
        f.pad(&text)
    }
}

/// One item of `--size`: a size, or a range of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct SizeRange(Vec<Size>);

/// How far apart the sizes of a range are unless it says so.
const FACTOR: u64 = 4;

impl FromStr for SizeRange {
    type Err = String;

    /// `A`, `A..B` (by factors of four) or `A..B:F` (by factors of F). B is always among them.
    fn from_str(text: &str) -> Result<Self, String> {
        let Some((first, rest)) = text.split_once("..") else {
            return Ok(Self(vec![text.parse()?]));
        };
        let (last, factor) = match rest.split_once(':') {
            Some((last, factor)) => {
                let factor = factor.parse().ok().filter(|factor| *factor >= 2);
                (last, factor.ok_or_else(|| format!("{text:?}: the factor must be 2 or more"))?)
            }
            None => (rest, FACTOR),
        };
        let (first, last): (Size, Size) = (first.parse()?, last.parse()?);
        if first > last {
            return Err(format!("{text:?} ends before it starts: write {last}..{first}"));
        }
        let up = std::iter::successors(Some(first.0), |bytes| bytes.checked_mul(factor));
        let mut sizes: Vec<_> = up.take_while(|bytes| *bytes < last.0).map(Size).collect();
        sizes.push(last);
        Ok(Self(sizes))
    }
}

impl From<Size> for SizeRange {
    fn from(size: Size) -> Self {
        Self(vec![size])
    }
}

impl SizeRange {
    /// All sizes of all ranges, ascending, each once.
    pub(crate) fn flatten(ranges: &[Self]) -> Vec<Size> {
        let mut sizes: Vec<_> = ranges.iter().flat_map(|range| range.0.iter().copied()).collect();
        sizes.sort();
        sizes.dedup();
        sizes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(text: &str) -> Vec<u64> {
        let ranges: Vec<SizeRange> =
            text.split(',').map(|part| part.parse().expect(part)).collect();
        SizeRange::flatten(&ranges).iter().map(|size| size.0).collect()
    }

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [
            ("64", 64),
            ("64B", 64),
            ("4K", 4096),
            ("4k", 4096),
            ("4 KiB", 4096),
            ("4KB", 4096),
            ("1M", 1 << 20),
            ("2GiB", 2 << 30),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for wrong in ["", "K", "0", "0K", "-1", "1.5M", "4X", "4iB", "99999999999T", "4KK"] {
            assert!(wrong.parse::<Size>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn sizes_are_written_exactly() {
        for (bytes, text) in [
            (64, "64 B"),
            (4096, "4 KiB"),
            (5000, "5000 B"),
            (1 << 20, "1 MiB"),
            (3 << 30, "3 GiB"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
            assert_eq!(text.parse(), Ok(Size(bytes)));
        }
    }

    #[test]
    fn lists_and_ranges() {
        assert_eq!(sizes("64K,4K,64K"), [4096, 65536]);
        assert_eq!(sizes("1M..64M"), [1 << 20, 4 << 20, 16 << 20, 64 << 20]);
        assert_eq!(sizes("1K..5K"), [1024, 4096, 5120]);
        assert_eq!(sizes("1K..4K:2,64"), [64, 1024, 2048, 4096]);
        assert_eq!(sizes("7..7"), [7]);
        for wrong in ["4K..1K", "1K..", "..4K", "1K..4K:1", "1K..4K:x"] {
            assert!(wrong.parse::<SizeRange>().is_err(), "{wrong:?}");
        }
    }
}
