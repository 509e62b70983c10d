"""Restores regions from the shares of all ranks: several in one exchange, ahead of their use.

Regions are numbered in the order of saving. Backward reads them in some order, mostly the reverse,
and that order is remembered by the labels of the regions:

    forward      1: a    2: b    3: c
    backward     3: c    2: b    1: a        after c its predecessor, after b too, after a none
    forward      4: a    5: b    6: c
    backward     6: c    so 5 and then 4 can be fetched before they are read

The order is a prediction. With their shares, ranks send the numbers of the regions, so that two
different regions are never combined, and their predictions, which are followed if all are equal.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import DisagreementError, LiveError, StateError
from reshard.layout.columns import SizedCache
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.layout.spec import TensorSpec
from reshard.nn.activations.region import NUM_SAMPLES, Region
from reshard.planning.plans import Plan, plan
from reshard.tensors.agreement import Agreement
from reshard.tensors.tensor_move import plan_bytes

NUMBERS = "numbers"
"""The name of the tensor with the numbers that each rank sends."""
MAX_BATCH_BYTES = 8 << 20
"""Bytes of regions that are fetched in one exchange; a larger region is fetched alone."""
MAX_BATCH = 15
MAX_PLAN_BYTES = 64 << 20
"""Bytes of the plans that a group keeps: a training step repeats a few exchanges."""


class Restorer:
    """Restores regions on the ranks of one group, for all modules that are resharded over it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.index = self.ranks.index(dist.get_rank())
        self._plans: SizedCache[tuple[object, ...], Plan] = SizedCache(MAX_PLAN_BYTES)
        self._order = _ReadOrder()
        self._in_flight: Callable[[], None] | None = None
        """Completes the exchange that was started ahead of its use."""
        self._expected: list[Region] = []
        """The regions that all ranks expect to read next."""
        self._prefetched: list[Region] = []
        """The regions of the last exchange; reading the last of them starts the next exchange."""
        self._whole: list[Region] = []
        """Restored regions, in the order of their last use."""
        self._lock = threading.RLock()

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise StateError("the process group of resharded activations was freed: keep it")
        return group

    def register(self, region: Region) -> None:
        with self._lock:
            self._order.add(region, torch._C._current_graph_task_id() != -1)

    def restore(self, region: Region, timeout: float, headroom: int | None) -> torch.Tensor:
        """All bytes of a region; ``headroom`` bounds what is fetched ahead of its use."""
        with self.reset_on_failure():
            began = time.perf_counter()
            if region.whole is None and self._in_flight is not None:
                self._in_flight()
            if region.whole is None:
                for other in self._prefetched:  # the prediction was wrong
                    other.whole = None
                self._fetch([region], timeout, headroom, False)()
            self._order.read(region)
            if self._expected and region is self._prefetched[-1] and self._in_flight is None:
                self._in_flight = self._fetch(self._expected, timeout, headroom, True)
            region.stats.seconds_waiting += time.perf_counter() - began
            whole = region.whole
            assert whole is not None
            # Only the last regions that were read stay restored.
            read = [one for one in self._whole if one is not region] + [region]
            self._whole = read[-2 if headroom is None else -1 :]
            for older in read[: -len(self._whole)]:
                older.whole = None
            return whole

    def gather(self, values: Sequence[Any], timeout: float) -> list[Any]:
        """The values of each rank, which are those of JSON."""
        agreement = Agreement(self.group, "resharding activations", timeout)
        with self.reset_on_failure():
            return [*agreement.gather(values).values()]

    def _fetch(
        self, regions: list[Region], timeout: float, headroom: int | None, ahead: bool
    ) -> Callable[[], None]:
        """Start an exchange that restores regions; the returned function completes it."""
        for region in regions:
            region.stats.restores += 1
        regions[0].stats.collectives += 1
        following = self._order.after(regions[-1], MAX_BATCH if headroom is None else 1)
        if headroom is not None and following and following[0].num_bytes > headroom:
            following = []
        identities = [number for one in regions for number in one.identity]
        expected = [one.number for one in following]
        numbers = identities + expected + [0] * (MAX_BATCH - len(expected))
        names = tuple(f"{number}: {one.label}" for number, one in enumerate(regions))
        gather = self.plan_for(names, tuple((one.num_bytes, one.unit) for one in regions))
        device = regions[0].device
        tensors = {name: one.memory for name, one in zip(names, regions, strict=True)}
        tensors[NUMBERS] = torch.tensor([numbers], dtype=torch.int64, device=device)
        options: Any = {"group": self.group, "device": device, "timeout": timeout}
        if ahead:
            wait = gather.start(tensors, **options).wait
        else:
            wait = partial(dict, gather.run(tensors, **options))

        def complete() -> None:
            """Wait for the regions, and for what all ranks expect next."""
            self._in_flight, self._prefetched = None, regions
            moved = wait()
            by_rank = moved[NUMBERS].tolist()
            self._check_same([numbers[: len(identities)] for numbers in by_rank], regions[0].label)
            for region, name in zip(regions, names, strict=True):
                # Views that were freed in the meantime do not need it any more.
                region.whole = moved[name] if region.views else None
            is_same = all(numbers == by_rank[0] for numbers in by_rank)
            self._expected = following if is_same else []

        return complete

    def _check_same(self, identities: list[list[int]], label: str) -> None:
        pairs = zip(self.ranks, identities, strict=True)
        different = [rank for rank, numbers in pairs if numbers != identities[0]]
        if different:
            raise DisagreementError(
                "ranks ask for different tensors, or for one that is not the same on all ranks, "
                f'beginning with "{label}": ranks {different} differ from rank {self.ranks[0]}; '
                "all ranks must have the same inputs, and run backward through the same graphs in "
                "the same order, in one thread"
            )

    def plan_for(self, names: tuple[str, ...], sizes: tuple[tuple[int, int], ...]) -> Plan:
        """The plan that gathers the shares of regions of these names, and sizes and units."""
        known = self._plans.get((names, sizes))
        if known is not None:
            return known
        mesh = Mesh(tp=len(self.ranks), ranks=self.ranks)
        have, want = {}, {}
        for name, (size, unit) in zip(names, sizes, strict=True):
            shares = Layout(mesh, f"tp*{unit}" if unit > 1 else "tp")
            have[name] = TensorSpec((size,), "uint8", shares)
            want[name] = TensorSpec((size,), "uint8", Layout(mesh, "-"))
        # The number and the sample of each region, and the regions that are expected next.
        count = len(names) * (1 + NUM_SAMPLES // 8) + MAX_BATCH
        have[NUMBERS] = TensorSpec((len(self.ranks), count), "int64", Layout(mesh, "tp -"))
        want[NUMBERS] = TensorSpec((len(self.ranks), count), "int64", Layout(mesh, "- -"))
        gather = plan(have, want)
        return self._plans.put((names, sizes), gather, plan_bytes(gather))

    @contextmanager
    def reset_on_failure(self) -> Iterator[None]:
        """After a failure ranks may have saved and read different regions: start counting again."""
        with self._lock:
            try:
                yield
            except LiveError:
                self._order, self._in_flight = _ReadOrder(), None
                self._expected, self._prefetched = [], []
                raise


class _ReadOrder:
    """The order in which regions are saved, and in which backward reads them."""

    def __init__(self) -> None:
        self._count = 0
        self._regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
        self._last: tuple[str, int] | None = None
        self._steps: dict[str, int | None] = {}
        """From the label of a region to the difference in number to the next one; None: the last"""

    def add(self, region: Region, in_backward: bool) -> None:
        """Number a region; one that is saved in backward, by a recomputation, may stay unread."""
        if not in_backward and self._last is not None:
            self._steps[self._last[0]] = None
            self._last = None
        self._count += 1
        region.number = self._count
        self._regions[self._count] = region

    def read(self, region: Region) -> None:
        if self._last is not None:
            label, number = self._last
            if number == region.number:
                return
            self._steps[label] = region.number - number
        self._last = (region.label, region.number)

    def after(self, region: Region, count: int) -> list[Region]:
        """The regions that are expected next, at most as many as fit into one exchange."""
        batch: list[Region] = []
        total, last = 0, region
        while len(batch) < count:
            step = self._steps.get(last.label)
            following = None if step is None else self._regions.get(last.number + step)
            if following is None or following in (region, *batch):
                break
            if not following.is_share or following.whole is not None or not following.views:
                break  # it does not have to be fetched
            total += following.num_bytes
            if batch and (total > MAX_BATCH_BYTES or following.device != batch[0].device):
                break
            batch.append(following)
            last = following
        return batch


_restorers: weakref.WeakKeyDictionary[dist.ProcessGroup, Restorer] = weakref.WeakKeyDictionary()


def restorer_of(group: dist.ProcessGroup) -> Restorer:
    if group not in _restorers:
        _restorers[group] = Restorer(group)
    return _restorers[group]
