// Expert parallelism: the kernels of a dispatch and of a combine.
//
// In low latency mode, a dispatch is `layout` (not for a small batch), `low_latency_send` and
// `low_latency_receive`; a combine is `low_latency_return` and `low_latency_sum`, or, where rows
// are packed, `low_latency_return_packed` and `low_latency_sum_packed`. Where records or rows have
// flags and the caller does nothing between the halves, one launch does both:
// `low_latency_dispatch` or `low_latency_combine`.
//
// In normal mode, a dispatch is `layout`, perhaps `normal_count` (one block), and
// `normal_dispatch`; a combine is `normal_combine`. Where chunks have no flags, a dispatch is
// `layout`, `normal_send`, perhaps `normal_count`, and `normal_receive`, and a combine
// `normal_return` and `normal_sum`.
//
// A call of normal mode in several rounds is `layout`, perhaps `normal_count`, and `normal_totals`;
// then, for each round, `layout` and `normal_dispatch_round`, or `normal_send` and
// `normal_receive_round`; for each round of a combine `normal_combine_round`, or
// `normal_return_round` and `normal_sum`. `normal_recount` reads the counts of such a handle.
//
// These are the kernels of groups of up to UCCL_EP_NARROW_RANKS ranks; wide.cu has those of larger ones.
//
// A launch that waits for peers has so few blocks that all of them run at the same time, with those
// of all other ranks on the GPU.

#include "low_latency/combine_chunks.cuh"
#include "low_latency/packed.cuh"
#include "low_latency/small_dispatch.cuh"
#include "mask.cuh"
#include "normal/combine_chunks.cuh"
#include "normal/rounds.cuh"

extern "C" __global__ void __launch_bounds__(UCCL_EP_LAYOUT_THREADS)
    uccl_ep_layout(const __grid_constant__ UcclEpLayout p) {
  UCCL_SHARED(LayoutState, s);
  layout(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_low_latency_send(const __grid_constant__ UcclEpSend p) {
  UCCL_SHARED(SendState, s);
  low_latency_send(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_low_latency_receive(const __grid_constant__ UcclEpLowLatencyReceive p) {
  UCCL_SHARED(ReceiveState, s);
  low_latency_receive(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_low_latency_return(const __grid_constant__ UcclEpLowLatencyReturn p) {
  UCCL_SHARED(ChunkReturnState, s);
  low_latency_return(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_PACKING_THREADS)
    uccl_ep_low_latency_return_packed(const __grid_constant__ UcclEpLowLatencyReturn p) {
  UCCL_SHARED(ReturnState, s);
  low_latency_return_packed(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_UNPACKING_THREADS)
    uccl_ep_low_latency_sum_packed(const __grid_constant__ UcclEpLowLatencySum p) {
  UCCL_SHARED(WaitState, s);
  low_latency_sum_packed(p, s);
}

extern "C" __global__ void __launch_bounds__(RANKS) uccl_ep_mask(const __grid_constant__ UcclEpMask p) {
  change_masks(p);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_low_latency_sum(const __grid_constant__ UcclEpLowLatencySum p) {
  UCCL_SHARED(WaitState, s);
  low_latency_sum(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_low_latency_dispatch(const __grid_constant__ UcclEpLowLatencyDispatch p) {
  UCCL_SHARED(DispatchState, s);
  low_latency_dispatch(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_low_latency_combine(const __grid_constant__ UcclEpLowLatencyCombine p) {
  UCCL_SHARED(ChunkReturnState, s);
  low_latency_combine(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS)
    uccl_ep_normal_send(const __grid_constant__ UcclEpNormalSend p) {
  UCCL_SHARED(WaitState, s);
  normal_send(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS)
    uccl_ep_normal_count(const __grid_constant__ UcclEpNormalCount p) {
  UCCL_SHARED(NormalReceiveState, s);
  normal_count(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS)
    uccl_ep_normal_receive(const __grid_constant__ UcclEpNormalReceive p) {
  UCCL_SHARED(NormalReceiveState, s);
  normal_receive(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS)
    uccl_ep_normal_return(const __grid_constant__ UcclEpNormalReturn p) {
  UCCL_SHARED(WaitState, s);
  normal_return(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS)
    uccl_ep_normal_sum(const __grid_constant__ UcclEpNormalSum p) {
  UCCL_SHARED(WaitState, s);
  normal_sum(p, s);
}

struct NormalDispatchState {
  NormalReceiveState rows;
  FlagQueue out;
};

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS)
    uccl_ep_normal_dispatch(const __grid_constant__ UcclEpNormalDispatch p) {
  UCCL_SHARED(NormalDispatchState, s);
  normal_dispatch(p, s.rows, s.out);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS)
    uccl_ep_normal_combine(const __grid_constant__ UcclEpNormalCombine p) {
  UCCL_SHARED(CombineState, s);
  normal_combine(p, s, OneReturn{});
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_normal_totals(const __grid_constant__ UcclEpNormalTotals p) {
  UCCL_SHARED(NormalReceiveState, s);
  normal_totals(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS)
    uccl_ep_normal_recount(const __grid_constant__ UcclEpNormalRecount p) {
  UCCL_SHARED(NormalReceiveState, s);
  normal_recount(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS)
    uccl_ep_normal_dispatch_round(const __grid_constant__ UcclEpNormalDispatchRound p) {
  UCCL_SHARED(NormalDispatchState, s);
  normal_dispatch_round(p, s.rows, s.out);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS)
    uccl_ep_normal_receive_round(const __grid_constant__ UcclEpNormalReceiveRound p) {
  UCCL_SHARED(NormalReceiveState, s);
  normal_receive_round(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS)
    uccl_ep_normal_return_round(const __grid_constant__ UcclEpNormalReturnRound p) {
  UCCL_SHARED(ReturnRoundState, s);
  normal_return_round(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS)
    uccl_ep_normal_combine_round(const __grid_constant__ UcclEpNormalCombineRound p) {
  UCCL_SHARED(CombineState, s);
  normal_combine(p.whole, s, RoundReturn{p.round});
}
