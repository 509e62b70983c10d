"""Optimizers over plain and sharded parameters.

Plain ``torch.optim`` optimizers work with sharded parameters. ``ShardedOptimizer`` also takes their
names, like that of ``torch.distributed._shard``, and keeps them in its state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from reshard.errors import ArgumentError, ArgumentTypeError
from reshard.sharded.move import move_like
from reshard.sharded.tensor import ShardedTensor, tensor_of

State = dict[str, Any]
"""The state dict of an optimizer, or a group of its parameters."""


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of any class over named parameters, plain ones and sharded ones.

    named = dict(named_params_with_sharded_tensor(model))
    optimizer = ShardedOptimizer(named, torch.optim.AdamW, lr=1e-3)
    """

    def __init__(
        self,
        named_params: Mapping[str, torch.Tensor],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *args: object,
        **kwargs: object,
    ) -> None:
        for name, param in named_params.items():
            if not isinstance(param, torch.Tensor):
                kind = type(param).__name__
                raise ArgumentTypeError(
                    f'parameter "{name}" is a {kind}: give tensors, by their names'
                )
        self.named_params = dict(named_params)
        self._optim = optimizer_class(list(self.named_params.values()), *args, **kwargs)
        self.defaults = self._optim.defaults

    @property
    def param_groups(self) -> list[State]:  # type: ignore[override]
        """The groups of parameters and their options; changes to them count."""
        return self._optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of each parameter, with its layout."""
        return self._optim.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; ``closure`` computes the loss again for optimizers that need it."""
        return self._optim.step() if closure is None else self._optim.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: State) -> None:
        self._optim.add_param_group(param_group)

    def state_dict(self) -> State:
        """The state dict of the wrapped optimizer, and the names of the parameters."""
        return {**self._optim.state_dict(), "names": list(self.named_params)}

    def load_state_dict(self, state_dict: State) -> None:
        """Load a state dict of the same parameters, and lay its tensors out like them."""
        names = state_dict.get("names", list(self.named_params))
        if names != list(self.named_params):
            differing = sorted(set(names) ^ set(self.named_params)) or names
            raise ArgumentError(
                f"the saved optimizer has {len(names)} parameters and this one "
                f"{len(self.named_params)}, which differ in {differing[:8]}: load it for the same "
                "ones, in the same order"
            )
        rest = {key: value for key, value in state_dict.items() if key != "names"}
        self._optim.load_state_dict(rest)
        lay_out_state(self._optim)

    def __getstate__(self) -> State:
        return vars(self).copy()

    def __setstate__(self, state: State) -> None:
        vars(self).update(state)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        return self._optim.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        return self._optim.register_step_post_hook(hook)

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self._optim!r})"


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Move the state of each parameter to the layout of the parameter; all ranks call this.

    State from files is on the ranks that read it. Steps would be right without this, but each would
    move the state. ``ShardedOptimizer.load_state_dict`` calls this itself.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {}) if isinstance(param, ShardedTensor) else {}
            for key, value in state.items():
                is_alike = isinstance(value, ShardedTensor) and value.shape == param.shape
                if is_alike and not value._content.is_like(param._content):
                    state[key] = tensor_of(move_like(value._content, param._content))


def named_params_with_sharded_tensor(
    module: nn.Module,
    prefix: str = "",
    recurse: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters by name, and sharded tensors that are plain attributes; tied ones once.

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
