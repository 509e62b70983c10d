"""Sends what the ranks have read to the ranks that need it: one move for each batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from reshard.checkpoint.live.entries import RankBoxes, View, part_of
from reshard.checkpoint.live.read_shares import Batch, ReadRequest, Share
from reshard.checkpoint.live.shared_reads import ShareData
from reshard.layout.box import Box
from reshard.layout.layout import Layout
from reshard.layout.spec import TensorSpec
from reshard.planning.plans import plan
from reshard.tensors.agreement import Agreement

__all__ = ["Scatter"]


class Scatter:
    """Writes what the ranks have read into the tensors of a state dict."""

    def __init__(
        self,
        agreement: Agreement,
        requests: Mapping[str, ReadRequest],
        specs: Mapping[str, TensorSpec],
        tensors: Mapping[str, torch.Tensor],
        memory: int,
    ) -> None:
        self.bytes_moved = 0
        self._boxes = RankBoxes()
        self._agreement, self._requests, self._specs, self._memory = (
            agreement,
            requests,
            specs,
            memory,
        )
        self.views: Mapping[str, Sequence[View]] = {
            name: self._boxes.views(tensors[name], spec.shape, agreement.rank)
            for name, spec in specs.items()
            if name in tensors
        }

    def move(self, batch: Batch, read: Sequence[ShareData]) -> None:
        """Write a batch into the tensors of all ranks."""
        if len(self._agreement.ranks) == 1:
            for one in read:
                _copy(one, self.views.get(one.share.name, []))
            return
        have: dict[str, TensorSpec] = {}
        want: dict[str, TensorSpec] = {}
        given: dict[str, torch.Tensor] = {}
        into: dict[str, torch.Tensor] = {}
        mine = {(one.share.name, one.share.window): one for one in read}
        for share in batch.shares:
            source = self._source(share, is_first=not have)
            here = mine.get((share.name, share.window))
            for number, destination in self._destinations(share):
                name = f"{share.name} {share.window}" + f" part {number}" * (number > 0)
                have[name], want[name] = source, destination
                if here is not None:
                    given[name] = _local(here)
                into |= self._destination(name, share, number)
        if have:
            scatter = plan(have, want, memory=self._memory)
            self.bytes_moved += scatter.summary().wire_bytes
            scatter.run(
                given,
                into=into,
                group=self._agreement.group,
                timeout=self._agreement.timeout,
                progress=False,
                sync=True,
            )

    def _source(self, share: Share, is_first: bool) -> TensorSpec:
        """The boxes that ranks have read; the first tensor lists all ranks: each move has these."""
        transfer = self._requests[share.name].transfer
        ranks = self._agreement.ranks if is_first else share.boxes
        boxes = {rank: share.boxes.get(rank, ()) for rank in ranks}
        return TensorSpec(transfer.shape, transfer.have, Layout.from_boxes(transfer.shape, boxes))

    def _destinations(self, share: Share) -> Iterator[tuple[int, TensorSpec]]:
        """The parts of a window on the ranks: their first boxes in it, their second, and so on.

        A rank has at most one box in each, so that the box is a view of its tensor.
        """
        spec = self._specs[share.name]
        inside = {
            rank: [box & share.window for box in boxes]
            for rank, boxes in self._boxes.of(spec.layout, spec.shape).items()
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

    def _destination(self, name: str, share: Share, number: int) -> dict[str, torch.Tensor]:
        """The memory of this rank for a destination, if it has any."""
        views = self.views.get(share.name, [])
        if number >= len(views) or not (views[number][0] & share.window).size:
            return {}
        return {name: part_of(views[number], share.window)}


def _local(one: ShareData) -> torch.Tensor:
    """The data in the shape of a local tensor with a layout of boxes."""
    return one.local.view(one.boxes[0].shape) if len(one.boxes) == 1 else one.local


def _copy(one: ShareData, views: Sequence[View]) -> None:
    """Copy what a single process has read into its own tensors."""
    for box, part in one.parts():
        for view in views:
            common: Box = view[0] & box
            if common.size:
                part_of(view, box).copy_(part_of((box, part), common))
