"""What torch.compile does with a move: it ends the graph, runs the move as it is, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["outside_graphs"]

REASON = "reshard moves data between processes, which is not a part of a graph"

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """Have torch.compile call a function, and all that it calls, without tracing it.

    ``torch.compiler.disable`` does the same, but imports the compiler, which takes longer than
    everything else that an import of ours does.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = REASON
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return function  # an older torch: it traces what it can, and runs the rest as it is
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function
