"""Modules whose activations are kept as shares, and what undoes it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from reshard.nn.activations.frame import Frame, not_compiled
from reshard.nn.activations.keeping import Keeper
from reshard.nn.activations.known import Known, sources_in
from reshard.nn.activations.owned import Owned
from reshard.nn.activations.stats import Stats

__all__ = ["Resharded", "Resharding", "resharding_of"]


class Resharding:
    """What looks after the activations of some modules; ``remove`` makes them what they were."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._modules: weakref.WeakKeyDictionary[nn.Module, Resharded] = weakref.WeakKeyDictionary()

    def attach(self, module: nn.Module, path: str, dim: int, owned: Owned) -> None:
        """Look after one more module."""
        before = vars(module).get("forward")
        if isinstance(before, Resharded):
            before.handle.detach(module)
        made = Resharded(module, self, path, dim, owned)
        module.forward = made
        self._modules[module] = made

    def adopt(self, module: nn.Module, made: Resharded) -> None:
        """Look after a copy of a module, too."""
        self._modules[module] = made

    def detach(self, module: nn.Module) -> None:
        """Look after a module no more; what it has saved is still restored."""
        if module not in self._modules:
            return
        made = self._modules.pop(module)
        made.is_off = True
        if vars(module).get("forward") is made:  # else somebody has wrapped it since
            del module.forward
            if made.had_own:
                module.forward = made.__wrapped__

    def remove(self) -> None:
        """Make the modules what they were; a second time does nothing."""
        for module in list(self._modules):
            self.detach(module)

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the modules that are looked after."""
        return tuple(made.path for made in self._modules.values())

    def stats(self) -> Stats:
        """What was done so far."""
        return replace(self._keeper.stats)

    @property
    def keeper(self) -> Keeper:
        """What decides how saved tensors are kept."""
        return self._keeper

    def __repr__(self) -> str:
        return f"Resharding({', '.join(self.modules) or 'nothing'}: {self.stats()})"


class Resharded:
    """Stands for the forward of a module; every call of it is one frame.

    An attribute of the module rather than a pair of hooks: whatever ends the call, an interrupt
    too, also ends the frame, and the inputs are those that forward gets in the end.
    """

    def __init__(
        self, module: nn.Module, handle: Resharding, path: str, dim: int, owned: Owned
    ) -> None:
        self.had_own = "forward" in vars(module)
        self.__wrapped__ = module.forward
        self.handle, self.path = handle, path
        self.is_off = False
        """Whether the module is not looked after any more."""
        self._owned, self._dim = owned, dim
        self._to_check = handle.keeper.options.check

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_off or self._is_idle():
            return self.__wrapped__(*args, **kwargs)
        with self._frame(args, kwargs) as frame:
            found = self.__wrapped__(*args, **kwargs)
        if frame.finish():
            self._to_check = False
        return found

    @not_compiled
    def _is_idle(self) -> bool:
        """Whether there is nothing to look after, or nobody may: as in torch.func."""
        forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        alone = len(self.handle.keeper.restorer.ranks) == 1
        return alone or not torch.is_grad_enabled() or forbidden is not None

    @not_compiled
    def _frame(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Frame:
        self._check_dim(args, kwargs)
        keeper = self.handle.keeper
        sources = sources_in(args, kwargs, self._owned)
        known = Known(sources, keeper.restorer.ranks, self._owned)
        return Frame(keeper, known, self.path, self._to_check)

    def _check_dim(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves = tree_leaves((args, dict(kwargs)))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if given and not any(-one.ndim <= self._dim < one.ndim for one in given):
            shapes = [list(one.shape) for one in given]
            raise ValueError(
                f"{self.path} has inputs of shapes {shapes}, of which none has a dim "
                f"{self._dim}: give a dim that one of them has"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Resharded:
        made = object.__new__(Resharded)
        vars(made).update(vars(self))
        made.__wrapped__ = copy.deepcopy(self.__wrapped__, memo)
        module = getattr(made.__wrapped__, "__self__", None)
        if isinstance(module, nn.Module):
            made._owned = Owned(module)
            self.handle.adopt(module, made)
        return made

    def __reduce__(self) -> Any:
        # A process group cannot be saved: who loads the module has it as it was.
        method: Any = self.__wrapped__
        if hasattr(method, "__self__"):
            return getattr, (method.__self__, method.__name__)
        return _itself, (method,)


def _itself(method: Any) -> Any:
    return method


def resharding_of(module: nn.Module) -> Resharding:
    """What looks after the activations of a module, or of modules inside it."""
    for one in module.modules():
        found = vars(one).get("forward")
        if isinstance(found, Resharded):
            return found.handle
    raise ValueError(
        f"{type(module).__name__} is not resharded: call input_reshard(module, mesh, dim) first"
    )
