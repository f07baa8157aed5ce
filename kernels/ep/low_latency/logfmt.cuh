// LogFMT-10 with the steps of uccl-ep's numerics/logfmt.rs, so results are equal to the last bit.
#pragma once

#include "../numerics.cuh"

// Logarithms of the significands of a bf16: log2(1 + at / 128), the nearest multiple of 2^-44.
struct Logarithms {
  double of[128];

  // Bit by bit: squaring a number doubles its logarithm.
  constexpr Logarithms() : of() {
    for (u32 at = 0; at < 128; at++) {
      u64 number = (128ull + at) << 55, bits = 0;
      for (u32 left = 45; left > 0; left--) {
        u64 square = static_cast<u64>(static_cast<unsigned __int128>(number) * number >> 62);
        u64 is_two = square >> 63;
        number = square >> is_two;
        bits = bits << 1 | is_two;
      }
      of[at] = static_cast<double>((bits + 1) >> 1) / static_cast<double>(1ull << 44);
    }
  }
};

__device__ constexpr Logarithms LOGARITHMS;

// The logarithm of a magnitude that is not 0.
__device__ __forceinline__ double log2_of(u32 magnitude) {
  bool is_normal = magnitude >= 0x80;
  // Subnormal numbers count in units of the smallest.
  u32 bits = is_normal ? magnitude << 16 : __float_as_uint(static_cast<float>(magnitude));
  int exponent = static_cast<int>(bits >> 23) - (is_normal ? 127 : 127 + 133);
  return __dadd_rn(static_cast<double>(exponent), LOGARITHMS.of[bits >> 16 & 127]);
}

// 2 to a power from -200 to 1.
__device__ __forceinline__ double exp2_of(double power) {
  // The unit in the last place of this number is 1, and its last bits are 0.
  constexpr double UNITS = 6755399441055744.0;
  double shifted = __dadd_rn(power, UNITS);
  double rest = __dsub_rn(power, __dsub_rn(shifted, UNITS));
  // ln(2)^k / k!, from the tenth on down.
  double sum = 7.054911620801123e-9;
  sum = __fma_rn(sum, rest, 1.01780860092397e-7);
  sum = __fma_rn(sum, rest, 1.321548679014431e-6);
  sum = __fma_rn(sum, rest, 1.5252733804059841e-5);
  sum = __fma_rn(sum, rest, 1.540353039338161e-4);
  sum = __fma_rn(sum, rest, 1.3333558146428443e-3);
  sum = __fma_rn(sum, rest, 9.618129107628477e-3);
  sum = __fma_rn(sum, rest, 5.550410866482158e-2);
  sum = __fma_rn(sum, rest, 2.4022650695910072e-1);
  sum = __fma_rn(sum, rest, 6.931471805599453e-1);
  sum = __fma_rn(sum, rest, 1.0);
  // The last bits are now the nearest whole number: the exponent.
  long long exponent = static_cast<long long>((static_cast<u64>(__double_as_longlong(shifted)) + 1023) << 52);
  return __dmul_rn(sum, __longlong_as_double(exponent));
}

// The code of a group of 128 values, if its largest and smallest magnitudes allow packing.
struct LogCodes {
  double low;
  double step;
  double steps_of_one;
};

__device__ __forceinline__ bool is_packed(u32 largest, u32 smallest) {
  constexpr u32 ONE = 0x3f80;
  return largest < ONE && smallest < largest;
}

__device__ __forceinline__ LogCodes log_codes(u32 largest, u32 smallest) {
  constexpr double REACH = 32.0, STEPS = 510.0;
  double high = log2_of(largest), low = __dsub_rn(high, REACH);
  if (smallest != 0) low = max(low, log2_of(smallest));
  double range = __dsub_rn(high, low);
  return {low, __ddiv_rn(range, STEPS), __ddiv_rn(STEPS, range)};
}

__device__ __forceinline__ u32 log_encode(const LogCodes& codes, u32 bits) {
  u32 magnitude = bits & 0x7fff;
  double steps = __dmul_rn(__dsub_rn(log2_of(magnitude), codes.low), codes.steps_of_one);
  constexpr double HALF = 0.5 + 1.0 / 1048576.0;
  // Magnitudes below `low` have the smallest code.
  u32 code = 1 + static_cast<u32>(__dadd_rn(steps > 0.0 ? steps : 0.0, HALF));
  return bits >> 15 << 9 | (magnitude == 0 ? 0 : code);
}

__device__ __forceinline__ u32 log_decode(const LogCodes& codes, u32 code) {
  u32 magnitude = code & 511;
  double power = __dadd_rn(codes.low, __dmul_rn(static_cast<double>(static_cast<int>(magnitude) - 1), codes.step));
  u32 value = bf16_from_f32(__double2float_rn(exp2_of(power)));
  return code >> 9 << 15 | (magnitude == 0 ? 0 : value);
}

// Sixteen values of a group in transit, in words: plain bf16, or five words with ten bits for each
// value.
struct LaneValues {
  u32 words[8];
};

constexpr u32 PACKED_WORDS = 5;

__device__ __forceinline__ u32 bf16_of(const LaneValues& values, u32 at) {
  return values.words[at / 2] >> (at % 2 * 16) & 0xffff;
}

// Gives each full packed word to `put`. Four values at a time: registers do not suffice for more.
template <typename Put>
__device__ __forceinline__ void pack(const LogCodes& codes, LaneValues values, Put put) {
  u64 bits = 0;
#pragma unroll 1
  for (u32 word = 0; word < 4; word++) {
    u64 four = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) four |= static_cast<u64>(log_encode(codes, bf16_of(values, i))) << (10 * i);
#pragma unroll
    for (u32 i = 0; i < 6; i++) values.words[i] = values.words[i + 2];
    // Each four values leave eight more bits behind the word.
    bits |= four << (8 * word);
    put(word, static_cast<u32>(bits));
    bits >>= 32;
  }
  put(4, static_cast<u32>(bits));
}

// Adds packed values, each times the weight.
__device__ __forceinline__ void add_packed(Sums (&sums)[2], const LogCodes& codes, const LaneValues& in, float weight) {
#pragma unroll
  for (u32 i = 0; i < 16; i++) {
    u32 word = 10 * i / 32, bit = 10 * i % 32, code = in.words[word] >> bit;
    if (bit > 22) code |= in.words[word + 1] << (32 - bit);
    float& sum = sums[i / 8].of[i % 8];
    sum = __fmaf_rn(bf16_to_f32(log_decode(codes, code & 0x3ff)), weight, sum);
  }
}

__device__ __forceinline__ void add_plain(Sums (&sums)[2], const LaneValues& in, float weight) {
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    const u32* words = in.words + 4 * half;
    add_weighted(sums[half], Vector{words[0], words[1], words[2], words[3]}, weight);
  }
}
