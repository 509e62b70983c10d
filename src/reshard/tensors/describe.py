"""What is in a state dict? The specs of its tensors, by name, without touching their data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from numbers import Number
from typing import Any

import torch

from reshard.errors import ReshardError, TensorError
from reshard.layout.layout import Layout
from reshard.layout.spec import TensorSpec
from reshard.tensors.kinds import is_sharded_tensor
from reshard.tensors.reading import layout_of
from reshard.text import quoted

__all__ = ["describe", "spec_of", "tensors_in"]

MAX_DEPTH = 64
"""A dict deeper than this holds itself."""


def describe(state_dict: Mapping[Any, Any]) -> dict[str, TensorSpec]:
    """The spec of every tensor: DTensors, ShardedTensors and plain ones, which are whole here.

    Nested dicts and lists, as optimizers have them, get dotted names: ``state.0.exp_avg``.
    Numbers, strings and None are left out; anything else that is no tensor is an error.
    """
    return {name: _described(name, tensor) for name, tensor in tensors_in(state_dict).items()}


def tensors_in(state_dict: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict under the names that ``describe`` gives them."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _walk("", state_dict, 0):
        if name in found:
            raise TensorError(
                f"two entries of the state dict are called {quoted(name)}, one of them nested: "
                "rename one"
            )
        found[name] = tensor
    return found


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Global shape, dtype and layout of one tensor."""
    layout = layout_of(tensor)
    if is_sharded_tensor(tensor):
        # Asking the tensor itself is an operation on it, and torch warns of every one.
        metadata = tensor.metadata()
        return _spec(metadata.size, metadata.tensor_properties.dtype, layout)
    if tensor.layout is not torch.strided:
        raise TensorError(f"the tensor is {tensor.layout}: only dense tensors can be moved")
    return _spec(tensor.shape, tensor.dtype, layout)


@lru_cache(maxsize=1 << 16)
def _spec(shape: torch.Size, dtype: torch.dtype, layout: Layout) -> TensorSpec:
    """One object per spec: a large state dict has few, and comparing them is then quick."""
    return TensorSpec(tuple(shape), str(dtype), layout)


def _described(name: str, tensor: torch.Tensor) -> TensorSpec:
    try:
        return spec_of(tensor)
    except ReshardError as error:
        raise type(error)(f"{quoted(name)}: {error}") from None


def _walk(name: str, value: object, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested dicts and lists, in their order."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        if depth > MAX_DEPTH:
            raise TensorError(f"{quoted(name)} is nested more than {MAX_DEPTH} deep: flatten it")
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _walk(_joined(name, key), inner, depth + 1)
    elif not (value is None or isinstance(value, Number | str)):
        raise TensorError(
            f"{quoted(name)} is a {type(value).__name__}, which cannot be moved: "
            "take it out of the state dict and carry it yourself"
        )


def _joined(name: str, key: object) -> str:
    if not isinstance(key, str | int):
        raise TensorError(
            f"the key {quoted(key)} in {quoted(name)} is a {type(key).__name__}: "
            "names are strings or numbers"
        )
    return f"{name}.{key}" if name else str(key)
