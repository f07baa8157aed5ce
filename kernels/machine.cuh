// What kernels need of a GPU and of no kernel's subject: words that ranks share, vectors of 16 bytes, time. Tests of expert
// parallelism put a header of this name before it, which has a CPU do the same.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A function that kernels call seldom: copies of it in them would have the code that they do need come late from memory.
#define UCCL_SELDOM __device__ __noinline__

// Memory of a block's threads together: one struct for a kernel.
#define UCCL_SHARED(Type, name) __shared__ Type name

struct Vector {
  u32 x, y, z, w;
};

// Each byte is read once: keep it out of L1. Plain loads, since another GPU may own the memory.
__device__ __forceinline__ Vector load_vector(u64 address) {
  Vector v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_vector(u64 address, Vector v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// The first half of a vector, aligned to 8 bytes.
__device__ __forceinline__ void store_half(u64 address, Vector v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(v.x), "r"(v.y) : "memory");
}

// What was written before the word was set is seen after it is read so.
__device__ __forceinline__ u64 load_acquire(u64 address) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(u64 address, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Alone it orders nothing: a fence before it may.
__device__ __forceinline__ void store_relaxed(u64 address, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// A word that says itself of what it is, whenever it is seen.
__device__ __forceinline__ u64 load_relaxed(u64 address) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// Two words that lie behind each other, aligned to 16 bytes: each is whole whenever it is seen.
__device__ __forceinline__ void store_pair(u64 address, u64 first, u64 second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(first), "l"(second) : "memory");
}

// Counts one more, and returns how many were before. What every thread that has counted wrote, itself or before a barrier of its
// block, is seen behind the count by those that count later.
__device__ __forceinline__ u32 count_up(u32* count) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}

// A word that the host, or another block, may set at any time.
__device__ __forceinline__ u32 look(u64 address) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ u32 look_shared(const u32& word) {
  return *const_cast<const volatile u32*>(&word);
}

__device__ __forceinline__ u64 now_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// Two numbers as bf16, the nearest, ties to even: the first has the lower half. Every NaN becomes this one.
constexpr u32 GPU_NAN = 0x7fff;

__device__ __forceinline__ u32 bf16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Sets a word of the block's for whom what this thread wrote before is there, when it has looked and made a fence.
__device__ __forceinline__ void say_to_block(u32& word, u32 value) {
  __threadfence_block();
  *const_cast<volatile u32*>(&word) = value;
}

// Between two looks at a word.
__device__ __forceinline__ void relax() { __nanosleep(40); }
