"""Events behind the work of a call.

On the CPU a call's work is done when it returns, or when its hook does, so without a GPU an event
is always over.
"""

from __future__ import annotations

from typing import Any, Callable, ContextManager, Protocol

import torch

from uccl.ep._untraced import untraced


class EventHandle:
    """An event behind the work that a stream has been given.

    Args:
        stream: The stream; None: the current stream of the current GPU.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.event: torch.cuda.Event | None = None
        # Only if torch has begun to use CUDA; asking the driver takes longer than the call.
        if torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record(stream or torch.cuda.current_stream())

    @untraced
    def current_stream_wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Makes a stream wait for that work.

        Args:
            stream: The stream; None: the current stream of the current GPU.
        """
        if self.event is not None:
            self.event.wait(stream or torch.cuda.current_stream())


class EventOverlap:
    """An event, or none, and objects that live as long as the work before it.

    Args:
        event: The event; None, if the call was not asynchronous.
        extra_tensors: The objects that are dropped when the event has been waited for.
        keeps: Whether they live as long as this object instead.
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[Any, ...] | None = None,
        keeps: bool = False,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._keeps = keeps
        self._hooks: list[Callable[[], Any]] = []
        self._is_released_at_exit = False

    @untraced
    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream wait for the event, and drops the objects that lived until then.

        Args:
            release_handle: Whether the event is dropped too.

        Raises:
            RuntimeError: If there is no event, because the call was not asynchronous.
        """
        if self.event is None:
            raise RuntimeError("there is no event to wait for: the call was not asynchronous")
        self.event.current_stream_wait()
        if not self._keeps:
            self.extra_tensors = None
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Registers a function for the next wait.

        Args:
            hook: The function, which the next wait calls once.
        """
        self._hooks.append(hook)

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Returns itself, for ``with event(release_handle=True):``. The end of this block waits.

        Args:
            release_handle: Whether the end of the block drops the event too.
        """
        self._is_released_at_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    @untraced
    def __exit__(self, *_: object) -> None:
        is_released, self._is_released_at_exit = self._is_released_at_exit, False
        if self.event is not None:
            self.current_stream_wait(release_handle=is_released)


#: The events that a call waits for: before it begins, and before its epilogue.
Events = tuple["EventHandle | None", "EventHandle | None"]


class AnyCall(Protocol):
    """A call that is being made: a context of its body, and then its event."""

    def __enter__(self) -> Any: ...

    def __exit__(self, failure: Any, *_: object) -> None: ...

    def on_stream(self) -> ContextManager[Any]:
        """A context in which torch's own operations are behind the call's launches."""

    def done(self, *made: Any, keeps: bool = False) -> EventOverlap:
        """The event behind the call, empty for a synchronous one. ``made`` are returned tensors.
        In a graph only the event ``keeps`` the tensors of some calls."""


class SyncCall:
    """A call on the current stream, whose event is empty."""

    def __enter__(self) -> SyncCall:
        return self

    def __exit__(self, failure: Any, *_: object) -> None:
        pass

    def on_stream(self) -> ContextManager[Any]:
        """A context without effect."""
        return self

    def done(self, *made: Any, keeps: bool = False) -> EventOverlap:
        """An empty event."""
        return EventOverlap()


#: The context of all synchronous calls.
SYNCHRONOUS = SyncCall()


class EndedCall(SyncCall):
    """An asynchronous call on the CPU, which has ended when it returns."""

    def __init__(self, tensors: tuple[Any, ...]) -> None:
        self._tensors = tensors

    def done(self, *made: Any, keeps: bool = False) -> EventOverlap:
        """An event that is over."""
        return EventOverlap(EventHandle(), (*self._tensors, *made))
