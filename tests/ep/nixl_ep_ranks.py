"""Ranks in processes that make buffers of ``nixl_ep``, and calls that are compared with the slow
reference."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import comers
from comers import Comers

#: Ranks that buffers have room for, experts of each, and the sizes of calls.
ROOM, LOCAL = 4, 2
TOKENS, HIDDEN, TOP_K = 8, 512, 3


class Here:
    """A rank's process: its store, and its buffer once it has made one."""

    def __init__(self, rank: int, store: Any, options: dict[str, Any]) -> None:
        self.rank, self.store, self.options = rank, store, options
        self.buffer: Any = None
        #: A framework's own state.
        self.state: Any = None

    @property
    def device(self) -> Any:
        """The device of tensors."""
        return self.buffer.runtime.device

    def settle(self) -> None:
        """Waits for the buffer's calls."""
        comers.settle(self.buffer.runtime)


def serve(rank: int, options: dict[str, Any], port: int, pipe: Any) -> None:
    """The main loop of a rank's process: runs ``function(here, *args)``, and sends the results
    back."""
    os.environ["UCCL_P2P_TRANSPORT"] = "tcp"
    os.environ["UCCL_EP_NODE"] = str(rank * options["nodes"] // ROOM)
    os.environ["UCCL_EP_DEVICE"] = options["device"]
    # The distribution that only has NIXL EP's name, for a machine without it.
    sys.path.append(str(Path(__file__).parents[2] / "python" / "nixl_ep"))
    import torch

    torch.set_num_threads(1)
    if options["emulated"]:
        import emulated

        emulated.load(Path(options["emulated"]))
    elif options["device"] == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = torch.distributed.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=comers.LIMIT))
    here = Here(rank, store, options)
    while True:
        function, args = pipe.recv()
        try:
            answer = True, function(here, *args)
        except Exception as e:
            answer = False, f"{type(e).__name__}: {e}\n{traceback.format_exc()}"
        pipe.send(answer)


class NixlEpRanks(Comers):
    """The ranks' processes."""

    serve = staticmethod(serve)

    def leave(self, rank: int) -> None:
        """Ends a rank's process, which the others no longer need."""
        process, pipe = self._ranks.pop(rank)
        process.kill()
        process.join(comers.LIMIT)
        pipe.close()

    def together(self, functions: dict[int, tuple[Any, ...]]) -> list[Any]:
        """The results of functions, with their arguments, that ranks run at the same time."""
        for rank, (function, *args) in functions.items():
            self.tell(rank, function, *args)
        return [self.heard(rank) for rank in functions]


def made(here: Here, **keywords: Any) -> None:
    """Makes a rank's buffer."""
    import nixl_ep

    size = nixl_ep.Buffer.get_rdma_size_hint(TOKENS, HIDDEN, ROOM, ROOM * LOCAL)
    here.buffer = nixl_ep.Buffer(
        **{
            "disable_ll_nvlink": here.options["via_host"],
            "rank": here.rank,
            "explicitly_destroy": True,
            "tcp_store_group": here.store,
            "timeout_ms": int(1000 * here.options["timeout"]),
            **keywords,
        }
    )
    here.buffer.update_memory_buffers(
        num_ranks=ROOM, num_experts_per_rank=LOCAL, num_rdma_bytes=size
    )


def connected(here: Here, ranks: list[int], activate: bool = True) -> None:
    """Connects ranks, and makes the buffer first if there is none."""
    if here.buffer is None:
        made(here)
    here.buffer.connect_ranks(ranks, activate=activate)


def disconnected(here: Here, ranks: list[int]) -> None:
    """Disconnects ranks."""
    here.buffer.disconnect_ranks(ranks)


def let_in(here: Here, ranks: list[int]) -> None:
    """Lets ranks take part."""
    for rank in ranks:
        here.buffer.update_mask_buffer(rank, mask=False)


def masks(here: Here) -> list[int]:
    """The masks, by rank."""
    import torch

    status = torch.full((ROOM,), 7, dtype=torch.int32, device=here.device)
    here.buffer.query_mask_buffer(status)
    here.settle()
    return status.tolist()


