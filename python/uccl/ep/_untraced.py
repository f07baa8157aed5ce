"""Calls that torch.compile leaves as they are.

Without a mark, torch.compile traces the Python code of a call, breaks at each call of the engine,
and compiles the parts between, with guards that are checked in each call.
"""

from __future__ import annotations

from typing import Any, Callable, TypeVar

from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Has torch.compile end its graph before a function, call it, and begin another graph.

    ``torch.compiler.disable`` does so by a wrapper, and imports the compiler, which takes as long
    as the import of torch.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "it is a call of uccl.ep"
    # Older versions of torch have no such function: they compile the parts.
    set_strategy: Any = getattr(eval_frame, "set_code_exec_strategy", None)
    if set_strategy is not None:
        skip = eval_frame._FrameAction.SKIP
        set_strategy(marked.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
