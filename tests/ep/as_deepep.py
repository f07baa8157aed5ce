"""The calls and checks of DeepEP's own suites, in their order, for ranks in threads, on the CPU and
on the emulated GPU."""

from __future__ import annotations

from typing import Any

import torch
from cases import listed, same
from on_device import bits
from oracle import elastic, low_latency
from oracle.elastic import Rounding
from oracle.low_latency import Format
from oracle.routing import Shape
from thread_ranks import Rank

TOKENS, HIDDEN, TOP_K, LOCAL = 10, 512, 3, 4
FORMATS = [Format(), Format(True), Format(True, True), Format(True, True, True)]


class Suite:
    """One rank's buffer, and inputs that every rank can compute."""

    def __init__(self, rank: Rank, device: str) -> None:
        self.rank, self.device, self.me = rank, device, rank.rank()
        self.shape = Shape(rank.size(), LOCAL * rank.size())
        self.counts = [max(1, TOKENS - number) for number in range(rank.size())]
        self.buffer: Any = None
        self._kept: list[torch.Tensor] = []

    def drawn(self, seed: int) -> list[torch.Generator]:
        """Generators, one for each rank."""
        return [
            torch.Generator().manual_seed(100 * seed + number) for number in range(self.shape.ranks)
        ]

    def choices(self, seed: int, masked: float = 0.0) -> list[torch.Tensor]:
        """The choices of each rank's tokens; a share ``masked`` of them is -1."""
        made = []
        for draw, count in zip(self.drawn(seed), self.counts):
            chosen = torch.rand((count, self.shape.experts), generator=draw).topk(TOP_K).indices
            chosen[torch.rand(chosen.shape, generator=draw) < masked] = -1
            made.append(chosen)
        return made

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor to the buffer's device."""
        made = tensor.to(self.buffer.device).clone()
        # The memory of an emulated GPU is free as soon as its last reference is gone.
        self._kept.append(made)
        return made

    def settle(self) -> None:
        """Waits for this rank's calls."""
        if self.device != "cpu":
            torch.cuda.current_stream().synchronize()
            self.buffer.check()
        self._kept.clear()

    def end(self) -> None:
        """Destroys the buffer once no rank is in a call."""
        self.settle()
        self.rank.allgather(b"")
        self.buffer.destroy()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """1 - 2 <a, b> / (|a|^2 + |b|^2), over all elements and with 1 added to each: 0 for equal
    tensors."""
    a, b = a.double() + 1, b.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


