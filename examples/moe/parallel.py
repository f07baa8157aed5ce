"""Mixtures with their experts spread over ranks: a template for training and for decoding with
``uccl.ep``. Rows travel in bf16."""

import torch
from uccl.ep import Buffer


class Dispatch(torch.autograd.Function):
    """Sends each token to the ranks of its experts. The token's gradient is the sum of its rows'
    gradients there: a combine."""

    @staticmethod
    def forward(ctx, x, weights, choices, buffer, num_experts):
        per_rank, per_node, per_expert, token_in_rank, _ = buffer.get_dispatch_layout(
            choices, num_experts
        )
        rows, local_choices, row_weights, counts, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=token_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=choices,
            topk_weights=weights,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(local_choices)
        return rows, row_weights, local_choices, counts, handle

    @staticmethod
    def backward(ctx, of_rows, of_weights, *_):
        of_x, of_weights, _ = ctx.buffer.combine(
            of_rows.contiguous(), ctx.handle, topk_weights=of_weights.contiguous()
        )
        return of_x, of_weights, None, None, None


class Combine(torch.autograd.Function):
    """Sums the ranks' outputs for each token. Each output gets the sum's gradient: a dispatch to
    the token's ranks."""

    @staticmethod
    def forward(ctx, made, buffer, handle):
        ctx.buffer, ctx.handle = buffer, handle
        out, _, _ = buffer.combine(made, handle)
        return out

    @staticmethod
    def backward(ctx, of_out):
        of_made, *_ = ctx.buffer.dispatch(of_out.contiguous(), handle=ctx.handle)
        return of_made, None, None


class ManyTokens:
    """For training. All ranks make the same calls in the same order, in the backward pass too,
    because all have the same graph. A rank without a single token makes them as well."""

    def __init__(self, group, hidden, num_experts, device):
        ranks, row_bytes = group.size(), 2 * hidden
        configs = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
        nvl = max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(row_bytes, ranks) for config in configs)
        self.buffer, self.num_experts = Buffer(group, nvl, rdma, device=device), num_experts

    def __call__(self, x, choices, weights, experts):
        rows, row_weights, local_choices, counts, handle = Dispatch.apply(
            x.bfloat16(), weights.float(), choices, self.buffer, self.num_experts
        )
        made = experts(rows.to(x.dtype), local_choices, row_weights, counts)
        return Combine.apply(made.bfloat16(), self.buffer, handle).to(x.dtype)


class FewTokens:
    """For decoding, up to ``most`` tokens of each rank. No shape depends on choices, so a CUDA graph can repeat it."""

    def __init__(self, group, hidden, num_experts, device, most):
        size = Buffer.get_low_latency_rdma_size_hint(most, hidden, group.size(), num_experts)
        self.buffer = Buffer(group, 0, size, low_latency_mode=True, device=device)
        self.num_experts, self.most = num_experts, most

    def __call__(self, x, choices, weights, experts):
        rows, _, handle, _, _ = self.buffer.low_latency_dispatch(
            x.bfloat16(), choices, self.most, self.num_experts, use_fp8=False
        )
        # Rows behind the received ones have any values, and their outputs are not used.
        made = experts.of_each(rows.to(x.dtype)).bfloat16()
        out, _, _ = self.buffer.low_latency_combine(made, choices, weights.float(), handle)
        return out.to(x.dtype)
