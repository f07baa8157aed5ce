"""Random inputs of all ranks, and the experts' answers to them. Every rank draws the same from a
seed, so each knows the inputs of the others."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Callable

import torch
from oracle.routing import Shape

#: Hidden sizes; some are those of models.
HIDDEN = (128, 256, 384, 512, 1024, 1536, 2048, 3584, 7168, 8192)
#: The most channels that all ranks together send: a slow reference takes too long with more.
CHANNELS = 400_000
#: The most choices of all ranks together.
CHOICES = 6_000
#: The most experts of all ranks together.
EXPERTS = 384


@dataclass(frozen=True)
class Sizes:
    """Sizes that all calls of a case share."""

    shape: Shape
    hidden: int
    top_k: int
    most: int
    """The most tokens of a rank in a call: T."""


@dataclass
class Call:
    """Inputs of one call, by rank."""

    xs: list[torch.Tensor]
    """``[n, H]`` bf16, of any magnitude: the input of dispatch."""
    ys: list[torch.Tensor]
    """``[n, H]`` bf16, of moderate magnitude: the base of the answers."""
    choices: list[torch.Tensor]
    """``[n, K]`` i64; -1 is no choice."""
    weights: list[torch.Tensor]
    """``[n, K]`` f32."""

    def answer(self, rank: int, token: int, by: int) -> torch.Tensor:
        """``[H]`` bf16: the answer of the expert or the rank ``by`` to a token. Each has a factor
        of its own."""
        factor = 0.25 + (by * 37 % 64) / 32
        return (self.ys[rank][token].float() * factor).bfloat16()


class Draw(random.Random):
    """A random generator of cases."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.torch = torch.Generator().manual_seed(seed)

    def sizes(self, ranks: int, multiple_of: int = 128) -> Sizes:
        """Sizes for a number of ranks; ``multiple_of`` divides the hidden size."""
        local = self.choice([1, 2, 3, 5, 8, EXPERTS // ranks, self.randint(1, EXPERTS // ranks)])
        local = max(1, min(local, EXPERTS // ranks))
        experts = ranks * local
        hidden = self.choice([size for size in HIDDEN if size % multiple_of == 0])
        top_k = self.choice([1, 2, 6, 8, 32, self.randint(1, 32)])
        top_k = min(top_k, experts)
        room = min(CHANNELS // (ranks * hidden), CHOICES // (ranks * top_k), 512)
        most = max(1, self.choice([room, self.randint(1, max(room, 1))]))
        return Sizes(Shape(ranks, experts), hidden, top_k, most)

    def call(self, sizes: Sizes, names_again: bool = False) -> Call:
        """Inputs of one call. The number of tokens differs by rank, and some ranks have none. With
        ``names_again`` a token may name an expert twice."""
        ranks = range(sizes.shape.ranks)
        tokens = [self.choice([0, sizes.most, self.randint(0, sizes.most)]) for _ in ranks]
        style = self.choice(
            ["any", "any", "some", "one expert", "one rank", "none"] + ["again"] * 2 * names_again
        )
        return Call(
            [self.rows(count, sizes.hidden) for count in tokens],
            [torch.randn(count, sizes.hidden, generator=self.torch).bfloat16() for count in tokens],
            [self.choices_of(count, sizes, style) for count in tokens],
            [torch.randn(count, sizes.top_k, generator=self.torch) for count in tokens],
        )

    def rows(self, count: int, hidden: int) -> torch.Tensor:
        """``[count, hidden]`` bf16: each block of 128 has a magnitude of its own, from 0 to the
        largest."""
        blocks = torch.randn(count, hidden // 128, 128, generator=self.torch)
        most = self.choice([30, 120])
        exponents = torch.randint(-most, most + 1, (count, hidden // 128, 1), generator=self.torch)
        rows = torch.ldexp(blocks, exponents)
        rows[torch.rand(count, hidden // 128, generator=self.torch) < 0.1] = 0
        return rows.view(count, hidden).bfloat16()

    def choices_of(self, count: int, sizes: Sizes, style: str) -> torch.Tensor:
        """``[count, K]`` i64. The style decides how many experts a token has, which ones, and
        whether it names one twice."""
        out = torch.full((count, sizes.top_k), -1, dtype=torch.int64)
        if style == "none":
            return out
        among = list(range(sizes.shape.experts))
        if style == "one rank":
            rank = self.randrange(sizes.shape.ranks)
            among = among[rank * sizes.shape.local : (rank + 1) * sizes.shape.local]
        if style == "one expert":
            among = [sizes.shape.experts - 1]
        for token in range(count):
            row = self.sample(among, min(sizes.top_k, len(among)))
            if style == "some":
                row = [expert if self.random() < 0.6 else -1 for expert in row]
            row += [-1] * (sizes.top_k - len(row))
            self.shuffle(row)
            if style == "again":
                row = [self.choice(row) for _ in row]
            out[token] = torch.tensor(row)
        return out


def lacks_nodes() -> bool:
    """Whether ranks of one host cannot be kept apart as if on several nodes."""
    from uccl import _core

    return not hasattr(_core, "ep_node")


def same(name: str, seen: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raises unless two tensors have the same shape, dtype and values (zeros of either sign are the
    same)."""
    assert seen.dtype == wanted.dtype, f"{name}: {seen.dtype}, not {wanted.dtype}"
    assert seen.shape == wanted.shape, f"{name}: {tuple(seen.shape)}, not {tuple(wanted.shape)}"
    if torch.equal(seen, wanted):
        return
    differ = (seen != wanted).nonzero()
    at = tuple(differ[0].tolist())
    raise AssertionError(
        f"{name}: {len(differ)} of {seen.numel()} differ, first at {at}: {seen[at]}, not {wanted[at]}"
    )


def listed(name: str, seen: torch.Tensor, wanted: list) -> None:
    """Raises unless a tensor equals a list; of an empty list only the length is compared."""
    assert seen.tolist() == wanted, f"{name}: {seen.tolist()}, not {wanted}"


def answers(calls: list[Callable[[], Any]]) -> list[str]:
    """The exceptions that the calls raise, as text."""
    texts = []
    for call in calls:
        try:
            call()
        except Exception as e:
            texts.append(f"{type(e).__name__}: {e}")
        else:
            texts.append("nothing")
    return texts
