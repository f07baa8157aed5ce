"""When something has been done.

On the CPU a call has done what it does when it returns, or when its hook does, so an event is over where there is no GPU.
"""

from __future__ import annotations

from typing import Any, Callable

import torch


class EventHandle:
    """The work that was given to the current stream, of the current GPU or of ``device``, before this."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.event: torch.cuda.Event | None = None
        # It is there where torch has begun to use it; asking the driver takes longer than the call.
        if torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))

    def current_stream_wait(self, device: torch.device | None = None) -> None:
        """Makes the current stream, of the current GPU or of ``device``, wait for that work."""
        if self.event is not None:
            self.event.wait(torch.cuda.current_stream(device))


class EventOverlap:
    """An event, or none, and what lives as long as the work before it."""

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hooks: list[Callable[[], Any]] = []

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream wait for the event, which there must be."""
        if self.event is None:
            raise RuntimeError("there is no event to wait for: the call was not asynchronous")
        self.event.current_stream_wait()
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook()
        if release_handle:
            self.event = self.extra_tensors = None

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Has ``hook`` called by the next wait."""
        self._hooks.append(hook)

    def __call__(self) -> None:
        """As :meth:`current_stream_wait`."""
        self.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.current_stream_wait()


def wait_for(event: EventHandle | EventOverlap | None, device: torch.device | None = None) -> None:
    """Waits for an event of any of the kinds that callers pass: on the current stream of the current GPU or of ``device``."""
    if isinstance(event, EventOverlap):
        event = event.event
    if event is not None:
        event.current_stream_wait(device)


def done(is_async: bool, *tensors: Any, device: torch.device | None = None) -> EventOverlap:
    """What a call returns: with an event, of the current stream of the current GPU or of ``device``, if it was asynchronous."""
    return EventOverlap(EventHandle(device), tensors) if is_async else EventOverlap()
