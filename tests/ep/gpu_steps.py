"""Many calls on one buffer of a GPU, and the resources that are in use after them."""

from __future__ import annotations

import os
import random
from typing import Any

import torch

#: The number of calls; a run by hand may have more.
STEPS = int(os.environ.get("UCCL_EP_STEPS", "300"))
#: Calls before the first count: allocations that are made once have been made then.
FIRST = 100
TOKENS, TOP_K, EXPERTS, HIDDEN = 24, 4, 8, 1024
#: Ways to dispatch in low latency mode.
FORMS = (
    {"use_fp8": False},
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
    {"use_nvfp4": True, "x_global_scale": 100.0},
)


def used() -> dict[str, int]:
    """The resources of the GPU and of the system that this process uses. Pages vary by some MiB."""
    free, total = torch.cuda.mem_get_info()
    return {
        "bytes of torch's": torch.cuda.memory_allocated(),
        "bytes that torch keeps": torch.cuda.memory_reserved(),
        "MiB of the GPU": (total - free) >> 20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


class Steps:
    """A rank's random calls. All ranks draw the same kinds of calls."""

    def __init__(self, buffer: Any, rank: int) -> None:
        self.buffer, self.kinds, self.own = buffer, random.Random(11), random.Random(rank)
        self.generator = torch.Generator(device="cuda").manual_seed(rank)
        self.waits = torch.zeros(buffer.group_size, dtype=torch.int64, device="cuda")
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        # Sums of these are exact.
        self.weights = torch.tensor([0.5, 0.25, 1.0, 2.0], device="cuda").repeat(TOKENS, 1)
        # torch loads its kernels now: the driver loads none while a kernel waits for another rank.
        for tokens in range(TOKENS + 1):
            x, _, weights = self.inputs(tokens)
            self.compare(x, self.ones(*x.shape), weights)
            self.compare(x, x, (weights[:, : buffer.group_size] > 0).float())
        self.ones(EXPERTS // buffer.group_size, TOKENS * buffer.group_size, HIDDEN)
        self.wrong.zero_()
        torch.cuda.current_stream().synchronize()

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, their choices and weights."""
        x = torch.randn(tokens, HIDDEN, device="cuda", generator=self.generator).bfloat16()
        scores = torch.rand(tokens, EXPERTS, device="cuda", generator=self.generator)
        return x, scores.topk(TOP_K).indices, self.weights[:tokens]

    def ones(self, *shape: int) -> torch.Tensor:
        """Rows of ones, which LogFMT does not change."""
        return torch.ones(shape, dtype=torch.bfloat16, device="cuda")

    def compare(self, out: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> None:
        """Counts values that are not the sum of a row and its weights."""
        wanted = (rows.float() * weights.sum(1, keepdim=True)).bfloat16()
        self.wrong += (out != wanted).sum()

    def step(self) -> None:
        """A dispatch and a combine in either mode."""
        if self.kinds.random() < 0.3:
            self.many_tokens()
        else:
            self.few_tokens()

    def many_tokens(self) -> None:
        """A dispatch and a combine in normal mode: each rank sends back the received rows."""
        x, choices, weights = self.inputs(self.own.choice([0, TOKENS, self.own.randint(0, TOKENS)]))
        _, _, per_expert, token_in_rank, _ = self.buffer.get_dispatch_layout(choices, EXPERTS)
        rows, _, _, _, handle, _ = self.buffer.dispatch(
            x,
            is_token_in_rank=token_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=choices,
            topk_weights=weights,
            # With 0 the host waits for the other rank.
            num_worst_tokens=self.own.choice([0, TOKENS * self.buffer.group_size]),
        )
        out, _, _ = self.buffer.combine(rows, handle)
        self.compare(out, x, token_in_rank.float())

    def few_tokens(self) -> None:
        """A dispatch and a combine in low latency mode."""
        form, has_hook = self.kinds.choice(FORMS), self.own.random() < 0.5
        is_plain, is_packed = form == FORMS[0], self.kinds.random() < 0.3
        x, choices, weights = self.inputs(self.own.choice([0, TOKENS, self.own.randint(0, TOKENS)]))
        rows, _, handle, _, hook = self.buffer.low_latency_dispatch(
            x,
            choices,
            TOKENS,
            EXPERTS,
            return_recv_hook=has_hook,
            dispatch_wait_recv_cost_stats=self.waits,
            **form,
        )
        if hook is not None:
            hook()
        if not is_plain:
            rows = self.ones(
                EXPERTS // self.buffer.group_size, TOKENS * self.buffer.group_size, HIDDEN
            )
        out, _, hook = self.buffer.low_latency_combine(
            rows, choices, weights, handle, use_logfmt=is_packed, return_recv_hook=has_hook
        )
        if hook is not None:
            hook()
        if not (is_plain and is_packed):
            self.compare(out, x if is_plain else self.ones(*x.shape), weights)


def steps(rank: Any) -> list[dict[str, int]]:
    """The resources after the first calls and after all, counted by rank 0, without the memory that
    is allocated ahead for the next call of each kind."""
    from uccl.ep import Buffer

    room = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, rank.size(), EXPERTS)
    buffer = Buffer(None, 0, room, low_latency_mode=True, comm=rank, device="cuda", timeout=30)
    backend: Any = buffer._backend
    calls, counted, plans = Steps(buffer, rank.rank()), [], backend.plans.plans
    rank.allgather(b"")
    for count in (FIRST, STEPS):
        for _ in range(count):
            calls.step()
        torch.cuda.current_stream().synchronize()
        assert len(plans) <= TOKENS.bit_length() + 1, "tokens of as many bits are of one shape"
        for plan in plans.values():
            plan.next_workspace = None
        # The other ranks open and close nothing meanwhile, not even a descriptor for their own
        # count.
        rank.allgather(b"")
        if rank.rank() == 0:
            counted.append(used())
        rank.allgather(b"")
    buffer.check()
    assert calls.wrong.item() == 0
    rank.allgather(b"")
    buffer.destroy()
    return counted
