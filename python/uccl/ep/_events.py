"""Events behind the work of a call.

On the CPU a call's work is done when it returns, or when its hook does, so without a GPU an event
is always over.
"""

from __future__ import annotations

from typing import Any, Callable

import torch


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
    """

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hooks: list[Callable[[], Any]] = []
        self._is_released_at_exit = False

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

    def __exit__(self, *_: object) -> None:
        is_released, self._is_released_at_exit = self._is_released_at_exit, False
        if self.event is not None:
            self.current_stream_wait(release_handle=is_released)
