"""Functions of ranks with GPUs that come and go: graphs that were captured before, and errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from comers import EXPERTS, TOKENS, inputs, settle


class Graph:
    """The captured launches of calls, on a GPU or an emulated one."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._real = None if buffer.device.type == "cpu" else torch.cuda.CUDAGraph()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Captures the calls in the context; an emulated GPU makes them, too."""
        if self._real is not None:
            with torch.cuda.graph(self._real, capture_error_mode="thread_local"):
                yield
            return
        from emulated import DRIVER

        DRIVER.fake_record(1)
        yield
        DRIVER.fake_record(0)

    def replay(self) -> None:
        """Makes the calls again."""
        if self._real is not None:
            self._real.replay()
            return
        from emulated import DRIVER

        assert DRIVER.fake_replay() == 0


class Captured:
    """A dispatch and its combine in a graph, and a combine in a graph of its own."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.x, self.experts, self.weights = inputs(buffer, 0)
        self.out = torch.zeros_like(self.x)
        self.whole, self.half = Graph(buffer), Graph(buffer)

    def both(self) -> Any:
        """A dispatch and a combine of its rows."""
        rows, _, handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.experts, TOKENS, EXPERTS, use_fp8=False
        )
        self.combine(rows, handle)
        return rows, handle

    def combine(self, rows: Any, handle: Any) -> None:
        """A combine."""
        self.buffer.low_latency_combine(rows, self.experts, self.weights, handle, out=self.out)

    def take(self, seed: int) -> None:
        """Changes the inputs."""
        for to, new in zip((self.x, self.experts, self.weights), inputs(self.buffer, seed)):
            to.copy_(new)


#: The graphs of this process.
KEPT: list[Captured] = []


def captures(buffer: Any) -> None:
    """Captures graphs. As a capture makes no calls on a GPU, all ranks are of the same kind."""
    captured = Captured(buffer)
    KEPT[:] = [captured]
    # Loads what a capture may not.
    captured.both()
    settle(buffer)
    with captured.whole.capture():
        captured.both()
    settle(buffer)


def replays(buffer: Any, seed: int, count: int = 2) -> list[list[int]]:
    """Sums of the graph's calls, or, on a rank without a graph, of the same calls without it."""
    captured = KEPT[0] if KEPT else Captured(buffer)
    sums = []
    for nth in range(seed, seed + count):
        captured.take(nth)
        if KEPT:
            captured.whole.replay()
        else:
            captured.both()
        settle(buffer)
        sums.append(captured.out.view(torch.int16).flatten().tolist())
    return sums


def eager(buffer: Any, seed: int, count: int = 2) -> list[list[int]]:
    """The sums of the same calls without a graph."""
    captured, sums = Captured(buffer), []
    for nth in range(seed, seed + count):
        captured.take(nth)
        captured.both()
        settle(buffer)
        sums.append(captured.out.view(torch.int16).flatten().tolist())
    return sums


def captures_half(buffer: Any) -> None:
    """Captures a combine of a dispatch that is in no graph."""
    captured = Captured(buffer)
    KEPT[:] = [captured]
    rows, handle = captured.both()
    settle(buffer)
    with captured.half.capture():
        captured.combine(rows, handle)
    settle(buffer)


def replays_half(buffer: Any) -> str:
    """The error of that combine."""
    KEPT[0].half.replay()
    try:
        settle(buffer)
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("the combine succeeds")


def refused(buffer: Any) -> str:
    """The error of letting in an absent rank."""
    try:
        buffer.update_mask_buffer(1, False)
    except ValueError as error:
        return str(error)
    raise AssertionError("an absent rank is let in")


def keeps_its_pool(buffer: Any, ranks: list[int]) -> None:
    """Connects anew, and reads a tensor of the earlier pool."""
    pool = buffer.get_local_buffer_tensor(torch.int32)
    buffer.connect_ranks(ranks)
    assert pool.sum().item() is not None


def of_before(buffer: Any, ranks: list[int]) -> list[str]:
    """The errors for handles of dispatches before ranks connected anew."""
    captured = Captured(buffer)
    rows, few = captured.both()
    per_rank, _, per_expert, token_in_rank, _ = buffer.get_dispatch_layout(
        captured.experts, EXPERTS
    )
    *_, many, _ = buffer.dispatch(
        captured.x,
        None,
        per_rank,
        None,
        token_in_rank,
        per_expert,
        captured.experts,
        captured.weights,
    )
    settle(buffer)
    buffer.connect_ranks(ranks)
    texts = []
    for call in (
        lambda: captured.combine(rows, few),
        lambda: buffer.combine(captured.x, many),
        lambda: buffer.dispatch(captured.x, handle=many),
    ):
        try:
            call()
        except RuntimeError as error:
            texts.append(str(error))
    assert len(texts) == 3, texts
    return texts
