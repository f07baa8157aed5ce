"""Ranks that come and go: meetings, masks, and the engine's group that follows them."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any, Callable, ContextManager, Iterable

import torch

from nixl_ep._engine import Engine
from nixl_ep._meetings import NAP, Answer, Meeting, way_of
from nixl_ep._members import Introduction, Members


class Connections:
    """One rank's connections."""

    def __init__(
        self, make: Callable[[bool], Engine], by_host: bool, members: Members, local_experts: int
    ) -> None:
        """``make`` makes an engine, by the host's memory or not."""
        self._make, self._by_host = make, by_host
        self.engine = make(by_host)
        self.members = members
        self._local_experts = local_experts
        #: The last meeting, which may have left keys in its store.
        self._last: Meeting | None = None
        #: A meeting that is carried out once its new ranks take part.
        self._staged: Meeting | None = None
        self._answer: Answer | None = None
        #: The stream of this rank's calls when it was staged; None on the CPU.
        self._stream: Any = None
        # Frameworks stage ranks on a thread of their own.
        self._lock = threading.RLock()

    def connect(
        self, ranks: Iterable[int], activate: bool, store: Any, group: Any, comm: Any
    ) -> None:
        """Meets ranks that are new, or have come back, by the store, or else by the group or the
        communicator. All that take part call it. If some do not activate the others, the meeting is
        carried out when those let them take part."""
        with self._lock:
            members = self.members
            named = members.checked(ranks)
            known = members.connected & (members.met | members.staged) - self._lost()
            new = named - known - {members.rank}
            if new:
                together = frozenset({members.rank}) | known | new
                meeting = self._introduce(together, activate, (store, group, comm))
                self._enter(meeting, members.active | named if activate else members.active)
            members.connect(named, activate)
            if activate:
                self._let_in(named - new)

    def disconnect(self, ranks: Iterable[int]) -> None:
        """Leaves ranks out until they are connected anew. Tells no other rank."""
        with self._lock:
            members = self.members
            gone = members.checked(ranks)
            if members.rank in gone:
                raise ValueError(f"rank {members.rank} is this one; it leaves by destroy()")
            strangers = sorted(gone - members.connected)
            if strangers:
                raise ValueError(f"rank {strangers[0]} is not connected")
            for rank in sorted(gone & members.met):
                self.engine.update_mask_buffer(rank, True)
            members.disconnect(gone)
            if not (members.staged - members.met) & members.connected:
                self._drop_staged()

    def mask(self, rank: int, is_masked: bool) -> None:
        """Leaves a rank out of later calls, or lets a connected one take part."""
        with self._lock:
            members = self.members
            members.checked([rank])
            if rank == members.rank:
                if is_masked:
                    raise ValueError(f"rank {rank} is this one, which is never masked")
                return
            if is_masked:
                members.active -= {rank}
                if rank in members.met:
                    self.engine.update_mask_buffer(rank, True)
                return
            if rank not in members.connected:
                raise ValueError(f"rank {rank} is not connected: connect_ranks comes first")
            self._let_in(frozenset({rank}))

    def clean_masks(self) -> None:
        """Lets all connected ranks take part."""
        with self._lock:
            members = self.members
            self._let_in(members.connected & (members.met | members.staged))

    def read_masks(self, status: torch.Tensor) -> None:
        """Writes 1 to ``status`` for each rank that is masked or not connected, else 0."""
        self.engine.query_mask_buffer(status)
        members = self.members
        if members.must_meet:
            # These ranks let this one take part soon.
            self.engine.synchronize()
            status[sorted((members.staged - members.met) & members.active)] = 0

    def join(self) -> Engine:
        """The engine, for a call of all ranks that take part: those that have staged this rank let
        it in before."""
        answer = self._answer
        if answer is not None and self.members.must_meet:
            if self._is_on_gpu() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"ranks {sorted(self.members.active)} are not let in yet, and a graph does not "
                    "wait for that: mask them, or make a call outside of graphs first"
                )
            answer.wait()
        return self.engine

    def close(self) -> None:
        """Drops the memory. Local."""
        self._drop_staged()
        self.engine.destroy()

    def _is_on_gpu(self) -> bool:
        return self.engine.get_comm_stream() is not None

    def _lost(self) -> frozenset[int]:
        """Ranks that a call has masked, because they were late or have ended."""
        members = self.members
        expected = members.connected & members.active & members.met
        if not expected:
            return frozenset()
        masks = self.engine.masks()
        return frozenset(rank for rank in expected if masks[rank])

    def _introduce(self, ranks: frozenset[int], activate: bool, ways: tuple[Any, ...]) -> Meeting:
        """Exchanges introductions with these ranks."""
        members = self.members
        is_new = members.met == {members.rank}
        mine = Introduction(members.num_ranks, self._local_experts, activate, is_new, self._by_host)
        meeting = Meeting(ranks, way_of(members, ranks, *ways), mine)
        before, self._last = self._last, meeting
        if before is not None:
            before.clear()
        return meeting

    def _enter(self, meeting: Meeting, active: frozenset[int]) -> None:
        """Carries a meeting out, or stages it."""
        self._drop_staged()
        if not meeting.beginners:
            self._carry_out(meeting, active)
            return
        self._staged, self.members.staged = meeting, meeting.ranks
        if self.members.rank not in meeting.beginners:
            self._stream = torch.cuda.current_stream() if self._is_on_gpu() else None
            self._answer = Answer(meeting, self._carry_out_staged)

    def _drop_staged(self) -> None:
        answer, self._answer, self._staged = self._answer, None, None
        self.members.staged = frozenset()
        if answer is not None:
            answer.end()

    def _let_in(self, ranks: frozenset[int]) -> None:
        """Lets ranks take part. Those that are staged are met now, if this rank begins."""
        members = self.members
        ranks -= {members.rank}
        strangers = sorted(ranks - members.met - members.staged)
        if strangers:
            raise ValueError(
                f"rank {strangers[0]} did not come to the last meeting: connect_ranks lets it come "
                "back"
            )
        staged, active = self._staged, members.active | ranks
        for rank in sorted(ranks & members.met):
            self.engine.update_mask_buffer(rank, False)
        if staged is not None and members.rank in staged.beginners and ranks - members.met:
            staged.together()
            self._carry_out(staged, active)
        members.active = active

    def _carry_out_staged(self, stop: threading.Event) -> None:
        """Carries the staged meeting out, on a thread of its own."""
        while not self._lock.acquire(timeout=NAP):
            if stop.is_set():
                return
        try:
            staged = self._staged
            if staged is None:
                return
            with on_stream(self.engine.device, self._stream):
                staged.together()
                self._carry_out(staged, self.members.active)
        finally:
            self._lock.release()

    def _carry_out(self, meeting: Meeting, active: frozenset[int]) -> None:
        """Joins the engine's group anew with the ranks of a meeting. Those that do not take part are
        masked."""
        members = self.members
        try:
            self.engine.meet(meeting.exchange)
        except ValueError as why:
            if not (self._is_on_gpu() and meeting.may_go_by_host):
                raise
            # All ranks have failed alike, and none has met others in its buffer.
            text = f"calls take the slower way by the host's memory: {why}"
            warnings.warn(text, RuntimeWarning, stacklevel=5)
            self._by_host, self.engine = True, self._make(True)
            self.engine.meet(meeting.exchange)
        for rank in sorted(meeting.ranks - active):
            self.engine.update_mask_buffer(rank, True)
        members.met, members.staged, self._staged = meeting.ranks, frozenset(), None
        members.active = active
        # A rank may make calls once all have come so far.
        meeting.together()


def on_stream(device: torch.device, stream: Any) -> ContextManager[Any]:
    """A context with this stream as the current one."""
    if stream is None:
        return contextlib.nullcontext()
    contexts = contextlib.ExitStack()
    if device.type == "cuda":
        contexts.enter_context(torch.cuda.device(device))
        torch.cuda.synchronize(device)
    contexts.enter_context(torch.cuda.stream(stream))
    return contexts
