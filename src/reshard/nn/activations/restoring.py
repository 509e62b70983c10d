"""Makes regions whole again: one exchange for several of them, begun before they are needed.

With their shares ranks send the numbers of the regions, so that never two different ones are put
together, and which regions they expect next; what all expect comes ahead of its time.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import DisagreementError, LiveError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.layout.spec import TensorSpec
from reshard.nn.activations.order import MOST_AHEAD, Order
from reshard.nn.activations.region import Region
from reshard.planning.plans import Plan, plan
from reshard.sharded.making import home_of

__all__ = ["Restorer", "restorer_of"]

Group = dist.ProcessGroup
WORDS = "words"
"""The name of the tensor in which ranks tell each other numbers."""


class Restorer:
    """Brings regions to the ranks of one group; one for all modules that are resharded over it."""

    def __init__(self, group: Group) -> None:
        self._known_group = weakref.ref(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.place = self.ranks.index(dist.get_rank())
        self._order = Order()
        self._coming: _Exchange | None = None
        self._expected: list[Region] = []
        """What all ranks expect next."""
        self._ahead: list[Region] = []
        """What came last, perhaps before it was asked for."""
        self._tail = 0
        """The number of the last region that was brought; when it is used, the next ones come."""
        self._whole: list[Region] = []
        """Regions that are whole, in the order in which they were used."""
        self._lock = threading.RLock()

    @property
    def group(self) -> Group:
        """The process group."""
        found = self._known_group()
        if found is None:
            raise RuntimeError("the process group of resharded activations is gone: keep it")
        return found

    def keep(self, region: Region) -> None:
        """Number a region that is kept."""
        with self._lock:
            self._order.keep(region, torch._C._current_graph_task_id() != -1)

    def whole(self, region: Region, timeout: float, room: int | None) -> torch.Tensor:
        """All bytes of a region; ``room`` bounds what is brought before its time."""
        with self._lock:
            began = time.perf_counter()
            with self._counted_anew():
                self._bring(region, timeout, room)
            region.stats.seconds_waiting += time.perf_counter() - began
            found = region.whole
            assert found is not None
            self._let_go(region, 1 if room is not None else 2)
            return found

    def tell(self, words: Sequence[int], timeout: float) -> list[list[int]]:
        """Numbers of each rank, for all; all ranks call this with equally many."""
        with self._lock, self._counted_anew():
            return _Message(self, [], list(words), timeout, False).words()

    def _bring(self, region: Region, timeout: float, room: int | None) -> None:
        if region.whole is None and self._coming is not None:
            self._arrive(self._coming)
        if region.whole is None:
            for other in self._ahead:  # the guess was wrong
                other.whole = None
            self._fetch([region], timeout, room, False)
        self._order.ask(region)
        if region.number == self._tail and self._expected and self._coming is None:
            self._fetch(self._expected, timeout, room, True)

    def _fetch(self, regions: list[Region], timeout: float, room: int | None, ahead: bool) -> None:
        for region in regions:
            region.stats.restores += 1
        following = self._guess(regions[-1], room)
        exchange = _Exchange(self, regions, following, timeout, ahead)
        if ahead:
            self._coming = exchange
        else:
            self._arrive(exchange)

    def _guess(self, region: Region, room: int | None) -> list[Region]:
        found = self._order.after(region, MOST_AHEAD if room is None else 1)
        return [] if room is not None and found and found[0].num_bytes > room else found

    def _arrive(self, exchange: _Exchange) -> None:
        self._coming, self._ahead = None, exchange.regions
        self._expected = exchange.arrive()
        self._tail = exchange.regions[-1].number

    def _let_go(self, region: Region, most: int) -> None:
        """Only the last ones that were used stay whole."""
        self._whole = [one for one in self._whole if one is not region] + [region]
        for one in self._whole[:-most]:
            one.whole = None
        del self._whole[:-most]

    @contextmanager
    def _counted_anew(self) -> Iterator[None]:
        """After a failure ranks may have kept and asked for different things: count again."""
        try:
            yield
        except LiveError:
            self._order, self._coming = Order(), None
            self._expected, self._ahead, self._tail = [], [], 0
            raise


class _Message:
    """Shares of regions that are on their way to all ranks, and numbers with them."""

    def __init__(
        self,
        restorer: Restorer,
        regions: Sequence[Region],
        words: list[int],
        timeout: float,
        ahead: bool,
    ) -> None:
        self._num_words = len(words)
        self._names = tuple(f"{number}: {one.label}" for number, one in enumerate(regions))
        sizes = tuple((one.num_bytes, one.unit) for one in regions)
        device = regions[0].device if regions else home_of(restorer.group)
        # A share may wait on the host.
        given = {
            name: one.memory.to(one.device) for name, one in zip(self._names, regions, strict=True)
        }
        given[WORDS] = torch.tensor(words, dtype=torch.int64).to(device)
        plan = _plan(restorer.ranks, self._names, sizes, len(words))
        options: Any = {"group": restorer.group, "device": device, "timeout": timeout}
        self._handle = plan.start(given, **options) if ahead else None
        self._moved = {} if ahead else plan.run(given, **options)

    def _wait(self) -> dict[str, torch.Tensor]:
        return self._moved if self._handle is None else self._handle.wait()

    def words(self) -> list[list[int]]:
        """What each rank has said."""
        said = self._wait()[WORDS].tolist()
        return [said[at : at + self._num_words] for at in range(0, len(said), self._num_words)]

    def wholes(self) -> list[torch.Tensor]:
        """All bytes of each region."""
        moved = self._wait()
        return [moved[name] for name in self._names]


class _Exchange:
    """Regions that are on their way, and those that this rank expects after them."""

    def __init__(
        self,
        restorer: Restorer,
        regions: list[Region],
        following: list[Region],
        timeout: float,
        ahead: bool,
    ) -> None:
        self.regions, self._following, self._ranks = regions, following, restorer.ranks
        regions[0].stats.collectives += 1
        identities = [word for one in regions for word in one.identity]
        self._num_identities = len(identities)
        expected = [one.number for one in following]
        words = identities + expected + [0] * (MOST_AHEAD - len(expected))
        self._message = _Message(restorer, regions, words, timeout, ahead)

    def arrive(self) -> list[Region]:
        """Wait for the regions; gives those that all ranks expect next."""
        said, count = self._message.words(), self._num_identities
        self._check([words[:count] for words in said])
        for region, whole in zip(self.regions, self._message.wholes(), strict=True):
            # Views that have gone in the meantime do not ask for it any more.
            region.whole = whole if region.views else None
        same = all(words[count:] == said[0][count:] for words in said)
        return self._following if same else []

    def _check(self, numbers: list[list[int]]) -> None:
        odd = [rank for rank, own in zip(self._ranks, numbers, strict=True) if own != numbers[0]]
        if odd:
            raise DisagreementError(
                f"ranks ask for different tensors, or one that is not the same on all, beginning "
                f'with "{self.regions[0].label}": ranks {odd} differ from rank {self._ranks[0]}; '
                "all ranks must have the same inputs, and go backward through the same graphs in "
                "the same order, in one thread"
            )


@lru_cache(maxsize=1024)
def _plan(
    ranks: tuple[int, ...],
    names: tuple[str, ...],
    sizes: tuple[tuple[int, int], ...],
    num_words: int,
) -> Plan:
    """From a share on each rank to the whole on all; and words from each to all."""
    mesh = Mesh(tp=len(ranks), ranks=ranks)
    have, want = {}, {}
    for name, (size, unit) in zip(names, sizes, strict=True):
        cut = Layout(mesh, f"tp*{unit}" if unit > 1 else "tp")
        have[name] = TensorSpec((size,), "uint8", cut)
        want[name] = TensorSpec((size,), "uint8", Layout(mesh, "-"))
    shape = (len(ranks) * num_words,)
    have[WORDS] = TensorSpec(shape, "int64", Layout(mesh, "tp"))
    want[WORDS] = TensorSpec(shape, "int64", Layout(mesh, "-"))
    return plan(have, want)


_restorers: weakref.WeakKeyDictionary[Group, Restorer] = weakref.WeakKeyDictionary()


def restorer_of(group: Group) -> Restorer:
    """The restorer of a group."""
    found = _restorers.get(group)
    if found is None:
        found = _restorers[group] = Restorer(group)
    return found
