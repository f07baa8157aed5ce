"""The calls that frameworks make of ``deep_ep``, in their order and with their keywords, and the
fields that they read of the results.

Files and lines are those of the wheels of vLLM 0.33.0 (``all2all.py`` is in
``vllm/distributed/device_communicators``, ``deepep_*.py`` in
``vllm/model_executor/layers/fused_moe/prepare_finalize``), of SGLang 0.5.23
(``sglang/srt/layers/moe/token_dispatcher``) and of Megatron-core 0.19.2
(``megatron/core/transformer/moe``).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.xdist_group("ep"), pytest.mark.timeout(60)]

HIDDEN, MOST, TOP_K = 1024, 16, 4


def batch(group, per_rank: int = 4):
    """A rank's tokens: rows, choices, weights; and the number of experts."""
    torch.manual_seed(group.rank())
    tokens = MOST - 3 * group.rank()
    num_experts = group.size() * per_rank
    x = torch.randint(-4, 5, (tokens, HIDDEN)).bfloat16()
    ids = torch.rand(tokens, num_experts).topk(TOP_K).indices
    return x, ids, torch.full((tokens, TOP_K), 0.5), num_experts


def copies(ids, ranks: int, num_experts: int):
    """``[n, 1]``: the number of ranks that each token is sent to."""
    owners = ids // (num_experts // ranks)
    return torch.tensor([[len(set(row))] for row in owners.tolist()], dtype=torch.float32)


