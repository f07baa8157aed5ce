"""A rank's calls of the second interface, compared with the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from cases import Call, Draw, Sizes, listed, same
from many_tokens import scales_of
from on_device import NAN, OnDevice, bits, inputs_of
from oracle import elastic, low_latency
from oracle.elastic import Rounding


class Elastic(OnDevice):
    """One rank's calls of a case of the second interface."""

    def __init__(self, group: Any, seed: int, **keywords: Any) -> None:
        from uccl.ep import ElasticBuffer

        super().__init__(**keywords)
        self.draw, self.rank = inputs_of(seed), group.rank()
        self.sizes: Sizes = self.draw.sizes(group.size())
        self.multiple = self.draw.random() < 0.6
        self.expand = self.draw.random() < 0.5
        self.alignment = self.draw.choice([1, 1, 8, 128])
        allow_hybrid = self.draw.random() < 0.7
        sizes = (
            self.sizes.most,
            self.sizes.hidden,
            self.sizes.top_k,
            False,
            allow_hybrid,
            self.multiple,
        )
        size = ElasticBuffer.get_buffer_size_hint(group, *sizes)
        if self.is_on_gpu and self.draw.random() < 0.5:
            # There is room for fewer tokens, so calls take several rounds.
            fewer = self.draw.choice([1, 2, max(1, self.sizes.most // 3)])
            size = ElasticBuffer.get_buffer_size_hint(group, fewer, *sizes[1:])
        self.buffer = ElasticBuffer(
            None if self.shares_context else group,
            size,
            num_max_tokens_per_rank=self.sizes.most,
            allow_multiple_reduction=self.multiple,
            allow_hybrid_mode=allow_hybrid,
            num_cpu_timeout_secs=15,
            num_gpu_timeout_secs=15,
            **keywords,
        )
        nodes, _ = self.buffer.get_logical_domain_size()
        self.shape = dataclasses.replace(self.sizes.shape, nodes=nodes)
        self.stats = torch.zeros(self.shape.local, dtype=torch.int32, device=self.buffer.device)
        self.counted = [0] * self.shape.local

    def inputs(self, call: Call) -> list[Any]:
        """``x`` of each rank: bf16, or bytes and packs of random bits, which the engine does not
        interpret."""
        kind = self.draw.choice(["bf16", "fp8", "half bytes"])
        if kind == "bf16":
            return [(x, None) for x in call.xs]
        packs = self.draw.randrange(2**30)
        width = self.sizes.hidden if kind == "fp8" else self.sizes.hidden // 2
        inputs = []
        for x in call.xs:
            codes = torch.randint(
                0, 256, (x.shape[0], width), generator=self.draw.torch, dtype=torch.uint8
            )
            inputs.append((codes, scales_of(Draw(packs), *x.shape)))
        return inputs

    def dispatch(self, call: Call, inputs: list[Any], sync: bool, handle: Any = None) -> Any:
        """Dispatches and compares; returns the oracle's arrival, the handle, and the number of
        rows."""
        mine = self.rank
        x, scales = inputs[mine]
        column_major = self.draw.random() < 0.5
        zero_padding = self.expand and self.draw.random() < 0.5
        first = {
            "topk_idx": self.there(call.choices[mine]),
            "num_experts": self.shape.experts,
            "expert_alignment": self.alignment,
            "cumulative_local_expert_recv_stats": self.stats,
            "do_cpu_sync": sync,
        }
        rows, idx, weights, made, _ = self.buffer.dispatch(
            self.there(x) if scales is None else (self.there(x), self.there(scales)),
            topk_weights=self.there(call.weights[mine]),
            do_expand=self.expand,
            do_zero_padding=zero_padding,
            use_tma_aligned_col_major_sf=column_major,
            **(first if handle is None else {"handle": handle}),
        )
        received = elastic.dispatch(call.choices, self.shape, mine, self.sizes.most, self.alignment)
        if handle is None:
            self.counted = [a + b for a, b in zip(self.counted, received.counts)]
            listed("statistics", self.here(self.stats), self.counted)
            self.check_handle(call, received, made, sync)
        else:
            assert made is handle
        values, packs = rows if scales is not None else (rows, None)
        if sync:
            total = len(received.expanded) if self.expand else len(received.tokens)
        elif self.expand:
            total = elastic.worst_expanded_rows(
                self.shape, self.sizes.most, self.sizes.top_k, self.alignment
            )
        else:
            total = self.shape.ranks * self.sizes.most
        assert values.shape == (total, x.shape[1]), f"{tuple(values.shape)}, not {total} rows"
        if packs is not None and column_major and total:
            assert packs.stride() == (1, -(-total // 4) * 4), f"strides {packs.stride()}"
        values, packs = self.here(values), None if packs is None else self.here(packs)
        idx, weights = None if idx is None else self.here(idx), self.here(weights)
        named: list[Any] = received.expanded if self.expand else received.tokens
        where = [row for row, token in enumerate(named) if token is not None]
        for name, seen, part in (("rows", values, 0), ("packs", packs, 1)):
            if seen is None:
                continue
            wanted = low_latency.stacked(
                [bits(inputs[named[row][0]][part].contiguous())[named[row][1]] for row in where],
                bits(x.contiguous() if part == 0 else scales.contiguous()),
            )
            same(name, bits(seen[where].contiguous()), wanted)
        self.check_choices(call, received, (idx, weights), total)
        if zero_padding:
            last = max(where, default=-1)
            gaps = [row for row, token in enumerate(named) if token is None and row < last]
            for seen in (values, packs, weights):
                assert seen is None or not bits(seen[gaps].contiguous()).any(), "gaps are not zero"
        return received, made, total

    def check_choices(self, call: Call, received: elastic.Received, seen: Any, total: int) -> None:
        """Compares choices and weights; their layout is by rank or by expert."""
        idx, weights = seen
        if not self.expand:
            nothing = [[-1] * self.sizes.top_k] * (total - len(received.tokens))
            listed("choices", idx, received.choices + nothing)
            wanted = [call.weights[source][token] for source, token in received.tokens]
            like = call.weights[self.rank]
            same("weights", weights[: len(wanted)], low_latency.stacked(wanted, like))
            return
        assert idx is None
        assert weights.shape == (total,)
        for row, token in enumerate(received.expanded):
            if token is not None:
                k = self.choice_of(call, received, row)
                assert weights[row] == call.weights[token[0]][token[1], k], f"weight of row {row}"

    def choice_of(self, call: Call, received: elastic.Received, row: int) -> int:
        """The index of the choice, among those of its token, that an expanded row belongs to."""
        source, token = received.expanded[row]
        starts = [sum(received.aligned[:expert]) for expert in range(self.shape.local)]
        local = max(expert for expert, start in enumerate(starts) if start <= row)
        while not received.aligned[local]:
            local -= 1
        chosen = call.choices[source][token].tolist()
        return chosen.index(self.rank * self.shape.local + local)

    def check_handle(self, call: Call, received: elastic.Received, handle: Any, sync: bool) -> None:
        """Compares the fields of a dispatch's handle."""
        assert handle.num_recv_tokens_per_expert_list == (received.aligned if sync else [])
        same("choices", self.here(handle.topk_idx), call.choices[self.rank])
        listed(
            "tokens by scale-up rank",
            self.here(handle.psum_num_recv_tokens_per_scaleup_rank),
            received.per_scaleup_rank,
        )
        listed(
            "tokens by expert",
            self.here(handle.psum_num_recv_tokens_per_expert),
            received.psum_per_expert(self.expand),
        )
        listed(
            "real tokens", self.here(handle.num_unaligned_recv_tokens_per_expert), received.counts
        )
        m = len(received.tokens)
        if sync:
            assert handle.num_recv_tokens == m
            assert not self.expand or handle.num_expanded_tokens == len(received.expanded)
        wanted = []
        for names, (source, token) in zip(received.metadata, received.tokens):
            row = call.choices[source][token].tolist()
            master = {rank: k for k, rank in elastic.masters(row, self.shape)}[self.rank]
            wanted.append([names[0], source * self.sizes.top_k + master, *names[1:]])
        self.settle()
        seen = self.here(handle.recv_src_metadata)[:m]
        if not self.expand:
            here = [
                [row if choice >= 0 else -1 for choice in choices]
                for row, choices in enumerate(received.choices)
            ]
            wanted = [[*sources[:2], *rows] for sources, rows in zip(wanted, here)]
        self.check_slots(call, handle)
        if self.shape.nodes > 1:
            # On several nodes the second column names a slot, which the oracle does not compute.
            seen, wanted = seen[:, [0, *range(2, seen.shape[1])]], [[a, *b] for a, _, *b in wanted]
        listed("metadata", seen, wanted)

    def check_slots(self, call: Call, handle: Any) -> None:
        """Compares the slots of this rank's own tokens at their receivers."""
        counts, wanted = [0] * self.shape.ranks, []
        for row in call.choices[self.rank].tolist():
            slots = [-1] * len(row)
            for k, rank in elastic.masters(row, self.shape):
                slots[k] = self.rank * self.sizes.most + counts[rank]
                counts[rank] += 1
            wanted.append(slots)
        listed("slots", self.here(handle.dst_buffer_slot_idx), wanted)

    def parts(self, call: Call, token: int) -> list[elastic.Part]:
        """The rows that come back for one of this rank's tokens."""
        row = call.choices[self.rank][token].tolist()
        if not self.expand:
            return [
                (k, rank, call.answer(self.rank, token, rank).float())
                for k, rank in elastic.masters(row, self.shape)
            ]
        return [
            (k, self.shape.owner(expert), call.answer(self.rank, token, expert).float())
            for k, expert in enumerate(row)
            if expert >= 0
        ]

    def combine(self, call: Call, received: elastic.Received, handle: Any, total: int) -> None:
        """Combines and compares."""
        mine, hidden = self.rank, self.sizes.hidden
        rows = torch.full((total, hidden), NAN, dtype=torch.bfloat16)
        back = torch.full((total,) if self.expand else (total, self.sizes.top_k), NAN)
        named: list[Any] = received.expanded if self.expand else received.tokens
        for row, token in enumerate(named):
            if token is None:
                continue
            by = mine
            if self.expand:
                k = self.choice_of(call, received, row)
                by = int(call.choices[token[0]][token[1], k])
                back[row] = call.weights[token[0]][token[1], k] * (1 + by)
            else:
                back[row] = call.weights[token[0]][token[1]] * (1 + by)
            rows[row] = call.answer(token[0], token[1], by)
        count = self.draw.choice([0, 0, 1, 2])
        drawn = [[self.draw.rows(len(x), hidden) for x in call.xs] for _ in range(count)]
        biases = [of_ranks[mine] for of_ranks in drawn]
        with_weights = self.draw.random() < 0.5 and not (self.expand and not self.multiple)
        added = [self.there(bias) for bias in biases]
        combined, weights, _ = self.buffer.combine(
            self.there(rows),
            handle,
            topk_weights=self.there(back) if with_weights else None,
            bias=None if not added else added[0] if count == 1 else tuple(added),
        )
        wanted = elastic.combine(
            lambda token: self.parts(call, token),
            biases,
            self.shape,
            Rounding.of(self.multiple, self.shape.nodes),
            (len(call.xs[mine]), hidden),
        )
        same("sums", self.here(combined), wanted)
        if with_weights:
            same("weights", self.here(weights), self.weights_back(call))
        else:
            assert weights is None

    def weights_back(self, call: Call) -> torch.Tensor:
        """``[n, K]`` f32: the weights that the owners return for each choice; 0 for no choice."""
        chosen = call.choices[self.rank]
        by = chosen if self.expand else chosen.div(self.shape.local, rounding_mode="floor")
        given = call.weights[self.rank] * (1 + by)
        return torch.where(chosen >= 0, given, torch.zeros_like(given))


def elastic_calls(group: Any, seed: int, **keywords: Any) -> None:
    """Two live handles: each serves a combine, a dispatch of other rows, and another combine."""
    rank = Elastic(group, seed, **keywords)
    calls = [rank.draw.call(rank.sizes) for _ in range(2)]
    returned = []
    for call in calls:
        sync = rank.draw.random() < 0.5
        returned.append(rank.dispatch(call, rank.inputs(call), sync))
    for number in rank.draw.sample([0, 1], 2):
        call, (received, handle, total) = calls[number], returned[number]
        rank.combine(call, received, handle, total)
        received, handle, total = again(rank, call, handle, total)
        rank.combine(call, received, handle, total)
    rank.end(group)


def again(rank: Elastic, call: Call, handle: Any, total: int) -> Any:
    """Dispatches other rows with an old handle."""
    sync = bool(handle.num_recv_tokens_per_expert_list)
    return rank.dispatch(call, rank.inputs(call), sync, handle)
