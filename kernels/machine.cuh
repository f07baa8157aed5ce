// Primitives that all kernels use: words shared by ranks, vectors of 16 bytes, time. Tests of
// expert parallelism put a header of the same name before this one, which does the same on a CPU.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A function that kernels seldom call. Inlined, it would fill the instruction cache and delay the
// code that runs often.
#define UCCL_COLD __device__ __noinline__

// Shared memory of a block: one struct for each kernel.
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
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// The first half of a vector, aligned to 8 bytes.
__device__ __forceinline__ void store_half(u64 address, Vector v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(v.x), "r"(v.y) : "memory");
}

// Writes made before the word was released are visible after this load has read it.
__device__ __forceinline__ u64 load_acquire(u64 address) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(u64 address, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Orders nothing by itself: a caller that needs order puts a fence before it.
__device__ __forceinline__ void store_relaxed(u64 address, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// For words that carry their call's number: such a word needs no order with other memory.
__device__ __forceinline__ u64 load_relaxed(u64 address) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// Reads a word that nobody writes while kernels run, so the multiprocessor's cache may keep it. The
// compiler reads it each time: kept in registers, such words would push others out.
__device__ __forceinline__ u64 load_fixed(const u64* word) {
  u64 value;
  asm volatile("ld.global.nc.u64 %0, [%1];" : "=l"(value) : "l"(word));
  return value;
}

// Stores two adjacent words, aligned to 16 bytes. A reader sees each of them whole.
__device__ __forceinline__ void store_pair(u64 address, u64 first, u64 second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(first), "l"(second) : "memory");
}

// Increments a count and returns its value before. Writes of every thread that has counted, or of
// its block before a barrier, are visible to the threads that count later.
__device__ __forceinline__ u32 count_up(u32* count) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}

// Reads a word that the host, or another block, may set at any time.
__device__ __forceinline__ u32 load_word(u64 address) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ u32 load_shared(const u32& word) { return *const_cast<const volatile u32*>(&word); }

__device__ __forceinline__ u64 now_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// The bf16 NaN that `bf16_pair` makes of every NaN. Other numbers become the nearest, ties to even;
// the first has the lower half.
constexpr u32 GPU_NAN = 0x7fff;

__device__ __forceinline__ u32 bf16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Sets a word in shared memory. A thread of the block that reads it and then makes a fence sees
// this thread's earlier writes.
__device__ __forceinline__ void store_to_block(u32& word, u32 value) {
  __threadfence_block();
  *const_cast<volatile u32*>(&word) = value;
}

// Pauses between two reads of a word.
__device__ __forceinline__ void relax() { __nanosleep(40); }
