"""One call of a module whose saved tensors are looked after.

The hooks of saved tensors are a stack of which only the top one is asked. What a frame does not
keep itself it hands to the hooks below: to another frame, to activation checkpointing, to the
user's own. Inside of checkpointing a frame keeps nothing; around it, it keeps the inputs that
checkpointing saves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint

from reshard.nn.activations.checking import Checked, checksum_of, compare
from reshard.nn.activations.keeping import Keeper, SavedTensor, SavedView
from reshard.nn.activations.known import Known

__all__ = ["Frame", "not_compiled"]

F = TypeVar("F", bound=Callable[..., Any])
Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


def not_compiled(function: F) -> F:
    """Keep torch.compile out of what looks after tensors; what the module does it may have."""
    found: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return found


class _HandedOn:
    """What other hooks keep."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, unpack: Unpack, packed: Any) -> None:
        self._unpack, self._packed = unpack, packed

    def tensor(self) -> torch.Tensor:
        """What they give back."""
        return self._unpack(self._packed)


class _Stack(threading.local):
    """The frames that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []


_stack = _Stack()
_calls = count(1)


class Frame:
    """Looks after the tensors that are saved while it is entered.

    with Frame(keeper, known, "layers.0.mlp"):
        out = forward(x)
    """

    def __init__(self, keeper: Keeper, known: Known, label: str, check: bool = False) -> None:
        self._keeper, self._known, self._label = keeper, known, label
        self._below: tuple[Pack, Unpack] | None = None
        self._is_checkpointed = False
        """Whether checkpointing below drops what is saved here, or computes it again."""
        self._call = 0
        """The number of the outermost call that this one is in."""
        self._checked: list[Checked] | None = [] if check else None
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @not_compiled
    def __enter__(self) -> Frame:
        outer = _stack.frames[-1] if _stack.frames else None
        self._call = next(_calls) if outer is None else outer._call
        if outer is None:
            self._keeper.begin()
        self._below = torch._C._autograd._top_saved_tensors_default_hooks(False)
        handed_on = outer is not None and outer._is_checkpointed
        self._is_checkpointed = handed_on or _is_of_checkpoint(self._below)
        self._hooks.__enter__()
        _stack.frames.append(self)
        return self

    @not_compiled
    def __exit__(self, *error: object) -> None:
        _stack.frames.remove(self)
        self._hooks.__exit__(*error)

    @not_compiled
    def finish(self) -> bool:
        """After forward: raise if a budget was too small, or if what was kept is not equal.

        Gives whether anything was compared.
        """
        if self._is_checkpointed or torch._C._current_graph_task_id() != -1:
            return False
        if self._call and not _stack.frames:
            self._keeper.finish()
        if not self._checked:
            return False
        compare(self._checked, self._keeper)
        return True

    @not_compiled
    def _pack(self, saved: torch.Tensor) -> SavedView | SavedTensor | _HandedOn:
        view = self._kept(saved)
        if view is not None:
            if self._checked is not None and view.region.is_equal:
                self._checked.append((view.region.label, checksum_of(saved)))
            return view
        if self._below is not None:
            pack, unpack = self._below
            return _HandedOn(unpack, pack(saved))
        return SavedTensor(saved)

    def _kept(self, saved: torch.Tensor) -> SavedView | None:
        if self._is_checkpointed:
            return None
        return self._keeper.kept(saved, self._known, self._label, self._call)

    @not_compiled
    def _unpack(self, packed: SavedView | SavedTensor | _HandedOn) -> torch.Tensor:
        return packed.tensor()


def _is_of_checkpoint(hooks: tuple[Pack, Unpack] | None) -> bool:
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__
