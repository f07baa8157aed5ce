//! bfloat16: the upper half of an f32.

const NAN: u32 = 0x7fc0;

/// The value of a bf16; exact.
#[inline(always)]
#[must_use]
pub fn to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bf16, ties to even. All NaNs become the same: processors give a NaN that they make
/// different bits.
#[inline(always)]
#[must_use]
pub fn from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    (if value.is_nan() { NAN } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn every_bf16_is_its_own_nearest() {
        for bits in 0..=u16::MAX {
            let value = to_f32(bits);
            let theirs = bf16::from_bits(bits).to_f32();
            assert!(value.to_bits() == theirs.to_bits() || value.is_nan() && theirs.is_nan());
            assert!(value.is_nan() || from_f32(value) == bits, "{bits:#06x}");
        }
    }

    #[test]
    fn rounding_agrees_with_another_library() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..1_000_000 {
            let value = f32::from_bits(random.u32(..));
            let (ours, theirs) = (from_f32(value), bf16::from_f32(value));
            assert!(
                ours == theirs.to_bits() || value.is_nan() && to_f32(ours).is_nan(),
                "{value:e}"
            );
        }
        assert_eq!(from_f32(f32::MAX), 0x7f80, "it is nearer to infinity");
        for nan in [0x7f80_0001, 0x7fff_ffff, 0xffc0_0000] {
            assert_eq!(from_f32(f32::from_bits(nan)), 0x7fc0);
        }
    }
}
