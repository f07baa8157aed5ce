"""Dispatches of normal mode on a GPU.

Only the host time before the launch delays a call: the rest runs beside the GPU's work. So objects
that follow from sizes are kept for the next call, small parts share one piece of memory, and their
tensors are made after the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from uccl import _core
from uccl.ep._cuda.group import GpuGroup
from uccl.ep._cuda.routing import LaidOut, Routed, Rows
from uccl.ep._cuda.workspace import Cut, Parts, Placed, Small, words
from uccl.ep._group import TOKENS, address, check, scales_for, scales_in

COMBINE_SCRATCH_WORDS = words(_core.ep_cuda_combine_scratch_len())
#: Words for a combine, and for a dispatch.
NO_SCRATCH = (0, 0)
#: Tokens, and their scales if they have any.
Sent = tuple[torch.Tensor, "torch.Tensor | None"]


@dataclass
class Wanted:
    """The caller's options for received rows."""

    placed: Placed | None = None
    """The layout of rows; None: exactly as many as arrive, for which the host waits."""
    alignment: int | None = None
    """The alignment of each expert's rows; None: rows are by token."""
    choices: torch.dtype | None = None
    """The dtype of returned choices, or None."""
    zeroes_foreign: bool = False
    """Whether weights of other ranks' experts are 0."""
    zeroes_gaps: bool = False
    """Whether rows between those of experts are 0."""
    is_col_major: bool = False
    """Whether the scales of one channel are contiguous."""
    may_stay: bool = False
    """Whether rows may stay in the buffer, for any ``placed``."""
    most: int | None = None
    """The most tokens of any rank; None: as many as the pool has room for."""
    blocks: int = 0
    """The most blocks of a launch; 0: as many as the group has."""


@dataclass
class Arrived:
    """Received tensors, all with as many rows."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    """``[m, S]`` or ``[m]``, of any strides."""
    choices: torch.Tensor | None
    weights: torch.Tensor | None


class Sizes(NamedTuple):
    """Sizes of a dispatch, without its tokens."""

    hidden: int
    """Values of a row."""
    row_bytes: int
    scales: int
    """Words of a row's scales."""
    top_k: int
    num_experts: int
    alignment: int | None
    choice_words: int
    """Words of each returned choice, or 0."""
    has_weights: bool
    zeroes_foreign: bool
    zeroes_gaps: bool
    is_col_major: bool
    stays: bool
    """Whether rows may stay in the buffer."""
    tells: bool
    """Whether the dispatch fills the handle's tables: one that reuses a handle does not."""
    may_guess: bool
    """Whether memory for received rows may be allocated from a guess, before the host has counts.
    """


#: Arguments for the engine about sent tokens; 0 is no address. Rows; scales, with words of a token
#: and strides by token and by word; weights; experts, and whether they have 64 bits; for tokens
#: with ranks and without choices, a byte by token and rank, and i32 by expert; tokens; a layout, or
#: the handle of an earlier dispatch; the most tokens of any rank, and the most blocks; scratch; the
#: stream.
Sending = tuple[
    int,
    "tuple[int, int, int, int] | None",
    int,
    int,
    bool,
    "tuple[int, int] | None",
    int,
    Any,
    Any,
    int,
    int,
    int,
    int,
]
#: Arguments for the engine about output memory: rows and their address; scales, with strides by row
#: and by word; whether both stay in the buffer; tokens; the small parts.
Receiving = tuple[int, int, "tuple[int, int, int] | None", bool, int, int, Any]


class Kind:
    """Dispatches of the same sizes and of about as many tokens: the engine's data for them, and a
    guess of rows."""

    def __init__(self, sizes: Sizes, ranks: int) -> None:
        self.sizes, self._ranks = sizes, ranks
        self.native = _core.EpCudaNormalKind(sizes)
        #: The most tokens of any rank that the pool has room for; -1 before the first check.
        self.most = -1
        #: The guessed layout of the next received rows.
        self.guess: Placed | None = None
        #: Memory for the small parts of the next dispatch, on a stream.
        self.ready: tuple[Small, int] | None = None

    def learn(self, last: Placed, slots: int) -> None:
        """Makes the next guess from the received sizes, where each rank has up to ``slots`` tokens."""
        sizes, ranks = self.sizes, self._ranks
        if sizes.may_guess:
            most = Placed.at_most(
                ranks * slots, sizes.alignment, sizes.top_k, sizes.num_experts // ranks
            )
            self.guess = last.and_more(most)


