"""DeepEP's timing helpers. One finds kernels by DeepEP's names, so it is replaced: calls are timed
as a whole."""

from __future__ import annotations

from typing import Any, Callable

import torch
from deep_ep.utils._testing import *  # noqa: F403
from deep_ep.utils._testing import flush_l2_cache

#: The number of repetitions of a call.
REPEATS = 5


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    *_: Any,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
    **__: Any,
) -> Any:
    """The seconds of a whole call, repeated for each name of a kernel and each launch in a call."""
    fn()
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for _ in range(min(num_tests, REPEATS))
    ]
    for first, last in events:
        flush_l2_cache()
        if barrier is not None:
            barrier()
        first.record()
        fn()
        last.record()
    torch.cuda.synchronize()
    seconds = sorted(first.elapsed_time(last) / 1e3 for first, last in events)[len(events) // 2]
    one = (
        seconds
        if num_kernels_per_period == 1
        else [seconds / num_kernels_per_period] * num_kernels_per_period
    )
    return one if isinstance(kernel_names, str) else tuple(one for _ in kernel_names)
