"""Normal mode of ranks that have GPUs: what both interfaces make of it. A call is one round, and waits for nothing unless it is asked
how much arrives."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Callable

import torch

from uccl import _core
from uccl.ep._gpu_group import GpuGroup
from uccl.ep._group import address, align, align_all, biases, check, scales_in, weights_address

#: Rows that a guess has room for beyond those that came last: one of so many, and no fewer than these.
SPARE, LEAST_SPARE = 16, 64


@dataclass
class LaidOut:
    """Tokens whose layout a caller has asked for, as a dispatch may take them."""

    native: Any
    topk_idx: torch.Tensor
    version: int
    """Of the choices: another one when they were written to since."""
    num_experts: int
    memory: torch.Tensor
    stream: int
    """The number of the stream that they were laid out on."""
    is_captured: bool
    """Whether a graph lays them out, and does so each time that it is repeated: then only dispatches of graphs take them, and else none
    of these."""

    def is_of(self, topk_idx: torch.Tensor, num_experts: int) -> bool:
        """Whether a dispatch by these choices finds the same now."""
        return (
            self.topk_idx is topk_idx
            and self.version == version_of(topk_idx)
            and self.num_experts == num_experts
            and self.is_captured == torch.cuda.is_current_stream_capturing()
        )


def version_of(tensor: torch.Tensor) -> int:
    """Another number after each time that torch writes to a tensor; always the same for one of inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass
class Routed:
    """What says where tokens go: their choices, their ranks, or a dispatch before."""

    tokens: int
    top_k: int
    num_experts: int
    #: ``[n, K]``
    topk_idx: torch.Tensor | None = None
    #: Of these choices, if the caller has asked for it.
    laid_out: LaidOut | None = None
    #: ``[n, R]`` bool, and i32 by expert.
    ranks: tuple[torch.Tensor, torch.Tensor] | None = None
    again: Rows | None = None


@dataclass
class Placed:
    """How rows lie: by token, or by expert."""

    tokens: int
    """How many there are, or, where the host does not know, may be."""
    least: int = 0
    """Rows that a combine needs, as far as the host knows."""
    alignment: int | None = None
    """Of the rows of each expert; None by token."""
    rows: int | None = None
    """How many there are by expert."""

    @staticmethod
    def of(counts: tuple[int, list[int]], alignment: int | None) -> Placed:
        """As so many tokens lie of which so many chose each expert."""
        tokens, per_expert = counts
        if alignment is None:
            return Placed(tokens, tokens)
        aligned = align_all(per_expert, alignment)
        return Placed(tokens, sum(aligned[:-1]) + per_expert[-1], alignment, sum(aligned))

    def length(self) -> int:
        """How many rows there are."""
        return self.tokens if self.rows is None else self.rows

    def and_more(self, most: int, top_k: int, local: int) -> Placed:
        """Room for so much, and for some more, if there are ``most`` tokens at most."""
        tokens = min(with_spare(self.tokens), most)
        if self.alignment is None:
            return Placed(tokens)
        rows = min(with_spare(self.length()), most_rows(most, top_k, local, self.alignment))
        # What fits then fits with the rows behind the last expert's, that alignment leaves.
        return Placed(tokens, alignment=self.alignment, rows=align(rows, self.alignment))


