// The number formats of numerics/ in Rust, with equal bits.
#pragma once

#include "params.cuh"

__device__ __forceinline__ float bf16_to_f32(u32 bits) { return __uint_as_float(bits << 16); }

// The nearest bf16, ties to even. All NaNs become the same: processors give NaNs of their own
// different bits.
__device__ __forceinline__ u32 bf16_from_f32(float value) {
  u32 bits = __float_as_uint(value);
  u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return is_nan ? 0x7fc0 : rounded;
}

// Turns the GPU's NaN, in two bf16, into the NaN that `bf16_from_f32` makes.
__device__ __forceinline__ u32 one_nan(u32 pair) {
  constexpr u32 OTHER = GPU_NAN ^ 0x7fc0;
  u32 low = (pair & 0xffff) == GPU_NAN ? OTHER : 0, high = pair >> 16 == GPU_NAN ? OTHER << 16 : 0;
  return pair ^ (low | high);
}

// The nearest number with so many bits of significand and such a bias, ties to even, to a magnitude
// in range.
template <u32 BITS, u32 BIAS>
__device__ __forceinline__ u32 nearest(u32 magnitude_bits) {
  constexpr u32 LEAST_NORMAL = (127 + 1 - BIAS) << 23, SHIFT = 23 - BITS;
  // The bits of a positive number grow with it.
  u32 exponent = max(magnitude_bits, LEAST_NORMAL) & 0x7f800000, magic = exponent + (SHIFT << 23);
  // The addition rounds to the step of numbers with this exponent, or of subnormal ones, and counts
  // the steps.
  u32 steps = __float_as_uint(__fadd_rn(__uint_as_float(magnitude_bits), __uint_as_float(magic))) - magic;
  return steps + ((exponent - LEAST_NORMAL) >> SHIFT);
}

// The nearest E4M3, saturating, ties to even. The sign is given: a product that is NaN has none.
__device__ __forceinline__ u32 e4m3_from_f32(float value, u32 sign) {
  constexpr u32 MOST = 0x43e00000;  // 448
  u32 bits = __float_as_uint(value) & 0x7fffffff, finite = nearest<3, 7>(min(bits, MOST));
  return sign | (bits > 0x7f800000 ? 0x7f : finite);
}

__device__ __forceinline__ float e4m3_to_f32(u32 bits) {
  constexpr u32 REBIAS = (127 - 7) << 23;
  u32 magnitude = bits & 0x7f;
  float value = magnitude >= 8 ? __uint_as_float((magnitude << 20) + REBIAS)
                               : __fmul_rn(static_cast<float>(magnitude), 1.0f / 512.0f);
  return __uint_as_float((magnitude == 0x7f ? 0x7fc00000 : __float_as_uint(value)) | (bits & 0x80) << 24);
}

// The nearest E2M1 in four bits, ties to even; larger numbers than 6 become 6, and so does a NaN.
__device__ __forceinline__ u32 e2m1_from_f32(float value) {
  constexpr u32 MOST = 0x40c00000;  // 6
  u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffff, finite = nearest<1, 1>(min(magnitude, MOST));
  return magnitude > 0x7f800000 ? 7 : ((bits >> 28) & 8) | finite;
}

// The factor for sixteen values in NVFP4, and the byte of their scale, which is `amax / 6 *
// global_scale`.
struct NarrowScale {
  float factor;
  u32 byte;
};

// For a group with the bf16 `amax` as its largest magnitude.
__device__ __forceinline__ NarrowScale narrow_scale_of(u32 amax, float global_scale) {
  u32 byte = e4m3_from_f32(__fmul_rn(__fdiv_rn(bf16_to_f32(amax), 6.0f), global_scale), 0);
  float scale = e4m3_to_f32(byte), factor = __fdiv_rn(global_scale, scale);
  constexpr float MOST = 3.40282346638528859812e38f;
  // A factor stays finite, so that zeros stay zeros; a NaN becomes the largest, too.
  if (!(factor < MOST)) factor = MOST;
  return {scale == 0.0f ? 0.0f : factor, byte};
}

// Eight bf16 as eight E2M1, the first the lowest.
__device__ __forceinline__ u32 e2m1_of(const Vector& v, float factor) {
  u32 words[4] = {v.x, v.y, v.z, v.w}, codes = 0;
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    u32 low = e2m1_from_f32(__fmul_rn(bf16_to_f32(words[i] & 0xffff), factor));
    u32 high = e2m1_from_f32(__fmul_rn(bf16_to_f32(words[i] >> 16), factor));
    codes |= (low | high << 4) << (8 * i);
  }
  return codes;
}

struct Scale {
  float scale, inverse;
};

// For a group with the bf16 `amax` as its largest magnitude.
__device__ __forceinline__ Scale scale_of(u32 amax, bool is_power_of_two) {
  float most = bf16_to_f32(amax);
  // As maxNum: the maximum of a NaN and a number is the number.
  most = most > 1e-4f ? most : 1e-4f;
  if (!is_power_of_two) return {__fdiv_rn(448.0f, most), __fdiv_rn(most, 448.0f)};
  u32 bits = __float_as_uint(__fdiv_rn(most, 448.0f));
  u32 exponent = (bits >> 23) + ((bits & 0x7fffff) != 0);
  // For an infinity the inverse is infinite, and the scale 0.
  return {__uint_as_float((254 - min(exponent, 254u)) << 23), __uint_as_float(exponent << 23)};
}

// Two bf16 as two E4M3.
__device__ __forceinline__ u32 e4m3_pair(u32 pair, float scale) {
  u32 low = e4m3_from_f32(__fmul_rn(bf16_to_f32(pair & 0xffff), scale), (pair >> 8) & 0x80);
  u32 high = e4m3_from_f32(__fmul_rn(bf16_to_f32(pair >> 16), scale), (pair >> 24) & 0x80);
  return low | high << 8;
}

// The largest of a magnitude and those of eight bf16.
__device__ __forceinline__ u32 amax_of(u32 most, const Vector& v) {
  u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    most = max(most, words[i] & 0x7fff);
    most = max(most, (words[i] >> 16) & 0x7fff);
  }
  return most;
}

// Sums of eight values.
struct Sums {
  float of[8];
};

__device__ __forceinline__ void add_weighted(Sums& sums, const Vector& v, float weight) {
  u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    sums.of[2 * i] = __fmaf_rn(bf16_to_f32(words[i] & 0xffff), weight, sums.of[2 * i]);
    sums.of[2 * i + 1] = __fmaf_rn(bf16_to_f32(words[i] >> 16), weight, sums.of[2 * i + 1]);
  }
}

__device__ __forceinline__ void add(Sums& sums, const Vector& v) {
  u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    sums.of[2 * i] = __fadd_rn(sums.of[2 * i], bf16_to_f32(words[i] & 0xffff));
    sums.of[2 * i + 1] = __fadd_rn(sums.of[2 * i + 1], bf16_to_f32(words[i] >> 16));
  }
}

__device__ __forceinline__ Vector rounded(const Sums& sums) {
  u32 words[4];
#pragma unroll
  for (u32 i = 0; i < 4; i++) words[i] = one_nan(bf16_pair(sums.of[2 * i], sums.of[2 * i + 1]));
  return {words[0], words[1], words[2], words[3]};
}
