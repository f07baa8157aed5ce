//! FP4 E2M1 (of OCP's microscaling formats): a sign, two bits of exponent, one of mantissa; 6 at
//! most, no infinity, no NaN.

const MAX: f32 = 6.0;
const MAX_BITS: u32 = 7;
/// One unit in the last place of this is 2^-1, the step between subnormal values.
const SUBNORMAL_MAGIC: f32 = 4_194_304.0;
/// The difference of the exponents' biases: 127 of f32, and 1.
const REBIAS: u32 = (127 - 1) << 23;

/// The nearest E2M1 in the lower four bits, ties to even. Magnitudes above 6 become 6, and so does
/// a NaN.
#[inline(always)]
#[must_use]
pub fn from_f32(value: f32) -> u8 {
    let magnitude = value.abs();
    let normal = {
        let bits = magnitude.to_bits().wrapping_sub(REBIAS);
        bits.wrapping_add(0x1f_ffff + ((bits >> 22) & 1)) >> 22
    };
    // The addition rounds to the step; it is exact otherwise.
    let subnormal = (magnitude + SUBNORMAL_MAGIC).to_bits().wrapping_sub(SUBNORMAL_MAGIC.to_bits());
    let nearest = if magnitude < 1.0 { subnormal } else { normal };
    let finite = if magnitude > MAX { MAX_BITS } else { nearest };
    let sign = (value.to_bits() >> 28) & 8;
    (if value.is_nan() { MAX_BITS } else { sign | finite }) as u8
}

#[cfg(test)]
mod tests {
    use super::{super::bf16, *};

    /// The magnitudes, by code.
    const ALL: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    /// Compares with all magnitudes; of two as near, takes the even one.
    fn nearest(value: f32) -> u8 {
        let distance =
            |code: &u8| (f64::from(ALL[*code as usize]) - f64::from(value.abs().min(MAX))).abs();
        let closer =
            |a: &u8, b: &u8| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)));
        let code = (0..8u8).min_by(closer).unwrap();
        if value.is_sign_negative() { code | 8 } else { code }
    }

    #[test]
    fn every_value_is_its_own_nearest() {
        for (code, value) in ALL.into_iter().enumerate() {
            assert_eq!([from_f32(value), from_f32(-value)], [code as u8, code as u8 | 8]);
        }
    }

    #[test]
    fn every_bf16_goes_to_the_nearest() {
        for bits in 0..=u16::MAX {
            let value = bf16::to_f32(bits);
            let expected = if value.is_nan() { 7 } else { nearest(value) };
            assert_eq!(from_f32(value), expected, "{value:e}");
        }
    }

    #[test]
    fn a_value_between_two_codes_goes_to_the_nearest_and_ties_to_even() {
        for code in 0..7u8 {
            let middle = f32::midpoint(ALL[code as usize], ALL[code as usize + 1]);
            assert_eq!(from_f32(middle), code + (code & 1), "{middle}");
            assert_eq!(from_f32(middle.next_down()), code, "below {middle}");
            assert_eq!(from_f32(middle.next_up()), code + 1, "above {middle}");
            assert_eq!(from_f32(-middle), (code + (code & 1)) | 8);
        }
    }
}