def with_spare(count: int) -> int:
    """Some more."""
    return count + max(count // SPARE, LEAST_SPARE)


def most_rows(tokens: int, top_k: int, local: int, alignment: int) -> int:
    """The most rows by expert of so many tokens."""
    return align(tokens * min(top_k, local) + (alignment - 1) * local, alignment)


@dataclass
class Rows:
    """What a dispatch returned, and its combines need, or a dispatch to where its tokens went."""

    mode: NormalMode
    native: Any
    routed: Routed
    slots: int
    """The most tokens of any rank."""
    layout: Placed
    memory: torch.Tensor
    """Scratch of the first combine, and of this."""
    laid_out: torch.Tensor | None
    """Where tokens go, if that was known before."""
    told: torch.Tensor
    """``[R + 1]`` starts of ranks, ``[E/R]`` counts, and by token its number, and its origin; by expert also ``[E/R]`` ends of experts, and
    ``[m, K + 2]`` by token."""
    at: tuple[int, int, int, int]
    """Where in that counts begin, numbers of tokens, ends of experts, and what is told by token."""
    stream: int
    """The number of the stream that they were made on."""
    spare: int
    """Where in the memory the first combine has its scratch; 0 behind it."""
    stayed: bool
    """Whether rows stayed in the buffer: their places are those of the buffer's rows."""

    def kept(self) -> tuple[torch.Tensor, ...]:
        """What calls with it read."""
        own = self.memory, self.told
        return own if self.laid_out is None else (*own, self.laid_out)

    def ends_of_ranks(self) -> torch.Tensor:
        """``[R]`` i32: how many tokens arrived from the ranks up to each."""
        return self._part(1, self.mode.ranks)

    def prefixes(self) -> torch.Tensor:
        """``[R, R]`` i32, as DeepEP has it: each column is this rank's, the only one that it knows."""
        return self.told.as_strided((self.mode.ranks, self.mode.ranks), (1, 0), 1)

    def per_expert(self) -> torch.Tensor:
        """``[E/R]`` i32: how many tokens chose each."""
        return self._part(self.at[0], self.mode.local(self.routed))

    def source_tokens(self) -> torch.Tensor:
        """``[m]`` i32: numbers of tokens at their ranks."""
        return self._part(self.at[1], self.layout.tokens)

    def ends_of_experts(self) -> torch.Tensor:
        """``[E/R]`` i32: where the last row of each ends, where rows are by expert."""
        return self._part(self.at[2], self.mode.local(self.routed))

    def metadata(self) -> torch.Tensor:
        """``[m, K + 2]`` i32: ``rank * T + token``, ``rank * K + last choice``, and the row of each choice, or -1; by expert."""
        tokens, width = self.layout.tokens, 2 + self.routed.top_k
        return self.told.as_strided((tokens, width), (width, 1), self.at[3])

    def _part(self, start: int, length: int) -> torch.Tensor:
        return self.told.as_strided((length,), (1,), start)


class NormalMode:
    """Calls of normal mode of one rank's end of a group."""

    def __init__(self, gpu: GpuGroup, limit: float) -> None:
        """The host waits ``limit`` seconds for counts, at most."""
        self.gpu, self.limit = gpu, limit
        self.device, self.ranks, self.native = gpu.device, gpu.ranks, gpu.native
        #: What handles of DeepEP's have of its channels.
        self.channels = gpu.empty((gpu.ranks, 0), torch.int32)
        #: How what arrived last was placed, by kind of call: what the next one of that kind has room for before the host knows.
        self.last: dict[tuple[int, ...], Placed] = {}
        self._guesses = gpu.native.has_whole_calls
        #: By the number of the object that says which tokens go to which ranks, for as long as that object lives: tensors are no keys,
        #: since they are compared value by value.
        self._laid_out: dict[int, LaidOut] = {}

    def local(self, routed: Routed) -> int:
        """Experts of each rank."""
        return routed.num_experts // self.ranks

    def layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts tokens: by rank ``[R]`` i32, by expert ``[E]`` i32, and ``[n, R]`` bool."""
        check("topk_idx", topk_idx, (None, None), torch.int64, torch.int32, device=self.device)
        (tokens, top_k), empty = topk_idx.shape, self.gpu.empty
        goes = empty((tokens, self.ranks), torch.bool)
        # One piece of memory, whose parts begin at multiples of 16 bytes.
        scratch_len = _core.ep_cuda_scratch_len(tokens, top_k, num_experts, self.ranks)
        ranks_at = align(num_experts, 4)
        scratch_at = ranks_at + align(self.ranks, 4)
        whole = empty((scratch_at + align(scratch_len, 4) // 4,), torch.int32)
        per_expert = whole.as_strided((num_experts,), (1,))
        per_rank = whole.as_strided((self.ranks,), (1,), ranks_at)
        stream = self.gpu.stream()
        native = _core.ep_cuda_layout(
            self.native,
            experts=address(topk_idx),
            is_64=topk_idx.dtype == torch.int64,
            tokens=tokens,
            top_k=top_k,
            num_experts=num_experts,
            per_rank=address(per_rank),
            per_expert=address(per_expert),
            goes=address(goes),
            scratch=whole.data_ptr() + 4 * scratch_at,
            stream=stream,
        )
        is_captured, version = torch.cuda.is_current_stream_capturing(), version_of(topk_idx)
        self._laid_out[id(goes)] = LaidOut(native, topk_idx, version, num_experts, whole, stream, is_captured)
        weakref.finalize(goes, self._laid_out.pop, id(goes), None).atexit = False
        return per_rank, per_expert, goes

    def by_choices(self, topk_idx: torch.Tensor, num_experts: int, goes: torch.Tensor | None = None) -> Routed:
        """Tokens go to the ranks of their experts. With ``goes`` of ``layout`` they need not be counted again."""
        check("topk_idx", topk_idx, (None, None), torch.int64, torch.int32, device=self.device)
        tokens, top_k = topk_idx.shape
        laid_out = self._laid_out.get(id(goes))
        if laid_out is not None and not laid_out.is_of(topk_idx, num_experts):
            laid_out = None
        return Routed(tokens, top_k, num_experts, topk_idx=topk_idx, laid_out=laid_out)

    def by_ranks(self, goes: torch.Tensor, per_expert: torch.Tensor) -> Routed:
        """Tokens go to these ranks, and have no choices."""
        check("is_token_in_rank", goes, (None, self.ranks), torch.bool, device=self.device)
        check("num_tokens_per_expert", per_expert, (None,), torch.int32, device=self.device)
        return Routed(goes.shape[0], 0, per_expert.numel(), ranks=(goes, per_expert))

    def again(self, rows: Rows) -> Routed:
        """Tokens go where they went before."""
        if rows.mode is not self:
            raise RuntimeError("the handle is of another buffer")
        return Routed(rows.routed.tokens, rows.routed.top_k, rows.routed.num_experts, again=rows)

    def guess(self, kind: tuple[int, ...], slots: int, routed: Routed) -> Placed | None:
        """Room for what will arrive, unless nobody knows: more is possible."""
        last = self.last.get(kind) if self._guesses else None
        return None if last is None else last.and_more(self.ranks * slots, routed.top_k, self.local(routed))

    def begin(
        self,
        x: tuple[torch.Tensor, torch.Tensor | None],
        weights: torch.Tensor | None,
        routed: Routed,
        most: int | None = None,
        blocks: int = 0,
        may_stay: bool = False,
    ) -> Dispatch:
        """Begins the sending of rows and their scales. ``most`` are the tokens of any rank, at most; where nobody says, as many as there
        is room for, where rows ``may_stay`` too. Launches have ``blocks`` at most, or as many as the group has."""
        rows, scales = x
        check("x", rows, (None, None), device=self.device)
        if rows.shape[0] != routed.tokens:
            raise ValueError(f"x has {rows.shape[0]} tokens, and {routed.tokens} are routed")
        if weights is not None:
            shape = (routed.tokens, routed.top_k)
            check("topk_weights", weights, shape, torch.float32, device=self.device)
        return Dispatch(self, (rows, scales), weights, routed, most, blocks, may_stay)

    def combine(
        self,
        x: torch.Tensor,
        rows: Rows,
        weights: torch.Tensor | None,
        bias: Any,
        sums: str,
        sends: str = "row",
        blocks: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sends rows back and sums them by "rank" or by "choice", and weights if there are any. Of rows by expert ``sends`` their "sum", or
        "each"."""
        check("x", x, (None, None), torch.bfloat16, device=self.device)
        (have, hidden), routed, empty = x.shape, rows.routed, self.gpu.empty
        if have < rows.layout.least:
            raise ValueError(f"x has {have} rows, and {rows.layout.least} arrived")
        if weights is not None:
            shape = (have, routed.top_k) if sends == "row" else (have,)
            check("topk_weights", weights, shape, torch.float32, device=self.device)
        out = empty((routed.tokens, hidden), torch.bfloat16)
        out_weights = None if weights is None else empty((routed.tokens, routed.top_k), torch.float32)
        bias = biases(bias, out)
        stream = self.gpu.stream()
        self.gpu.keep_for(stream, rows.stream, rows.kept())
        _memory, scratch = self.gpu.scratch_of(rows)
        combine = _core.EpCudaNormalCombine(
            self.native,
            rows.native,
            len=have,
            rows=address(x),
            hidden=hidden,
            weights=weights_address(weights),
            sends=sends,
            blocks=blocks,
            scratch=scratch,
            stream=stream,
        )
        combine.finish(rows=address(out), sums=sums, bias=bias, weights=address(out_weights))
        return out, out_weights


class Dispatch:
    """A dispatch that was begun."""

    def __init__(
        self,
        mode: NormalMode,
        x: tuple[torch.Tensor, torch.Tensor | None],
        weights: torch.Tensor | None,
        routed: Routed,
        most: int | None,
        blocks: int,
        may_stay: bool,
    ) -> None:
        (rows, scales), again, laid_out = x, routed.again, routed.laid_out
        given = scales_in(scales, routed.tokens, mode.device)
        self.mode, self.routed, self._may_stay = mode, routed, may_stay
        # What is read until the work of ``receive`` has ended.
        self._sent = x, weights
        self._row_bytes = rows.shape[1] * rows.element_size()
        self._scales = 0 if given is None else given[1]
        if again is not None:
            # The same on all ranks, whatever they send now.
            self.slots = again.slots
        elif most is None:
            self.slots = _core.ep_cuda_room_for(
                mode.native,
                routed.tokens,
                payload=self._row_bytes,
                scales=self._scales,
                hidden=rows.shape[1],
                top_k=routed.top_k,
                local_experts=mode.local(routed),
                stays=may_stay,
            )
        else:
            self.slots = most
        self._stream = mode.gpu.stream()
        length = _core.ep_cuda_combine_scratch_len()
        spare = 0
        if again is not None:
            mode.gpu.keep_for(self._stream, again.stream, again.kept())
        else:
            spare = length
            if laid_out is None:
                length = _core.ep_cuda_scratch_len(routed.tokens, routed.top_k, routed.num_experts, mode.ranks)
            else:
                mode.gpu.keep_for(self._stream, laid_out.stream, (laid_out.memory,))
        self._memory = mode.gpu.empty((spare + length,), torch.uint8)
        idx, ranks = routed.topk_idx, routed.ranks
        self.native = _core.EpCudaNormalDispatch(
            mode.native,
            rows=address(rows),
            len=self._row_bytes,
            scales=given,
            weights=address(weights),
            experts=address(idx),
            is_64=idx is not None and idx.dtype == torch.int64,
            ranks=None if ranks is None else (address(ranks[0]), address(ranks[1])),
            tokens=routed.tokens,
            top_k=routed.top_k,
            num_experts=routed.num_experts,
            laid_out=None if laid_out is None else laid_out.native,
            again=None if again is None else again.native,
            slots=self.slots,
            blocks=blocks,
            scratch=self._memory.data_ptr() + spare,
            stream=self._stream,
        )

    def counts(self) -> tuple[int, list[int]]:
        """How many tokens arrive, and how many of them chose each of this rank's experts. Waits until every rank has told."""
        refuse_in_graph()
        of_ranks, per_expert = self.native.counts(self.mode.limit)
        return sum(of_ranks), per_expert

    def receive_counted(
        self,
        arriving: Callable[[int], Arriving],
        alignment: int | None = None,
        may_guess: bool = True,
        zeroes_foreign: bool = False,
        zeroes_gaps: bool = False,
    ) -> tuple[Arriving, Rows, list[int]]:
        """As :meth:`counts` and :meth:`receive`, to exactly as many rows as arrive, for which ``arriving`` makes tensors; and returns how many
        tokens chose each expert. Where the host has a guess, rows are on their way while it waits."""
        refuse_in_graph()
        mode, routed, zeroes = self.mode, self.routed, (zeroes_foreign, zeroes_gaps)
        kind = (self._row_bytes, self._scales, routed.top_k, routed.num_experts, alignment or 0, routed.tokens.bit_length())
        guess = mode.guess(kind, self.slots, routed) if may_guess else None
        if guess is None:
            counts = self.counts()
            placed = mode.last[kind] = Placed.of(counts, alignment)
        else:
            to = arriving(guess.length())
            rows, told = self._receive(to, guess, zeroes, mode.limit)
            counts = sum(told[0]), told[1]
            placed = mode.last[kind] = Placed.of(counts, alignment)
            if rows is not None:
                rows.layout = placed
                to.shorten(placed.length())
                return to, rows, counts[1]
        to = arriving(placed.length())
        return to, self._receive(to, placed, zeroes)[0], counts[1]

    def in_place(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Rows in the buffer, and their scales if they have any, if they may stay there and can."""
        place = self.native.in_place() if self._may_stay else None
        if place is None:
            return None
        count, rows_at, stride, scales_at = place
        (rows, scales), view = self._sent[0], self.mode.gpu.rows_in_pool
        return (
            view(rows_at, stride, (count, rows.shape[1]), rows.dtype),
            None if scales is None else view(scales_at, stride, (count, *scales.shape[1:]), scales.dtype),
        )

    def receive(
        self, to: Arriving, layout: Placed, zeroes_foreign: bool = False, zeroes_gaps: bool = False
    ) -> Rows:
        """Enqueues the taking out of what arrives. Weights of other ranks' experts are 0 with ``zeroes_foreign``, and rows between those of
        experts with ``zeroes_gaps``."""
        return self._receive(to, layout, (zeroes_foreign, zeroes_gaps))[0]

    def _receive(
        self, to: Arriving, layout: Placed, zeroes: tuple[bool, bool], limit: float | None = None
    ) -> tuple[Any, Any]:
        """The same. With a ``limit`` in seconds the layout is a guess: counts are waited for and returned, and there are no rows if they do not
        fit."""
        mode, routed, again = self.mode, self.routed, self.routed.again
        told = at = table = by_expert = None
        if again is None:
            told, at, table, by_expert = self._tables(layout)
        scales = to.scales
        native, counts = self.native.receive(
            len=to.rows.shape[0],
            rows=address(to.rows),
            stride=self._row_bytes,
            scales=None if scales is None else (address(scales), scales.stride(0), word_stride(scales)),
            choices=address(to.choices),
            is_64=to.choices is not None and to.choices.dtype == torch.int64,
            weights=address(to.weights),
            zeroes_foreign=zeroes[0],
            zeroes_gaps=zeroes[1],
            table=table,
            by_expert=by_expert,
            limit=limit,
            stays=to.stays,
        )
        if native is None:
            return None, counts
        if again is not None:
            return again, counts
        spare, laid_out = self._memory.data_ptr(), routed.laid_out
        before = None if laid_out is None else laid_out.memory
        rows = Rows(mode, native, routed, self.slots, layout, self._memory, before, told, at, self._stream, spare, to.stays)
        return rows, counts

    def _tables(self, layout: Placed) -> tuple[torch.Tensor, tuple[int, int, int, int], Any, Any]:
        """Memory for what is told of rows, where its parts begin, and their addresses."""
        ranks, local, tokens = self.mode.ranks, self.mode.local(self.routed), layout.tokens
        # Kernels of torch's that read a part are others where it is not aligned to 16 bytes.
        of_experts, of_tokens = align(local, 4), align(tokens, 4)
        per_expert = align(1 + ranks, 4)
        src_info = per_expert + of_experts
        ends = src_info + 2 * of_tokens
        at = per_expert, src_info, ends, ends + of_experts
        is_by_expert = layout.alignment is not None
        length = at[3] + (2 + self.routed.top_k) * tokens if is_by_expert else ends
        told = self.mode.gpu.empty((length,), torch.int32)
        start = told.data_ptr()
        table = start + 4 * src_info, start + 4 * (src_info + of_tokens), start, start + 4 * per_expert
        by_expert = (layout.alignment, tokens, start + 4 * at[2], start + 4 * at[3]) if is_by_expert else None
        return told, at, table, by_expert


@dataclass
class Arriving:
    """Tensors for what arrives, each with as many rows."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    """``[m, S]`` or ``[m]``, of any strides."""
    choices: torch.Tensor | None
    weights: torch.Tensor | None
    stays: bool = False
    """Whether rows and scales are those that :meth:`Dispatch.in_place` has returned."""

    def shorten(self, rows: int) -> None:
        """Leaves so many rows of each, and the memory as it is."""
        for tensor in (self.rows, self.scales, self.choices, self.weights):
            if tensor is not None:
                tensor.resize_((rows, *tensor.shape[1:]))


def refuse_in_graph() -> None:
    """Raises where a graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a graph does not wait for counts: capture dispatch with num_worst_tokens, or of ElasticBuffer with do_cpu_sync=False"
        )


def word_stride(scales: torch.Tensor) -> int:
    """From one word of a row's scales to the next."""
    return scales.stride(1) if scales.dim() > 1 else 1
