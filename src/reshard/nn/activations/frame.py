"""One call of a module whose saved tensors are looked after.

The hooks of saved tensors are a stack of which only the top one is asked. What a frame does not
keep itself it hands to the hooks below: to another frame, to activation checkpointing, to the
user's own. Inside of checkpointing a frame keeps nothing; around it, it keeps the inputs that
checkpointing saves.
"""

from __future__ import annotations

from collections.abc import Callable
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


def _is_of_checkpoint(hooks: tuple[Pack, Unpack] | None) -> bool:
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


class _HandedOn:
    """What other hooks keep."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, unpack: Unpack, packed: Any) -> None:
        self._unpack, self._packed = unpack, packed

    def tensor(self) -> torch.Tensor:
        """What they give back."""
        return self._unpack(self._packed)


class Frame:
    """Looks after the tensors that are saved while it is entered.

    with Frame(keeper, known, "layers.0.mlp"):
        out = forward(x)
    """

    def __init__(self, keeper: Keeper, known: Known, label: str, check: bool = False) -> None:
        self._keeper, self._known, self._label = keeper, known, label
        self._below: tuple[Pack, Unpack] | None = None
        self._is_recomputed = False
        self._checked: list[Checked] | None = [] if check else None
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @not_compiled
    def __enter__(self) -> Frame:
        self._below = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._is_recomputed = _is_of_checkpoint(self._below)
        self._hooks.__enter__()
        return self

    @not_compiled
    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @not_compiled
    def finish(self) -> None:
        """After forward: raise if a budget was too small, or if what was kept is not equal."""
        if self._keeper.ledger is not None:
            self._keeper.ledger.check()
        if self._checked is not None:
            compare(self._checked, self._keeper.restorer.group)

    @not_compiled
    def _pack(self, saved: torch.Tensor) -> SavedView | SavedTensor | _HandedOn:
        view = self._kept(saved)
        if view is not None:
            if self._checked is not None and view.is_equal:
                self._checked.append((view.label, checksum_of(saved)))
            return view
        if self._below is not None:
            pack, unpack = self._below
            return _HandedOn(unpack, pack(saved))
        return SavedTensor(saved)

    def _kept(self, saved: torch.Tensor) -> SavedView | None:
        # Checkpointing saves nothing here, and computes it again: there is nothing to keep.
        if self._is_recomputed:
            return None
        return self._keeper.kept(saved, self._known, self._label)

    @not_compiled
    def _unpack(self, packed: SavedView | SavedTensor | _HandedOn) -> torch.Tensor:
        return packed.tensor()
