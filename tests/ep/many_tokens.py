"""A rank's calls of the first interface's normal mode, compared with the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from cases import Call, Draw, listed, same
from on_device import NAN, OnDevice, bits, inputs_of
from oracle import low_latency, normal


def scales_of(draw: Draw, count: int, hidden: int) -> torch.Tensor:
    """``[count, hidden/128]`` of four bytes each, f32 or i32, in any order of memory."""
    words = torch.randint(0, 2**30, (hidden // 128, count), generator=draw.torch, dtype=torch.int32)
    words = words if draw.random() < 0.5 else words.view(torch.float32)
    return words.T if draw.random() < 0.5 else words.T.contiguous()


class ManyTokens(OnDevice):
    """One rank's calls of a case of normal mode."""

    def __init__(self, group: Any, seed: int, **keywords: Any) -> None:
        from uccl.ep import Buffer

        super().__init__(**keywords)
        self.draw, self.rank = inputs_of(seed), group.rank()
        self.sizes = self.draw.sizes(group.size())
        room = Buffer.get_dispatch_config(group.size()).get_nvl_buffer_size_hint(
            self.sizes.hidden * 2, group.size()
        )
        # A small buffer has room for a token or two of each rank and of each node, so a dispatch
        # takes several rounds.
        room = room if self.draw.random() < 0.5 else group.size() * 60_000
        self.buffer = Buffer(None if self.shares_context else group, room, **keywords)
        self.reserve_on_comm(group)
        nodes = 1 if self.is_on_gpu else self.buffer.runtime.nodes.count
        self.shape = dataclasses.replace(self.sizes.shape, nodes=nodes)

    def inputs(self, call: Call) -> list[Any]:
        """``x`` of each rank: bf16, or bytes and scales."""
        if self.draw.random() < 0.5:
            return list(call.xs)
        kind = self.draw.randrange(2**30)
        pairs = []
        for x in call.xs:
            draw = Draw(kind)
            codes = torch.randint(0, 256, x.shape, generator=self.draw.torch, dtype=torch.uint8)
            pairs.append((codes.view(torch.float8_e4m3fn), scales_of(draw, *x.shape)))
        return pairs

    def check_rows(self, inputs: list[Any], received: normal.Received, seen: Any) -> None:
        """Compares rows, and scales if there are any."""
        m = len(received.tokens)
        for part, name in enumerate(["rows", "scales"][: 2 if isinstance(inputs[0], tuple) else 1]):
            sent = [pair[part] for pair in inputs] if isinstance(inputs[0], tuple) else inputs
            got = seen[part] if isinstance(inputs[0], tuple) else seen
            like = bits(sent[0].contiguous())
            wanted = low_latency.stacked(
                [bits(sent[source].contiguous())[token] for source, token in received.tokens], like
            )
            same(name, bits(self.here(got)[:m].contiguous()), wanted)

    def all_there(self, x: Any) -> Any:
        """Copies rows, and scales if there are any, to the buffer's device."""
        return tuple(map(self.there, x)) if isinstance(x, tuple) else self.there(x)

    def dispatch(self, call: Call, inputs: list[Any]) -> tuple[normal.Received, Any, int]:
        """Dispatches and compares; returns the oracle's arrival, the handle, and the number of
        rows."""
        mine, alignment = self.rank, self.draw.choice([1, 1, 8, 128])
        counts = normal.layout(call.choices[mine], self.shape)
        is_async = self.draw.random() < 0.5
        choices = call.choices[mine] if self.draw.random() < 0.7 else call.choices[mine].int()
        choices, mine_of = self.there(choices), self.all_there(inputs[mine])
        weights = self.there(call.weights[mine])
        per_rank, _, per_expert, in_rank, event = self.buffer.get_dispatch_layout(
            choices, self.shape.experts, async_finish=is_async
        )
        worst = self.draw.choice([0, 0, self.sizes.most * self.shape.ranks])
        x, idx, weights, per_expert_list, handle, event = self.buffer.dispatch(
            mine_of,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=choices,
            topk_weights=weights,
            expert_alignment=alignment,
            num_worst_tokens=worst,
            previous_event=event if is_async else None,
            async_finish=is_async,
        )
        assert (event.event is not None) == is_async
        if is_async:
            event.current_stream_wait()
        listed("tokens by rank", self.here(per_rank), counts.per_rank)
        listed("tokens by expert", self.here(per_expert), counts.per_expert)
        listed("token in rank", self.here(in_rank), counts.in_rank)
        assert idx.dtype == choices.dtype
        idx, weights = self.here(idx), self.here(weights)
        received = normal.dispatch(call.choices, call.weights, self.shape, mine, alignment)
        m = len(received.tokens)
        rows = worst or m
        assert (x[0] if isinstance(x, tuple) else x).shape[0] == rows
        self.check_rows(inputs, received, x)
        nothing = [[-1] * self.sizes.top_k] * (rows - m)
        listed("choices", idx, received.choices + nothing)
        same("weights", weights[:m], received.weights)
        assert per_expert_list == ([] if worst else received.per_expert)
        # A rank knows the prefixes of its own received tokens alone.
        prefixes, tokens = self.here(handle[0]), self.here(handle[3])
        listed("prefixes", prefixes[:, mine], [of_source[mine] for of_source in received.prefix])
        listed("source tokens", tokens[:m], [token for _, token in received.tokens])
        return received, handle, rows

    def combine(self, call: Call, received: normal.Received, handle: Any, total: int) -> None:
        """Combines and compares."""
        mine, m, hidden = self.rank, len(received.tokens), self.sizes.hidden
        rows = torch.full((total, hidden), NAN, dtype=torch.bfloat16)
        weights = torch.full((total, self.sizes.top_k), NAN)
        for row, (source, token) in enumerate(received.tokens):
            rows[row] = call.answer(source, token, mine)
        weights[:m] = received.weights
        biases = (
            [self.draw.rows(len(x), hidden) for x in call.xs] if self.draw.random() < 0.5 else []
        )
        more = (
            [self.draw.rows(len(x), hidden) for x in call.xs]
            if biases and self.draw.random() < 0.5
            else []
        )
        mine_of = [kind[mine] for kind in (biases, more) if kind]
        with_weights = self.draw.random() < 0.5
        added = [self.there(bias) for bias in mine_of]
        combined, combined_weights, _ = self.buffer.combine(
            self.there(rows),
            handle,
            topk_weights=self.there(weights) if with_weights else None,
            bias=None if not added else added[0] if len(added) == 1 else tuple(added),
        )
        wanted = normal.combine(
            lambda token, rank: call.answer(mine, token, rank),
            call.choices[mine],
            self.shape,
            mine_of,
            hidden,
        )
        same("sums", self.here(combined), wanted)
        if not with_weights:
            assert combined_weights is None
            return
        wanted = normal.combine_weights(
            lambda token, rank: self.weights_at(call, token, rank), call.choices[mine], self.shape
        )
        same("weights", self.here(combined_weights), wanted)

    def weights_at(self, call: Call, token: int, rank: int) -> torch.Tensor:
        """``[K]`` f32: the weights of a token's choices on a rank, 0 for other choices."""
        owners = call.choices[self.rank][token].div(self.shape.local, rounding_mode="floor")
        return torch.where(owners == rank, call.weights[self.rank][token], 0.0)


def many_tokens(group: Any, seed: int, **keywords: Any) -> None:
    """Two live handles: each serves a combine, a dispatch of other rows to the same places, and
    another combine."""
    rank = ManyTokens(group, seed, **keywords)
    calls = [rank.draw.call(rank.sizes) for _ in range(2)]
    returned = [rank.dispatch(call, rank.inputs(call)) for call in calls]
    for number in rank.draw.sample([0, 1], 2):
        call, (received, handle, total) = calls[number], returned[number]
        rank.combine(call, received, handle, total)
        others = [rank.draw.rows(len(x), rank.sizes.hidden) for x in call.xs]
        x, *between, again, _ = rank.buffer.dispatch(rank.there(others[rank.rank]), handle=handle)
        assert between == [None] * 3 and again is None
        rank.check_rows(others, received, x)
        rank.combine(call, received, handle, total)
    rank.end(group)
