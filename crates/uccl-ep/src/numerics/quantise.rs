//! Rows of bf16 to E4M3, with one scale for each group of 128 channels.

use multiversion::multiversion;

use super::{bf16, e4m3};

/// Channels that share a scale.
pub const GROUP: usize = 128;
/// Amounts below this are quantised as if the largest were this, so that a group of zeros has a
/// finite scale.
const SMALLEST_AMAX: f32 = 1e-4;
/// A bf16; NaNs are larger.
const INFINITY: u16 = 0x7f80;

/// How a group's scale is chosen, and how it is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScaleFormat {
    /// The scale maps the group's largest magnitude to 448. Stored: its inverse, an f32 for each
    /// group.
    Exact,
    /// The inverse is rounded up to a power of two. Stored: the inverse, an f32 for each group.
    PowerOfTwo,
    /// As [`PowerOfTwo`](Self::PowerOfTwo). Stored: the inverse's exponent (UE8M0), four groups in
    /// each u32, the first in its lowest byte.
    Exponent,
}

impl ScaleFormat {
    /// How many words of four bytes hold the scales of `hidden` channels.
    #[must_use]
    pub fn words(self, hidden: usize) -> usize {
        let groups = hidden / GROUP;
        match self {
            Self::Exact | Self::PowerOfTwo => groups,
            Self::Exponent => groups / 4,
        }
    }
}

/// The scale and its inverse, for a group with the largest magnitude `amax`.
#[inline(always)]
fn scale_of(amax: f32, is_power_of_two: bool) -> (f32, f32) {
    let amax = amax.max(SMALLEST_AMAX);
    if !is_power_of_two {
        return (e4m3::MAX / amax, amax / e4m3::MAX);
    }
    let bits = (amax / e4m3::MAX).to_bits();
    let exponent = (bits >> 23) + u32::from(bits & 0x7f_ffff != 0);
    // 2^-e has the exponent that mirrors e's at the bias of 127. Of an infinity the inverse is one,
    // and the scale 0.
    (f32::from_bits(254u32.saturating_sub(exponent) << 23), f32::from_bits(exponent << 23))
}

/// Quantises a row of bf16 to `out`, one byte for each channel. The length of `row` is a multiple
/// of [`GROUP`]. `scales` has [`ScaleFormat::words`] words.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+fma", "x86_64+avx2+fma+f16c"))]
pub fn row(row: &[u16], how: ScaleFormat, out: &mut [u8], scales: &mut [u32]) {
    let is_power_of_two = how != ScaleFormat::Exact;
    if how == ScaleFormat::Exponent {
        scales.fill(0);
    }
    let groups = row.as_chunks::<GROUP>().0.iter().zip(out.as_chunks_mut::<GROUP>().0);
    for (at, (group, out)) in groups.enumerate() {
        // The maximum of the bits, because that of floats does not vectorise. A NaN is the largest,
        // and spoils its group alone.
        let amax = group.iter().fold(0, |most: u16, bits| most.max(bits & 0x7fff));
        let (scale, inverse) = scale_of(bf16::to_f32(amax), is_power_of_two);
        let scaled = group.iter().map(|bits| bf16::to_f32(*bits) * scale);
        // Scaled, every finite value has a magnitude that rounds to at most 448.
        if amax < INFINITY {
            out.iter_mut().zip(scaled).for_each(|(out, value)| *out = e4m3::from_small_f32(value));
        } else {
            // A NaN that a processor makes has any sign.
            let signs = group.iter().map(|bits| (bits >> 8) as u8 & 0x80);
            let values = scaled.map(|value| e4m3::from_f32(value) & 0x7f);
            for ((out, value), sign) in out.iter_mut().zip(values).zip(signs) {
                *out = sign | value;
            }
        }
        match how {
            ScaleFormat::Exponent => scales[at / 4] |= (inverse.to_bits() >> 23) << (8 * (at % 4)),
            ScaleFormat::Exact | ScaleFormat::PowerOfTwo => scales[at] = inverse.to_bits(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantised(values: &[f32], how: ScaleFormat) -> (Vec<u8>, Vec<u32>) {
        let bits: Vec<_> = values.iter().map(|value| bf16::from_f32(*value)).collect();
        let (mut out, mut scales) = (vec![0; bits.len()], vec![0; how.words(bits.len())]);
        row(&bits, how, &mut out, &mut scales);
        (out, scales)
    }

    #[test]
    fn the_largest_of_a_group_becomes_448() {
        let mut values = vec![0.5; 2 * GROUP];
        (values[3], values[GROUP + 7]) = (-7.0, 1000.0);
        let (out, scales) = quantised(&values, ScaleFormat::Exact);
        assert_eq!((out[3], out[GROUP + 7]), (0xfe, 0x7e));
        assert_eq!(out[0], e4m3::from_f32(0.5 * (448.0 / 7.0)));
        assert_eq!(scales, [7.0f32 / 448.0, 1000.0 / 448.0].map(f32::to_bits));
    }

    #[test]
    fn rounded_scales_are_powers_of_two_that_reach() {
        // 2^0 reaches exactly 448; a little more needs 2^1.
        for (largest, inverse) in
            [(448.0, 1.0f32), (450.0, 2.0), (7.0, 1.0 / 64.0), (0.0, 0.5f32.powi(22))]
        {
            let (out, scales) = quantised(&[largest; GROUP], ScaleFormat::PowerOfTwo);
            assert_eq!(f32::from_bits(scales[0]), inverse, "{largest}");
            let nearest =
                e4m3::to_f32(e4m3::from_f32(bf16::to_f32(bf16::from_f32(largest)) / inverse));
            assert_eq!(e4m3::to_f32(out[0]), nearest);
        }
    }

    #[test]
    fn exponents_of_four_groups_share_a_word() {
        let values: Vec<f32> = (0..8 * GROUP).map(|at| 2.0f32.powi((at / GROUP) as i32)).collect();
        let (bytes, words) = quantised(&values, ScaleFormat::Exponent);
        let (same, inverses) = quantised(&values, ScaleFormat::PowerOfTwo);
        assert_eq!(bytes, same);
        let exponents: Vec<_> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let expected: Vec<_> = inverses.iter().map(|inverse| (inverse >> 23) as u8).collect();
        assert_eq!(exponents, expected);
    }

    #[test]
    fn an_infinity_becomes_a_nan_of_its_sign_and_spoils_its_group() {
        let mut values = vec![1.0; 2 * GROUP];
        (values[5], values[6]) = (f32::INFINITY, f32::NEG_INFINITY);
        for how in [ScaleFormat::Exact, ScaleFormat::PowerOfTwo] {
            let (out, scales) = quantised(&values, how);
            assert_eq!((&out[4..7], out[GROUP] & 0x80), (&[0, 0x7f, 0xff][..], 0), "{how:?}");
            assert_eq!(f32::from_bits(scales[0]), f32::INFINITY, "what is 0 is 0 times this");
            assert!(f32::from_bits(scales[1]) < 1.0, "{how:?}");
        }
        let values = [&values[..], &values[..]].concat();
        assert_eq!(quantised(&values, ScaleFormat::Exponent).1[0].to_le_bytes()[0], 0xff);
    }

    #[test]
    fn a_nan_spoils_its_group_and_no_other() {
        let mut values = vec![1.0; 2 * GROUP];
        values[5] = f32::NAN;
        let (out, scales) = quantised(&values, ScaleFormat::Exact);
        assert_eq!(out[5] & 0x7f, 0x7f);
        assert_eq!((out[GROUP], scales[1]), (0x7e, (1.0f32 / 448.0).to_bits()));
    }
}
