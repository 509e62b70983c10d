"""Does a tensor that was given lie as the plan says, and how is it written to?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reshard.errors import LayoutError, TensorError
from reshard.layout.layout import BoxLayout
from reshard.layout.spec import TensorSpec, agrees, is_part_of
from reshard.tensors.describe import spec_of
from reshard.tensors.kinds import knows_layout
from reshard.tensors.reading import parts_of

__all__ = ["NOWHERE", "Place", "check_fits", "joined", "place_of"]


def check_fits(tensor: torch.Tensor, planned: TensorSpec, name: str, is_source: bool) -> None:
    """Refuse a DTensor or ShardedTensor that holds something else than planned on some rank.

    A tensor on a sub-mesh does not know of its replicas, so the plan may have more ranks. Of a
    source it may also have fewer: a replica that it does not have is not read. Shape and dtype of
    plain tensors are checked where they are moved.
    """
    if not knows_layout(tensor):
        return
    role = "to move" if is_source else "to move into"
    try:
        found = spec_of(tensor)
    except LayoutError as error:
        raise TensorError(f'"{name}" {role}: {error}') from None
    if found is planned:
        return
    fits = agrees if is_source else is_part_of
    alike = (found.shape, found.dtype) == (planned.shape, planned.dtype)
    if not alike or not fits(found.layout, planned.layout, found.shape):
        raise TensorError(
            f'"{name}" {role} is a {type(tensor).__name__} {_text(found)} and the plan says '
            f"{_text(planned)}: plan with what rs.describe says of the tensors you give, merged by "
            "rs.exchange"
        )


def _text(spec: TensorSpec) -> str:
    layout = spec.layout
    how = repr(layout) if isinstance(layout, BoxLayout) else f'"{layout}" on mesh {layout.mesh}'
    return f"{spec.dtype}{list(spec.shape)} {how}"


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A rank's parts as its layout has them: one as it is, several flattened and joined."""
    if len(parts) > 1:
        return torch.cat([part.reshape(-1) for part in parts])
    return parts[0] if parts else None


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Where a result goes on this rank."""

    local: torch.Tensor | None
    """What is written to; of several parts a tensor beside them."""
    parts: tuple[torch.Tensor, ...]

    def fill(self) -> None:
        """Bring what was written beside several parts into them."""
        if self.local is None or len(self.parts) < 2:
            return
        at = 0
        for part in self.parts:
            part.detach().copy_(self.local[at : at + part.numel()].view(part.shape))
            at += part.numel()


NOWHERE = Place(None, ())


def place_of(tensor: torch.Tensor) -> Place:
    """The place that a tensor of any kind offers."""
    parts = parts_of(tensor)
    if len(parts) > 1:
        total = sum(part.numel() for part in parts)
        return Place(torch.empty(total, dtype=parts[0].dtype, device=parts[0].device), parts)
    return Place(parts[0] if parts else None, parts)
