"""The interface between the buffers and the backends: ranks on the CPU, and ranks with GPUs.

The buffers check DeepEP's arguments and translate its names. A backend gives tensors to the engine.
Each backend takes its own routings and handles only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Callable, NamedTuple, Protocol

import torch

from uccl.ep._checks import check_count
from uccl.ep._events import AnyCall, Events
from uccl.ep._formats import Format
from uccl.ep._row_layout import RowLayout

#: Tokens, and their scales if they have any.
Tokens = tuple[torch.Tensor, "torch.Tensor | None"]
#: The experts that tokens chose, and their weights.
Choices = tuple[torch.Tensor, torch.Tensor]
#: The tensors of a combine in low latency mode: for the sums, and for waits by rank.
CombineResults = tuple["torch.Tensor | None", "torch.Tensor | None"]
#: A function by which ranks exchange bytes: it returns those of all ranks, by rank.
Exchange = Callable[[bytes], "list[bytes | None]"]


@dataclass(frozen=True)
class BufferParams:
    """A buffer's parameters, for the CPU and for GPUs."""

    pool_bytes: int
    timeout: float | None
    """Seconds that a call waits for its peers."""
    gpu_timeout: float | None
    """Seconds that a call on a GPU waits for its peers."""
    masks_late: bool = False
    count_timeout: float | None = None
    """With GPUs, seconds that the host waits for counts. None: twice the timeout."""
    via_host: bool = False
    """Whether ranks do not reach each other's GPU memory, and use host memory."""
    in_fabric: bool = False
    """Whether ranks on several hosts of an NVLink domain reach each other's GPU memory."""
    says_fabric: bool = False
    """Whether the caller has asked for that, and so is told if it cannot be."""
    shares_comm_stream: bool = False
    """Whether a rank's buffers on a GPU have one communication stream together."""


@dataclass(frozen=True)
class DispatchOptions:
    """The options of a dispatch in normal mode. Buffers keep those of earlier calls, since making
    them takes a microsecond."""

    row_layout: RowLayout | None = None
    """The layout of received rows; None: exactly as many rows as arrive, for which the host
    waits."""
    alignment: int | None = None
    """The alignment of each expert's rows; None for rows by token."""
    choice_dtype: torch.dtype | None = None
    """The dtype of returned choices; None: no choices are returned."""
    zero_foreign_weights: bool = False
    """Whether weights of other ranks' experts are 0."""
    zero_gaps: bool = False
    """Whether rows between those of experts are 0."""
    is_col_major: bool = False
    """Whether the scales of one channel are contiguous."""
    zero_copy: bool = False
    """Whether received rows may be a view of the communication buffer. The CPU copies them."""
    max_tokens: int | None = None
    """The most tokens of any rank; None: any number, in rounds. On GPUs without counts, as many as
    are a rank's part of the rows."""
    max_blocks: int = 0
    """The most blocks of a launch; 0: as many as the group has. The CPU has none."""
    needs_counts: bool = False
    """Whether a dispatch that reuses a handle waits for counts, if the host has none."""
    uses_relays: bool = False
    """Whether tokens for another node cross once, to a relay there. GPUs have none."""


class CombineOptions(NamedTuple):
    """The options of a combine in normal mode."""

    sums: str
    """The order of sums: by "rank" or by "choice"."""
    sends: str
    """The rows that are sent: "row" for rows by token; for rows by expert, their "sum" over this
    rank's experts, or "each" of them."""
    uses_relays: bool
    """Whether the rows of a node are summed there, if their tokens came through a relay."""
    max_blocks: int
    """The most blocks of a launch; 0: as many as the group has. The CPU has none."""


class LowLatencyDispatchOptions(NamedTuple):
    """The options of a dispatch in low latency mode."""

    max_tokens: int
    """The most tokens of any rank."""
    num_experts: int
    row_format: Format
    stats: torch.Tensor | None
    """Counts by local expert are added to it."""
    waits: torch.Tensor | None
    """Nanoseconds of waits by rank are added to it."""
    has_hook: bool
    """Whether a hook receives, some time after the sending."""
    rank_bound: int
    """Ranks that received rows have room for; those from there on take no part."""


class LowLatencyCombineOptions(NamedTuple):
    """The options of a combine in low latency mode."""

    use_logfmt: bool
    """Whether rows are sent with ten bits a value."""
    zero_copy: bool
    """Whether peers read the rows in place. GPUs never copy them."""
    has_hook: bool
    """Whether a hook receives, some time after the sending."""