class Inputs:
    """The tokens of all ranks that take part. Every rank draws the same."""

    def __init__(self, seed: int, there: list[int]) -> None:
        import torch

        #: Experts of ranks that are there, and of one that is not.
        experts = [rank * LOCAL + nth for rank in there for nth in range(LOCAL)]
        absent = next((rank for rank in range(max(there) + 1) if rank not in there), None)
        if absent is not None:
            experts.append(absent * LOCAL)
        experts += [-1] * (TOP_K - len(experts))
        self.there = there
        self.xs, self.choices, self.weights = [], [], []
        for rank in range(ROOM):
            draw = torch.Generator().manual_seed(100 * seed + rank)
            count = max(1, TOKENS - rank) if rank in there else 0
            self.xs.append(torch.randn(count, HIDDEN, generator=draw).bfloat16())
            places = torch.rand(count, len(experts), generator=draw).topk(TOP_K).indices
            chosen = torch.tensor(experts)[places]
            chosen[torch.rand(chosen.shape, generator=draw) < 0.1] = -1
            self.choices.append(chosen)
            self.weights.append(torch.rand(count, TOP_K, generator=draw))


def moved(here: Here, tensor: Any) -> Any:
    """A copy on the buffer's device, which lives as long as an emulated GPU may use it."""
    copy = tensor.to(here.device).clone()
    if "emulated" in sys.modules:
        sys.modules["emulated"].KEPT.append(copy.untyped_storage())
    return copy


def step(
    here: Here, seed: int, there: list[int], form: int = 0, has_hook: bool = True, **how: Any
) -> list[int]:
    """A dispatch and a combine of rows unchanged by their experts, each equal to the reference bit
    for bit. ``there`` are the ranks that take part; ``how`` has ``num_experts``, and whether the
    combine is with ``zero_copy``. Returns the sums' bits."""
    import torch
    from as_deepep import FORMATS
    from on_device import bits
    from oracle import low_latency
    from oracle.routing import Shape

    chosen_form, me, given = FORMATS[form], here.rank, Inputs(seed, there)
    num_experts = how.get("num_experts", ROOM * LOCAL)
    bound = max(there) + 1 if num_experts is None else num_experts // LOCAL
    shape, form_of = Shape(ROOM, ROOM * LOCAL), chosen_form
    x, chosen, weights = (
        moved(here, each[me]) for each in (given.xs, given.choices, given.weights)
    )
    stats = moved(here, torch.zeros(LOCAL, dtype=torch.int32))
    packed, count, handle, event, hook = here.buffer.dispatch(
        x,
        chosen,
        TOKENS,
        num_experts,
        use_fp8=form_of.use_fp8,
        round_scale=form_of.round_scale,
        use_ue8m0=form_of.use_ue8m0,
        cumulative_local_expert_recv_stats=stats,
        async_finish=not has_hook,
        return_recv_hook=has_hook,
    )
    hook() if has_hook else event.current_stream_wait()
    here.settle()
    src_info, layout_range, most, hidden = handle
    assert (most, hidden) == (TOKENS, HIDDEN)
    assert layout_range.shape == (LOCAL, bound)
    rows = packed[0] if form_of.use_fp8 else packed
    assert rows.shape == (LOCAL, bound * TOKENS, HIDDEN) and rows.is_contiguous()
    wanted = low_latency.dispatch(given.xs, given.choices, shape, me, form_of)
    answers = torch.zeros(rows.shape, dtype=torch.bfloat16)
    for expert, received in enumerate(wanted):
        m = len(received.tokens)
        assert m == count[expert] == stats[expert] == (layout_range[expert] & 0xFFFFFFFF).sum()
        assert src_info[expert, :m].tolist() == [token for _, token in received.tokens]
        assert torch.equal(bits(rows[expert, :m].contiguous()).cpu(), bits(received.rows))
        values = rows[expert, :m].cpu()
        if form_of.use_fp8:
            scales = packed[1][expert, :m].contiguous().cpu()
            assert torch.equal(scales, received.scales)
            values = low_latency.decoded(
                values.view(torch.uint8), scales, form_of.use_ue8m0
            ).bfloat16()
        answers[expert, :m] = values
    made_of_experts = moved(here, answers)
    if how.get("zero_copy"):
        here.buffer.get_next_combine_buffer(handle)[:, :, :] = made_of_experts
    out = moved(here, torch.empty(len(x), HIDDEN).bfloat16())
    combined, event, hook = here.buffer.combine(
        made_of_experts,
        chosen,
        weights,
        handle,
        zero_copy=how.get("zero_copy", False),
        async_finish=not has_hook,
        return_recv_hook=has_hook,
        out=out,
    )
    hook() if has_hook else event.current_stream_wait()
    here.settle()
    assert combined is out
    sent, scales = low_latency.quantised(given.xs[me], form_of)
    if form_of.use_fp8:
        sent = low_latency.decoded(sent.view(torch.uint8), scales, form_of.use_ue8m0).bfloat16()
    reference = low_latency.combine(
        lambda token, _: sent[token],
        given.choices[me],
        given.weights[me],
        shape.owner,
        HIDDEN,
        lambda expert: shape.owner(expert) not in there,
    )
    assert torch.equal(bits(out).cpu(), bits(reference)), "sums"
    return bits(out).flatten().tolist()


