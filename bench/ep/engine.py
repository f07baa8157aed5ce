"""The benches' interface to a library with DeepEP's normal mode, and a check of its results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Callable

import torch

from bench.ep.inputs import Routing

#: A row's values, with their scales if they are of FP8.
Tokens = Any
#: Tokens by rank, the mask of each token's ranks, and tokens by expert.
Layout = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Received:
    """The result of a dispatch."""

    tokens: Tokens
    ids: torch.Tensor
    weights: torch.Tensor
    per_expert: list[int]
    handle: Any


class Engine(ABC):
    """A library's calls on one rank."""

    #: Blocks of a launch.
    sms: int
    #: Whether received rows may be views of the communication buffer (zero_copy).
    has_views = False

    @abstractmethod
    def layout(self, routing: Routing) -> Layout:
        """Counts the tokens of each rank and of each expert."""

    @abstractmethod
    def dispatch(self, x: Tokens, routing: Routing, layout: Layout) -> Received:
        """Sends tokens, and waits on the host for the number of received tokens."""

    def dispatch_view(self, x: Tokens, routing: Routing, layout: Layout) -> Received:
        """Sends tokens; received rows are views of the buffer (zero_copy). The host waits for
        nothing."""
        raise NotImplementedError

    def dispatch_view_reusing(self, x: Tokens, handle: Any) -> Tokens:
        """Sends tokens with the handle of an earlier zero_copy dispatch, to the same ranks."""
        raise NotImplementedError

    @abstractmethod
    def dispatch_reusing(self, x: Tokens, handle: Any) -> Tokens:
        """Sends tokens with the handle of an earlier dispatch, to the same ranks."""

    @abstractmethod
    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        """Sends rows back, and sums the rows of each token."""

    def tune(
        self, routing: Routing, meet: Callable[[], Any], agree: Callable[[float], float]
    ) -> str:
        """Sets the fastest options for this shape, and describes them. ``agree`` returns the
        slowest rank's time."""
        return ""

    def check(self) -> None:
        """Raises an error of this rank's work on the GPU."""
        torch.cuda.synchronize()


def calls(engine: Engine, routing: Routing, with_layout: bool) -> dict[str, Callable[[], Any]]:
    """The timed calls, by name."""
    known = engine.layout(routing)
    first = engine.dispatch(routing.x, routing, known)
    received, handle = first.tokens, first.handle

    def dispatch(x: Tokens) -> Received:
        return engine.dispatch(x, routing, engine.layout(routing) if with_layout else known)

    named: dict[str, Callable[[], Any]] = {
        "dispatch fp8": lambda: dispatch(routing.quantised),
        "dispatch bf16": lambda: dispatch(routing.x),
        "dispatch bf16, handle": lambda: engine.dispatch_reusing(routing.x, handle),
        "combine bf16": lambda: engine.combine(received, handle),
    }
    return {**named, **_views(engine, routing, with_layout)} if engine.has_views else named


def _views(engine: Engine, routing: Routing, with_layout: bool) -> dict[str, Callable[[], Any]]:
    """The same calls with zero_copy."""
    known = engine.layout(routing)
    handle = engine.dispatch_view(routing.x, routing, known).handle

    def dispatch(x: Tokens) -> Received:
        return engine.dispatch_view(x, routing, engine.layout(routing) if with_layout else known)

    return {
        "dispatch fp8, in place": lambda: dispatch(routing.quantised),
        "dispatch bf16, in place": lambda: dispatch(routing.x),
        "dispatch bf16, handle, in place": lambda: engine.dispatch_view_reusing(routing.x, handle),
    }


def check_calls(engine: Engine, routing: Routing) -> None:
    """Raises unless received rows equal the sent ones, in order of rank and token, and sums are
    right to the last bit."""
    shape, rank, device = routing.shape, routing.rank, str(routing.x.device)
    everyone = [
        routing if other == rank else Routing(shape, other, device) for other in range(shape.ranks)
    ]
    layout = engine.layout(routing)
    experts = torch.arange(shape.experts, device=device)
    _same("tokens by rank", layout[0], routing.token_in_rank.sum(0))
    _same("where tokens go", layout[1], routing.token_in_rank)
    _same("tokens by expert", layout[2], (routing.ids.view(-1, 1) == experts).sum(0))
    for form in ("quantised", "x"):
        sent = [getattr(each, form) for each in everyone]
        got = engine.dispatch(sent[rank], routing, layout)
        _same_tokens(f"rows, {form}", got.tokens, sent, everyone, rank)
        _check_choices(got, everyone, rank)
        _same_tokens(
            f"rows with a handle, {form}",
            engine.dispatch_reusing(sent[rank], got.handle),
            sent,
            everyone,
            rank,
        )
        if engine.has_views:
            got = engine.dispatch_view(sent[rank], routing, layout)
            used = (got.ids >= 0).any(1)
            viewed = got.tokens if isinstance(got.tokens, tuple) else (got.tokens,)
            rows = tuple(part[used] for part in viewed)
            _same_tokens(
                f"rows in place, {form}", rows if len(rows) > 1 else rows[0], sent, everyone, rank
            )
    got = engine.dispatch(routing.integers(), routing, layout)
    # Each rank multiplies its rows by another factor, so a row of a wrong rank changes the sum.
    sums = engine.combine(got.tokens * (rank + 1), got.handle)
    factors = (routing.token_in_rank * torch.arange(1, shape.ranks + 1, device=device)).sum(
        1, keepdim=True
    )
    _same("sums", sums, (routing.integers() * factors).bfloat16())
    engine.check()


def _check_choices(got: Received, everyone: list[Routing], rank: int) -> None:
    local = everyone[rank].shape.local_experts
    ids, weights = (
        torch.cat([getattr(each, name)[each.token_in_rank[:, rank]] for each in everyone])
        for name in ("ids", "weights")
    )
    ours = ids // local == rank
    _same("choices", got.ids, torch.where(ours, ids - rank * local, -1))
    _same("weights", got.weights, torch.where(ours, weights, 0))
    here = [int((ids == rank * local + expert).sum()) for expert in range(local)]
    if got.per_expert != here:
        raise AssertionError(f"tokens of local experts: {got.per_expert}, not {here}")


def _same_tokens(
    what: str, got: Tokens, sent: list[Tokens], everyone: list[Routing], rank: int
) -> None:
    parts = zip(*sent) if isinstance(got, tuple) else [sent]
    received = got if isinstance(got, tuple) else [got]
    for part, values in zip(parts, received):
        _same(
            what,
            values,
            torch.cat([rows[each.token_in_rank[:, rank]] for rows, each in zip(part, everyone)]),
        )


def _same(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    if got.shape != wanted.shape:
        raise AssertionError(f"{what}: {tuple(got.shape)}, not {tuple(wanted.shape)}")
    differ = (_bits(got) != _bits(wanted.to(got.dtype))).view(len(got), -1).any(1)
    if differ.any():
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {len(got)} differ, the first is {int(differ.nonzero()[0])}"
        )


def _bits(values: torch.Tensor) -> torch.Tensor:
    """FP8 values as bytes, so that they are compared bit by bit."""
    return values.view(torch.uint8) if values.element_size() == 1 else values
