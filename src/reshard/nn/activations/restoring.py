"""Makes regions whole again: one exchange for several of them, begun before they are needed."""

from __future__ import annotations

import threading
import time
import weakref
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from reshard.layout import Layout
from reshard.mesh import Mesh
from reshard.nn.activations.host import brought_back
from reshard.nn.activations.order import Order
from reshard.nn.activations.region import Form, Region
from reshard.planning.plan import Plan, plan
from reshard.run.live import engine
from reshard.spec import TensorSpec

__all__ = ["Restorer", "restorer_of"]

Group = dist.ProcessGroup


class Restorer:
    """Brings regions to the ranks of one group; one for all modules that are resharded over it."""

    def __init__(self, group: Group) -> None:
        self._known_group = weakref.ref(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.place = self.ranks.index(dist.get_rank())
        self._order = Order()
        self._coming: _Coming | None = None
        self._lock = threading.RLock()

    @property
    def group(self) -> Group:
        """The process group."""
        found = self._known_group()
        if found is None:
            raise RuntimeError("the process group of resharded activations is gone: keep it")
        return found

    def keep(self, region: Region) -> None:
        """Forward keeps a region."""
        if torch._C._current_graph_task_id() == -1:
            # What backward computes again is not part of the order: it may never be asked for.
            with self._lock:
                self._order.keep(region)

    def whole(self, region: Region, timeout: float, room: int | None) -> torch.Tensor:
        """All bytes of a region; ``room`` bounds what is brought before its time."""
        with self._lock:
            began = time.perf_counter()
            is_new = not any(region.uses.values())
            if region.whole is None:
                self._bring(region, timeout, room)
            if is_new:
                self._order.ask(region)
                self._look_ahead(region, timeout, room)
            region.stats.seconds_waiting += time.perf_counter() - began
            assert region.whole is not None
            return region.whole

    def _bring(self, region: Region, timeout: float, room: int | None) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            # Also where the guess was wrong: other ranks have sent it.
            coming.arrive()
        if region.whole is None:
            together = self._order.together(region) if room is None else [region]
            self._send_for(together, timeout, False).arrive()

    def _look_ahead(self, region: Region, timeout: float, room: int | None) -> None:
        following = self._order.after(region)
        if following is None or self._coming is not None:
            return
        together = self._order.together(following)
        if room is not None:
            if following.num_bytes > room:
                return
            together = [following]
        self._coming = self._send_for(together, timeout, True)

    def _send_for(self, regions: list[Region], timeout: float, ahead: bool) -> _Coming:
        for region in regions:
            region.stats.restores += 1
        if regions[0].form is Form.HOST:
            return _Coming(regions, None, [brought_back(one, ahead) for one in regions])
        regions[0].stats.collectives += 1
        names = tuple(f"{number}: {one.label}" for number, one in enumerate(regions))
        sizes = tuple((one.num_bytes, one.unit) for one in regions)
        # A share may wait on the host.
        given = {name: one.memory.to(one.device) for name, one in zip(names, regions, strict=True)}
        device, group = regions[0].device, self.group
        handle = engine.start(
            _plan(self.ranks, names, sizes),
            given,
            group=group,
            device=device,
            timeout=timeout,
            _thread=ahead,
        )
        return _Coming(regions, (handle, names), [])


class _Coming:
    """Regions that are on their way."""

    def __init__(self, regions: list[Region], handle: Any, brought: list[Any]) -> None:
        self._regions = regions
        self._handle = handle
        self._brought = brought

    def arrive(self) -> None:
        """Wait for them."""
        if self._handle is None:
            found = [one() for one in self._brought]
        else:
            handle, names = self._handle
            moved = handle.wait()
            found = [moved[name] for name in names]
        for region, whole in zip(self._regions, found, strict=True):
            # Views that have gone in the meantime do not ask for it any more.
            region.whole = whole if region.uses else None


@lru_cache(maxsize=1024)
def _plan(
    ranks: tuple[int, ...], names: tuple[str, ...], sizes: tuple[tuple[int, int], ...]
) -> Plan:
    """From a share on each rank to the whole on all."""
    mesh = Mesh(tp=len(ranks), ranks=ranks)
    want = Layout(mesh, "-")
    pairs = list(zip(names, sizes, strict=True))
    have = {
        name: TensorSpec((size,), "uint8", Layout(mesh, f"tp*{unit}" if unit > 1 else "tp"))
        for name, (size, unit) in pairs
    }
    return plan(have, {name: TensorSpec((size,), "uint8", want) for name, (size, _) in pairs})


_restorers: weakref.WeakKeyDictionary[Group, Restorer] = weakref.WeakKeyDictionary()


def restorer_of(group: Group) -> Restorer:
    """The restorer of a group."""
    found = _restorers.get(group)
    if found is None:
        found = _restorers[group] = Restorer(group)
    return found
