//! FP8 E4M3 (the `fn` variant of OCP's 8-bit format): four bits of exponent, three of mantissa, no
//! infinities, one NaN of each sign, 448 at most.

/// The largest value.
pub const MAX: f32 = 448.0;

const MAX_BITS: u32 = 0x7e;
const NAN_BITS: u32 = 0x7f;
/// The smallest normal value is 2^-6.
const SMALLEST_NORMAL: f32 = 0.015_625;
/// One unit in the last place of this is 2^-9, the step between subnormal values.
const SUBNORMAL_MAGIC: f32 = 16_384.0;
const EXPONENT: u32 = 0x7f80_0000;
/// The difference of the exponents' biases: 127 of f32, and 7.
const REBIAS: u32 = (127 - 7) << 23;

/// The nearest E4M3, ties to even. Magnitudes above the largest value, infinities too, become the
/// largest value.
#[inline(always)]
#[must_use]
pub fn from_f32(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24) & 0x80;
    let magnitude = value.abs();
    let bits = magnitude.to_bits();
    let normal = {
        let bits = bits.wrapping_sub(REBIAS);
        bits.wrapping_add(0x7_ffff + ((bits >> 20) & 1)) >> 20
    };
    // The addition rounds to the step; it is exact otherwise.
    let subnormal = (magnitude + SUBNORMAL_MAGIC).to_bits().wrapping_sub(SUBNORMAL_MAGIC.to_bits());
    let nearest = if magnitude < SMALLEST_NORMAL { subnormal } else { normal };
    let finite = if magnitude > MAX { MAX_BITS } else { nearest };
    (sign | if value.is_nan() { NAN_BITS } else { finite }) as u8
}

/// The same in fewer steps, for a magnitude that rounds to no more than [`MAX`].
#[inline(always)]
#[must_use]
pub fn from_small_f32(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let exponent = magnitude.max(SMALLEST_NORMAL.to_bits()) & EXPONENT;
    // 2^20 times the value's power of two: one unit in its last place is the step between E4M3s
    // there.
    let magic = exponent.wrapping_add(20 << 23);
    let steps = (f32::from_bits(magnitude) + f32::from_bits(magic)).to_bits().wrapping_sub(magic);
    // Eight steps lead from one power of two to the next; the first counts from zero.
    let nearest = steps.wrapping_add((exponent - SMALLEST_NORMAL.to_bits()) >> 20);
    (bits >> 24 & 0x80 | nearest) as u8
}

/// The value of an E4M3; exact.
#[inline(always)]
#[must_use]
pub fn to_f32(bits: u8) -> f32 {
    let sign = u32::from(bits & 0x80) << 24;
    let magnitude = u32::from(bits & 0x7f);
    let value = if magnitude >= 8 {
        f32::from_bits((magnitude << 20) + REBIAS)
    } else {
        magnitude as f32 / 512.0
    };
    let value = if magnitude == NAN_BITS { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_its_own_nearest() {
        for bits in (0..=0x7e).chain(0x80..=0xfe) {
            assert_eq!(from_f32(to_f32(bits)), bits);
        }
        assert!(to_f32(0x7f).is_nan() && to_f32(0xff).is_nan());
        assert_eq!([to_f32(0x7e), to_f32(0x08), to_f32(0x01)], [448.0, 0.015_625, 1.0 / 512.0]);
    }

    #[test]
    fn a_value_between_two_codes_goes_to_the_nearest_and_ties_to_even() {
        for bits in 0..0x7eu8 {
            let [low, high] = [to_f32(bits), to_f32(bits + 1)];
            // Exact: both have few bits.
            let middle = f32::midpoint(low, high);
            let even = bits + (bits & 1);
            assert_eq!(from_f32(middle), even, "{middle}");
            assert_eq!(from_f32(middle.next_down()), bits, "below {middle}");
            assert_eq!(from_f32(middle.next_up()), bits + 1, "above {middle}");
            assert_eq!(from_f32(-middle), even | 0x80);
        }
    }

    #[test]
    fn small_values_become_the_same_in_fewer_steps() {
        // Beyond half a step above the largest value, the nearest code is a NaN's.
        let end = 464.0f32.to_bits();
        for bits in
            (0..end).step_by(if cfg!(debug_assertions) { 61 } else { 1 }).chain(end - 64..end)
        {
            let value = f32::from_bits(bits);
            assert_eq!(from_small_f32(value), from_f32(value), "{value:e}");
            assert_eq!(from_small_f32(-value), from_f32(-value), "{value:e}");
        }
    }

    #[test]
    fn too_much_saturates_and_nothing_is_not_a_number_but_nan() {
        for large in [448.1, 464.0, 1e9, f32::MAX, f32::INFINITY] {
            assert_eq!([from_f32(large), from_f32(-large)], [0x7e, 0xfe]);
        }
        assert_eq!(from_f32(f32::NAN) & 0x7f, 0x7f);
        assert_eq!([from_f32(0.0), from_f32(-0.0), from_f32(1e-30)], [0, 0x80, 0]);
    }
}