def steps(here: Here, seeds: list[int], there: list[int], **how: Any) -> list[list[int]]:
    """Several steps."""
    return [step(here, seed, there, **how) for seed in seeds]


def in_all_forms(here: Here, there: list[int], **how: Any) -> None:
    """All formats, with hooks and without, with zero copy and without."""
    for form in range(4):
        for has_hook in (True, False):
            step(here, 10 + form, there, form, has_hook, zero_copy=has_hook, **how)


class Fixed:
    """Tensors at fixed addresses, of as many tokens on each rank, and a dispatch and a combine of
    them."""

    def __init__(self, here: Here) -> None:
        import torch

        self._here, count = here, TOKENS
        self._x, self._out = (
            moved(here, torch.zeros(count, HIDDEN, dtype=torch.bfloat16)) for _ in range(2)
        )
        self._chosen = moved(here, torch.zeros(count, TOP_K, dtype=torch.int64))
        self._weights = moved(here, torch.zeros(count, TOP_K))
        self._wanted: Any = None

    def take(self, seed: int, there: list[int]) -> None:
        """Changes the tensors to inputs for these ranks."""
        import torch

        here, draw = self._here, torch.Generator().manual_seed(100 * seed + self._here.rank)
        experts = torch.tensor([rank * LOCAL + nth for rank in there for nth in range(LOCAL)])
        chosen = experts[torch.randint(len(experts), (TOKENS, TOP_K), generator=draw)]
        # No token chooses an expert twice.
        chosen[:, 1:][chosen[:, 1:] == chosen[:, :1]] = -1
        chosen[:, 2:][chosen[:, 2:] == chosen[:, 1:2]] = -1
        x = torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16()
        weights = torch.rand(TOKENS, TOP_K, generator=draw)
        self._wanted = x.float() * (weights * (chosen >= 0)).sum(1, keepdim=True)
        here.settle()
        for tensor, given in ((self._x, x), (self._chosen, chosen), (self._weights, weights)):
            tensor.copy_(given)

    def calls(self) -> None:
        """A dispatch and a combine, with room for all ranks."""
        rows, _, handle, _, _ = self._here.buffer.dispatch(
            self._x, self._chosen, TOKENS, ROOM * LOCAL, use_fp8=False
        )
        self._here.buffer.combine(rows, self._chosen, self._weights, handle, out=self._out)

    def check(self) -> None:
        """Compares the sums."""
        import torch

        torch.testing.assert_close(self._out.float().cpu(), self._wanted, rtol=0.02, atol=0.02)


def dies(here: Here, when: str, there: list[int]) -> None:
    """Kills this rank's process before a call, or at any moment of calls."""
    if when == "anywhere":
        threading.Timer(0.02, os.kill, (os.getpid(), 9)).start()
        seed = 0
        while True:
            calls(here, seed := seed + 1, there)
    os.kill(os.getpid(), 9)


def calls(here: Here, seed: int, there: list[int]) -> None:
    """A dispatch and a combine, whose results nobody checks."""
    given = Inputs(seed, there)
    x, chosen, weights = (
        moved(here, each[here.rank]) for each in (given.xs, given.choices, given.weights)
    )
    rows, _, handle, _, _ = here.buffer.dispatch(x, chosen, TOKENS, ROOM * LOCAL, use_fp8=False)
    here.buffer.combine(rows, chosen, weights, handle)
    here.settle()


def survives(here: Here, count: int, there: list[int]) -> list[int]:
    """Makes calls while a rank dies; returns the masks."""
    for seed in range(count):
        calls(here, seed, there)
    return masks(here)