class Few(Suite):
    """Low latency mode."""

    def __init__(self, rank: Rank, device: str, **keywords: Any) -> None:
        from uccl.ep import Buffer

        super().__init__(rank, device)
        # All ranks have the same number of tokens.
        self.counts = [TOKENS] * rank.size()
        room = Buffer.get_low_latency_rdma_size_hint(
            TOKENS, HIDDEN, self.shape.ranks, self.shape.experts
        )
        self.buffer = Buffer(
            None,
            num_rdma_bytes=room,
            low_latency_mode=True,
            comm=rank,
            device=device,
            explicitly_destroy=True,
            **keywords,
        )
        self.chosen = self.choices(1, 0.1)
        self.xs = [
            torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16() * 0.1 for draw in self.drawn(2)
        ]
        self.weights = torch.rand(TOKENS, TOP_K, generator=self.drawn(3)[self.me])
        self.lost: set[int] = set()

    def dispatch(self, form: Format, hook: bool) -> tuple[torch.Tensor, Any]:
        """Dispatches and compares. Returns the rows of this rank's experts as bf16, and the
        handle."""
        stats = self.there(torch.zeros(LOCAL, dtype=torch.int32))
        packed, count, handle, event, ended = self.buffer.low_latency_dispatch(
            self.there(self.xs[self.me]),
            self.there(self.chosen[self.me]),
            TOKENS,
            self.shape.experts,
            use_fp8=form.use_fp8,
            round_scale=form.round_scale,
            use_ue8m0=form.use_ue8m0,
            cumulative_local_expert_recv_stats=stats,
            async_finish=not hook,
            return_recv_hook=hook,
        )
        ended() if hook else event.current_stream_wait()
        self.settle()
        src_info, layout_range = handle[0], handle[1]
        # Masked ranks send nothing.
        sent = [
            chosen if source not in self.lost else chosen[:0]
            for source, chosen in enumerate(self.chosen)
        ]
        wanted = low_latency.dispatch(self.xs, sent, self.shape, self.me, form)
        made = torch.zeros((LOCAL, self.shape.ranks * TOKENS, HIDDEN), dtype=torch.bfloat16)
        for expert, received in enumerate(wanted):
            m = len(received.tokens)
            assert m == count[expert] == stats[expert] == (layout_range[expert] & 0xFFFFFFFF).sum()
            listed("tokens", src_info[expert, :m], [token for _, token in received.tokens])
            for source in range(self.shape.ranks):
                word = int(layout_range[expert, source])
                named = received.tokens[word >> 32 :][: word & 0xFFFFFFFF]
                assert {rank for rank, _ in named} <= {source}
            rows = packed[0] if form.use_fp8 else packed
            same("rows", bits(rows[expert, :m].contiguous()), bits(received.rows))
            values = rows[expert, :m]
            if form.use_fp8:
                scales = packed[1][expert, :m].contiguous()
                assert torch.equal(scales, received.scales)
                values = low_latency.decoded(
                    values.view(torch.uint8), scales, form.use_ue8m0
                ).bfloat16()
            made[expert, :m] = values
        return made, handle

    def combine(
        self,
        made: torch.Tensor,
        handle: Any,
        form: Format,
        hook: bool,
        zero_copy: bool,
        logfmt: bool,
    ) -> None:
        """Sends the rows back unchanged, and compares the result with a token times its sum of
        weights."""
        rows, chosen = self.there(made), self.chosen[self.me]
        if zero_copy:
            # The view is dropped at once: the combine gets a tensor of NaN and has to read the
            # buffer.
            self.buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
            rows.fill_(float("nan"))
        out = self.there(torch.empty(TOKENS, HIDDEN).bfloat16())
        combined, event, ended = self.buffer.low_latency_combine(
            rows,
            self.there(chosen),
            self.there(self.weights),
            handle,
            use_logfmt=logfmt,
            zero_copy=zero_copy,
            async_finish=not hook,
            return_recv_hook=hook,
            out=out,
        )
        ended() if hook else event.current_stream_wait()
        self.settle()
        here = torch.tensor([owner not in self.lost for owner in range(self.shape.ranks)])
        is_there = (chosen >= 0) & here[chosen.clamp(min=0) // LOCAL]
        wanted = self.xs[self.me].float() * (self.weights * is_there).sum(1, keepdim=True)
        assert combined is out and not out.isnan().any()
        assert form.round_scale or difference(wanted, combined.float()) < (
            9e-4 if form.use_fp8 else 1e-5
        )
        # Other ranks read rows from this rank's buffer.
        self.rank.allgather(b"")

    def left_out(self) -> set[int]:
        """The masked ranks, as the buffer reports them."""
        status = self.there(torch.zeros(self.shape.ranks, dtype=torch.int32))
        self.buffer.low_latency_query_mask_buffer(status)
        self.settle()
        return set(status.nonzero().flatten().tolist())


def few_tokens(rank: Rank, device: str, logfmt: bool) -> None:
    """Each format, with and without hooks, dispatched once or twice before its combine, and
    combined with and without zero copy."""
    few, turn = Few(rank, device), 0
    for form in FORMATS:
        for hook in (False, True):
            turn += 1
            for _ in range(1 + turn % 2):
                made, handle = few.dispatch(form, hook)
            for zero_copy in (False,) if logfmt else (False, True):
                few.combine(made, handle, form, hook, zero_copy, logfmt)
    few.end()


def shrinks(rank: Rank, device: str) -> None:
    """The last rank misses a dispatch, and the rank before it a combine. The others mask them and
    continue."""
    few, last = Few(rank, device, enable_shrink=True, timeout=3), rank.size() - 1
    # The `allgather` of a combine would wait for the lost ranks too.
    few.rank = NoBoard(rank)
    for stage in range(2):
        few.lost.add(last)
        if few.me == last:
            break
        made, handle = few.dispatch(FORMATS[stage], stage == 1)
        assert few.left_out() == few.lost
        few.lost.add(last - 1)
        if few.me == last - 1:
            break
        for zero_copy in (False, True):
            few.combine(made, handle, FORMATS[stage], stage == 1, zero_copy, False)
            assert few.left_out() == few.lost
    rank.allgather(b"")
    few.buffer.destroy()


class NoBoard:
    """A rank with an ``allgather`` that waits for no other rank."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.size = rank.rank, rank.size

    def allgather(self, mine: Any) -> None:
        """Returns at once."""


def many_tokens(rank: Rank, device: str) -> None:
    """Normal mode of the first interface: three kinds of rows, with and without choices, with
    events before and after, with counts, for the worst case, with the handle, and a combine for
    each."""
    from uccl.ep import Buffer, Config

    suite = Suite(rank, device)
    buffer = suite.buffer = Buffer(None, 1 << 22, comm=rank, device=device, explicitly_destroy=True)
    ranks, me, experts = suite.shape.ranks, suite.me, suite.shape.experts
    every = suite.choices(4)
    token_in_rank = [
        torch.stack([(chosen // LOCAL == owner).any(1) for owner in range(ranks)], 1)
        for chosen in every
    ]
    chosen, mine, count = every[me], token_in_rank[me], suite.counts[me]
    per_expert = [torch.bincount(one.flatten(), minlength=experts) for one in every]
    here = slice(me * LOCAL, me * LOCAL + LOCAL)
    counted_layout = buffer.get_dispatch_layout(suite.there(chosen), experts)
    suite.settle()
    listed("tokens by rank", counted_layout[0], mine.sum(0).tolist())
    listed("tokens by expert", counted_layout[2], per_expert[me].tolist())
    assert torch.equal(counted_layout[3], mine)
    xs = [
        torch.randn(n, HIDDEN, generator=draw).bfloat16()
        for draw, n in zip(suite.drawn(5), suite.counts)
    ]
    received = [
        (source, token)
        for source in range(ranks)
        for token in range(suite.counts[source])
        if token_in_rank[source][token, me]
    ]
    ends = [sum(source <= last for source, _ in received) for last in range(ranks)]
    config, weights = Config(4, 8, 256), torch.rand(count, TOP_K, generator=suite.drawn(6)[me])
    all_weights = [
        torch.rand(n, TOP_K, generator=draw) for draw, n in zip(suite.drawn(6), suite.counts)
    ]
    for number in range(8):
        previous, is_async, is_fp8 = bool(number & 1), bool(number & 2), bool(number & 4)
        sent = (
            [low_latency.quantised(x, FORMATS[1]) for x in xs]
            if is_fp8
            else [(x, None) for x in xs]
        )
        rows, scales = sent[me]
        x: Any = suite.there(rows)
        if is_fp8:
            # Scales are column-major: one column lies behind the other.
            x = x.view(torch.float8_e4m3fn), suite.there(scales.t().contiguous()).t()
        for with_choices in (False, True):
            base: dict[str, Any] = {"config": config, "async_finish": is_async}
            if previous:
                base["previous_event"] = buffer.capture()
            asked = {
                "num_tokens_per_rank": suite.there(mine.sum(0).int()),
                "is_token_in_rank": suite.there(mine),
                "num_tokens_per_expert": suite.there(per_expert[me].int()),
            }
            if with_choices:
                asked |= {"topk_idx": suite.there(chosen), "topk_weights": suite.there(weights)}

            def dispatch(**keywords: Any) -> tuple[Any, ...]:
                got = buffer.dispatch(x, **base, **keywords)
                got[-1].current_stream_wait() if is_async else None
                suite.settle()
                return got

            def rows_are_right(got: Any) -> None:
                for part, name in enumerate(("rows", "scales")[: 1 + is_fp8]):
                    seen = got[part] if is_fp8 else got
                    wanted = torch.stack([sent[source][part][token] for source, token in received])
                    same(name, bits(seen[: len(received)].contiguous()), bits(wanted))

            got, idx, got_weights, counts, handle, _ = dispatch(**asked)
            listed("ends of ranks", handle[0][:, me], ends)
            assert counts == sum(one[here] for one in per_expert).tolist()
            assert (got[0] if is_fp8 else got).shape[0] == len(received)
            rows_are_right(got)
            if with_choices:
                local = torch.stack(
                    [every[source][token] - me * LOCAL for source, token in received]
                )
                is_here = (local >= 0) & (local < LOCAL)
                assert torch.equal(idx, torch.where(is_here, local, -1))
                given = torch.stack([all_weights[source][token] for source, token in received])
                assert torch.equal(got_weights, torch.where(is_here, given, 0.0))
                worst = sum([TOKENS] * ranks)
                more, more_idx, more_weights, none, _, _ = dispatch(**asked, num_worst_tokens=worst)
                assert none == [] and len(more_idx) == len(more_weights) == worst
                assert torch.equal(more_idx[: len(idx)], idx) and (more_idx[len(idx) :] == -1).all()
                assert torch.equal(more_weights[: len(idx)], got_weights)
                rows_are_right(more)
            else:
                again, *nothing, _ = dispatch(handle=handle)
                assert nothing == [None] * 4
                rows_are_right(again)
            values = torch.stack([xs[source][token] for source, token in received])
            back, back_weights, event = buffer.combine(
                suite.there(values),
                handle,
                topk_weights=suite.there(got_weights) if with_choices else None,
                **base,
            )
            event.current_stream_wait() if is_async else None
            suite.settle()
            assert difference(back.float() / mine.sum(1, keepdim=True), xs[me].float()) < 5e-6
            assert not with_choices or torch.equal(back_weights, weights)
    suite.end()


#: Options of a call, in columns: whether the handle copies the choices, the alignment of an
#: expert's rows, FP8, the number of biases, an event before, an event after, and whether tensors
#: are allocated on the communication stream. The lines combine them pairwise.
WAYS = [
    (1, 16, 1, 0, 0, 0, 0),
    (0, 1, 0, 1, 0, 1, 1),
    (1, 1, 1, 2, 1, 0, 1),
    (0, 16, 0, 2, 1, 1, 1),
    (1, 16, 0, 1, 0, 1, 0),
    (0, 1, 1, 0, 1, 1, 1),
]


class Second(Suite):
    """The second interface."""

    def __init__(self, rank: Rank, device: str, sync: bool, masked: float, multiple: bool) -> None:
        from uccl.ep import ElasticBuffer

        super().__init__(rank, device)
        self.sync, self.multiple = sync, multiple
        room = ElasticBuffer.get_buffer_size_hint(
            rank, TOKENS, HIDDEN, TOP_K, allow_hybrid_mode=False
        )
        # Integers, as scripts pass them.
        flags: dict[str, Any] = {"allow_hybrid_mode": 1, "allow_multiple_reduction": int(multiple)}
        self.buffer = ElasticBuffer(
            None,
            room,
            num_max_tokens_per_rank=TOKENS,
            hidden=HIDDEN,
            **flags,
            explicitly_destroy=True,
            comm=rank,
            device=device,
        )
        self.chosen = self.choices(7, masked)
        self.xs = [
            torch.randn(n, HIDDEN, generator=draw).bfloat16()
            for draw, n in zip(self.drawn(8), self.counts)
        ]
        self.weights = [
            torch.rand(n, TOP_K, generator=draw) for draw, n in zip(self.drawn(9), self.counts)
        ]
        for chosen, weights in zip(self.chosen, self.weights):
            weights[chosen < 0] = 0

    def answers(self, source: int, token: int) -> torch.Tensor:
        """``[K, H]``: the results of a token's experts."""
        seeds = (torch.arange(TOP_K) + (source * TOKENS + token) * TOP_K + 1).float()
        made = torch.sin(seeds[:, None] * torch.arange(1, HIDDEN + 1) / 97).bfloat16()
        made[self.chosen[source][token] < 0] = 0
        return made

    def call(self, name: str, way: tuple[int, ...], **keywords: Any) -> Any:
        """Makes a call, with events before and after it if ``way`` has them."""
        _, _, _, _, previous, is_async, allocates = way
        if previous:
            keywords["previous_event"] = self.buffer.capture()
        returned = getattr(self.buffer, name)(
            num_sms=4,
            num_qps=4,
            async_with_compute_stream=is_async,
            allocate_on_comm_stream=allocates,
            **keywords,
        )
        returned[-1].current_stream_wait() if is_async else None
        self.settle()
        return returned

    def one(self, way: tuple[int, ...]) -> None:
        """Dispatches by token and by expert, repeats both with their handles, and combines."""
        copies, alignment, is_fp8, num_biases, *_ = way
        me, shape, top_k = self.me, self.shape, TOP_K
        sent = (
            [low_latency.quantised(x, FORMATS[1]) for x in self.xs]
            if is_fp8
            else [(x, None) for x in self.xs]
        )
        rows, scales = sent[me]
        x: Any = self.there(rows)
        if is_fp8:
            x = x.view(torch.float8_e4m3fn), self.there(scales)
        topk_idx, stats = (
            self.there(self.chosen[me]),
            self.there(torch.zeros(LOCAL, dtype=torch.int32)),
        )
        asked = {
            "topk_idx": topk_idx,
            "topk_weights": self.there(self.weights[me]),
            "num_max_tokens_per_rank": TOKENS,
            "num_experts": shape.experts,
            "expert_alignment": alignment,
            "do_handle_copy": copies,
            "do_cpu_sync": int(self.sync),
        }
        got, idx, weights, handle, _ = self.call("dispatch", way, x=x, **asked)
        by_expert = {"do_expand": True, "use_tma_aligned_col_major_sf": True}
        wide, no_idx, wide_weights, wide_handle, _ = self.call(
            "dispatch", way, x=x, **asked, **by_expert
        )
        again, again_idx, _, same_handle, _ = self.call("dispatch", way, x=x, handle=handle)
        padded, _, padded_weights, _, _ = self.call(
            "dispatch",
            way,
            x=x,
            handle=wide_handle,
            topk_weights=asked["topk_weights"],
            do_zero_padding=True,
            **by_expert,
        )
        self.call("dispatch", way, x=x, **asked, cumulative_local_expert_recv_stats=stats)
        received = elastic.dispatch(self.chosen, shape, me, TOKENS, alignment)
        m = len(received.tokens)
        assert same_handle is handle and no_idx is None
        assert (handle.topk_idx.data_ptr() != topk_idx.data_ptr()) == bool(copies)
        listed("statistics", stats, received.counts)
        for each in (handle, wide_handle):
            assert each.psum_num_recv_tokens_per_scaleup_rank[-1] == m
            assert each.num_recv_tokens_per_expert_list == (received.aligned if self.sync else [])
            listed(
                "sources",
                each.recv_src_metadata[:m, 0],
                [source * TOKENS + token for source, token in received.tokens],
            )
            assert torch.equal(each.dst_buffer_slot_idx, handle.dst_buffer_slot_idx)
        listed("ends", handle.psum_num_recv_tokens_per_expert, received.psum_per_expert(False))
        listed(
            "ends by expert",
            wide_handle.psum_num_recv_tokens_per_expert,
            received.psum_per_expert(True),
        )
        listed("choices", idx[:m], received.choices)
        assert torch.equal(idx, again_idx)
        places = wide_handle.recv_src_metadata[:m, 2:]
        listed("rows", places, [row[1:] for row in received.metadata])
        for part in range(1 + is_fp8):
            wanted = low_latency.stacked(
                [bits(sent[source][part][token]) for source, token in received.tokens],
                bits(sent[me][part]),
            )
            narrow, once_more, expanded, with_zeros = (
                bits(one[part] if is_fp8 else one) for one in (got, again, wide, padded)
            )
            same("rows by token", narrow[:m], wanted)
            same("rows once more", once_more[:m], wanted)
            for k in range(top_k):
                has = places[:, k] >= 0
                same("rows by expert", expanded[places[has, k].long()], wanted[has])
                same("rows by expert once more", with_zeros[places[has, k].long()], wanted[has])
            for row, token in enumerate(received.expanded):
                assert token is not None or not with_zeros[row].any(), f"gap {row} of {alignment}"
        for row, token in enumerate(received.expanded):
            assert token is not None or padded_weights[row] == 0
        self.back(
            way,
            (handle, len(got[0] if is_fp8 else got), weights),
            (wide_handle, len(wide_weights), wide_weights),
            received,
        )

    def back(
        self,
        way: tuple[int, ...],
        narrow: tuple[Any, ...],
        wide: tuple[Any, ...],
        received: elastic.Received,
    ) -> None:
        """Combines the experts' results: the sums of each token, and the rows by expert."""
        me, num_biases, count = self.me, way[3], self.counts[self.me]
        biases = [
            torch.randn(count, HIDDEN, generator=self.drawn(20 + n)[me]).bfloat16()
            for n in range(num_biases)
        ]
        added = [self.there(bias) for bias in biases]
        bias: Any = None if not added else added[0] if len(added) == 1 else tuple(added)
        for (handle, length, weights), is_wide in ((narrow, False), (wide, True)):
            made = torch.zeros((length, HIDDEN), dtype=torch.bfloat16)
            for (source, token), places, local in zip(
                received.tokens, received.metadata, received.choices
            ):
                answers = self.answers(source, token)
                if is_wide:
                    for k, row in enumerate(places[1:]):
                        if row >= 0:
                            made[row] = answers[k]
                else:
                    row = received.tokens.index((source, token))
                    made[row] = sum(
                        answers[k].float() for k, expert in enumerate(local) if expert >= 0
                    ).bfloat16()
            takes_weights = self.multiple or not is_wide
            given = {"topk_weights": weights} if takes_weights else {}
            out, out_weights, _ = self.call(
                "combine", way, x=self.there(made), handle=handle, bias=bias, **given
            )
            # The rows of one rank are summed first, unless each row is sent back by itself.
            rounding = Rounding.of(self.multiple or not is_wide, 1)

            def parts(token: int, is_wide: bool = is_wide) -> list[elastic.Part]:
                answers, chosen = self.answers(me, token), self.chosen[me][token].tolist()
                return [
                    (k, self.shape.owner(expert), answers[k].float())
                    for k, expert in enumerate(chosen)
                    if expert >= 0
                ]

            same("sums", out, elastic.combine(parts, biases, self.shape, rounding, (count, HIDDEN)))
            assert not takes_weights or torch.equal(out_weights, self.weights[me])


def second(rank: Rank, device: str, sync: bool, masked: float, multiple: bool) -> None:
    """Runs all ways to make the calls."""
    suite = Second(rank, device, sync, masked, multiple)
    for way in WAYS:
        suite.one(way)
    suite.end()


#: Settings of the second interface's suite: whether the host waits for counts, the share of choices
#: that are -1, and whether the rows of a rank are summed before they are sent back.
SETTINGS = [
    (True, 0.0, True),
    (False, 0.0, True),
    (True, 0.4, True),
    (False, 0.4, False),
    (True, 0.0, False),
]