@dataclass
class Received:
    """Received tensors, all with as many rows."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    """``[m, S]`` or ``[m]``, of any strides."""
    choices: torch.Tensor | None
    weights: torch.Tensor | None

    def returned(self) -> Any:
        """The rows, or a pair of rows and scales, as callers get them."""
        return self.rows if self.scales is None else (self.rows, self.scales)


class NormalHandleState(Protocol):
    """A backend's handle of a dispatch in normal mode."""

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""

    @property
    def top_k(self) -> int:
        """Choices of each token."""

    @property
    def num_recv_tokens(self) -> int:
        """Received tokens, or an upper bound if the host has no counts."""

    def normal_tables(self, token_in_rank: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """The tensors of DeepEP's handle. ``token_in_rank`` is the caller's, if there is one."""

    def rank_ends(self, scaleup_ranks: int) -> torch.Tensor:
        """``[scaleup_ranks]`` i32: tokens from the scale-up ranks up to each, over all nodes."""

    def per_expert(self) -> torch.Tensor:
        """``[E/R]`` i32: tokens of each local expert."""

    def expert_ends(self) -> torch.Tensor:
        """``[E/R]`` i32: the end of each expert's rows, for rows by expert."""

    def source_metadata(self, choices: torch.Tensor | None) -> torch.Tensor:
        """``[m, K + 2]`` i32: ``rank * T + token``, ``rank * K + last choice``, and the row of each
        choice, or -1. For rows by token, ``choices`` are the received ones."""


class LowLatencyDispatch(Protocol):
    """A prepared dispatch of low latency mode."""

    returned: Any
    """The rows, or a pair of rows and scales."""
    count: torch.Tensor
    """``[E/R]`` i32: received tokens of each local expert."""
    tables: tuple[torch.Tensor, torch.Tensor]
    """``src_info`` and ``layout_range`` of DeepEP's handle."""

    def begin(self) -> None:
        """Sends the tokens, for a call with a hook."""

    def receive(self) -> Any:
        """Fills the tensors, and returns the backend's handle. Sends first, if :meth:`begin` was
        not called."""


class LowLatencyCombine(Protocol):
    """A prepared combine of low latency mode."""

    out: torch.Tensor
    """The sums, ``[n, H]`` bf16."""

    def begin(self) -> None:
        """Sends the rows, for a call with a hook."""

    def finish(self) -> None:
        """Fills the sums. Sends first, if :meth:`begin` was not called."""


class Backend(Protocol):
    """One rank's end of a group, with tensors on the CPU or on a GPU."""

    device: torch.device
    native: Any
    """The engine's end of the group."""

    @property
    def runtime(self) -> Any:
        """The engine's end of the group. Raises on GPUs."""

    @property
    def generation(self) -> int:
        """The number of meetings of the ranks so far."""

    def check(self) -> None:
        """Raises the failure of a call that has ended, unless calls raise it themselves."""

    def current_stream(self) -> torch.cuda.Stream | None:
        """The stream that synchronous calls are enqueued on; None on the CPU."""

    def comm_stream(self) -> torch.cuda.Stream | None:
        """The stream that asynchronous calls are enqueued on; None on the CPU."""

    def asynchronous(
        self,
        name: str,
        events: Events,
        allocates_on_comm: bool,
        tensors: tuple[Any, ...],
        state: Any = None,
    ) -> AnyCall:
        """The context of an asynchronous call of this name. It waits for the first of the caller's
        ``events``, or without that one for the current stream; and for the second. ``tensors`` are
        the caller's, which it reads or writes, and ``state`` is the handle that it uses."""

    def synchronize(self) -> None:
        """Makes the host wait for the calls on the current stream."""

    def barrier(self) -> None:
        """Waits for all ranks that take part, as a call does."""

    def set_mask(self, rank: int, is_masked: bool) -> None:
        """Leaves a rank out of later calls, or readmits it."""

    def read_masks(self, status: torch.Tensor) -> None:
        """Writes 1 to ``status``, ``[R]`` i32, for each rank that is masked or gone, else 0."""

    def masks(self) -> list[bool]:
        """By rank, whether it is masked or gone, behind the work on the current stream."""

    def clear_masks(self) -> None:
        """Readmits all ranks that are there."""

    def regroup(self, exchange: Exchange) -> None:
        """Joins the group anew, with the ranks that exchange bytes now."""

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts tokens: by rank ``[R]`` i32, by expert ``[E]`` i32, and ``[n, R]`` bool."""

    def by_choices(
        self, topk_idx: torch.Tensor, num_experts: int, token_in_rank: torch.Tensor | None = None
    ) -> Any:
        """The routing of tokens to the ranks of their experts. ``token_in_rank`` may be a tensor
        that :meth:`layout` has returned."""

    def by_ranks(self, token_in_rank: torch.Tensor, per_expert: torch.Tensor) -> Any:
        """The routing of tokens without choices to these ranks."""

    def by_handle(self, handle: Any) -> Any:
        """The routing of tokens to the places of an earlier dispatch."""

    def dispatch(
        self, x: Tokens, weights: torch.Tensor | None, routing: Any, options: DispatchOptions
    ) -> tuple[Received, NormalHandleState, list[int]]:
        """Sends tokens in normal mode. Returns the received ones, a handle, and the tokens of each
        local expert, if the host waits for counts."""

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        weights: torch.Tensor | None,
        bias: Any,
        options: CombineOptions,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums the rows of normal mode that ranks return, and weights if there are any."""

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, options: LowLatencyDispatchOptions
    ) -> LowLatencyDispatch:
        """Prepares to send rows of bf16."""

    def low_latency_combine(
        self,
        x: torch.Tensor,
        choices: Choices,
        handle: Any,
        results: CombineResults,
        options: LowLatencyCombineOptions,
    ) -> LowLatencyCombine:
        """Prepares to send the experts' rows back. If the tensor of the sums is None, a new one is
        made; nanoseconds of waits are added to the other, if there is one."""

    def combine_input(self, shape: tuple[int, ...]) -> torch.Tensor:
        """New memory for rows of bf16 that a combine with ``zero_copy`` sends without a copy."""


@lru_cache(maxsize=64)
def combine_options(sums: str, sends: str, uses_relays: bool, max_blocks: int) -> CombineOptions:
    """Makes options, or returns those of an earlier call: that takes a third of the time."""
    check_count("num_sms", max_blocks)
    return CombineOptions(sums, sends, uses_relays, max_blocks)


#: As :func:`combine_options`.
low_latency_combine_options = lru_cache(maxsize=64)(LowLatencyCombineOptions)
