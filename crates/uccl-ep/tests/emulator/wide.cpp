// The kernels of groups with many ranks, for the emulator. Their names are those of the other kernels' code, so they have a
// namespace of their own.

#include <machine.cuh>

namespace wide {
#include "../../../../kernels/ep/wide.cu"
}

namespace {

template <typename Parameter, void (*KERNEL)(Parameter)>
void kernel(const void* parameter) {
  KERNEL(*static_cast<const Parameter*>(parameter));
}

struct Emulated {
  const char* name;
  size_t len;
  void (*kernel)(const void*);
};

}  // namespace

extern "C" {

extern const Emulated emulated_wide_kernels[];
const Emulated emulated_wide_kernels[] = {
    {"uccl_ep_wide_layout", sizeof(wide::UcclEpLayout), kernel<const wide::UcclEpLayout, wide::uccl_ep_wide_layout>},
    {"uccl_ep_wide_low_latency_send", sizeof(wide::UcclEpSend),
     kernel<const wide::UcclEpSend, wide::uccl_ep_wide_low_latency_send>},
    {"uccl_ep_wide_low_latency_receive", sizeof(wide::UcclEpLowLatencyReceive),
     kernel<const wide::UcclEpLowLatencyReceive, wide::uccl_ep_wide_low_latency_receive>},
    {"uccl_ep_wide_low_latency_return", sizeof(wide::UcclEpLowLatencyReturn),
     kernel<const wide::UcclEpLowLatencyReturn, wide::uccl_ep_wide_low_latency_return>},
    {"uccl_ep_wide_low_latency_sum", sizeof(wide::UcclEpLowLatencySum),
     kernel<const wide::UcclEpLowLatencySum, wide::uccl_ep_wide_low_latency_sum>},
    {"uccl_ep_wide_low_latency_return_packed", sizeof(wide::UcclEpLowLatencyReturn),
     kernel<const wide::UcclEpLowLatencyReturn, wide::uccl_ep_wide_low_latency_return_packed>},
    {"uccl_ep_wide_low_latency_sum_packed", sizeof(wide::UcclEpLowLatencySum),
     kernel<const wide::UcclEpLowLatencySum, wide::uccl_ep_wide_low_latency_sum_packed>},
    {"uccl_ep_wide_mask", sizeof(wide::UcclEpMask), kernel<const wide::UcclEpMask, wide::uccl_ep_wide_mask>},
    {"uccl_ep_wide_normal_send", sizeof(wide::UcclEpNormalSend),
     kernel<const wide::UcclEpNormalSend, wide::uccl_ep_wide_normal_send>},
    {"uccl_ep_wide_normal_count", sizeof(wide::UcclEpNormalCount),
     kernel<const wide::UcclEpNormalCount, wide::uccl_ep_wide_normal_count>},
    {"uccl_ep_wide_normal_receive", sizeof(wide::UcclEpNormalReceive),
     kernel<const wide::UcclEpNormalReceive, wide::uccl_ep_wide_normal_receive>},
    {"uccl_ep_wide_normal_return", sizeof(wide::UcclEpNormalReturn),
     kernel<const wide::UcclEpNormalReturn, wide::uccl_ep_wide_normal_return>},
    {"uccl_ep_wide_normal_sum", sizeof(wide::UcclEpNormalSum),
     kernel<const wide::UcclEpNormalSum, wide::uccl_ep_wide_normal_sum>},
    {"uccl_ep_wide_normal_totals", sizeof(wide::UcclEpNormalTotals),
     kernel<const wide::UcclEpNormalTotals, wide::uccl_ep_wide_normal_totals>},
    {"uccl_ep_wide_normal_recount", sizeof(wide::UcclEpNormalRecount),
     kernel<const wide::UcclEpNormalRecount, wide::uccl_ep_wide_normal_recount>},
    {"uccl_ep_wide_normal_receive_round", sizeof(wide::UcclEpNormalReceiveRound),
     kernel<const wide::UcclEpNormalReceiveRound, wide::uccl_ep_wide_normal_receive_round>},
    {"uccl_ep_wide_normal_return_round", sizeof(wide::UcclEpNormalReturnRound),
     kernel<const wide::UcclEpNormalReturnRound, wide::uccl_ep_wide_normal_return_round>},
    {nullptr, 0, nullptr},
};
}
