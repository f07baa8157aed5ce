"""The calls that frameworks make of ``deep_ep``, in their order and with their keywords, and the
fields that they read of the results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    """vLLM's low latency backend: one buffer, a hook after each half, masks of lost ranks."""
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
        num_nvl_bytes=0,
        num_rdma_bytes=num_rdma_bytes,
        low_latency_mode=True,
        num_qps_per_rank=num_experts // ranks,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=False,
    )
    for use_fp8 in (False, True):
        expert_x, expert_num_tokens, handle, _, hook = buffer.low_latency_dispatch(
            x,
            ids,
            MOST,
            num_experts,
            use_fp8=use_fp8,
            round_scale=False,
            use_ue8m0=False,
            async_finish=False,
            return_recv_hook=True,
        )
        hook()
        if use_fp8:
            payload, scales = expert_x
            assert payload.shape == (num_experts // ranks, ranks * MOST, HIDDEN)
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
            return_recv_hook=True,
            out=output,
        )
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
    """vLLM and SGLang with NVFP4 weights: packed rows, scales in tiles, one global scale."""
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
    """vLLM's high throughput backend: layout, dispatch, combine, with configurations and captured
    events."""
    import deep_ep

    x, ids, weights, num_experts = batch(group)
    ranks = group.size()
    buffer = deep_ep.Buffer(
        group=group,
        num_nvl_bytes=1 << 22,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=1,
        explicitly_destroy=True,
    )
    deep_ep.Buffer.set_num_sms(20)
    config = deep_ep.Buffer.get_dispatch_config(ranks)
    previous = deep_ep.Buffer.capture()
    per_rank, per_node, per_expert, token_in_rank, event = buffer.get_dispatch_layout(
        topk_idx=ids,
        num_experts=num_experts,
        previous_event=previous,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    got, got_ids, got_weights, counts, handle, event = buffer.dispatch(
        x=x,
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
        async_finish=True,
        allocate_on_comm_stream=False,
    )
    if event.event is not None:
        event.current_stream_wait()
    assert sum(counts) == (got_ids >= 0).sum() and len(got) == len(got_ids) == len(got_weights)
    combined, _, event = buffer.combine(
        x=got,
        handle=handle,
        topk_weights=None,
        config=deep_ep.Buffer.get_combine_config(ranks),
        previous_event=previous,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    assert event.event is None
    assert torch.equal(combined.float(), x.float() * copies(ids, ranks, num_experts))


def vllm_elastic(group) -> None:
    """vLLM's backend for the second interface, after its own check of NCCL."""
    import deep_ep

    x, ids, weights, num_experts = batch(group)
    buffer = deep_ep.ElasticBuffer(
        group=group,
        num_max_tokens_per_rank=MOST,
        hidden=HIDDEN,
        num_topk=TOP_K,
        use_fp8_dispatch=False,
        allow_hybrid_mode=True,
        prefer_overlap_with_compute=True,
        allow_multiple_reduction=True,
        num_cpu_timeout_secs=1800,
        num_gpu_timeout_secs=1800,
        explicitly_destroy=True,
    )
    assert buffer.get_theoretical_num_sms(num_experts=num_experts, num_topk=TOP_K) % 2 == 0
    for bucket, counted in ((None, True), (MOST, False)):
        got, got_ids, got_weights, handle, event = buffer.dispatch(
            x=x,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=num_experts,
            num_max_tokens_per_rank=bucket,
            do_expand=counted,
            do_cpu_sync=counted,
            async_with_compute_stream=False,
        )
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
    """SGLang's first backend: both modes on one buffer, which it never destroys."""
    from deep_ep import Buffer, Config

    x, ids, weights, num_experts = batch(group)
    ranks, row_bytes = group.size(), 2 * HIDDEN
    nvl = rdma = 0
    for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)):
        nvl = max(config.get_nvl_buffer_size_hint(row_bytes, ranks), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(row_bytes, ranks), rdma)
    rdma = max(Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, ranks, num_experts), rdma)
    buffer = Buffer(group, nvl, rdma, low_latency_mode=True, num_qps_per_rank=20, allow_mnnvl=True)
    assert buffer.group_size == ranks and Buffer.num_sms == 20
    config = Config(**{"num_sms": 24, "num_max_nvl_chunked_send_tokens": 8})
    for _ in range(2):
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
            x,
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
        # Single batch overlap: deepep.py:926-955 of 0.5.23, with the arguments of
        # single_batch_overlap.py:112-163, for Hopper and for Blackwell. Without `overlap` only the
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
    """SGLang's second backend: decode expands and does not count, prefill counts and does not
    expand."""
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
        num_bytes=ElasticBuffer.get_buffer_size_hint(group, MOST, HIDDEN, TOP_K),
    )
    assert buffer.num_bytes > 0
    sms = buffer.get_theoretical_num_sms(num_experts, TOP_K)
    qps = buffer.get_theoretical_num_qps(sms)
    for decode in (True, False):
        packs = (x[:, :HIDDEN].contiguous(), torch.ones(len(x), HIDDEN // 128))
        (got, scales), _, got_weights, handle, _ = buffer.dispatch(
            packs,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=num_experts,
            num_max_tokens_per_rank=MOST,
            expert_alignment=8,
            num_sms=sms,
            num_qps=qps,
            use_tma_aligned_col_major_sf=decode,
            do_cpu_sync=not decode,
            do_expand=decode,
        )
        received = handle.psum_num_recv_tokens_per_scaleup_rank[-1].item()
        assert received > 0 and handle.psum_num_recv_tokens_per_expert.shape == (
            num_experts // group.size(),
        )
        assert not decode or scales.stride(0) == 1
        assert bool(handle.num_recv_tokens_per_expert_list) != decode
        out, _, _ = buffer.combine(got, handle=handle, topk_weights=None, num_sms=sms, num_qps=qps)
        times = TOP_K if decode else copies(ids, group.size(), num_experts)
        assert torch.equal(out.float(), x.float() * times)


def megatron(group) -> None:
    """Megatron's flexible dispatcher: the backward pass of dispatch is combine, and that of combine
    is dispatch, with the handle of the forward pass."""
    from deep_ep import Buffer
    from deep_ep.utils import EventHandle, EventOverlap

    x, ids, weights, num_experts = batch(group)
    ranks = group.size()
    config = Buffer.get_dispatch_config(ranks)
    nvl = config.get_nvl_buffer_size_hint(HIDDEN * max(x.element_size(), 2), ranks)
    buffer = Buffer(group, nvl, 0)
    assert buffer.group is group and (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (nvl, 0)
    Buffer.set_num_sms(24)
    previous = EventOverlap(EventHandle())
    layout = buffer.get_dispatch_layout(
        ids, num_experts, previous_event=previous, async_finish=False, allocate_on_comm_stream=False
    )
    per_rank, per_node, per_expert, token_in_rank, _ = layout
    got, got_ids, got_weights, counts, handle, after = buffer.dispatch(
        x,
        topk_idx=ids,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=token_in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=previous,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    grad, grad_weights, _ = buffer.combine(
        got, handle, topk_weights=got_weights.float(), previous_event=previous
    )
    assert torch.equal(grad.float(), x.float() * copies(ids, ranks, num_experts))
    # One rank has each weight, and the others have 0.
    assert torch.equal(grad_weights, weights)
    again, *nothing, handle_again, after = buffer.dispatch(
        grad,
        handle=handle,
        previous_event=previous,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    assert nothing == [None, None, None] and len(again) == len(got)


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
