"""What was read goes to where it belongs: one move for each batch, into the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from reshard.checkpoint.live.fetching import Fetched
from reshard.checkpoint.live.ranks import Circle
from reshard.checkpoint.live.read_shares import Batch, Share, Wish
from reshard.checkpoint.live.views import View, boxes_of, part_of, views_of
from reshard.layout.box import Box
from reshard.layout.layout import Layout
from reshard.layout.spec import TensorSpec
from reshard.planning.plans import plan

__all__ = ["Placer"]


class Placer:
    """Writes what ranks have read into the tensors of a state dict."""

    def __init__(
        self,
        circle: Circle,
        wishes: Mapping[str, Wish],
        specs: Mapping[str, TensorSpec],
        tensors: Mapping[str, torch.Tensor],
        memory: int,
    ) -> None:
        self.bytes_moved = 0
        self._circle, self._wishes, self._specs, self._memory = circle, wishes, specs, memory
        self.views: Mapping[str, Sequence[View]] = {
            name: views_of(tensors[name], spec.shape, circle.rank)
            for name, spec in specs.items()
            if name in tensors
        }

    def place(self, batch: Batch, fetched: Sequence[Fetched]) -> None:
        """Bring a batch to where it belongs."""
        if self._circle.is_alone:
            for one in fetched:
                _copy(one, self.views.get(one.share.name, []))
            return
        have: dict[str, TensorSpec] = {}
        want: dict[str, TensorSpec] = {}
        given: dict[str, torch.Tensor] = {}
        into: dict[str, torch.Tensor] = {}
        mine = {(one.share.name, one.share.window): one for one in fetched}
        for share in batch.shares:
            source = self._source(share, is_first=not have)
            read = mine.get((share.name, share.window))
            for number, target in self._targets(share):
                name = f"{share.name} {share.window}" + f" part {number}" * (number > 0)
                have[name], want[name] = source, target
                if read is not None:
                    given[name] = _local(read)
                into |= self._place(name, share, number)
        if have:
            move = plan(have, want, memory=self._memory)
            self.bytes_moved += move.summary().wire_bytes
            move.run(
                given,
                into=into,
                group=self._circle.group,
                timeout=self._circle.timeout,
                progress=False,
                sync=True,
            )

    def _source(self, share: Share, is_first: bool) -> TensorSpec:
        """Who has read what. The first tensor speaks of all ranks: each batch has the same team."""
        transfer = self._wishes[share.name].transfer
        ranks = self._circle.ranks if is_first else share.boxes
        boxes = {rank: share.boxes.get(rank, ()) for rank in ranks}
        return TensorSpec(transfer.shape, transfer.have, Layout.from_boxes(transfer.shape, boxes))

    def _targets(self, share: Share) -> Iterator[tuple[int, TensorSpec]]:
        """What the ranks want of a window: their first boxes in it, their second ones, and so on.

        A rank has at most one box of each, so that the box is a view of its tensor.
        """
        spec = self._specs[share.name]
        inside = {
            rank: [box & share.window for box in boxes]
            for rank, boxes in boxes_of(spec.layout, spec.shape).items()
        }
        for number in range(max(map(len, inside.values()), default=0)):
            boxes = {
                rank: (held[number],)
                for rank, held in inside.items()
                if number < len(held) and held[number].size
            }
            if boxes:
                layout = Layout.from_boxes(spec.shape, boxes)
                yield number, TensorSpec(spec.shape, spec.dtype, layout)

    def _place(self, name: str, share: Share, number: int) -> dict[str, torch.Tensor]:
        """Where this rank wants a target, if it does."""
        views = self.views.get(share.name, [])
        if number >= len(views) or not (views[number][0] & share.window).size:
            return {}
        return {name: part_of(views[number], share.window)}


def _local(one: Fetched) -> torch.Tensor:
    """The local tensor as a layout of boxes has it."""
    return one.local.view(one.boxes[0].shape) if len(one.boxes) == 1 else one.local


def _copy(one: Fetched, views: Sequence[View]) -> None:
    """Copy what one process has read into its own tensors."""
    for box, part in one.parts():
        for view in views:
            common: Box = view[0] & box
            if common.size:
                part_of(view, box).copy_(part_of((box, part), common))