@lru_cache(maxsize=64)
def cut_of(sizes: Sizes, ranks: int, scratch: tuple[int, int], placed: Placed | None) -> Cut:
    """Offsets of the parts in the workspace: scratch of a combine and of the dispatch, in words,
    and the parts for rows of this layout, if there is one."""
    if placed is None:
        return Parts(*scratch, 0, 0, 0, 0, 0, 0, 0, 0, 0).cut()
    tokens, local, by_expert = (
        placed.tokens,
        sizes.num_experts // ranks,
        placed.alignment is not None,
    )
    told = (1 + ranks, local, tokens, tokens) if sizes.tells else (0, 0, 0, 0)
    of_experts = (local, (2 + sizes.top_k) * tokens) if sizes.tells and by_expert else (0, 0)
    choices = tokens * sizes.top_k * sizes.choice_words
    weights = placed.length() if by_expert else tokens * sizes.top_k
    scales = 0 if sizes.is_col_major or placed.stays else placed.length() * sizes.scales
    return Parts(
        *scratch, *told, *of_experts, choices, weights if sizes.has_weights else 0, scales
    ).cut()


@dataclass
class Outputs:
    """Output memory."""

    placed: Placed
    rows: torch.Tensor | None
    """None where rows and scales stay in the buffer."""
    scales: torch.Tensor | None
    """None also where scales are a small part."""
    small: Small
    stay: tuple[int, int, int, int] | None = None
    """Rows that stay, the first one's offset in the pool, the bytes between them, and the first
    scale's offset."""


class Dispatches:
    """Dispatches of one rank's end of a group."""

    def __init__(self, gpu: GpuGroup, limit: float) -> None:
        """The host waits up to ``limit`` seconds for counts."""
        self.gpu, self.limit = gpu, limit
        self.guesses = gpu.native.has_whole_calls
        self.kinds: dict[tuple[Any, ...], Kind] = {}

    def kind_of(self, *about: Any) -> Kind:
        """The kind for these sizes, given one behind the other, and for token counts of so many
        bits."""
        kind = self.kinds.get(about)
        if kind is None:
            kind = self.kinds[about] = Kind(Sizes(*about[:-1]), self.gpu.ranks)
        return kind