def vllm_low_latency(group) -> None:
    """vLLM's low latency backend: one buffer (all2all.py:347 and :357 to :367), hooks
    (deepep_ll.py:294 to :310, :395 to :404), masks of lost ranks (all2all.py:388 to :413)."""
    import deep_ep

    x, ids, weights, num_experts = batch(group)
    ranks = group.size()
    assert deep_ep.Buffer and deep_ep.EventOverlap and deep_ep.ElasticBuffer and deep_ep.Config
    num_rdma_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=MOST,
        hidden=HIDDEN,
        num_ranks=ranks,
        num_experts=num_experts,
    )
    buffer = deep_ep.Buffer(
        group=group,
        num_nvl_bytes=1 << 20,
        num_rdma_bytes=num_rdma_bytes,
        low_latency_mode=True,
        num_qps_per_rank=num_experts // ranks,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=False,
    )
    # Experts that take packed scales have them sent so (deepep_ll.py:118 to :127). Only a
    # finalize beside other work has a hook (:383).
    for use_fp8, is_packed, is_async in (
        (False, False, True),
        (True, False, True),
        (True, True, False),
    ):
        expert_x, expert_num_tokens, handle, _, hook = buffer.low_latency_dispatch(
            x,
            ids,
            MOST,
            num_experts,
            use_fp8=use_fp8,
            round_scale=is_packed,
            use_ue8m0=is_packed,
            async_finish=False,
            return_recv_hook=True,
        )
        hook()
        if use_fp8:
            payload, scales = expert_x
            assert payload.shape == (num_experts // ranks, ranks * MOST, HIDDEN)
            if is_packed:
                assert scales.dtype == torch.int32
                exponents = scales.contiguous().view(torch.uint8).float()
                scales = torch.exp2(exponents - 127)
            assert scales.shape == (num_experts // ranks, ranks * MOST, HIDDEN // 128)
            rows = payload.float() * scales.repeat_interleave(128, -1)
            expert_x = rows.bfloat16()
        assert expert_num_tokens.dtype == torch.int32 and expert_num_tokens.sum() > 0
        output = torch.empty_like(x)
        _, _, hook = buffer.low_latency_combine(
            expert_x,
            ids,
            weights,
            handle,
            async_finish=False,
            zero_copy=False,
            return_recv_hook=is_async,
            out=output,
        )
        assert (hook is not None) == is_async
        if hook is not None:
            hook()
        torch.testing.assert_close(output, x * 2, rtol=0.05, atol=0.2 if use_fp8 else 0)
    mask = torch.empty(ranks, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(mask)
    assert not mask.any()
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    buffer.low_latency_clean_mask_buffer()
    buffer.destroy()


#: The values of E2M1, by code.
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4_low_latency(group) -> None:
    """vLLM and SGLang with NVFP4 weights: packed rows, scales in tiles, one global scale
    (deepep_ll.py:186 to :190, :302 to :307; SGLang's deepep.py:855 to :860)."""
    import deep_ep

    x, ids, weights, num_experts = batch(group)
    ranks, local = group.size(), num_experts // group.size()
    most = 128
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, HIDDEN, ranks, num_experts)
    buffer = deep_ep.Buffer(group, 0, size, low_latency_mode=True, num_qps_per_rank=local)
    # The largest value of any rank is 4.
    global_scale = torch.tensor(448 * 6 / 4)
    expert_x, expert_num_tokens, handle, event, hook = buffer.low_latency_dispatch(
        x,
        ids,
        most,
        num_experts,
        use_fp8=False,
        use_nvfp4=True,
        x_global_scale=global_scale,
        async_finish=False,
        return_recv_hook=True,
    )
    hook()
    packed, scales = expert_x[0].permute(2, 0, 1), expert_x[1]
    assert packed.dtype == torch.uint8 and packed.shape == (local, ranks * most, HIDDEN // 2)
    tile_rows = ranks * most // 128
    assert scales.dtype == torch.float8_e4m3fn and scales.shape == (
        32,
        4,
        tile_rows,
        4,
        HIDDEN // 64,
        local,
    )
    # The transposition follows the format, not the order of memory: rows of experts, scale by
    # scale.
    scales = scales.float().permute(5, 2, 1, 0, 4, 3).reshape(local, ranks * most, HIDDEN // 16)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(2)
    rows = (E2M1[codes.long()] * scales.repeat_interleave(16, -1) / global_scale).bfloat16()
    for expert, count in enumerate(expert_num_tokens.tolist()):
        rows[expert, count:] = float("nan")
    output, _, hook = buffer.low_latency_combine(
        x=rows,
        topk_idx=ids,
        topk_weights=weights,
        handle=handle,
        async_finish=False,
        return_recv_hook=True,
    )
    hook()
    # The two largest E2M1 values differ by a third of the largest.
    largest = x.view(len(x), -1, 16).abs().amax(-1).repeat_interleave(16, -1).float()
    error = (output.float() - 2 * x.float()).abs()
    assert (error <= 2 * largest * (1 / 6 + 1 / 16)).all(), error.max()


def vllm_high_throughput(group) -> None:
    """vLLM's high throughput backend: a buffer (all2all.py:278 to :285), its layout and dispatch
    (deepep_ht.py:149 to :190), rows of experts (:226 to :260), combine (:402 to :411); with events
    of micro-batches, and without."""
    import deep_ep

    x, ids, weights, num_experts = batch(group)
    buffer = deep_ep.Buffer(
        group=group,
        num_nvl_bytes=1 << 22,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=1,
        explicitly_destroy=True,
    )
    deep_ep.Buffer.set_num_sms(20)
    for is_quantized, is_dbo in ((False, False), (True, False), (False, True)):
        high_throughput_layer(buffer, (x, ids, weights, num_experts), is_quantized, is_dbo)


def high_throughput_layer(buffer, tokens, is_quantized: bool, is_dbo: bool) -> None:
    """One layer: rows with scales of blocks if they are quantized. Micro-batches have events, and
    are synchronous."""
    import deep_ep

    x, ids, weights, num_experts = tokens
    ranks = buffer.group_size
    config = deep_ep.Buffer.get_dispatch_config(ranks)
    previous = deep_ep.Buffer.capture() if is_dbo else None
    # Numbers that FP8 has.
    quantized = x.to(torch.float8_e4m3fn), torch.full((len(x), HIDDEN // 128), 2.0)
    per_rank, per_node, per_expert, token_in_rank, event = buffer.get_dispatch_layout(
        topk_idx=ids,
        num_experts=num_experts,
        previous_event=previous,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    got, got_ids, got_weights, counts, handle, event = buffer.dispatch(
        x=quantized if is_quantized else x,
        handle=None,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=token_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
        expert_alignment=1,
        config=config,
        previous_event=previous,
        async_finish=not is_dbo,
        allocate_on_comm_stream=False,
    )
    if event.event is not None:
        event.current_stream_wait()
    if is_quantized:
        got, scales = got
        assert scales.shape == (len(got), HIDDEN // 128)
        got = (got.float() * scales.repeat_interleave(128, -1) / 2).bfloat16()
    # Choices of other ranks' experts become an expert that is not here.
    foreign = num_experts - 1 if buffer.rank == 0 else 0
    offset = buffer.rank * num_experts // ranks
    experts = torch.where(got_ids == -1, foreign, got_ids + offset)
    assert experts.min() >= 0 and experts.max() < num_experts
    assert sum(counts) == (got_ids >= 0).sum() and len(got) == len(got_ids) == len(got_weights)
    combined, _, event = buffer.combine(
        x=got,
        handle=handle,
        topk_weights=None,
        config=deep_ep.Buffer.get_combine_config(ranks),
        previous_event=previous,
        async_finish=not is_dbo,
        allocate_on_comm_stream=False,
    )
    assert (event.event is None) == is_dbo
    if event.event is not None:
        event.current_stream_wait()
    assert torch.equal(combined.float(), x.float() * copies(ids, ranks, num_experts))


def vllm_elastic(group) -> None:
    """vLLM's backend for the second interface, after its own check of NCCL: a buffer (all2all.py:1060
    to :1071, :1115 to :1118), dispatch (deepep_v2.py:220 to :229), combine (:488 to :503). Decode
    says the batch's size, rounded up to a power of two, which may be more than the buffer's
    (:204 to :212). Prefill counts."""
    import deep_ep

    x, ids, weights, num_experts = batch(group)
    buffer = deep_ep.ElasticBuffer(
        group=group,
        num_max_tokens_per_rank=MOST - 4,
        hidden=HIDDEN,
        num_topk=TOP_K,
        use_fp8_dispatch=True,
        allow_hybrid_mode=True,
        prefer_overlap_with_compute=True,
        allow_multiple_reduction=True,
        explicitly_destroy=True,
    )
    assert buffer.get_theoretical_num_sms(num_experts=num_experts, num_topk=TOP_K) % 2 == 0
    x, ids, weights = x[: MOST - 4], ids[: MOST - 4], weights[: MOST - 4]
    for bucket, counted, is_mxfp8 in (
        (None, True, False),
        (MOST, False, False),
        (MOST, False, True),
        (None, True, True),
    ):
        # Scales of 32 values, four to an i32 (deepep_v2.py:39 to :52).
        packed = torch.full((len(x), HIDDEN // 32), 128, dtype=torch.uint8).view(torch.int32)
        sent = (x.to(torch.float8_e4m3fn), packed) if is_mxfp8 else x
        got, got_ids, got_weights, handle, event = buffer.dispatch(
            x=sent,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=num_experts,
            num_max_tokens_per_rank=bucket,
            do_expand=counted,
            do_cpu_sync=counted,
            async_with_compute_stream=False,
        )
        if event.event is not None:
            event.current_stream_wait()
        if is_mxfp8:
            got, scales = got
            there = handle.psum_num_recv_tokens_per_scaleup_rank[-1] if not counted else len(got)
            assert (scales.contiguous().view(torch.uint8)[:there] == 128).all()
            got = got.float().bfloat16()
        assert (got_ids is None) == counted
        assert bool(handle.num_recv_tokens_per_expert_list) == counted
        assert handle.psum_num_recv_tokens_per_scaleup_rank[-1] > 0
        out, _, event = buffer.combine(
            x=got,
            handle=handle,
            topk_weights=None,
            async_with_compute_stream=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        times = TOP_K if counted else copies(ids, group.size(), num_experts)
        assert torch.equal(out.float(), x.float() * times)
    buffer.destroy()


def sglang(group) -> None:
    """SGLang's first backend: both modes on one buffer, which it never destroys: sizes and the buffer
    (deepep.py:222 to :251, :285 to :304), normal mode (:648 to :682, :710 to :731), low latency
    mode (:843 to :864)."""
    from deep_ep import Buffer, Config

    x, ids, weights, num_experts = batch(group)
    ranks, row_bytes = group.size(), 2 * HIDDEN
    nvl = rdma = 0
    for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)):
        nvl = max(config.get_nvl_buffer_size_hint(row_bytes, ranks), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(row_bytes, ranks), rdma)
    rdma = max(Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, ranks, num_experts), rdma)
    # On GB200 and GB300.
    fabric = {"allow_mnnvl": True, "use_fabric": True}
    buffer = Buffer(group, nvl, rdma, low_latency_mode=True, num_qps_per_rank=20, **fabric)
    assert buffer.group_size == ranks and Buffer.num_sms == 20
    config = Config(**{"num_sms": 24, "num_max_nvl_chunked_send_tokens": 8})
    # On Blackwell scales are packed, and those of one channel are contiguous (:563 to :573).
    packed = torch.full((HIDDEN // 512, MOST), 0x7F7F7F7F, dtype=torch.int32)[:, : len(x)].t()
    for is_packed in (False, True):
        previous = Buffer.capture()
        layout = buffer.get_dispatch_layout(
            ids,
            num_experts,
            previous_event=previous,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        per_rank, per_node, per_expert, token_in_rank, previous = layout
        got, got_ids, got_weights, counts, handle, event = buffer.dispatch(
            (x.to(torch.float8_e4m3fn), packed) if is_packed else x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=token_in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=previous,
            async_finish=True,
            allocate_on_comm_stream=True,
            expert_alignment=128,
            config=config,
        )
        event.current_stream_wait()
        if is_packed:
            got, scales = got
            assert scales.shape == (len(got), HIDDEN // 512) and (scales == 0x7F7F7F7F).all()
            got = got.float().bfloat16()
        assert all(count % 128 == 0 for count in counts)
        out, _, event = buffer.combine(
            got,
            handle,
            async_finish=True,
            previous_event=Buffer.capture(),
            allocate_on_comm_stream=True,
            config=config,
        )
        event.current_stream_wait()
        assert torch.equal(out.float(), x.float() * copies(ids, ranks, num_experts))
        buffer.clean_low_latency_buffer(MOST, HIDDEN, num_experts)
        got, count, low_latency, event, hook = buffer.low_latency_dispatch(
            x, ids, MOST, num_experts, use_fp8=False, async_finish=True, return_recv_hook=False
        )
        event.current_stream_wait()
        assert hook is None
        # Single batch overlap: deepep.py:926 to :955, with the arguments of
        # single_batch_overlap.py:112 to :163, for Hopper and for Blackwell. Without `overlap` only the
        # shared experts run beside the combine, and there are no signals.
        for signals in (False, True):
            hopper = {
                "overlap": signals,
                "packed_recv_count": count,
                "comp_signal": torch.zeros(64, dtype=torch.int32) if signals else None,
                "block_m": 64,
                "threshold": 0,
                "num_sms": 3,
            }
            blackwell = {
                "overlap": signals,
                "src_signals": torch.zeros(2, dtype=torch.int32) if signals else None,
                "src_signal_expect_value": 0,
            }
            for overlap in (hopper, blackwell):
                out, event, hook = buffer.low_latency_combine(
                    x=got,
                    topk_idx=ids,
                    topk_weights=weights,
                    handle=low_latency,
                    async_finish=False,
                    return_recv_hook=True,
                    **overlap,
                )
                hook()
                assert torch.equal(out, x * 2)


def sglang_elastic(group) -> None:
    """SGLang's second backend: decode expands and does not count, prefill counts, and expands or not:
    a buffer (deepep_v2.py:192 to :201, without its size), dispatch (:385 to :399), combine (:475 to
    :481). A rank without tokens has one of weight 0 (:348 to :355)."""
    from deep_ep import ElasticBuffer

    x, ids, weights, num_experts = batch(group)
    buffer = ElasticBuffer(
        group,
        num_max_tokens_per_rank=MOST,
        hidden=HIDDEN,
        num_topk=TOP_K,
        use_fp8_dispatch=True,
        allow_hybrid_mode=False,
        sl_idx=0,
        prefer_overlap_with_compute=False,
    )
    assert buffer.num_bytes > 0
    dummy = torch.zeros(1, HIDDEN).bfloat16(), torch.arange(TOP_K)[None], torch.zeros(1, TOP_K)
    is_idle = group.rank() == group.size() - 1
    # Packed scales of which those of one channel are contiguous, on Blackwell; else numbers.
    for decode, expands, is_packed, idle in (
        (True, True, True, False),
        (True, True, False, False),
        (False, True, False, False),
        (False, False, True, False),
        (False, False, False, is_idle),
    ):
        rows, choices, row_weights = dummy if idle else (x, ids, weights)
        count = len(rows)
        one = torch.full((HIDDEN // 512, MOST), 0x7F7F7F7F, dtype=torch.int32)[:, :count].t()
        sent = one if is_packed else torch.ones(count, HIDDEN // 128)
        (got, scales), got_ids, got_weights, handle, event = buffer.dispatch(
            (rows.to(torch.float8_e4m3fn), sent),
            topk_idx=choices,
            topk_weights=row_weights,
            num_experts=num_experts,
            num_max_tokens_per_rank=MOST,
            expert_alignment=128,
            num_sms=0,
            use_tma_aligned_col_major_sf=is_packed,
            do_cpu_sync=not decode,
            do_expand=expands,
        )
        if event.event is not None:
            event.current_stream_wait()
        received = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1].item())
        assert received > 0 and handle.psum_num_recv_tokens_per_expert.shape == (
            num_experts // group.size(),
        )
        assert not is_packed or scales.stride(0) == 1
        assert bool(handle.num_recv_tokens_per_expert_list) != decode
        if expands:
            assert got_weights.shape == (len(got),)
            got_weights = None
        else:
            got, scales = got[:received], scales[:received]
            got_ids, got_weights = got_ids[:received], got_weights[:received]
        out, _, event = buffer.combine(
            got.float().bfloat16(), handle=handle, topk_weights=got_weights
        )
        if event.event is not None:
            event.current_stream_wait()
        times = TOP_K if expands else copies(choices, group.size(), num_experts)
        assert torch.equal(out.float(), rows.float() * times)


def megatron(group) -> None:
    """Megatron's flexible dispatcher: the backward pass of dispatch is combine, and that of combine
    is dispatch, with the handle of the forward pass: a buffer (fused_a2a.py:35 to :68), dispatch
    (:86 to :128) and its gradient (:144 to :161), combine (:169 to :183) and its gradient (:193 to
    :207)."""
    from deep_ep import Buffer
    from deep_ep.utils import EventHandle, EventOverlap

    x, ids, weights, num_experts = batch(group)
    ranks = group.size()
    row_bytes, nvl, rdma = HIDDEN * max(x.element_size(), 2), 0, 0
    for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)):
        nvl = max(config.get_nvl_buffer_size_hint(row_bytes, ranks), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(row_bytes, ranks), rdma)
    buffer = Buffer(group, nvl, rdma)
    assert buffer.group is group and (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (nvl, rdma)
    Buffer.set_num_sms(24)
    for is_async in (False, True):
        how: dict[str, Any] = {"async_finish": is_async, "allocate_on_comm_stream": is_async}
        previous = EventOverlap(EventHandle()) if is_async else None
        layout = buffer.get_dispatch_layout(ids, num_experts, previous_event=previous, **how)
        per_rank, per_node, per_expert, token_in_rank, event = layout
        got, got_ids, got_weights, counts, handle, after = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=token_in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            **how,
        )
        if is_async:
            after.current_stream_wait()
        assert torch.tensor(counts).sum() == (got_ids >= 0).sum()
        out, _, after = buffer.combine(got, handle=handle, previous_event=previous, **how)
        if is_async:
            after.current_stream_wait()
        assert torch.equal(out.float(), x.float() * copies(ids, ranks, num_experts))
        grad, grad_weights, after = buffer.combine(
            got, handle, topk_weights=got_weights.float(), previous_event=previous, **how
        )
        if is_async:
            after.current_stream_wait()
        assert torch.equal(grad, out)
        # One rank has each weight, and the others have 0.
        assert torch.equal(grad_weights, weights)
        again, _, _, _, _, after = buffer.dispatch(
            grad, handle=handle, previous_event=previous, **how
        )
        if is_async:
            after.current_stream_wait()
        assert len(again) == len(got)


def uccl_program(group) -> None:
    """A program in the manner of UCCL's own: it starts and ends proxies by hand."""
    from uccl.ep import Buffer, destroy_uccl, initialize_uccl

    x, ids, weights, num_experts = batch(group)
    size = Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, group.size(), num_experts)
    scratch = torch.zeros(size, dtype=torch.uint8)
    proxies, workers = initialize_uccl(
        scratch.data_ptr(), size, group.rank(), group.size(), group, num_experts
    )
    buffer = Buffer(group, num_rdma_bytes=size, low_latency_mode=True, explicitly_destroy=True)
    got, _, handle, event, hook = buffer.low_latency_dispatch(
        x, ids, MOST, num_experts, use_fp8=False, async_finish=True, return_recv_hook=False
    )
    out, event, hook = buffer.low_latency_combine(
        got,
        ids,
        weights,
        handle,
        use_logfmt=False,
        async_finish=True,
        zero_copy=True,
        return_recv_hook=False,
    )
    assert torch.equal(out, x * 2)
    buffer.destroy()
    destroy_uccl(proxies, workers)


CALLERS = [
    vllm_low_latency,
    nvfp4_low_latency,
    vllm_high_throughput,
    vllm_elastic,
    sglang,
    sglang_elastic,
    megatron,
    uccl_program,
]


@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.__name__)
def test_callers_run_as_they_are(world, caller):
    world.run(2, caller)


def names(group) -> list[str]:
    """Names that programs look for in ``deep_ep`` and that are missing."""
    import deep_ep
    import deep_ep.utils.event

    wanted = [
        "Buffer",
        "Config",
        "EventOverlap",
        "EventHandle",
        "ElasticBuffer",
        "EPHandle",
        "topk_idx_t",
    ]
    wanted += ["get_physical_domain_size", "get_logical_domain_size", "__version__"]
    assert deep_ep.__version__ >= "2.1" and not hasattr(deep_ep, "HybridEPBuffer")
    assert deep_ep.get_physical_domain_size(group) == (1, group.size())
    assert deep_ep.utils.event.EventHandle is deep_ep.utils.EventHandle is deep_ep.EventHandle
    return [name for name in wanted if not hasattr(deep_ep, name)]


def test_names_are_all_there(world):
    assert world.run(1, names) == [[]]


#: Expressions that programs write after ``import deep_ep`` alone.
WRITTEN = [
    "deep_ep.utils.EventOverlap is deep_ep.utils.event.EventOverlap is deep_ep.EventOverlap",
    "deep_ep.buffers.legacy.Buffer is deep_ep.buffer.Buffer is deep_ep.Buffer",
    "deep_ep.buffers.elastic.ElasticBuffer is deep_ep.ElasticBuffer",
    "deep_ep.buffers.elastic.EPHandle is deep_ep.EPHandle",
    "deep_ep.Buffer.set_num_sms(new_num_sms=12) is None and deep_ep.Buffer.num_sms == 12",
    "deep_ep.Buffer.get_dispatch_config(2).num_sms == deep_ep.Buffer.get_combine_config(2).num_sms == 12",
    "__import__('deep_ep._C')._C.topk_idx_t is deep_ep.topk_idx_t",
]


def test_modules_of_deepeps_are_there_when_it_is_imported():
    here = Path(__file__).parents[2] / "python" / "deep_ep"
    program = f"import sys; sys.path.append({str(here)!r}); import deep_ep\n"
    program += "".join(f"assert {line}, {line!r}\n" for line in WRITTEN)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
