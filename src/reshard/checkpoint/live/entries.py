"""The entries of a state dict, and the memory that this rank has of each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from reshard.errors import ReshardError, TensorError
from reshard.layout.box import Box, Piece
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.spec import TensorSpec
from reshard.tensors.local import box_view, parts_of, piece_view, spec_of
from reshard.text import quoted

MAX_DEPTH = 64
"""A dict that is nested deeper is taken to contain itself."""

Keys = tuple[str | int, ...]
"""The path of keys to an entry, as in torch's checkpoints."""

View = tuple[Box, torch.Tensor]
"""A box of a tensor, and the memory that holds it."""


class RankTensor(NamedTuple):
    """A tensor of this rank: its spec, and the memory of its parts in the order of its boxes."""

    spec: TensorSpec
    parts: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Entries:
    """A flattened state dict."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    """Entries that are not tensors: numbers, strings, lists, objects."""
    keys: dict[str, Keys] = field(default_factory=dict)

    @cached_property
    def local(self) -> dict[str, RankTensor]:
        """All tensors; an error names the tensor."""
        return {name: _rank_tensor(name, tensor) for name, tensor in self.tensors.items()}

    def specs(self) -> dict[str, TensorSpec]:
        return {name: local.spec for name, local in self.local.items()}

    def shared_memory(self) -> dict[str, str | None]:
        """The tensors with all of the memory of an earlier one, and that one.

        None instead if this rank has no element of the tensor.
        """
        firsts: dict[object, str | None] = {(): None}
        shared = {}
        for name, (_, parts) in self.local.items():
            some = [part for part in parts if part.numel()]
            key = tuple((p.data_ptr(), p.device, p.dtype, p.shape, p.stride()) for p in some)
            if firsts.setdefault(key, name) != name:
                shared[name] = firsts[key]
        return shared


def entries_of(state_dict: Mapping[Any, Any]) -> Entries:
    """The entries of a nested or flat state dict, with dotted names."""
    if not isinstance(state_dict, Mapping):
        raise TensorError(f"a {type(state_dict).__name__} is no state dict: give a dict of tensors")
    entries = Entries()
    for keys, value in _walk((), state_dict):
        name = ".".join(map(str, keys))
        if name in entries.keys:
            raise TensorError(
                f"two entries of the state dict are called {quoted(name)}, one of them nested: "
                "rename one"
            )
        entries.keys[name] = keys
        kind = entries.tensors if isinstance(value, torch.Tensor) else entries.others
        kind[name] = value
    return entries


def _walk(keys: Keys, value: Any) -> Iterator[tuple[Keys, Any]]:
    if len(keys) > MAX_DEPTH:
        raise TensorError(f"{quoted(keys[0])} is nested more than {MAX_DEPTH} deep: flatten it")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str | int):
                raise TensorError(
                    f"the key {quoted(key)} is a {type(key).__name__}: names are strings or numbers"
                )
            yield from _walk((*keys, str(key)), inner)
    elif isinstance(value, list | tuple) and _has_tensors(value, len(keys)):
        for at, inner in enumerate(value):
            yield from _walk((*keys, at), inner)
    else:
        yield keys, value


def _has_tensors(value: Any, depth: int) -> bool:
    """Whether a list is flattened: a list of numbers is one entry, as in torch."""
    if isinstance(value, torch.Tensor | Mapping) or depth > MAX_DEPTH:
        return True
    inside = value if isinstance(value, list | tuple) else ()
    return any(_has_tensors(one, depth + 1) for one in inside)


def _rank_tensor(name: str, tensor: torch.Tensor) -> RankTensor:
    if is_lazy(tensor) or tensor.is_nested:
        kind = "a nested tensor: pad it" if tensor.is_nested else "not initialized: run the model"
        raise TensorError(f"{quoted(name)} is {kind} first, and give a dense tensor")
    try:
        spec = spec_of(tensor)
    except ReshardError as error:
        raise type(error)(f"{quoted(name)}: {error}") from None
    parts = tuple(part.detach() for part in parts_of(tensor))
    for part in parts:
        is_plain = type(part).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if not is_plain or part.is_meta or part.is_conj() or part.is_neg():
            kind = "on the meta device" if part.is_meta else "a lazy conjugate or negative"
            kind = kind if is_plain else f"a {type(part).__name__}"
            raise TensorError(f"{quoted(name)} is {kind}: give a tensor that has its own memory")
    if spec.layout.reduce is not None:
        raise TensorError(
            f'{quoted(name)} has layout "{spec.layout}", which leaves a sum pending: a checkpoint '
            "holds values; redistribute the tensor first"
        )
    return RankTensor(spec, parts)


class RankBoxes:
    """The boxes that ranks hold, computed once for each layout of one load or save."""

    def __init__(self) -> None:
        self._pieces = cache(_pieces_of)
        self.of = cache(self._of)

    def _of(self, layout: Layout, shape: tuple[int, ...]) -> dict[int, list[Box]]:
        """The boxes of every rank in ascending order, without ranks that have none."""
        pieces = {rank: self._pieces(layout, rank, shape) for rank in layout.ranks}
        return {rank: sorted(piece.box for piece in some) for rank, some in pieces.items() if some}

    def views(self, local: RankTensor, rank: int) -> list[View]:
        """The boxes that this rank holds in ascending order, and the memory of each.

        Writing to that memory changes the tensor. The layout is that of the tensor itself: the
        layout that all ranks together describe may be an equal one in other words.
        """
        layout, parts = local.spec.layout, local.parts
        if isinstance(layout, BoxLayout):
            pairs = zip(layout.boxes.get(rank, ()), parts, strict=True)
            views = [(box, part) for box, part in pairs if box.size]
        else:
            pieces = self._pieces(layout, rank, local.spec.shape) if parts else ()
            views = [(piece.box, piece_view(parts[0], piece)) for piece in pieces]
        return sorted(views, key=lambda view: view[0])


def _pieces_of(layout: Layout, rank: int, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    return tuple(piece for piece in layout.pieces(rank, shape) if piece.box.size)


def part_of(view: View, box: Box) -> torch.Tensor:
    outer, tensor = view
    return box_view(tensor, outer, box)


def bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor of the host: that of one element may have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
