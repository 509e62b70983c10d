"""The handle of modules whose activations are kept as shares, and their new forward."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from reshard.errors import ArgumentError
from reshard.nn.activations.hooks import SavedTensorHooks, not_compiled
from reshard.nn.activations.policy import Policy
from reshard.nn.activations.region import Stats
from reshard.nn.activations.replicated import Parameters, ReplicatedInputs

__all__ = ["ReshardedForward", "Resharding", "resharding_of"]


class Resharding:
    """The modules of one `input_reshard` call; ``remove`` restores their forwards."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._forwards: weakref.WeakKeyDictionary[nn.Module, ReshardedForward] = (
            weakref.WeakKeyDictionary()
        )

    def attach(self, module: nn.Module, path: str, dim: int, parameters: Parameters) -> None:
        """Replace the forward of a module."""
        before = vars(module).get("forward")
        if isinstance(before, ReshardedForward):
            before.handle.detach(module)
        forward = ReshardedForward(module, self, path, dim, parameters)
        module.forward = forward
        self.track(module, forward)

    def track(self, module: nn.Module, forward: ReshardedForward) -> None:
        """Remember a module whose forward was replaced."""
        self._forwards[module] = forward

    def detach(self, module: nn.Module) -> None:
        """Restore the forward of a module; what it has saved is still restored in backward."""
        if module not in self._forwards:
            return
        forward = self._forwards.pop(module)
        forward.is_removed = True
        if vars(module).get("forward") is forward:  # else another wrapper is around it
            del module.forward
            if forward.replaces_attribute:
                module.forward = forward.__wrapped__

    def remove(self) -> None:
        """Restore the forwards of all modules; a second call does nothing."""
        for module in list(self._forwards):
            self.detach(module)

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the modules."""
        return tuple(forward.path for forward in self._forwards.values())

    def stats(self) -> Stats:
        """The counters so far."""
        return replace(self.policy.stats)

    def __repr__(self) -> str:
        return f"Resharding({', '.join(self.modules) or 'nothing'}: {self.stats()})"


class ReshardedForward:
    """Replaces the forward of a module and runs the original under saved-tensor hooks.

    An attribute of the module rather than a pair of forward hooks: then an interrupt, too, removes
    the saved-tensor hooks, and the inputs are those that forward gets after all other hooks.
    """

    def __init__(
        self, module: nn.Module, handle: Resharding, path: str, dim: int, parameters: Parameters
    ) -> None:
        self.replaces_attribute = "forward" in vars(module)
        self.__wrapped__ = module.forward
        self.handle, self.path = handle, path
        self.is_removed = False
        self._parameters, self._dim = parameters, dim
        self._must_check = handle.policy.check

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_removed or self._is_idle():
            return self.__wrapped__(*args, **kwargs)
        with self._hooks(args, kwargs) as hooks:
            output = self.__wrapped__(*args, **kwargs)
        if hooks.finish():
            self._must_check = False
        return output

    @not_compiled
    def _is_idle(self) -> bool:
        """Whether nothing is saved, or hooks are not possible, as in torch.func."""
        forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        is_alone = len(self.handle.policy.restorer.ranks) == 1
        return is_alone or not torch.is_grad_enabled() or forbidden is not None

    @not_compiled
    def _hooks(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SavedTensorHooks:
        self._check_dim(args, kwargs)
        policy = self.handle.policy
        inputs = ReplicatedInputs(args, kwargs, policy.restorer.ranks, self._parameters)
        return SavedTensorHooks(policy, inputs, self.path, self._must_check)

    def _check_dim(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves = tree_leaves((args, dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if tensors and not any(-one.ndim <= self._dim < one.ndim for one in tensors):
            shapes = [list(one.shape) for one in tensors]
            raise ArgumentError(
                f"{self.path} has inputs of shapes {shapes}, of which none has a dim "
                f"{self._dim}: give a dim that one of them has"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ReshardedForward:
        copied = object.__new__(ReshardedForward)
        vars(copied).update(vars(self))
        copied.__wrapped__ = copy.deepcopy(self.__wrapped__, memo)
        module = getattr(copied.__wrapped__, "__self__", None)
        if isinstance(module, nn.Module):
            copied._parameters = Parameters(module)
            self.handle.track(module, copied)
        return copied

    def __reduce__(self) -> Any:
        # A process group cannot be pickled: a module that is loaded has its original forward.
        method: Any = self.__wrapped__
        if hasattr(method, "__self__"):
            return getattr, (method.__self__, method.__name__)
        return _itself, (method,)


def _itself(method: Any) -> Any:
    return method


def resharding_of(module: nn.Module) -> Resharding:
    """The handle of a module whose activations are resharded, or of modules inside it."""
    for one in module.modules():
        forward = vars(one).get("forward")
        if isinstance(forward, ReshardedForward):
            return forward.handle
    raise ArgumentError(
        f"{type(module).__name__} is not resharded: call input_reshard(module, mesh, dim) first"
    )