class Dispatch:
    """A prepared dispatch."""

    def __init__(
        self, of: Dispatches, x: Sent, weights: torch.Tensor | None, routed: Routed, wanted: Wanted
    ) -> None:
        (rows, scales), gpu = x, of.gpu
        check("x", rows, (None, None), device=gpu.device)
        have, hidden = rows.shape
        if have != routed.tokens:
            raise ValueError(f"x has {have} tokens, and {routed.tokens} are routed")
        if weights is not None:
            check("topk_weights", weights, (have, routed.top_k), torch.float32, device=gpu.device)
        if wanted.placed is None:
            refuse_in_graph(routed.laid_out)
        given = scales_in(scales, have, gpu.device)
        self._of, self._gpu, self._routed, self._wanted = of, gpu, routed, wanted
        # The dispatch reads these tensors until its work has ended.
        self._rows, self._scales, self._weights = rows, scales, weights
        self._addresses = address(rows), given, address(weights)
        has_columns = scales is not None and wanted.is_col_major
        # In the order of `Sizes`, which a kind makes once, because that takes a microsecond or two.
        self._kind = of.kind_of(
            hidden,
            hidden * rows.element_size(),
            0 if given is None else given[1],
            routed.top_k,
            routed.num_experts,
            wanted.alignment,
            0 if wanted.choices is None else wanted.choices.itemsize // 4,
            weights is not None,
            wanted.zeroes_foreign,
            wanted.zeroes_gaps,
            has_columns,
            wanted.may_stay,
            routed.again is None,
            # With contiguous scales of a channel, their offsets depend on the number of rows.
            of.guesses and routed.again is None and not has_columns,
            have.bit_length(),
        )
        self._sizes = self._kind.sizes
        self._slots = self._most_tokens()
        self._stream = gpu.stream()
        #: Words of the first combine's scratch, and of the dispatch's.
        self._scratch = self._scratch_words()

    def make(self) -> tuple[Arrived, Rows, list[int]]:
        """Sends tokens, and takes out the received ones. Where the host waits for counts, also
        returns the tokens of each expert; with a guess, rows are on their way while it waits."""
        wanted, kind, group = self._wanted, self._kind, self._gpu.native
        placed, handle, left, counts = wanted.placed or kind.guess, None, None, None
        if placed is None or wanted.may_stay:
            # Whether rows stay, or how many there are, is known only after the call has begun.
            own = self._small(self._scratch, None)
            left = kind.native.begin(group, self._sending(own))
            if placed is None:
                counts = left.counts(self._of.limit)
        else:
            own = self._small(self._scratch, placed)
            to = self._outputs(placed, own)
            limit = None if wanted.placed else self._of.limit
            handle, left, counts = kind.native.dispatch(
                group, self._sending(own), self._receiving(to), limit
            )
        if counts is not None:
            placed = Placed.of(counts, wanted.alignment)
        if left is not None:
            # Rows may stay, or there was no guess, or it was too small.
            to = self._outputs(placed, None, left.in_place() if wanted.may_stay else None)
            handle = kind.native.receive(left, self._receiving(to))
        else:
            to.placed = placed
        rows = self._routed.again or self._rows_of(handle, to, own)
        arrived = self._arrived(to)
        if counts is None:
            return arrived, rows, []
        kind.learn(placed, self._slots)
        if kind.guess is not None:
            kind.ready = self._small(self._scratch, kind.guess), self._stream
        return arrived, rows, counts[1]

    def _most_tokens(self) -> int:
        """The most tokens of any rank: the caller's number, or else the room; with a handle, the
        handle's number. A rank with more tokens tells the others, which would wait for it."""
        routed, most = self._routed, self._wanted.most
        if routed.again is not None:
            return routed.again.slots
        if most is not None:
            if routed.tokens > most:
                self._tell_too_many()
                raise ValueError(
                    f"this rank has {routed.tokens} tokens, and room for {most} of each rank: num_max_tokens_per_rank is the most of any rank"
                )
            return most
        if routed.tokens > self._kind.most:
            try:
                self._kind.most = self._room()
            except ValueError as why:
                self._tell_too_many()
                raise ValueError(
                    f"{why}; programs that ask for its size set {TOKENS} to half of the tokens of a rank, on all ranks"
                ) from None
        return self._kind.most

    def _room(self) -> int:
        """The tokens of each rank that the pool has room for, if they are enough for this rank's."""
        routed, sizes = self._routed, self._sizes
        return _core.ep_cuda_room_for(
            self._gpu.native,
            routed.tokens,
            payload=sizes.row_bytes,
            scales=sizes.scales,
            hidden=sizes.hidden,
            top_k=routed.top_k,
            local_experts=routed.num_experts // self._gpu.ranks,
            stays=sizes.stays,
        )

    def _tell_too_many(self) -> None:
        # The work of a captured graph is not done now, on any rank.
        if not torch.cuda.is_current_stream_capturing():
            self._gpu.native.tell_too_many(self._gpu.stream())

    def _scratch_words(self) -> tuple[int, int]:
        routed, again, laid_out = self._routed, self._routed.again, self._routed.laid_out
        if again is not None:
            self._gpu.keep_for(self._stream, again.stream, again.kept())
            return 0, COMBINE_SCRATCH_WORDS
        if laid_out is not None:
            self._gpu.keep_for(self._stream, laid_out.stream, (laid_out.memory,))
            return COMBINE_SCRATCH_WORDS, COMBINE_SCRATCH_WORDS
        length = _core.ep_cuda_scratch_len(
            routed.tokens, routed.top_k, routed.num_experts, self._gpu.ranks
        )
        return COMBINE_SCRATCH_WORDS, words(length)

    def _small(self, scratch: tuple[int, int], placed: Placed | None) -> Small:
        """Memory for small parts."""
        cut = cut_of(self._sizes, self._gpu.ranks, scratch, placed)
        # A captured dispatch has memory of its own, and never waits for counts.
        if self._wanted.placed is None:
            ready, self._kind.ready = self._kind.ready, None
            if ready is not None and ready[0].cut is cut and ready[1] == self._stream:
                return ready[0]
        memory = self._gpu.empty((cut.length,), torch.int32)
        return Small(memory, memory.data_ptr(), cut)

    def _outputs(self, placed: Placed, small: Small | None, stay: Any = None) -> Outputs:
        """Memory for rows of this layout, or for the small parts of rows that stay in the buffer."""
        if stay is not None:
            placed = Placed(stay[0], stays=True)
            return Outputs(placed, None, None, self._small(NO_SCRATCH, placed), stay)
        have, scales = placed.length(), None
        rows = self._gpu.empty((have, self._sizes.hidden), self._rows.dtype)
        if self._sizes.is_col_major:
            scales = scales_for(self._scales, have, True)
        return Outputs(placed, rows, scales, small or self._small(NO_SCRATCH, placed))

    def _sending(self, own: Small) -> Sending:
        (rows, scales, weights), routed, idx = self._addresses, self._routed, self._routed.topk_idx
        ranks, laid_out, again = routed.ranks, routed.laid_out, routed.again
        return (
            rows,
            scales,
            weights,
            address(idx),
            idx is not None and idx.dtype == torch.int64,
            None if ranks is None else (address(ranks[0]), address(ranks[1])),
            routed.tokens,
            None if laid_out is None else laid_out.native,
            None if again is None else again.native,
            self._slots,
            self._wanted.blocks,
            own.start + 4 * own.cut.at.scratch,
            self._stream,
        )

    def _receiving(self, to: Outputs) -> Receiving:
        words_of, placed, small, scales = self._sizes.scales, to.placed, to.small, None
        if to.scales is not None:
            scales = address(to.scales), *to.scales.stride()
        elif words_of and to.stay is None:
            scales = small.start + 4 * small.cut.at.scales, words_of, 1
        return (
            placed.length(),
            address(to.rows),
            scales,
            to.stay is not None,
            placed.tokens,
            small.start,
            small.cut.native,
        )

    def _arrived(self, to: Outputs) -> Arrived:
        """The caller's tensors, with the rows of the layout."""
        sizes, small, tokens, have, scales = (
            self._sizes,
            to.small,
            to.placed.tokens,
            to.placed.length(),
            self._scales,
        )
        choices = weights = None
        if self._wanted.choices is not None:
            choices = small.tensor(
                small.cut.at.choices, (tokens, sizes.top_k), self._wanted.choices
            )
        if sizes.has_weights:
            shape = (tokens, sizes.top_k) if to.placed.alignment is None else (have,)
            weights = small.tensor(small.cut.at.weights, shape, torch.float32)
        if to.stay is not None:
            return Arrived(*self._staying(to.stay), choices, weights)
        if to.rows.shape[0] > have:
            to.rows.resize_((have, sizes.hidden))
        if scales is not None:
            shape = (have, *scales.shape[1:])
            scales = (
                to.scales
                if sizes.is_col_major
                else small.tensor(small.cut.at.scales, shape, scales.dtype)
            )
        return Arrived(to.rows, scales, choices, weights)

    def _staying(self, stay: tuple[int, int, int, int]) -> Sent:
        """Rows in the buffer, and their scales."""
        (have, rows_at, stride, scales_at), view, scales = (
            stay,
            self._gpu.rows_in_pool,
            self._scales,
        )
        return (
            view(rows_at, stride, (have, self._sizes.hidden), self._rows.dtype),
            None
            if scales is None
            else view(scales_at, stride, (have, *scales.shape[1:]), scales.dtype),
        )

    def _rows_of(self, native: Any, to: Outputs, own: Small) -> Rows:
        laid_out = self._routed.laid_out
        return Rows(
            self._of,
            native,
            self._routed,
            self._slots,
            to.placed,
            own.memory,
            None if laid_out is None else laid_out.memory,
            to.small,
            self._stream,
            own.start,
        )


def refuse_in_graph(laid_out: LaidOut | None) -> None:
    """Raises if a graph is being captured. A layout has stored the answer."""
    if torch.cuda.is_current_stream_capturing() if laid_out is None else laid_out.is_captured:
        raise RuntimeError(
            "a graph does not wait for counts: capture dispatch with num_worst_tokens, or of ElasticBuffer with do_cpu_sync=False"
        )
