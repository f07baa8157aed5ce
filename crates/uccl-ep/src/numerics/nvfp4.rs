//! Rows of bf16 to NVFP4: E2M1, with one E4M3 scale for each group of 16 channels, and one f32 for
//! all of a tensor.

use multiversion::multiversion;

use super::{bf16, e2m1, e4m3};

/// Channels that share a scale.
pub const GROUP: usize = 16;
/// Channels with their scales in one word of four bytes. A row's length is a multiple of these.
pub const UNIT: usize = 4 * GROUP;
/// The largest E2M1.
const MOST: f32 = 6.0;

/// The factor of a group's values, and the byte of its scale, which is `amax / 6 * global_scale`.
#[inline(always)]
fn scale_of(amax: f32, global_scale: f32) -> (f32, u8) {
    let byte = e4m3::from_f32(amax / MOST * global_scale);
    let scale = e4m3::to_f32(byte);
    // A factor stays finite, so that zeros stay zeros.
    let factor = if scale == 0.0 { 0.0 } else { (global_scale / scale).min(f32::MAX) };
    (factor, byte)
}

/// Quantises a row of bf16 to `out`: two channels in each byte, the first in its lower half. The
/// length of `row` is a multiple of [`UNIT`]. `scales` has a word for each unit, the scale of its
/// first group in the lowest byte.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+fma", "x86_64+avx2+fma+f16c"))]
pub fn row(row: &[u16], global_scale: f32, out: &mut [u8], scales: &mut [u32]) {
    scales.fill(0);
    let groups = row.as_chunks::<GROUP>().0.iter().zip(out.as_chunks_mut::<{ GROUP / 2 }>().0);
    for (at, (group, out)) in groups.enumerate() {
        // The maximum of the bits, because that of floats does not vectorise. A NaN is the largest,
        // and spoils its group alone.
        let amax = group.iter().fold(0, |most: u16, bits| most.max(bits & 0x7fff));
        let (factor, byte) = scale_of(bf16::to_f32(amax), global_scale);
        scales[at / 4] |= u32::from(byte) << (8 * (at % 4));
        let codes = group.map(|bits| e2m1::from_f32(bf16::to_f32(bits) * factor));
        for (out, [low, high]) in out.iter_mut().zip(codes.as_chunks::<2>().0) {
            *out = low | high << 4;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The codes of channels, one each, and the scales, one for each group.
    fn quantised(values: &[f32], global_scale: f32) -> (Vec<u8>, Vec<u8>) {
        let bits: Vec<_> = values.iter().map(|value| bf16::from_f32(*value)).collect();
        let (mut out, mut words) = (vec![0; bits.len() / 2], vec![0; bits.len() / UNIT]);
        row(&bits, global_scale, &mut out, &mut words);
        let codes = out.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect();
        (codes, words.iter().flat_map(|word| word.to_le_bytes()).collect())
    }

    /// As the format is defined, channel by channel.
    fn defined(values: &[f32], global_scale: f32) -> (Vec<u8>, Vec<u8>) {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for group in values.chunks(GROUP) {
            let amax = group.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
            let scale = e4m3::from_f32(amax / 6.0 * global_scale);
            scales.push(scale);
            for value in group {
                let scaled = match e4m3::to_f32(scale) {
                    0.0 => 0.0f32.copysign(*value),
                    scale => value * (global_scale / scale),
                };
                let code = e2m1::from_f32(scaled);
                codes.push(code);
            }
        }
        (codes, scales)
    }

    #[test]
    fn groups_have_their_own_scales_in_order() {
        let values: Vec<f32> =
            (0..2 * UNIT).map(|at| 6.0 * 2.0f32.powi((at / GROUP) as i32)).collect();
        let (codes, scales) = quantised(&values, 1.0);
        assert!(codes.iter().all(|code| *code == 7), "each is the largest of its group");
        let expected: Vec<_> = (0..8).map(|group| e4m3::from_f32(2.0f32.powi(group))).collect();
        assert_eq!(scales, expected);
    }

    #[test]
    fn channels_share_bytes_the_first_in_the_lower_half() {
        let mut values = [0.0; UNIT];
        (values[0], values[1], values[2]) = (6.0, -1.0, 0.5);
        let bits = values.map(bf16::from_f32);
        let (mut out, mut scales) = ([0; UNIT / 2], [0]);
        row(&bits, 1.0, &mut out, &mut scales);
        assert_eq!(out[..3], [0xa7, 0x01, 0]);
        assert_eq!(scales, [u32::from(e4m3::from_f32(1.0))], "groups of zeros have the scale 0");
    }

    #[test]
    fn random_rows_are_as_defined() {
        let mut random = fastrand::Rng::with_seed(4);
        for _ in 0..2000 {
            let size = 2.0f32.powi(random.i32(-20..20));
            let value = |_| bf16::to_f32(bf16::from_f32((random.f32() - 0.5) * size));
            let values: Vec<f32> = (0..3 * UNIT).map(value).collect();
            // The scale that callers choose, and ones that saturate or lose small groups.
            let global_scale = 448.0 * 6.0 / size * [1.0, 2.0, 0.001, 4000.0][random.usize(..4)];
            assert_eq!(quantised(&values, global_scale), defined(&values, global_scale));
        }
    }

    #[test]
    fn a_value_that_is_no_number_spoils_its_group_and_no_other() {
        let mut values = [1.0; UNIT];
        (values[3], values[GROUP], values[2 * GROUP]) = (f32::NAN, f32::INFINITY, f32::MAX);
        let (codes, scales) = quantised(&values, 6.0);
        assert_eq!((scales[0] & 0x7f, scales[1], scales[3]), (0x7f, 0x7e, e4m3::from_f32(1.0)));
        assert_eq!((codes[GROUP], codes[2 * GROUP]), (7, 7));
        assert!(codes[3 * GROUP..].iter().all(|code| *code == 7), "{codes:?}");
    }

    #[test]
    fn zeros_stay_zeros_at_any_scale() {
        let zeros = [0.0, -0.0].repeat(UNIT / 2);
        let (mut codes, _) = quantised(&zeros, f32::MAX);
        assert_eq!(codes, [0, 8].repeat(UNIT / 2));
        // The global scale over the group's is more than any f32.
        (codes, _) = quantised(&[&[1e-39], &zeros[1..]].concat(), f32::MAX);
        assert_eq!(codes[1..], [0, 8].repeat(UNIT / 2)[1..]);
    }
}
