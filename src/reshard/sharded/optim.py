"""Optimizers over plain and sharded parameters alike.

Plain ``torch.optim`` optimizers take sharded parameters as they are; this one also takes their
names, as that of ``torch.distributed._shard`` did, and a checkpoint of it holds these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from reshard.sharded.moving import laid_as
from reshard.sharded.tensor import ShardedTensor, wrap

__all__ = ["ShardedOptimizer", "lay_out_state", "named_params_with_sharded_tensor"]


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of any class over named parameters, plain ones and sharded ones.

    named = dict(named_params_with_sharded_tensor(model))
    optimizer = ShardedOptimizer(named, torch.optim.AdamW, lr=1e-3)
    """

    def __init__(
        self,
        named_params: Mapping[str, torch.Tensor],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        for name, param in named_params.items():
            if not isinstance(param, torch.Tensor):
                kind = type(param).__name__
                raise TypeError(f'parameter "{name}" is a {kind}: give tensors, by their names')
        self.named_params = dict(named_params)
        self._optim = optimizer_class(list(self.named_params.values()), *args, **kwargs)
        self.defaults = self._optim.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of parameters and their options; changes to them count."""
        return self._optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """What the optimizer keeps of each parameter; sharded as that is."""
        return self._optim.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; ``closure`` computes the loss again where the optimizer asks for it."""
        return self._optim.step() if closure is None else self._optim.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or make them 0."""
        self._optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """More parameters, with options of their own."""
        self._optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer keeps, as the wrapped one says it, with the names beside."""
        return {**self._optim.state_dict(), "names": list(self.named_params)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved, of the same parameters."""
        names = state_dict.get("names", list(self.named_params))
        if names != list(self.named_params):
            odd = sorted(set(names) ^ set(self.named_params)) or names
            raise ValueError(
                f"the saved optimizer has {len(names)} parameters and this one "
                f"{len(self.named_params)}, which differ in {odd[:8]}: load it for the same ones, "
                "in the same order"
            )
        rest = {key: value for key, value in state_dict.items() if key != "names"}
        self._optim.load_state_dict(rest)
        lay_out_state(self._optim)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Call something before each step."""
        return self._optim.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Call something after each step."""
        return self._optim.register_step_post_hook(hook)

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self._optim!r})"


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Lay what an optimizer keeps of each parameter out as that is; all ranks call this alike.

    State from files of other ranks lies where it was read. It would be right there too, but each
    step would move it. ``ShardedOptimizer.load_state_dict`` does this by itself.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, ShardedTensor):
                kept = optimizer.state.get(param, {})
                kept.update({key: _as_it_lies(one, param) for key, one in kept.items()})


def _as_it_lies(value: Any, param: ShardedTensor) -> Any:
    if not isinstance(value, ShardedTensor) or value.shape != param.shape:
        return value
    own = param._content
    return value if value._content.is_like(own) else wrap(laid_as(value._content, own))


def named_params_with_sharded_tensor(
    module: nn.Module,
    prefix: str = "",
    recurse: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters by name, and sharded tensors that are mere attributes; tied ones once.

    >>> [name for name, _ in named_params_with_sharded_tensor(nn.Linear(2, 3), "fc")]
    ['fc.weight', 'fc.bias']
    """
    seen: set[int] = set()
    modules = module.named_modules(prefix=prefix) if recurse else [(prefix, module)]
    for path, one in modules:
        own = {name: value for name, value in vars(one).items() if isinstance(value, ShardedTensor)}
        for name, tensor in (*one._parameters.items(), *own.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{name}" if path else name, tensor
