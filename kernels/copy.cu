// Copies any number of pieces, at any alignment, in one launch: gather, scatter, or both.
//
// The host has cut the work into shares of about equal cost, one for each warp (partition.rs); a
// warp finds the start of its share in one cursor and the end in the next. It fetches the
// descriptors of up to 32 pieces at once, and copies them one after the other, 16 bytes a lane,
// with all the loads of a round in flight before the first store. No byte outside a piece is read
// or written: model.rs follows the same indices on the CPU, byte by byte.

#include "copy.cuh"

namespace {

constexpr u32 LANES = 32;
constexpr u32 ALL = 0xffffffff;
// Vectors of 16 bytes that a lane has in flight: 4 KiB a warp.
constexpr u32 ROUND = 8;
constexpr u32 SHIFTED_ROUND = 4;

__device__ __forceinline__ void copy_bytes(u64 dst, u64 src, u64 len, u32 lane) {
#pragma unroll 1
  for (u64 i = lane; i < len; i += LANES) {
    reinterpret_cast<u8*>(dst)[i] = reinterpret_cast<const u8*>(src)[i];
  }
}

// `count` vectors between addresses that are both multiples of 16.
__device__ __forceinline__ void copy_aligned(u64 dst, u64 src, u64 count, u32 lane) {
  u64 v = lane;
#pragma unroll 1
  for (; v + LANES * (ROUND - 1) < count; v += LANES * ROUND) {
    Vector r[ROUND];
#pragma unroll
    for (u32 i = 0; i < ROUND; i++) r[i] = load_vector(src + 16 * (v + LANES * i));
#pragma unroll
    for (u32 i = 0; i < ROUND; i++) store_vector(dst + 16 * (v + LANES * i), r[i]);
  }
  Vector r[ROUND];
#pragma unroll
  for (u32 i = 0; i < ROUND; i++) {
    if (v + LANES * i < count) r[i] = load_vector(src + 16 * (v + LANES * i));
  }
#pragma unroll
  for (u32 i = 0; i < ROUND; i++) {
    if (v + LANES * i < count) store_vector(dst + 16 * (v + LANES * i), r[i]);
  }
}

// The 16 bytes that begin `k` bytes into `a`, which `b` follows. By selects: an array indexed with a
// number known only here would live in memory.
__device__ __forceinline__ Vector funnel(Vector a, Vector b, u32 k) {
  bool two = k & 8, one = k & 4;
  u32 bits = (k & 3) * 8;
  u32 p0 = two ? a.z : a.x, p1 = two ? a.w : a.y, p2 = two ? b.x : a.z;
  u32 p3 = two ? b.y : a.w, p4 = two ? b.z : b.x, p5 = two ? b.w : b.y;
  u32 q0 = one ? p1 : p0, q1 = one ? p2 : p1, q2 = one ? p3 : p2;
  u32 q3 = one ? p4 : p3, q4 = one ? p5 : p4;
  return {__funnelshift_r(q0, q1, bits), __funnelshift_r(q1, q2, bits), __funnelshift_r(q2, q3, bits),
          __funnelshift_r(q3, q4, bits)};
}

__device__ __forceinline__ Vector from_lane(Vector v, u32 lane) {
  return {__shfl_sync(ALL, v.x, lane), __shfl_sync(ALL, v.y, lane), __shfl_sync(ALL, v.z, lane),
          __shfl_sync(ALL, v.w, lane)};
}

// Copies `count` vectors to a multiple of 16 from `k` bytes (1 to 15) after a multiple of 16,
// `src`. Reads `count + 1` vectors from there, each once: a lane gets its second vector from the
// lane after it.
__device__ __forceinline__ void copy_shifted(u64 dst, u64 src, u64 count, u32 k, u32 lane) {
#pragma unroll 1
  for (u64 first = 0; first < count; first += LANES * SHIFTED_ROUND) {
    u64 v = first + lane;
    Vector r[SHIFTED_ROUND + 1];
#pragma unroll
    for (u32 i = 0; i <= SHIFTED_ROUND; i++) {
      r[i] = {0, 0, 0, 0};
      bool mine = i < SHIFTED_ROUND || lane == 0;
      if (mine && v + LANES * i <= count) r[i] = load_vector(src + 16 * (v + LANES * i));
    }
#pragma unroll
    for (u32 i = 0; i < SHIFTED_ROUND; i++) {
      // Lane 31 needs the first vector of the next row, which lane 0 has.
      Vector next = from_lane(lane == 0 ? r[i + 1] : r[i], (lane + 1) % LANES);
      if (v + LANES * i < count) store_vector(dst + 16 * (v + LANES * i), funnel(r[i], next, k));
    }
  }
}

// One piece or a part of one, by a whole warp.
__device__ __forceinline__ void copy_piece(u64 dst, u64 src, u64 len, u32 lane) {
  u64 head = (16 - dst % 16) % 16;
  u32 k = (src + head) % 16;
  // The vector with the first of these bytes begins before them: leave it to `copy_bytes`.
  if (k > head) head += 16;
  if (head > len) head = len;
  u64 count = (len - head) / 16;
  if (k != 0) {
    // The vector with the last one ends behind it: likewise.
    u64 whole = (len - head + k) / 16;
    count = whole == 0 ? 0 : min(count, whole - 1);
  }
  u64 tail = head + 16 * count;
  copy_bytes(dst, src, head, lane);
  if (k == 0) {
    copy_aligned(dst + head, src + head, count, lane);
  } else {
    copy_shifted(dst + head, src + head - k, count, k, lane);
  }
  copy_bytes(dst + tail, src + tail, len - tail, lane);
}

// A warp's share: the pieces from one cursor to the next.
__device__ __forceinline__ void copy_share(const UcclPiece* pieces, const UcclCursor* cursors, u32 warp, u32 lane) {
  UcclCursor begin = cursors[warp], end = cursors[warp + 1];
#pragma unroll 1
  for (u32 base = begin.piece; base <= end.piece; base += LANES) {
    u32 mine = base + lane;
    // The end's piece is not in this share if the share ends before its first byte.
    u32 stop = end.offset == 0 ? end.piece : end.piece + 1;
    UcclPiece piece = {0, 0, 0};
    if (mine < stop) {
      piece = pieces[mine];
      if (mine == end.piece) piece.len_bytes = end.offset;
      u64 skip = mine == begin.piece ? begin.offset : 0;
      piece.destination += skip;
      piece.source += skip;
      piece.len_bytes -= skip;
    }
    u32 here = stop > base ? min(LANES, stop - base) : 0;
#pragma unroll 1
    for (u32 i = 0; i < here; i++) {
      u64 dst = __shfl_sync(ALL, piece.destination, i);
      u64 src = __shfl_sync(ALL, piece.source, i);
      u64 len = __shfl_sync(ALL, piece.len_bytes, i);
      copy_piece(dst, src, len, lane);
    }
  }
}

// A GPU or CPU that reads the new value with acquire order sees all earlier writes of this thread.
__device__ __forceinline__ void release(u64 address, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void release_add(u64 address, u64 value) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Whether this block is the last to come here. Its first thread calls it.
__device__ __forceinline__ bool is_last(const UcclHead& head) {
  if (gridDim.x == 1) return true;
  __threadfence_system();
  u32* counter = reinterpret_cast<u32*>(head.counter);
  if (atomicAdd(counter, 1) + 1 != gridDim.x) return false;
  *counter = 0;
  __threadfence_system();
  return true;
}

// The last block to come here changes the word and sets the host's flag.
__device__ __forceinline__ void finish(const UcclHead& head) {
  if (head.flag == 0 && head.word == 0) return;
  // The barrier, and then a fence or the release, order the whole block's stores before this
  // thread's.
  __syncthreads();
  if (threadIdx.x != 0 || !is_last(head)) return;
  if (head.word != 0) {
    if (head.adds) {
      release_add(head.word, head.value);
    } else {
      release(head.word, head.value);
    }
  }
  if (head.flag != 0) release(head.flag, head.ticket);
}

__device__ __forceinline__ void run(const UcclHead& head, const UcclPiece* pieces, const UcclCursor* cursors) {
  u32 warp = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
  if (warp < head.warps) copy_share(pieces, cursors, warp, threadIdx.x % LANES);
  finish(head);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(UCCL_MOST_THREADS, 2)
    uccl_copy_table(const __grid_constant__ UcclCopyTable p) {
  run(p.head, reinterpret_cast<const UcclPiece*>(p.pieces), reinterpret_cast<const UcclCursor*>(p.cursors));
}

extern "C" __global__ void __launch_bounds__(UCCL_MOST_THREADS, 2)
    uccl_copy_small(const __grid_constant__ UcclCopySmall p) {
  run(p.head, p.pieces, p.cursors);
}

extern "C" __global__ void __launch_bounds__(UCCL_MOST_THREADS, 2)
    uccl_copy_wide(const __grid_constant__ UcclCopyWide p) {
  run(p.head, p.pieces, p.cursors);
}
