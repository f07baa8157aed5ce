"""When something has been done.

On the CPU a call has done what it does when it returns, or when its hook does, so an event is over where there is no GPU.
"""

from __future__ import annotations

from typing import Any, Callable

import torch


class EventHandle:
    """The work that was given to a stream before this: the current one of the current GPU, unless it is said."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.event: torch.cuda.Event | None = None
        # It is there where torch has begun to use it; asking the driver takes longer than the call.
        if torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record(stream or torch.cuda.current_stream())

    def current_stream_wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Makes the current stream of the current GPU, or the one that is said, wait for that work."""
        if self.event is not None:
            self.event.wait(stream or torch.cuda.current_stream())


class EventOverlap:
    """An event, or none, and what lives as long as the work before it."""

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hooks: list[Callable[[], Any]] = []
        self._is_released_at_exit = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream wait for the event, which there must be. What lived until then is let go of, and with ``release_handle``
        the event is too."""
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
        """Has ``hook`` called by the next wait."""
        self._hooks.append(hook)

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Itself, for ``with event(release_handle=True):``, whose end waits and lets go of the event."""
        self._is_released_at_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        is_released, self._is_released_at_exit = self._is_released_at_exit, False
        if self.event is not None:
            self.current_stream_wait(release_handle=is_released)
