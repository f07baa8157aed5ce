"""A rank's calls of the first interface's low latency mode, compared with the oracle."""

from __future__ import annotations

from typing import Any, Callable, Collection, Iterable

import torch
from cases import Call, Sizes, listed, same
from on_device import NAN, OnDevice, bits, inputs_of
from oracle import formats, low_latency


def in_tiles(name: str, tiles: torch.Tensor, scales: torch.Tensor, room: int) -> None:
    """Raises unless an expert's scales lie at the places of its rows, in tiles for ``room``
    rows."""
    padded = scales.new_zeros((-(-room // 128) * 128, scales.shape[1]))
    padded[: len(scales)] = 1
    is_there = low_latency.nvfp4_swizzled(padded) == 1
    padded[: len(scales)] = scales
    found = tiles.contiguous().view(torch.uint8)
    same(name, found[is_there], low_latency.nvfp4_swizzled(padded)[is_there])


class FewTokens(OnDevice):
    """One rank's calls of a low latency case, compared with the oracle."""

    def __init__(self, group: Any, seed: int, sizes: Sizes | None = None, **keywords: Any) -> None:
        """Draws the sizes, unless they are given."""
        from uccl.ep import Buffer

        super().__init__(**keywords)
        self.draw, self.rank = inputs_of(seed), group.rank()
        self.form = self.draw.choice(
            [
                low_latency.Format(),
                low_latency.Format(use_fp8=True),
                low_latency.Format(use_fp8=True, round_scale=True),
                low_latency.Format(use_fp8=True, round_scale=True, use_ue8m0=True),
                low_latency.Format(
                    global_scale=self.draw.choice([1.0, 672.0, self.draw.uniform(0.001, 9999)])
                ),
            ]
        )
        self.sizes = sizes or self.draw.sizes(
            group.size(), multiple_of=512 if self.form.use_fp8 else 128
        )
        self.shape = self.sizes.shape
        room = Buffer.get_low_latency_rdma_size_hint(
            self.sizes.most, self.sizes.hidden, group.size(), self.shape.experts
        )
        ends = (None, 0, room) if "comm" in keywords else (group, 0, room)
        self.buffer = Buffer(*ends, low_latency_mode=True, **keywords)
        self.reserve_on_comm(group)
        self.stats = torch.zeros(self.shape.local, dtype=torch.int32, device=self.buffer.device)
        self.counted = [0] * self.shape.local

    def dispatch(self, call: Call, hook: bool) -> tuple[Any, ...]:
        """Starts a dispatch and returns its results."""
        return self.buffer.low_latency_dispatch(
            self.there(call.xs[self.rank]),
            self.there(call.choices[self.rank]),
            self.sizes.most,
            self.shape.experts,
            cumulative_local_expert_recv_stats=self.stats,
            use_fp8=self.form.use_fp8,
            round_scale=self.form.round_scale,
            use_ue8m0=self.form.use_ue8m0,
            use_nvfp4=self.form.global_scale is not None,
            x_global_scale=self.global_scale(),
            async_finish=not hook,
            return_recv_hook=hook,
        )

    def global_scale(self) -> Any:
        """The global scale of NVFP4, as a tensor or as a number."""
        scale = self.form.global_scale
        if scale is None or self.draw.random() < 0.5:
            return scale
        return self.there(torch.tensor(scale, dtype=torch.float32))

    def check_dispatch(self, call: Call, returned: tuple[Any, ...]) -> list[low_latency.Received]:
        """Compares the received rows with the oracle's, and returns the oracle's."""
        rows, count, handle, event, hook = returned
        assert (event.event is None) == (hook is not None)
        if hook is None:
            event.current_stream_wait()
        wanted = low_latency.dispatch(call.xs, call.choices, self.shape, self.rank, self.form)
        values, scales = rows if self.form.has_scales else (rows, None)
        strides: tuple[int, ...] = () if scales is None else scales.stride()
        is_narrow, hidden = self.form.global_scale is not None, self.sizes.hidden
        if is_narrow:
            values, hidden = values.permute(2, 0, 1), hidden // 2
        values, count, src_info, layout_range = map(self.here, (values, count, *handle[:2]))
        room = self.shape.ranks * self.sizes.most
        assert values.shape == (self.shape.local, room, hidden)
        listed("count", count, [len(received.tokens) for received in wanted])
        ranges = low_latency.layout_range(call.choices, self.shape, self.rank)
        for expert, received in enumerate(wanted):
            m = len(received.tokens)
            listed("src_info", src_info[expert, :m], [token for _, token in received.tokens])
            for source, (begin, length) in enumerate(ranges[expert]):
                word = int(layout_range[expert, source])
                assert word & 0xFFFFFFFF == length, f"{length} of rank {source}: {word:#x}"
                assert length == 0 or word >> 32 == begin, (
                    f"begin {begin} of rank {source}: {word:#x}"
                )
            same(
                f"rows of expert {expert}",
                bits(values[expert, :m].contiguous()),
                bits(received.rows),
            )
            if is_narrow:
                in_tiles(
                    f"scales of expert {expert}",
                    self.here(scales[..., expert]),
                    received.scales,
                    room,
                )
            elif scales is not None:
                assert strides[2] == room or scales.shape[2] == 1, f"strides {strides}"
                seen = self.here(scales[expert, :m].contiguous())
                same(f"scales of expert {expert}", seen, received.scales)
        return wanted

    def answers(self, call: Call, received: list[low_latency.Received], out: torch.Tensor) -> None:
        """Writes the answers of this rank's experts, and NaN to rows without a token."""
        out.fill_(NAN)
        for local, of_expert in enumerate(received):
            expert = self.rank * self.shape.local + local
            for row, (source, token) in enumerate(of_expert.tokens):
                out[local, row] = call.answer(source, token, expert)

    def combine(
        self, call: Call, handle: Any, received: list[low_latency.Received], **options: Any
    ) -> Any:
        """Starts a combine of the answers of this rank's experts and returns its results."""
        room = self.shape.ranks * self.sizes.most
        rows = torch.empty((self.shape.local, room, self.sizes.hidden), dtype=torch.bfloat16)
        if options.get("zero_copy"):
            there = self.buffer.get_next_low_latency_combine_buffer(handle)
            rows = rows if self.is_on_gpu else there
        self.answers(call, received, rows)
        if self.is_on_gpu:
            self.settle()
            rows = there.copy_(rows) if options.get("zero_copy") else self.there(rows)
        choices, weights = call.choices[self.rank], call.weights[self.rank]
        return self.buffer.low_latency_combine(
            rows, self.there(choices), self.there(weights), handle, **options
        )

    def call(self) -> Call:
        """Inputs of a call. Some blocks of answers are below 1, which LogFMT packs, and some are
        not."""
        call = self.draw.call(self.sizes, names_again=True)
        for ys in call.ys:
            blocks = ys.view(ys.shape[0], ys.shape[1] // formats.BLOCK, formats.BLOCK)
            is_small = torch.rand(blocks.shape[:2], generator=self.draw.torch) < 0.7
            blocks *= torch.where(is_small, 0.1, 1)[:, :, None].bfloat16()
        return call

    def wanted(self, call: Call, is_packed: bool = False, **keywords: Any) -> torch.Tensor:
        """The expected result of a combine; with ``is_packed``, of rows that travel as LogFMT."""
        way = formats.through_logfmt if is_packed else lambda row: row
        return low_latency.combine(
            lambda token, expert: way(call.answer(self.rank, token, expert)),
            call.choices[self.rank],
            call.weights[self.rank],
            self.sizes.shape.owner,
            self.sizes.hidden,
            **keywords,
        )

    def options(self, call: Call) -> dict[str, Any]:
        """Options of a combine, drawn by chance."""
        options: dict[str, Any] = {
            "return_recv_hook": self.draw.random() < 0.5,
            "zero_copy": self.draw.random() < 0.3,
        }
        options["use_logfmt"] = not options["zero_copy"] and self.draw.random() < 0.3
        if self.draw.random() < 0.3:
            like = self.there(call.xs[self.rank])
            options["out"] = torch.full_like(like, NAN)
        return options

    def two_at_a_time(self) -> None:
        """Two calls in flight at a time, ended in any order, several times on one buffer."""
        for _ in range(2):
            calls = [self.call() for _ in range(2)]
            order = self.draw.sample([0, 1], 2)
            # Whether a call uses a hook.
            hooks = [self.draw.random() < 0.5 for _ in calls]
            returned = [self.dispatch(call, hook) for call, hook in zip(calls, hooks)]
            received: dict[int, Any] = {}
            for number in order:
                if hooks[number]:
                    returned[number][4]()
                received[number] = self.check_dispatch(calls[number], returned[number])
            self.counted = [
                so_far + sum(len(received[number][expert].tokens) for number in order)
                for expert, so_far in enumerate(self.counted)
            ]
            listed("statistics", self.here(self.stats), self.counted)
            order = self.draw.sample([0, 1], 2)
            ended = []
            for number in order:
                call = calls[number]
                options = self.options(call)
                combined, _, hook = self.combine(
                    call, returned[number][2], received[number], **options
                )
                ended.append((call, combined, hook, options))
            for call, combined, hook, options in ended:
                if options["return_recv_hook"]:
                    hook()
                assert "out" not in options or combined is options["out"]
                same("sums", self.here(combined), self.wanted(call, options["use_logfmt"]))

    def without(
        self, outs: Collection[int], call: Call, before_combine: Callable[[], Any] | None = None
    ) -> None:
        """A dispatch that masks ranks, and its combine. ``before_combine`` may change the masks."""
        returned = self.dispatch(call, False)
        nothing = Call(list(call.xs), list(call.ys), list(call.choices), list(call.weights))
        for out in outs:
            nothing.choices[out] = torch.full_like(call.choices[out], -1)
        received = self.check_dispatch(nothing, returned)
        if before_combine is not None:
            before_combine()
        combined, _, _ = self.combine(call, returned[2], received)
        wanted = self.wanted(call, left_out=lambda expert: self.shape.owner(expert) in outs)
        same("sums", self.here(combined), wanted)
        status = torch.zeros(self.shape.ranks, dtype=torch.int32, device=self.buffer.device)
        self.buffer.low_latency_query_mask_buffer(status)
        masked = outs if before_combine is None else ()
        listed(
            "masked",
            self.here(status) != 0,
            [number in masked for number in range(self.shape.ranks)],
        )

    def lets_in(self, out: int, counts: Iterable[int]) -> None:
        """A rank and the others mask each other for some calls, and then make more calls together
        than may be in flight at a time."""
        buffer, every = self.buffer, range(self.shape.ranks)
        others = [out] if self.rank != out else [rank for rank in every if rank != out]
        for count in counts:
            for rank in others:
                buffer.low_latency_update_mask_buffer(rank, True)
            for _ in range(count // 2):
                self.without(others, self.call())
            if count % 2:
                self.without(others, self.call(), buffer.low_latency_clean_mask_buffer)
            buffer.low_latency_clean_mask_buffer()
            self.counted = self.here(self.stats).tolist()
            for _ in range(2):
                self.two_at_a_time()
