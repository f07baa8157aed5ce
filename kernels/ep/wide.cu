// Expert parallelism of groups of more than UCCL_EP_NARROW_RANKS ranks: the kernels of ep.cu, with sets of
// ranks of several words. So many GPUs seldom reach each other's memory, so there are only the kernels
// of calls whose rows have no flags: each half of a call is a launch, and `layout` runs before each
// dispatch. Their blocks wait for the data of all ranks at once.
#define UCCL_EP_WIDE

#include "low_latency/packed.cuh"
#include "mask.cuh"
#include "normal/rounds.cuh"

extern "C" __global__ void __launch_bounds__(UCCL_EP_LAYOUT_THREADS, 1)
    uccl_ep_wide_layout(const __grid_constant__ UcclEpLayout p) {
  UCCL_SHARED(LayoutState, s);
  layout(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_wide_low_latency_send(const __grid_constant__ UcclEpSend p) {
  UCCL_SHARED(WaitState, s);
  send_all_routed(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_wide_low_latency_receive(const __grid_constant__ UcclEpLowLatencyReceive p) {
  UCCL_SHARED(ReceiveState, s);
  low_latency_receive(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_wide_low_latency_return(const __grid_constant__ UcclEpLowLatencyReturn p) {
  UCCL_SHARED(ReturnState, s);
  return_whole(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_wide_low_latency_sum(const __grid_constant__ UcclEpLowLatencySum p) {
  UCCL_SHARED(WaitState, s);
  if (begin_block(p.group, p.call, STEP_RECEIVE, s)) sum_whole(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_PACKING_THREADS)
    uccl_ep_wide_low_latency_return_packed(const __grid_constant__ UcclEpLowLatencyReturn p) {
  UCCL_SHARED(ReturnState, s);
  low_latency_return_packed(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_UNPACKING_THREADS)
    uccl_ep_wide_low_latency_sum_packed(const __grid_constant__ UcclEpLowLatencySum p) {
  UCCL_SHARED(WaitState, s);
  low_latency_sum_packed(p, s);
}

extern "C" __global__ void __launch_bounds__(RANKS) uccl_ep_wide_mask(const __grid_constant__ UcclEpMask p) {
  change_masks(p);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_wide_normal_send(const __grid_constant__ UcclEpNormalSend p) {
  UCCL_SHARED(WaitState, s);
  normal_send(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_wide_normal_count(const __grid_constant__ UcclEpNormalCount p) {
  UCCL_SHARED(NormalReceiveState, s);
  normal_count(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_wide_normal_receive(const __grid_constant__ UcclEpNormalReceive p) {
  UCCL_SHARED(NormalReceiveState, s);
  normal_receive(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_wide_normal_return(const __grid_constant__ UcclEpNormalReturn p) {
  UCCL_SHARED(WaitState, s);
  normal_return(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_wide_normal_sum(const __grid_constant__ UcclEpNormalSum p) {
  UCCL_SHARED(WaitState, s);
  normal_sum(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_wide_normal_totals(const __grid_constant__ UcclEpNormalTotals p) {
  UCCL_SHARED(NormalReceiveState, s);
  normal_totals(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_wide_normal_recount(const __grid_constant__ UcclEpNormalRecount p) {
  UCCL_SHARED(NormalReceiveState, s);
  normal_recount(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_wide_normal_receive_round(const __grid_constant__ UcclEpNormalReceiveRound p) {
  UCCL_SHARED(NormalReceiveState, s);
  normal_receive_round(p, s);
}

extern "C" __global__ void __launch_bounds__(UCCL_EP_THREADS, 1)
    uccl_ep_wide_normal_return_round(const __grid_constant__ UcclEpNormalReturnRound p) {
  UCCL_SHARED(ReturnRoundState, s);
  normal_return_round(p, s);
}
