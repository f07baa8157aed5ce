// A GPU for the kernels of expert parallelism, on a CPU: stands in front of kernels/machine.cuh. Threads are contexts that
// take turns, and give theirs away where they wait for each other.
#pragma once

#include <ctype.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include <algorithm>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

namespace emulated {

struct Place {
  u32 x;
};

// Indices of the thread with the turn.
Place thread();
Place block();
Place threads();
Place blocks();
void* shared(size_t len);
// Gives the turn away.
void turn();
// The same by a thread that waits for writes of other threads.
void relax();
void wait_for_block();
// Every lane of a warp gives a value, and sees the values of all lanes.
const u64* exchange(u64 value);
void exchanged();

template <typename T>
u64 bits_of(T value) {
  u64 bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}

template <typename T>
T value_of(u64 bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
T from_lane(T value, u32 lane) {
  u64 bits = exchange(bits_of(value))[lane % 32];
  exchanged();
  return value_of<T>(bits);
}

}  // namespace emulated

#define __global__
#define __device__
#define __forceinline__ inline
#define UCCL_COLD inline
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (emulated::thread())
#define blockIdx (emulated::block())
#define blockDim (emulated::threads())
#define gridDim (emulated::blocks())
#define UCCL_SHARED(Type, name) Type& name = *static_cast<Type*>(emulated::shared(sizeof(Type)))

using std::max;
using std::min;

struct Vector {
  u32 x, y, z, w;
};

// As on a GPU, an address that is no multiple of 16 is a fault.
inline Vector load_vector(u64 address) {
  if (address % 16 != 0) __builtin_trap();
  Vector v;
  memcpy(&v, reinterpret_cast<const void*>(address), sizeof v);
  return v;
}

inline void store_vector(u64 address, Vector v) {
  if (address % 16 != 0) __builtin_trap();
  memcpy(reinterpret_cast<void*>(address), &v, sizeof v);
}

inline void store_half(u64 address, Vector v) {
  if (address % 8 != 0) __builtin_trap();
  memcpy(reinterpret_cast<void*>(address), &v, sizeof v / 2);
}

inline u64 load_acquire(u64 address) {
  return __atomic_load_n(reinterpret_cast<const u64*>(address), __ATOMIC_ACQUIRE);
}

inline void store_release(u64 address, u64 value) {
  __atomic_store_n(reinterpret_cast<u64*>(address), value, __ATOMIC_RELEASE);
}

inline void store_relaxed(u64 address, u64 value) {
  __atomic_store_n(reinterpret_cast<u64*>(address), value, __ATOMIC_RELAXED);
}

inline u64 load_relaxed(u64 address) {
  return __atomic_load_n(reinterpret_cast<const u64*>(address), __ATOMIC_RELAXED);
}

inline u64 load_fixed(const u64* word) { return *word; }

inline void store_to_block(u32& word, u32 value) { __atomic_store_n(&word, value, __ATOMIC_RELEASE); }

// In either order, as on a GPU.
inline void store_pair(u64 address, u64 first, u64 second) {
  bool is_first = address / 16 % 2 == 0;
  __atomic_store_n(reinterpret_cast<u64*>(address) + !is_first, is_first ? first : second, __ATOMIC_RELAXED);
  emulated::turn();
  __atomic_store_n(reinterpret_cast<u64*>(address) + is_first, is_first ? second : first, __ATOMIC_RELAXED);
}

inline u32 count_up(u32* count) { return __atomic_fetch_add(count, 1, __ATOMIC_ACQ_REL); }

inline u32 load_word(u64 address) { return __atomic_load_n(reinterpret_cast<const u32*>(address), __ATOMIC_RELAXED); }

inline u32 load_shared(const u32& word) { return word; }

constexpr u32 GPU_NAN = 0x7fff;

inline u32 bf16_of(float value) {
  u32 bits = emulated::value_of<u32>(emulated::bits_of(value));
  return value != value ? GPU_NAN : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline u32 bf16_pair(float low, float high) { return bf16_of(low) | bf16_of(high) << 16; }

inline u64 now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  // A GPU's clock may step back by a little.
  static thread_local u32 looks = 0;
  u64 back = ++looks % 3 == 0 ? 20000000 : 0;
  return static_cast<u64>(now.tv_sec) * 1000000000 + static_cast<u64>(now.tv_nsec) - back;
}

inline void relax() { emulated::relax(); }

inline void __syncthreads() { emulated::wait_for_block(); }
inline void __syncwarp() {
  emulated::exchange(0);
  emulated::exchanged();
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline u32 atomicAdd(u32* word, u32 by) { return __atomic_fetch_add(word, by, __ATOMIC_RELAXED); }
inline u32 atomicExch(u32* word, u32 to) { return __atomic_exchange_n(word, to, __ATOMIC_RELAXED); }
template <typename T>
T atomicOr(T* word, T bits) {
  return __atomic_fetch_or(word, bits, __ATOMIC_RELAXED);
}
inline u32 atomicCAS(u32* word, u32 from, u32 to) {
  __atomic_compare_exchange_n(word, &from, to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return from;
}
inline u64 atomicCAS(u64* word, u64 from, u64 to) {
  __atomic_compare_exchange_n(word, &from, to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return from;
}

template <typename T>
T __shfl_sync(u32, T value, int lane) {
  return emulated::from_lane(value, static_cast<u32>(lane));
}

template <typename T>
T __shfl_xor_sync(u32, T value, int mask) {
  return emulated::from_lane(value, threadIdx.x % 32 ^ static_cast<u32>(mask));
}

// A lane without a source keeps its value.
template <typename T>
T __shfl_up_sync(u32, T value, u32 by) {
  u32 lane = threadIdx.x % 32;
  return emulated::from_lane(value, lane < by ? lane : lane - by);
}

inline u32 __ballot_sync(u32, bool yes) {
  const u64* all = emulated::exchange(yes);
  u32 bits = 0;
  for (u32 lane = 0; lane < 32; lane++) bits |= static_cast<u32>(all[lane] != 0) << lane;
  emulated::exchanged();
  return bits;
}

inline int __all_sync(u32, bool yes) { return __ballot_sync(~0u, yes) == ~0u; }
inline int __any_sync(u32, bool yes) { return __ballot_sync(~0u, yes) != 0; }

inline u32 __match_any_sync(u32, u32 value) {
  const u64* all = emulated::exchange(value);
  u32 bits = 0;
  for (u32 lane = 0; lane < 32; lane++) bits |= static_cast<u32>(all[lane] == value) << lane;
  emulated::exchanged();
  return bits;
}

inline int __ffs(int bits) { return ffs(bits); }
inline int __ffsll(long long bits) { return ffsll(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<u32>(bits)); }
inline u32 __popc(u32 bits) { return static_cast<u32>(__builtin_popcount(bits)); }
inline float __uint_as_float(u32 bits) { return emulated::value_of<float>(bits); }
// Each digit of `which` is a byte of both words.
inline u32 __byte_perm(u32 first, u32 second, u32 which) {
  u64 both = static_cast<u64>(second) << 32 | first;
  u32 bytes = 0;
  for (u32 i = 0; i < 4; i++) bytes |= static_cast<u32>(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  return bytes;
}

inline u32 __float_as_uint(float value) { return static_cast<u32>(emulated::bits_of(value)); }
inline double __longlong_as_double(long long bits) { return emulated::value_of<double>(static_cast<u64>(bits)); }
inline long long __double_as_longlong(double value) { return static_cast<long long>(emulated::bits_of(value)); }
inline float __double2float_rn(double value) { return static_cast<float>(value); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
