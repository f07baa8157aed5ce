"""Cases of normal mode for ranks in threads that share a GPU, a real or an emulated one."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterable
from unittest import mock

import pytest
import torch
from cases import answers
from elastic_calls import elastic_calls
from few_tokens import FewTokens
from many_tokens import many_tokens
from thread_ranks import LIMIT, Rank, Ranks
from torch.utils._python_dispatch import TorchDispatchMode

#: Sizes of the calls with exact sums.
TOKENS, TOP_K, EXPERTS, HIDDEN = 24, 3, 12, 256


def buffer_of(rank: Rank, timeout: float = 20, **keywords: Any) -> Any:
    """A buffer for both modes."""
    from uccl.ep import Buffer

    room = 2 * Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, rank.size(), EXPERTS)
    return Buffer(
        None, 0, room, low_latency_mode=True, comm=rank, device="cuda", timeout=timeout, **keywords
    )


class Exact:
    """Calls of one rank with exact sums: each rank returns a token's row unchanged."""

    def __init__(self, rank: Rank, buffer: Any) -> None:
        self.rank, self.buffer = rank, buffer
        generator = torch.Generator().manual_seed(rank.rank())
        self.x = torch.randint(-4, 5, (TOKENS, HIDDEN), generator=generator).bfloat16()
        self.choices = torch.rand((TOKENS, EXPERTS), generator=generator).topk(TOP_K).indices
        self.owners = [set(row) for row in (self.choices // (EXPERTS // rank.size())).tolist()]
        self.copies = torch.tensor([[len(ranks)] for ranks in self.owners])
        self.weights = torch.tensor([0.5, 0.25, 1.0]).repeat(TOKENS, 1)
        self.given = tuple(
            tensor.to(buffer.device) for tensor in (self.x, self.choices, self.weights)
        )

    def dispatch(self, **keywords: Any) -> tuple[Any, ...]:
        """A dispatch of the first interface's normal mode."""
        x, choices, weights = self.given
        per_rank, _, per_expert, token_in_rank, _ = self.buffer.get_dispatch_layout(
            choices, EXPERTS
        )
        return self.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=token_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=choices,
            topk_weights=weights,
            **keywords,
        )

    def normal(self, **keywords: Any) -> torch.Tensor:
        """Dispatches and combines."""
        rows, *_, handle, _ = self.dispatch(**keywords)
        out, _, _ = self.buffer.combine(rows, handle)
        return out

    def few(self) -> torch.Tensor:
        """Dispatches and combines in low latency mode."""
        x, choices, weights = self.given
        rows, _, handle, _, _ = self.buffer.low_latency_dispatch(
            x, choices, TOKENS, EXPERTS, use_fp8=False
        )
        out, _, _ = self.buffer.low_latency_combine(rows, choices, weights, handle)
        return out

    def check(self, normal: list[torch.Tensor], few: list[torch.Tensor]) -> None:
        """Compares the sums."""
        torch.cuda.current_stream().synchronize()
        for out in normal:
            assert torch.equal(out.cpu().float(), self.x.float() * self.copies)
        for out in few:
            assert torch.equal(out.cpu().float(), self.x.float() * self.weights[0].sum())
        self.buffer.check()
        self.rank.allgather(b"")


def both_modes(rank: Rank) -> None:
    """Calls of both modes by turns on one buffer, and a last combine with the handle of the first
    dispatch."""
    exact = Exact(rank, buffer_of(rank))
    kept = exact.dispatch(num_worst_tokens=TOKENS * rank.size())
    normal, few = [], []
    for number in range(4):
        few.append(exact.few())
        normal.append(exact.normal(num_worst_tokens=TOKENS * rank.size() if number % 2 else 0))
    normal.append(exact.buffer.combine(kept[0], kept[4])[0])
    exact.check(normal, few)


def via_host(rank: Rank) -> None:
    """Ranks use the host's memory in both modes if one of them may not use NVLink."""
    ways = [True, rank.rank() > 0, False]
    buffers = [buffer_of(rank, allow_nvlink_for_low_latency_mode=may) for may in ways]
    assert [buffer._backend.native.is_via_host for buffer in buffers] == [False, True, True]
    exact = Exact(rank, buffers[2])
    # Rows that zero copy would leave in the buffer are copied in this case.
    worst = TOKENS * rank.size()
    exact.check(
        [exact.normal(), exact.normal(num_worst_tokens=worst, zero_copy=True)], [exact.few()]
    )


def in_fabric(rank: Rank) -> None:
    """Ranks ask for fabric handles. Where the driver has none, the log says so, and calls go on."""
    from uccl.ep import ElasticBuffer

    words: list[logging.LogRecord] = []
    handler, log = logging.Handler(), logging.getLogger("uccl")
    handler.emit = words.append  # type: ignore[method-assign, assignment]
    log.addHandler(handler)
    try:
        buffer = buffer_of(rank, use_fabric=True)
        elastic = ElasticBuffer(None, 1 << 20, comm=rank, device="cuda", use_fabric=True)
        rank.allgather(b"")
    finally:
        log.removeHandler(handler)
    refusals = [each._backend.native.fabric_refusal for each in (buffer, elastic)]
    assert not any(each._backend.native.is_via_host for each in (buffer, elastic))
    # The handlers of all ranks are in one process.
    said = [word for word in words if "use_fabric" in word.getMessage()]
    assert bool(said) == (refusals[0] is not None) == (refusals[1] is not None), refusals
    quiet = buffer_of(rank, allow_mnnvl=True)
    assert (quiet._backend.native.fabric_refusal is None) == (refusals[0] is None)
    exact = Exact(rank, buffer)
    exact.check([exact.normal()], [exact.few()])


def nodes_of(rank: Rank) -> list[tuple[int, int]]:
    """The nodes, and the ranks of a node, as elastic buffers report them."""
    from uccl.ep import ElasticBuffer

    buffer = ElasticBuffer(None, 1 << 20, comm=rank, device="cuda")
    flat = ElasticBuffer(None, 1 << 20, comm=rank, device="cuda", allow_hybrid_mode=False)
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == buffer.get_physical_domain_size()
    return [
        buffer.get_physical_domain_size(),
        buffer.get_logical_domain_size(),
        flat.get_logical_domain_size(),
    ]


def tells_its_nodes(run: Callable[..., list[Any]]) -> None:
    """Elastic buffers report the nodes of their ranks, which may be one."""
    from uccl.ep._cuda import group

    node = threading.local()

    def spread(rank: Rank, nodes: int) -> list[tuple[int, int]]:
        node.number = rank.rank() * nodes // rank.size()
        return nodes_of(rank)

    with mock.patch.object(group, "node_of_environment", lambda: node.number):
        assert run(4, spread, 2) == [[(2, 2), (2, 2), (1, 4)]] * 4
        # Nodes with different numbers of ranks count as one node.
        assert run(3, spread, 2) == [[(1, 3), (1, 3), (1, 3)]] * 3
        assert run(2, spread, 1) == [[(1, 2), (1, 2), (1, 2)]] * 2


def scaleup_counts(rank: Rank) -> None:
    """Each rank sends a token to each rank, and one more to rank 0. In hybrid mode, ranks of the
    same number on all nodes count together."""
    from uccl.ep import ElasticBuffer

    ranks = rank.size()
    for is_hybrid in (True, False):
        buffer = ElasticBuffer(
            None,
            1 << 20,
            num_max_tokens_per_rank=8,
            comm=rank,
            device="cuda",
            allow_hybrid_mode=is_hybrid,
        )
        x = torch.ones((ranks + 1, HIDDEN), dtype=torch.bfloat16, device=buffer.device)
        choices = torch.arange(ranks + 1, device=buffer.device).remainder(ranks).unsqueeze(1)
        for do_cpu_sync in (True, False):
            handle = buffer.dispatch(x, choices, num_experts=ranks, do_cpu_sync=do_cpu_sync)[3]
            torch.cuda.current_stream().synchronize()
            ends = handle.psum_num_recv_tokens_per_scaleup_rank
            each = ranks // buffer.num_scaleup_ranks * (2 if rank.rank() == 0 else 1)
            wanted = [each * (other + 1) for other in range(buffer.num_scaleup_ranks)]
            assert ends.dtype == torch.int32 and ends.tolist() == wanted
        buffer.check()
    rank.allgather(b"")


def counts_by_scaleup_rank(run: Callable[..., list[Any]]) -> None:
    """The counts of ranks on one node and on two."""
    from uccl.ep._cuda import group

    node = threading.local()

    def spread(rank: Rank, nodes: int) -> None:
        node.number = rank.rank() * nodes // rank.size()
        scaleup_counts(rank)

    with mock.patch.object(group, "node_of_environment", lambda: node.number):
        run(4, spread, 2)
        run(2, spread, 1)


def in_rounds(rank: Rank, worst: bool, via_host: bool) -> None:
    """Ranks have more tokens than the buffer has room for, and some have few or none: calls take
    several rounds."""
    from uccl.ep import Buffer

    exact = Exact(rank, buffer_of(rank))
    way = {"allow_nvlink_for_low_latency_mode": not via_host}
    small = Buffer(None, rank.size() * 5000, comm=rank, device="cuda", timeout=LIMIT, **way)
    rows = TOKENS * rank.size() if worst else 0
    for tokens in ([TOKENS, 8, 0], [3, TOKENS, 20], [2, 2, 2]):
        few = tokens[rank.rank() % len(tokens)]
        x, choices, weights = (tensor[:few].contiguous() for tensor in exact.given)
        _, _, per_expert, token_in_rank, _ = small.get_dispatch_layout(choices, EXPERTS)
        for _ in range(2):
            received, *_, handle, _ = small.dispatch(
                x,
                is_token_in_rank=token_in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=choices,
                topk_weights=weights,
                num_worst_tokens=rows,
            )
            again, *_ = small.dispatch(x, handle=handle)
            outs = [small.combine(each, handle)[0] for each in (received, again)]
            torch.cuda.current_stream().synchronize()
            small.check()
            for out in outs:
                wanted = exact.x[:few].float() * exact.copies[:few]
                assert torch.equal(out.cpu().float(), wanted)
    exact.check([exact.normal()], [])


def any_number(group: Any, tokens: list[int], size: int, hidden: int, **keywords: Any) -> None:
    """Calls with any numbers of tokens, in a buffer of ``size`` bytes. Each value says its rank and
    token, and sums are exact."""
    from uccl.ep import Buffer

    rank, ranks, experts = group.rank(), group.size(), 2 * group.size()
    buffer = Buffer(None if "comm" in keywords else group, size, **keywords)
    device, stream = buffer.device, torch.cuda.current_stream()

    def numbers(count: int) -> torch.Tensor:
        return torch.arange(count, device=device)

    def values(source: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        first = (number * 31 + source * 7).unsqueeze(1)
        return ((first + numbers(hidden) % 3) % 251).bfloat16()

    def chosen(source: int) -> torch.Tensor:
        number = numbers(tokens[source])
        return torch.stack([(number + source) % experts, (number * 5 + 1) % experts], dim=1)

    mine, choices = numbers(tokens[rank]), chosen(rank)
    x, owners = values(torch.full_like(mine, rank), mine), choices // 2
    copies = 1 + (owners[:, :1] != owners[:, 1:]).int()
    arrive = [int((chosen(source) // 2 == rank).any(1).sum()) for source in range(ranks)]
    ends = torch.tensor(arrive).cumsum(0)
    weights = torch.ones(choices.shape, device=device)
    for worst in (0, max(tokens) * ranks):
        _, _, per_expert, token_in_rank, _ = buffer.get_dispatch_layout(choices, experts)
        ways: list[dict[str, Any]] = [
            {"topk_idx": choices, "topk_weights": weights, "num_worst_tokens": worst}
        ]
        # Tokens without choices have ranks alone.
        ways += [] if worst else [{}]
        for way in ways:
            received, *_, handle, _ = buffer.dispatch(
                x, is_token_in_rank=token_in_rank, num_tokens_per_expert=per_expert, **way
            )
            again, *_ = buffer.dispatch(x, handle=handle)
            out, *_ = buffer.combine(received, handle)
            stream.synchronize()
            buffer.check()
            assert torch.equal(handle[0][:, rank].cpu().long(), ends)
            rows = numbers(int(ends[-1]))
            source = torch.searchsorted(ends.to(device), rows, right=True)
            wanted = values(source, handle[3][: len(rows)].long())
            assert torch.equal(received[: len(rows)], wanted)
            assert torch.equal(again[: len(rows)], wanted)
            assert torch.equal(out, (x.float() * copies).bfloat16())
    stream.synchronize()
    buffer.check()


def any_number_in_threads(rank: Rank, tokens: list[int], size: int, hidden: int) -> None:
    """The same of ranks that share a GPU."""
    any_number(rank, tokens, size, hidden, comm=rank, device="cuda", timeout=LIMIT)
    rank.allgather(b"")


def too_many(rank: Rank, is_elastic: bool, worst: bool, via_host: bool) -> None:
    """Rank 0 has more tokens than the call says: its error names the argument, and the other ranks
    fail at once."""
    from uccl.ep import Buffer, ElasticBuffer

    exact = Exact(rank, buffer_of(rank))
    x, choices, _ = exact.given
    few = slice(None) if rank.rank() == 0 else slice(8)
    mine = choices[few].contiguous()
    buffer: Any
    if is_elastic:
        buffer = ElasticBuffer(
            None,
            1 << 22,
            num_max_tokens_per_rank=8,
            comm=rank,
            device="cuda",
            num_gpu_timeout_secs=LIMIT,
        )
    else:
        way = {"allow_nvlink_for_low_latency_mode": not via_host}
        size = 1 << 14 if worst else 1
        buffer = Buffer(None, size, comm=rank, device="cuda", timeout=LIMIT, **way)
        # Without rows for the worst case there is not even room for a token, which is wide.
        x = x if worst else x.repeat(1, 16)

    def call() -> None:
        if is_elastic:
            buffer.dispatch(x[few], mine, num_experts=EXPERTS, do_cpu_sync=not worst)
            return
        _, _, per_expert, _, _ = buffer.get_dispatch_layout(mine, EXPERTS)
        rows = 8 * rank.size() if worst else 0
        buffer.dispatch(
            x[few], topk_idx=mine, num_tokens_per_expert=per_expert, num_worst_tokens=rows
        )

    if is_elastic:
        why = f"this rank has {TOKENS} tokens, and .*num_max_tokens_per_rank"
    elif worst:
        why = f"this rank has {TOKENS} tokens, and .*num_worst_tokens"
    else:
        why = "the call needs .* bytes of the buffer, which has"
    # A rank with tokens finds no room by itself.
    if rank.rank() == 0 or not (is_elastic or worst):
        with pytest.raises(ValueError, match=why):
            call()
    else:
        why = "rank 0 has more tokens than .*num_worst_tokens.*num_max_tokens_per_rank"
        with pytest.raises(RuntimeError, match=why):
            call()
            torch.cuda.current_stream().synchronize()
            buffer.check()
    torch.cuda.current_stream().synchronize()
    exact.check([exact.normal()], [])


def room_of_the_hint(rank: Rank) -> None:
    """A buffer of the hinted size has room for 4096 tokens of each rank, as DeepEP's programs send
    them."""
    from uccl.ep import Buffer, Config

    size, experts = Config().get_nvl_buffer_size_hint(2 * HIDDEN, rank.size()), 128 * rank.size()
    buffer = Buffer(None, size, comm=rank, device="cuda")
    x = torch.ones((8, HIDDEN), dtype=torch.bfloat16, device=buffer.device)
    choices = torch.arange(64, device=buffer.device).view(8, 8)
    # The rows of a view take more room than others.
    _, _, _, _, handle, _ = buffer.dispatch(
        x,
        topk_idx=choices,
        num_tokens_per_expert=torch.empty(experts, dtype=torch.int32, device=buffer.device),
        num_worst_tokens=8 * rank.size(),
        zero_copy=True,
    )
    torch.cuda.current_stream().synchronize()
    state: Any = handle.state
    assert state.native.max_tokens >= 4096
    rank.allgather(b"")


def two_combines(rank: Rank) -> None:
    """Several combines of one dispatch are in flight."""
    exact = Exact(rank, buffer_of(rank))
    x, choices, weights = exact.given
    rows, _, handle, _, _ = exact.buffer.low_latency_dispatch(
        x, choices, TOKENS, EXPERTS, use_fp8=False
    )
    torch.cuda.current_stream().synchronize()
    factors = [1, 2, 4]
    made = [rows * factor for factor in factors]
    back = [
        exact.buffer.low_latency_combine(each, choices, weights, handle, return_recv_hook=True)
        for each in made
    ]
    for _, _, hook in back:
        hook()
    torch.cuda.current_stream().synchronize()
    exact.check([], [out / factor for (out, _, _), factor in zip(back, factors)])


def two_streams(rank: Rank, prepare: Callable[[], None]) -> None:
    """A combine on another stream waits for the event of its dispatch, and the next calls wait for
    the combine. ``prepare`` is called first, with each of the other streams current."""
    exact = Exact(rank, buffer_of(rank))
    ours, other = torch.cuda.current_stream(), torch.cuda.Stream()
    for stream in (other, exact.buffer.get_comm_stream()):
        with torch.cuda.stream(stream):
            prepare()
    rank.allgather(b"")
    outs = []
    for _ in range(3):
        rows, *_, handle, event = exact.dispatch(async_finish=True)
        with torch.cuda.stream(other):
            out, _, combined = exact.buffer.combine(
                rows, handle, previous_event=event, async_finish=True
            )
        again, *_, after = exact.buffer.dispatch(
            exact.given[0], handle=handle, previous_event=combined, async_finish=True
        )
        with after:
            pass
        outs += [out, exact.buffer.combine(again, handle)[0]]
    ours.wait_stream(other)
    exact.check(outs, [])


def asynchronous(rank: Rank, prepare: Callable[[], None]) -> None:
    """Asynchronous and synchronous calls of both modes by turns, with each kind of event and of
    memory. ``prepare`` is called first, with the communication stream current."""
    exact, worst = Exact(rank, buffer_of(rank)), TOKENS * rank.size()
    x, choices, weights = exact.given
    normal, few = [], []
    with torch.cuda.stream(exact.buffer.get_comm_stream()):
        prepare()
    rank.allgather(b"")
    for number in range(8):
        previous, on_comm = bool(number & 1), bool(number & 2)

        def way() -> dict[str, Any]:
            event = exact.buffer.capture() if previous else None
            return {
                "async_finish": True,
                "previous_event": event,
                "allocate_on_comm_stream": on_comm,
            }

        rows, *_, handle, event = exact.dispatch(
            **way(), num_worst_tokens=worst if number & 4 else 0
        )
        # In the meantime, and perhaps on the other stream.
        few.append(exact.few())
        event.current_stream_wait()
        out, _, combined = exact.buffer.combine(rows, handle, **way())
        of_few, _, few_handle, dispatched, _ = exact.buffer.low_latency_dispatch(
            x, choices, TOKENS, EXPERTS, use_fp8=False, async_finish=True
        )
        # All of these are on the communication stream, so the combine needs no wait.
        again, few_combined, _ = exact.buffer.low_latency_combine(
            of_few, choices, weights, few_handle, async_finish=True
        )
        for ended in (dispatched, combined, few_combined):
            ended.current_stream_wait()
        normal += [out, exact.buffer.combine(rows, handle)[0]]
        few.append(again)
    exact.check(normal, few)


def asynchronous_elastic(rank: Rank, prepare: Callable[[], None]) -> None:
    """Asynchronous and synchronous calls of the second interface by turns. Statistics are counted
    behind the dispatch, and the copy of the choices precedes it."""
    from uccl.ep import ElasticBuffer

    elastic = ElasticBuffer(None, 1 << 22, num_max_tokens_per_rank=TOKENS, comm=rank, device="cuda")
    exact = Exact(rank, elastic)
    x, choices, weights = exact.given
    comm, outs, counted = elastic.get_comm_stream(), [], []
    with torch.cuda.stream(comm):
        prepare()
    rank.allgather(b"")
    for number in range(8):
        stats = torch.zeros(EXPERTS // rank.size(), dtype=torch.int32, device=elastic.device)
        torch.cuda.current_stream().synchronize()

        def way() -> dict[str, Any]:
            return {
                "async_with_compute_stream": True,
                "allocate_on_comm_stream": bool(number & 2),
                "previous_event": elastic.capture() if number & 1 else None,
                "previous_event_before_epilogue": elastic.capture() if number & 4 else None,
            }

        rows, _, _, handle, dispatched = elastic.dispatch(
            x,
            choices,
            weights,
            num_experts=EXPERTS,
            do_cpu_sync=bool(number & 4),
            cumulative_local_expert_recv_stats=stats,
            **way(),
        )
        out, _, combined = elastic.combine(rows, handle, **way())
        combined.current_stream_wait()
        again, _, _, _, repeated = elastic.dispatch(x, handle=handle, **way())
        with repeated(release_handle=True):
            pass
        outs += [out, elastic.combine(again, handle)[0]]
        counted.append((stats, handle.num_unaligned_recv_tokens_per_expert, dispatched))
    exact.check(outs, [])
    for stats, counts, _ in counted:
        assert torch.equal(stats.cpu(), counts.cpu())


def by_ranks(rank: Rank) -> None:
    """A dispatch of tokens with ranks and without choices."""
    exact = Exact(rank, buffer_of(rank))
    x, choices, _ = exact.given
    _, _, per_expert, token_in_rank, _ = exact.buffer.get_dispatch_layout(choices, EXPERTS)
    rows, idx, weights, counts, handle, _ = exact.buffer.dispatch(
        x, is_token_in_rank=token_in_rank, num_tokens_per_expert=per_expert
    )
    assert idx is None and weights is None and len(counts) == EXPERTS // rank.size()
    out, _, _ = exact.buffer.combine(rows, handle)
    exact.check([out], [])


def of_another_buffer(rank: Rank) -> None:
    """Normal mode accepts the handles of a previous buffer, also after that buffer's end."""
    from uccl.ep import Buffer

    before, after = Exact(rank, buffer_of(rank)), Exact(rank, buffer_of(rank))
    rows, *_, handle, _ = before.dispatch()
    kept, *_, worst, _ = before.dispatch(num_worst_tokens=TOKENS * rank.size())
    outs = [after.buffer.combine(rows, handle)[0]]
    again = after.buffer.dispatch(after.given[0], handle=worst)[0]
    torch.cuda.current_stream().synchronize()
    before.buffer.destroy()
    outs += [
        after.normal(),
        after.buffer.combine(again, worst)[0],
        after.buffer.combine(kept, worst)[0],
    ]
    after.check(outs, [])
    on_cpu = Buffer(None, 1 << 20, comm=rank, device="cpu")
    with pytest.raises(
        RuntimeError, match="the handle is of a buffer on a GPU, and this one is on the CPU"
    ):
        on_cpu.combine(rows, handle)
    # Each rank is alone here, as this buffer is only to give a handle.
    store = torch.distributed.HashStore()
    alone = Buffer(None, 1 << 20, store=store, rank=0, num_ranks=1, device="cpu")
    x, choices = before.x.cpu(), before.choices
    _, _, per_expert, _, _ = alone.get_dispatch_layout(choices, EXPERTS)
    rows, *_, handle, _ = alone.dispatch(x, topk_idx=choices, num_tokens_per_expert=per_expert)
    for call in (
        lambda: after.buffer.combine(rows, handle),
        lambda: after.buffer.dispatch(x, handle=handle),
    ):
        with pytest.raises(RuntimeError, match="the handle is of a buffer on the CPU"):
            call()
    rank.allgather(b"")


def counted_layout(rank: Rank) -> None:
    """A dispatch reuses the layout that was made of its choices, unless the choices have
    changed."""
    exact = Exact(rank, buffer_of(rank))
    buffer, (x, choices, weights) = exact.buffer, exact.given
    first, second = exact.choices.clone(), exact.choices.flip(0)
    kept, others = choices.clone(), second.to(buffer.device)
    per_rank, _, per_expert, token_in_rank, _ = buffer.get_dispatch_layout(choices, EXPERTS)
    twice = torch.empty(2 * EXPERTS, dtype=torch.int32, device=buffer.device)

    def begin(token_in_rank: Any, per_expert: Any = per_expert) -> tuple[Any, Any]:
        rows, *_, handle, _ = buffer.dispatch(
            x,
            is_token_in_rank=token_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=choices,
            topk_weights=weights,
        )
        return rows, handle

    def end(*begun: tuple[Any, Any]) -> list[torch.Tensor]:
        outs = [buffer.combine(*one)[0] for one in begun]
        torch.cuda.current_stream().synchronize()
        return outs

    def copies(choices: torch.Tensor, experts: int = EXPERTS) -> torch.Tensor:
        return torch.tensor(
            [[len(set(row))] for row in (choices // (experts // rank.size())).tolist()]
        )

    torch.cuda.current_stream().synchronize()
    # torch does not notice writes to ``data``, and a layout of these choices would fail. The caller
    # may overwrite its counts, too.
    choices.data.fill_(EXPERTS)
    for tensor in (per_rank, per_expert, token_in_rank):
        tensor.zero_()
    seen = [(out, copies(first)) for out in end(begin(token_in_rank), begin(token_in_rank))]
    choices.data.copy_(kept)
    # No layout is known for another number of experts or for other choices: the dispatch makes one.
    seen += [(out, copies(first, 2 * EXPERTS)) for out in end(begin(token_in_rank, twice))]
    choices.copy_(others)
    seen += [(out, copies(second)) for out in end(begin(token_in_rank), begin(None))]
    for out, wanted in seen:
        assert torch.equal(out.cpu().float(), exact.x.float() * wanted)
    assert buffer._backend.layouts
    del token_in_rank, tensor
    assert not buffer._backend.layouts
    with torch.inference_mode():
        choices = kept.clone()
        *_, token_in_rank, _ = buffer.get_dispatch_layout(choices, EXPERTS)
        exact.check(end(begin(token_in_rank)), [])


def zero_copy_rows(rank: Rank) -> None:
    """Rows that stay in the buffer equal the copied ones, in both interfaces and with the handle;
    so do their sums."""
    from uccl.ep import ElasticBuffer

    exact = Exact(rank, buffer_of(rank))
    elastic = ElasticBuffer(None, 1 << 22, num_max_tokens_per_rank=TOKENS, comm=rank, device="cuda")
    x, choices, weights = exact.given
    narrow = (x.view(torch.uint8).view(torch.float8_e4m3fn), x.view(torch.int32)[:, :4].clone())

    def of_buffer(sent: Any, zero_copy: bool) -> tuple[Any, ...]:
        exact.given = sent, choices, weights
        x, idx, weights_of, _, handle, _ = exact.dispatch(
            num_worst_tokens=TOKENS * rank.size(), zero_copy=zero_copy
        )
        return x, idx, weights_of, handle

    def of_elastic(sent: Any, zero_copy: bool) -> tuple[Any, ...]:
        return elastic.dispatch(
            sent,
            choices,
            weights,
            num_experts=EXPERTS,
            do_cpu_sync=False,
            zero_copy=zero_copy,
        )[:4]

    def arrived(rows: Any, used: torch.Tensor) -> list[torch.Tensor]:
        torch.cuda.current_stream().synchronize()
        parts = rows if isinstance(rows, tuple) else (rows,)
        return [part[used].contiguous().view(torch.uint8) for part in parts]

    def same_rows(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
        assert all(map(torch.equal, one, other))

    for buffer, dispatch in [(exact.buffer, of_buffer), (elastic, of_elastic)]:
        for sent in (x, narrow):
            rows, idx, had, _ = dispatch(sent, False)
            torch.cuda.current_stream().synchronize()
            used = (idx >= 0).any(1)
            wanted = arrived(rows, used) + arrived((idx, had), used)
            rows, idx, had, handle = dispatch(sent, True)
            torch.cuda.current_stream().synchronize()
            view, used = rows if sent is x else rows[0], (idx >= 0).any(1)
            assert not view.is_contiguous() and view.shape[0] > TOKENS * rank.size() - TOKENS
            same_rows(arrived(rows, used) + arrived((idx, had), used), wanted)
            # A dispatch with the handle sends tokens to the same rows, which stay in the buffer or
            # are copied.
            for zero_copy in (True, False):
                # An emulated GPU's memory is free as soon as its last reference is gone.
                again = buffer.dispatch(x, handle=handle, zero_copy=zero_copy)
                torch.cuda.current_stream().synchronize()
                assert again[0].is_contiguous() != zero_copy
                copied = again[0].contiguous()
                out, _, _ = buffer.combine(copied, handle)
                torch.cuda.current_stream().synchronize()
                assert torch.equal(out.cpu().float(), exact.x.float() * exact.copies)
        buffer.check()
    # Without choices a caller could not tell the rows without a token, so all rows are copied.
    _, _, per_expert, token_in_rank, _ = exact.buffer.get_dispatch_layout(choices, EXPERTS)
    by_rank = {"is_token_in_rank": token_in_rank, "num_tokens_per_expert": per_expert}
    rows, *_ = exact.buffer.dispatch(
        x, num_worst_tokens=TOKENS * rank.size(), zero_copy=True, **by_rank
    )
    torch.cuda.current_stream().synchronize()
    assert rows.is_contiguous() and rows.shape[0] == TOKENS * rank.size()
    rank.allgather(b"")


class Passed(torch.autograd.Function):
    """An autograd function that dispatches, and saves tensors of the handle."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, exact: Exact) -> tuple[torch.Tensor, torch.Tensor]:
        _, choices, weights = exact.given
        exact.given = x.detach(), choices, weights
        rows, _, weights, _, handle, _ = exact.dispatch()
        context.save_for_backward(*(part for part in handle if part is not None))
        return rows, weights

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        assert context.saved_tensors
        return None, None


def returned_to_autograd(rank: Rank) -> None:
    """Callers may write in place to the results of a dispatch and save them for gradients, though
    an earlier call allocated their memory in inference mode."""
    exact = Exact(rank, buffer_of(rank))
    with torch.inference_mode():
        for _ in range(2):
            kept = exact.dispatch()
            torch.cuda.current_stream().synchronize()
    assert kept[0].is_inference()
    x = exact.given[0].clone().requires_grad_()
    rows, weights = Passed.apply(x, exact)
    torch.cuda.current_stream().synchronize()
    rows.mul_(2)
    weights.mul_(2)
    (rows.float().sum() + weights.sum()).backward()
    exact.buffer.check()
    rank.allgather(b"")


def memory_ahead(rank: Rank) -> None:
    """A call that waits for counts allocates memory ahead for the next call of its kind on the same
    stream. No other call takes it: torch reuses memory in the order of the stream that it was
    allocated on, and a graph has memory of its own."""
    exact, other = Exact(rank, buffer_of(rank)), torch.cuda.Stream()
    x, choices, weights = exact.given
    narrow = x.view(torch.uint8).view(torch.float8_e4m3fn), x.view(torch.int32)[:, :4].clone()

    def dispatch(sent: Any = x, **keywords: Any) -> Any:
        exact.given = sent, choices, weights
        *_, handle, _ = exact.dispatch(**keywords)
        torch.cuda.current_stream().synchronize()
        return handle.state

    def ready(sent: Any = x) -> Any:
        plans = exact.buffer._backend.plans.plans.values()
        return next(plan for plan in plans if plan.shape.scales == (0 if sent is x else 4))

    for sent in (x, narrow):
        dispatch(sent)
        left = ready(sent).next_workspace[0]
        assert dispatch(sent).workspace is left and ready(sent).next_workspace[0] is not left
    left, estimate = ready().next_workspace[0], ready().native.estimate
    # The rows have the layout of the estimate, but this call does not wait for counts.
    handle = dispatch(num_worst_tokens=estimate.tokens)
    assert handle.workspace is not left and ready().next_workspace[0] is left
    dispatch(narrow)
    assert ready().next_workspace[0] is left
    # A call without a layout needs more scratch.
    _, _, per_expert, _, _ = exact.buffer.get_dispatch_layout(choices, EXPERTS)
    *_, handle, _ = exact.buffer.dispatch(
        x, topk_idx=choices, topk_weights=weights, num_tokens_per_expert=per_expert
    )
    torch.cuda.current_stream().synchronize()
    assert handle.state.workspace is not left
    left = ready().next_workspace[0]
    # The other stream's work follows that of this stream.
    with torch.cuda.stream(other):
        assert dispatch().workspace is not left
    exact.buffer.check()
    rank.allgather(b"")


def not_in_graph(rank: Rank) -> None:
    """A graph repeats the layout of its choices, even if it was made before the capture: each
    replay may have other choices."""
    exact = Exact(rank, buffer_of(rank))
    x, choices, _ = exact.given
    flipped = choices.flip(0)
    _, _, per_expert, token_in_rank, _ = exact.buffer.get_dispatch_layout(choices, EXPERTS)
    torch.cuda.current_stream().synchronize()
    choices.data.copy_(flipped)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        _, arrived, *_ = exact.buffer.dispatch(
            x,
            is_token_in_rank=token_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=choices,
            num_worst_tokens=TOKENS,
        )
    torch.cuda.current_stream().synchronize()
    assert torch.equal(arrived, flipped)


def few_blocks(rank: Rank) -> None:
    """Calls use no more of a GPU's multiprocessors than their setting allows."""
    from uccl import _core
    from uccl.ep import Buffer, Config, ElasticBuffer

    exact, config = Exact(rank, buffer_of(rank)), Config(num_sms=2)
    elastic = ElasticBuffer(None, 1 << 22, num_max_tokens_per_rank=TOKENS, comm=rank, device="cuda")
    rows, *_, handle, _ = exact.dispatch(config=config)
    outs = [exact.buffer.combine(rows, handle, config=config)[0]]
    x, choices, _ = exact.given
    rows, _, _, kept, _ = elastic.dispatch(x, choices, num_experts=EXPERTS, num_sms=1)
    outs.append(elastic.combine(rows, kept)[0])
    # The size of a launch is not visible, so mocks check that the setting is passed on.
    if rank.size() == 1:
        plans_of(exact.buffer).clear()
        plans_of(elastic).clear()
        begun = mock.Mock(side_effect=ValueError)
        with mock.patch.object(_core.EpCudaDispatchPlan, "dispatch", begun):
            for call in (
                lambda: exact.dispatch(config=config),
                exact.dispatch,
                lambda: elastic.dispatch(x, choices, num_experts=EXPERTS, num_sms=6),
                lambda: elastic.dispatch(x, handle=kept),
            ):
                pytest.raises(ValueError, call)
        blocks = [call.args[1].max_blocks for call in begun.call_args_list]
        assert blocks == [2, Buffer.num_sms, 6, 0]
        with mock.patch.object(_core, "EpCudaNormalCombine", side_effect=ValueError) as begun:
            pytest.raises(ValueError, exact.buffer.combine, rows, handle, config=config)
            pytest.raises(ValueError, elastic.combine, rows, kept)
            pytest.raises(ValueError, elastic.combine, rows, kept, num_sms=5)
        assert [call.kwargs["blocks"] for call in begun.call_args_list] == [2, 1, 5]
    exact.check(outs, [])


def masked(rank: Rank) -> None:
    """Normal mode works without the last rank, which is masked and makes no calls."""
    exact, lost = Exact(rank, buffer_of(rank, enable_shrink=True)), rank.size() - 1
    if rank.rank() == lost:
        rank.allgather(b"")
        return
    exact.buffer.update_mask_buffer(lost, True)
    exact.copies = torch.tensor([[len(ranks - {lost})] for ranks in exact.owners])
    left_out = torch.zeros(rank.size(), dtype=torch.int32, device=exact.buffer.device)
    outs = [exact.normal(num_worst_tokens=worst) for worst in (0, TOKENS * rank.size())]
    # A rank that the driver ran too late is masked as well; the sums alone would only differ.
    exact.buffer.query_mask_buffer(left_out)
    torch.cuda.current_stream().synchronize()
    assert left_out.tolist() == [0] * lost + [1], left_out
    exact.check(outs, [])


def let_in(rank: Rank, is_few: bool, counts: Iterable[int]) -> None:
    """Ranks that mask each other for some calls take part again, in either mode."""
    out = rank.size() - 1
    if is_few:
        FewTokens(rank, 7, comm=rank, device="cuda", timeout=60).lets_in(out, counts)
        rank.allgather(b"")
        return
    exact = Exact(rank, buffer_of(rank))
    every, outs = list(exact.owners), []
    others = {out} if rank.rank() != out else set(range(out))
    for count in counts:
        for other in others:
            exact.buffer.update_mask_buffer(other, True)
        exact.copies = torch.tensor([[len(ranks - others)] for ranks in every])
        # An odd count adds a dispatch without a combine.
        if count % 2:
            exact.dispatch(num_worst_tokens=TOKENS * rank.size())
        exact.check(
            [exact.normal(num_worst_tokens=TOKENS * rank.size()) for _ in range(count // 2)], []
        )
        exact.buffer.clean_mask_buffer()
        exact.copies = torch.tensor([[len(ranks)] for ranks in every])
        outs = [exact.normal(num_worst_tokens=TOKENS * rank.size()) for _ in range(5)]
        exact.check(outs, [])
    rank.allgather(b"")


def late(rank: Rank, worst: int) -> str:
    """Rank 1 makes no call. Returns the error of rank 0, which the call with counts raises, or else
    the next call."""
    exact = Exact(rank, buffer_of(rank, timeout=1))
    said = ""
    if rank.rank() == 0:
        with pytest.raises(TimeoutError) as raised:
            exact.dispatch(num_worst_tokens=worst)
            torch.cuda.current_stream().synchronize()
            exact.dispatch(num_worst_tokens=worst)
        said = str(raised.value)
        torch.cuda.current_stream().synchronize()
    rank.allgather(b"")
    return said


def names_the_late(run: Callable[..., list[Any]]) -> None:
    """The error names the late rank: at once where the host waits, or else in the next call."""
    for worst in (0, 2 * TOKENS):
        started = time.monotonic()
        said = run(2, lambda rank: late(rank, worst))[0]
        assert "dispatch on rank 0" in said and "rank 1: data of call 1 round 0 expected" in said, (
            said
        )
        assert time.monotonic() - started < 20


def refusals(rank: Rank) -> list[str]:
    """The errors of wrong calls, none of which starts."""
    from uccl.ep import Buffer, ElasticBuffer

    exact = Exact(rank, buffer_of(rank))
    buffer, (x, choices, _) = exact.buffer, exact.given
    _, _, per_expert, token_in_rank, _ = buffer.get_dispatch_layout(choices, EXPERTS)
    small = Buffer(None, 1 << 14, comm=rank, device="cuda")
    elastic = ElasticBuffer(None, 1 << 20, num_max_tokens_per_rank=TOKENS, comm=rank, device="cuda")
    # A call of the same kind has succeeded before.
    small.dispatch(x[:8], topk_idx=choices[:8], num_tokens_per_expert=per_expert)

    def with_rows(tokens: int, rows: int) -> Any:
        return small.dispatch(
            x[:tokens],
            topk_idx=choices[:tokens],
            num_tokens_per_expert=per_expert,
            num_worst_tokens=rows,
        )

    calls = [
        lambda: with_rows(TOKENS, 30),
        # 15 has as many bits as 8, so this call is of the same kind; a round has 14.
        lambda: with_rows(15, 4),
        lambda: buffer.dispatch(x, topk_idx=choices),
        lambda: buffer.dispatch(x),
        lambda: buffer.dispatch(x[:3], topk_idx=choices, num_tokens_per_expert=per_expert),
        lambda: buffer.dispatch(x, topk_idx=choices[:, :0], num_tokens_per_expert=per_expert),
        lambda: buffer.dispatch(
            x, is_token_in_rank=token_in_rank.int(), num_tokens_per_expert=per_expert
        ),
        lambda: elastic.dispatch(
            x, choices, num_experts=EXPERTS, expert_alignment=1 << 20, do_expand=True
        ),
        lambda: elastic.dispatch(x, choices, num_experts=EXPERTS, num_max_tokens_per_rank=4),
        lambda: buffer.get_local_buffer_tensor(torch.int8, torch.Size([1]), offset=1 << 40),
        lambda: exact.dispatch(num_worst_tokens=-1),
        lambda: buffer.low_latency_dispatch(x, choices, -1, EXPERTS),
        lambda: exact.dispatch(zero_copy=True),
        lambda: elastic.dispatch(x, choices, num_experts=EXPERTS, zero_copy=True),
    ]
    texts = answers(calls)
    few = buffer.low_latency_dispatch(x, choices, TOKENS, EXPERTS, use_fp8=False)[2]
    torch.cuda.current_stream().synchronize()
    rank.allgather(b"")
    buffer.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        buffer.dispatch(x, topk_idx=choices, num_tokens_per_expert=per_expert)
    with pytest.raises(RuntimeError, match="destroyed"):
        buffer.low_latency_combine(x, choices, exact.given[2], few)
    return texts


#: Words of each error.
REFUSED = [
    f"this rank has {TOKENS} tokens, and rows for 30 of all ranks: num_worst_tokens is",
    "this rank has 15 tokens, and rows for 4 of all ranks",
    "num_tokens_per_expert",
    "is_token_in_rank",
    "x has 3 tokens",
    "top-k",
    "torch.bool",
    "expert_alignment is 1 to 65536, not 1048576",
    f"{TOKENS} tokens, and room for 4 of each rank: num_max_tokens_per_rank is",
    "1 elements at byte 1099511627776 of a pool",
    "num_worst_tokens is at least 0, not -1",
    "num_max_dispatch_tokens_per_rank is at least 0, not -1",
    "zero_copy needs num_worst_tokens",
    "zero_copy has no do_cpu_sync",
]


def is_refused_with_words(run: Callable[..., list[Any]]) -> None:
    """Each error has the words for its argument."""
    for texts in run(2, refusals):
        for text, words in zip(texts, REFUSED):
            assert words in text, texts


@dataclass(frozen=True)
class Given:
    """A rank's inputs of one call."""

    x: torch.Tensor
    choices: torch.Tensor
    weights: torch.Tensor
    bias: torch.Tensor
    token_in_rank: torch.Tensor
    """``[tokens, ranks]``: whether a token is sent to a rank."""


class Varying:
    """Calls of one buffer with other numbers of tokens each time. The sums are exact: each rank
    returns rows unchanged. Every rank draws the inputs of all ranks."""

    def __init__(self, rank: Rank, hidden: int, most: int) -> None:
        """``most`` is the highest number of tokens of a rank."""
        from uccl.ep import Buffer

        self.rank, self.hidden, self.most, self.calls = rank, hidden, most, 0
        # The room holds rows with their choices and weights, and counts.
        room = rank.size() * (most * (2 * hidden + 128) + 1024)
        self.buffer = Buffer(None, room, comm=rank, device="cuda", timeout=40)

    def given(self, source: int, tokens: int) -> Given:
        """The inputs of the rank ``source`` in this call."""
        generator = torch.Generator().manual_seed(self.calls * self.rank.size() + source)

        def rows() -> torch.Tensor:
            return torch.randint(-4, 5, (tokens, self.hidden), generator=generator).bfloat16()

        choices = torch.rand((tokens, EXPERTS), generator=generator).topk(TOP_K).indices
        owners = choices // (EXPERTS // self.rank.size())
        token_in_rank = (owners[:, :, None] == torch.arange(self.rank.size())).any(1)
        return Given(
            rows(), choices, torch.rand((tokens, TOP_K), generator=generator), rows(), token_in_rank
        )

    def call(
        self, tokens: list[int], num_sms: int, is_worst: bool = False, is_again: bool = False
    ) -> Any:
        """Dispatches, repeats the dispatch with the handle if ``is_again``, and combines, with
        launches of ``num_sms`` blocks. ``tokens`` has the number of each rank. Returns the layout
        of the received rows."""
        from uccl.ep import Config

        self.calls += 1
        all_given = [self.given(source, count) for source, count in enumerate(tokens)]
        mine, buffer, config = all_given[self.rank.rank()], self.buffer, Config(num_sms=num_sms)
        # A copy must not queue behind a kernel that waits for another rank.
        torch.cuda.current_stream().synchronize()
        x, choices, weights, bias, other = (
            tensor.to(buffer.device)
            for tensor in (mine.x, mine.choices, mine.weights, mine.bias, -mine.x)
        )
        per_rank, _, per_expert, token_in_rank, _ = buffer.get_dispatch_layout(choices, EXPERTS)
        rows, idx, got_weights, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=token_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=choices,
            topk_weights=weights,
            num_worst_tokens=self.most * self.rank.size() if is_worst else 0,
            config=config,
        )
        again = buffer.dispatch(other, handle=handle, config=config)[0] if is_again else None
        out, out_weights, _ = buffer.combine(
            rows, handle, topk_weights=got_weights, bias=bias, config=config
        )
        plain = None if again is None else buffer.combine(again, handle, config=config)[0]
        torch.cuda.current_stream().synchronize()
        buffer.check()
        self.check_rows(all_given, rows, idx, got_weights)
        copies = mine.x.float() * mine.token_in_rank.sum(1, keepdim=True)
        assert torch.equal(out.cpu().float(), copies + mine.bias.float())
        assert torch.equal(out_weights.cpu(), mine.weights)
        if plain is not None:
            assert torch.equal(plain.cpu().float(), -copies)
        state: Any = handle.state
        return state.row_layout

    def check_rows(
        self, given: list[Given], rows: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Compares the received rows, which are in order of rank and token."""
        me, local = self.rank.rank(), EXPERTS // self.rank.size()
        wanted, choices, of_choices = (
            torch.cat([getattr(one, name)[one.token_in_rank[:, me]] for one in given])
            for name in ("x", "choices", "weights")
        )
        count, is_here = len(wanted), choices // local == me
        assert torch.equal(rows.cpu()[:count], wanted)
        assert torch.equal(idx.cpu()[:count], torch.where(is_here, choices - me * local, -1))
        assert (idx.cpu()[count:] == -1).all()
        assert torch.equal(weights.cpu()[:count], torch.where(is_here, of_choices, 0.0))

    def end(self) -> None:
        """Waits until no rank is in a call."""
        self.rank.allgather(b"")


def few_and_many(rank: Rank, tokens: list[int], num_sms: int, hidden: int) -> None:
    """Calls of each kind, with the given number of tokens of each rank."""
    varying = Varying(rank, hidden, max(*tokens, 1))
    for is_worst in (False, True):
        varying.call(tokens, num_sms, is_worst=is_worst, is_again=True)
    varying.end()


def changing(rank: Rank, seed: int, sizes: list[int], turns: int, hidden: int) -> None:
    """Calls on one buffer, of changing kinds and numbers of tokens."""
    varying, draw = Varying(rank, hidden, max(sizes)), random.Random(seed)
    for _ in range(turns):
        tokens = [
            draw.choice([0, 1, size, draw.randint(0, size)])
            for size in draw.choices(sizes, k=rank.size())
        ]
        varying.call(tokens, draw.choice([1, 2, 3, 24]), draw.random() < 0.5, draw.random() < 0.5)
    varying.end()


def estimates(rank: Rank) -> None:
    """Calls of a kind: the first, one with exactly the needed room, one with a guess one too
    small, and others far off; several kinds by turns, and no tokens after many. The received rows
    are the same with and without a guess."""
    varying, size = Varying(rank, HIDDEN, 600), rank.size()
    several = [[600] * size, [0] * size, [40] * size, [600] * size]
    for tokens in several * 2:
        varying.call(tokens, 3, is_again=True)
    for wrong_by in (0, 1, 300):
        # The same call again; its guess is the received number less ``wrong_by``.
        varying.calls = 100
        received = varying.call([600] * size, 3)
        for plan in plans_of(varying.buffer).values():
            set_estimate(plan, received, -wrong_by)
        varying.calls = 100
        varying.call([600] * size, 3, is_again=True)
        # A different call follows at once.
        varying.call([40] * size, 3)
    varying.end()


def plans_of(buffer: Any) -> dict[Any, Any]:
    """The plans of a buffer's dispatches in normal mode."""
    return buffer._backend.plans.plans


def set_estimate(plan: Any, received: Any, spare: int) -> None:
    """Sets the estimate of a plan, if it has one, to the received number and ``spare`` rows, with
    the gap of the alignment."""
    from uccl.ep._row_layout import RowLayout

    rows, unit = received.rows, received.alignment
    if rows is not None:
        rows = -(-max(rows + spare, 0) // unit) * unit
    if plan.native.estimate is not None:
        plan.native.estimate = RowLayout(max(received.tokens + spare, 0), unit, rows)


def same_by_expert(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Compares the results of two dispatches of the second interface, with shapes and strides."""
    (x, scales), _, weights, handle, _ = one
    (other_x, other_scales), _, other_weights, other_handle, _ = other
    ends, starts = handle.psum_num_recv_tokens_per_expert.tolist(), [0]
    starts += [-(-end // ALIGNMENT) * ALIGNMENT for end in ends]
    pairs = [
        (x.view(torch.uint8), other_x.view(torch.uint8)),
        (scales, other_scales),
        (weights, other_weights),
    ]
    for tensor, wanted in pairs:
        assert tensor.shape == wanted.shape and tensor.stride() == wanted.stride()
        for start, end in zip(starts, ends):
            assert torch.equal(tensor[start:end], wanted[start:end])
    for name in (
        "num_recv_tokens",
        "num_expanded_tokens",
        "num_recv_tokens_per_expert_list",
        "psum_num_recv_tokens_per_scaleup_rank",
        "psum_num_recv_tokens_per_expert",
        "num_unaligned_recv_tokens_per_expert",
        "recv_src_metadata",
    ):
        found, wanted = getattr(handle, name), getattr(other_handle, name)
        assert torch.equal(found, wanted) if isinstance(found, torch.Tensor) else found == wanted, (
            name
        )


#: The alignment of an expert's rows.
ALIGNMENT = 8


def estimates_by_expert(rank: Rank) -> None:
    """Guesses of rows by expert that come with scales, in both memory orders. Each handle serves
    another dispatch and a combine."""
    from uccl.ep import ElasticBuffer

    elastic = ElasticBuffer(None, 1 << 22, num_max_tokens_per_rank=TOKENS, comm=rank, device="cuda")
    exact, plans = Exact(rank, elastic), plans_of(elastic)
    x, choices, weights = exact.given
    sent = (x.view(torch.uint8).view(torch.float8_e4m3fn), x.view(torch.int32)[:, :4].clone())

    def dispatch(is_col_major: bool) -> tuple[Any, ...]:
        got = elastic.dispatch(
            sent,
            choices,
            weights,
            num_experts=EXPERTS,
            do_expand=True,
            expert_alignment=ALIGNMENT,
            use_tma_aligned_col_major_sf=is_col_major,
        )
        torch.cuda.current_stream().synchronize()
        return got

    for is_col_major in (False, True):
        plans.clear()
        first = dispatch(is_col_major)
        for spare in (64, 0, -1, -5, -1000):
            # The room for rows by expert also holds the padding of the alignment.
            for plan in plans.values():
                set_estimate(plan, first[3].state.row_layout, spare)
            estimated = dispatch(is_col_major)
            same_by_expert(estimated, first)
            rows, _, _, again, _ = elastic.dispatch(x, handle=estimated[3])
            out, _, _ = elastic.combine(rows, again)
            torch.cuda.current_stream().synchronize()
            # An emulated GPU's memory is free as soon as its last reference is gone.
            rows = elastic.dispatch(x, handle=first[3])[0]
            wanted, _, _ = elastic.combine(rows, first[3])
            exact.check([], [])
            assert torch.equal(out, wanted)


class Recorder(TorchDispatchMode):
    """Records the operations that this thread asks of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


#: Operations that make tensors or views of them, and the copy of the choices for a handle.
MAKES = {
    "empty",
    "empty_strided",
    "as_strided",
    "view",
    "set_",
    "slice",
    "select",
    "unsqueeze",
    "detach",
    "alias",
    "clone",
}


def computes_nothing(rank: Rank) -> None:
    """A dispatch of the second interface has torch make tensors, and compute nothing: each
    operation would be a kernel, in each layer."""
    from uccl.ep import ElasticBuffer

    elastic = ElasticBuffer(None, 1 << 22, num_max_tokens_per_rank=TOKENS, comm=rank, device="cuda")
    exact = Exact(rank, elastic)
    x, choices, weights = exact.given
    for do_cpu_sync in (False, True):
        for do_expand in (False, True):
            with Recorder() as recorder:
                *_, handle, _ = elastic.dispatch(
                    x,
                    choices,
                    weights,
                    num_experts=EXPERTS,
                    do_cpu_sync=do_cpu_sync,
                    do_expand=do_expand,
                    expert_alignment=ALIGNMENT,
                )
            torch.cuda.current_stream().synchronize()
            assert recorder.names <= MAKES, recorder.names - MAKES
            # The property makes its tensor when it is read.
            assert handle.psum_num_recv_tokens_per_expert.shape == (EXPERTS // rank.size(),)
            torch.cuda.current_stream().synchronize()
            elastic.barrier(with_cpu_sync=True)


class Stop(Exception):
    """The exception of the signal handler."""


def stops(prepare: Callable[[], None]) -> None:
    """A signal ends the wait for counts in the thread that handles signals. The other rank makes no
    call."""
    ranks = Ranks(2)

    def alone() -> None:
        prepare()
        keeps.append(buffer_of(Rank(ranks, 1), timeout=LIMIT))

    def raises(*_: Any) -> None:
        raise Stop

    keeps: list[Any] = []
    thread = threading.Thread(target=alone)
    thread.start()
    prepare()
    exact = Exact(Rank(ranks, 0), buffer_of(Rank(ranks, 0), timeout=LIMIT))
    thread.join()
    before, timer = (
        signal.signal(signal.SIGUSR1, raises),
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)),
    )
    try:
        timer.start()
        started = time.monotonic()
        with pytest.raises(Stop):
            exact.dispatch()
        assert time.monotonic() - started < 10
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    torch.cuda.current_stream().synchronize()
    with pytest.raises(RuntimeError, match="interrupted"):
        exact.buffer.check()


def few_tokens(rank: Rank, seed: int) -> None:
    """A case of low latency mode, which shares its machinery with normal mode."""
    few = FewTokens(rank, seed, comm=rank, device="cuda", timeout=20)
    few.two_at_a_time()
    few.end(rank)


def random_normal(rank: Rank, seed: int) -> None:
    """A case of the first interface."""
    many_tokens(rank, seed, comm=rank, device="cuda", timeout=20)


def random_elastic(rank: Rank, seed: int) -> None:
    """A case of the second interface."""
    elastic_calls(rank, seed, comm=rank, device="cuda")
