"""How each saved tensor is kept: whole, as a share, or on the host; the budget; and the hooks.

Whether a tensor that is identical on all ranks becomes a share is a collective decision, so it
depends only on what all ranks know. In the first forward the total is still unknown, and all of
them become shares. When backward begins, ranks exchange how much rank-local memory they keep, and
from then on the newest replicated tensors stay whole, as many as fit:

    budget 12, 4 ranks, replicated tensors of size 4, at most 2 rank-local on any rank
    first forward    1 1 1 1    + 2, and headroom to restore two: 4 + 4    14 is too much: an error
    budget 14        1 1 1 1    + 2, and 4 + 4
    budget 18        all stay whole: 4 4 4 4 + 2

Rank-local tensors of a GPU are offloaded to the host once the budget is reached; each rank decides
that alone. Counting starts again with the first tensor that is saved after a backward.

Autograd asks only the top of the stack of saved-tensor hooks. What our hooks do not keep they hand
to the hooks below: of an outer module, of activation checkpointing, of the user. Inside of
checkpointing nothing is kept; around it, the inputs that checkpointing saves are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, zip_longest
from typing import Any
from zlib import crc32

import torch
import torch.utils.checkpoint
from torch.distributed.tensor import DTensor

from reshard.errors import ArgumentError, DisagreementError, MemoryCapError
from reshard.nn.activations.region import (
    Region,
    SavedTensor,
    SavedView,
    Stats,
    TensorLocation,
    share_of,
)
from reshard.nn.activations.replicated import ReplicatedInputs, is_plain
from reshard.nn.activations.restore import Restorer
from reshard.tensors.kinds import not_compiled, wait_ready
from reshard.text import format_bytes, parse_bytes


class Policy:
    """Decides how saved tensors are kept, for all modules of one `input_reshard` call."""

    def __init__(
        self,
        restorer: Restorer,
        *,
        budget: int | str | None = None,
        min_bytes: int | str = 0,
        timeout: float = 60.0,
        check: bool = False,
    ) -> None:
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ArgumentError(f"timeout={timeout!r}: give a number of seconds above 0")
        self.restorer, self.timeout = restorer, float(timeout)
        self.check = bool(check)
        """Whether ranks compare checksums of replicated tensors, once for each module."""
        self.budget = None if budget is None else Budget(parse_bytes(budget))
        """None: a share of everything that is replicated is kept."""
        self._min_bytes = parse_bytes(min_bytes)
        self.stats = Stats()
        self._regions: weakref.WeakValueDictionary[Any, Region] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    def pack(
        self, saved: torch.Tensor, inputs: ReplicatedInputs, label: str, call: int
    ) -> SavedView | None:
        """Keep a saved tensor in a region; None if it stays as it is."""
        local = wait_ready(saved._local_tensor) if isinstance(saved, DTensor) else saved
        num_ranks = len(self.restorer.ranks)
        if num_ranks == 1 or not is_plain(local):
            return None
        if local.nbytes < self._min_bytes or local.numel() < num_ranks:
            return None
        source = inputs.find(saved, local)
        is_replicated = source is not None
        if source is None:
            if self.budget is None or saved in inputs.parameters:
                return None
            source = TensorLocation.of(local, f"saved {list(saved.shape)}")
        gaps = None if source.is_dense else source.elements
        # Only within one call: later the same memory may hold other values.
        key = (source.address, source.start, source.stop, gaps, local._version, call)
        with self._lock:
            region = self._regions.get(key)
            if region is None:
                label = f"{label}, {source.label}"
                region = Region(label, source, local, is_replicated, self.stats)
                self._regions[key] = region
                self._place(region)
            return SavedView(region, self._restore, saved, local)

    def _place(self, region: Region) -> None:
        """Offload a region, leave it whole, or keep only this rank's share."""
        budget, size, num_ranks = self.budget, region.num_bytes, len(self.restorer.ranks)
        if not region.is_replicated:
            assert budget is not None
            if budget.should_offload(size, region.device.type == "cuda"):
                region.offload()
            return
        self.restorer.register(region)
        _, share = share_of(size, region.unit, 0, num_ranks)
        if budget is None or not budget.stays_whole(size, share):
            region.keep_share(self.restorer.index, num_ranks)

    def _restore(self, region: Region) -> torch.Tensor:
        """All bytes of a region, on its device."""
        budget, headroom = self.budget, None
        if budget is not None:
            budget.was_read = True
            if region.is_replicated and not budget.has_planned:
                # The first replicated tensor of a backward: exchange the rank-local bytes.
                numbers = [budget.rank_local, budget.signature]
                gathered = self.restorer.gather(numbers, self.timeout)
                is_same = len({signature for _, signature in gathered}) == 1
                budget.plan(max(rank_local for rank_local, _ in gathered), is_same)
            headroom = budget.headroom
        if region.is_share:
            return self.restorer.restore(region, self.timeout, headroom)
        return region.copy_from_host() if region.is_offloaded else region.memory

    def before_forward(self) -> None:
        """Stop counting what earlier forwards saved without a backward, once it is freed."""
        if self.budget is not None and self.budget.is_first_forward and not len(self._regions):
            self.budget.reset()

    def after_forward(self) -> None:
        """In the first forward, raise on all ranks if the budget is too small on any."""
        if self.budget is not None and self.budget.is_first_forward:
            gathered = self.restorer.gather([self.budget.needed], self.timeout)
            self.budget.check(max(needed for (needed,) in gathered))


class Budget:
    """Decides, tensor by tensor, what fits into a number of bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._sizes: list[int] = []
        """Bytes of the replicated tensors that were saved since the last backward."""
        self._shares: list[int] = []
        self.rank_local = 0
        """Bytes of this rank's own saved tensors on the device since the last backward."""
        self.kept = 0
        """Bytes that were kept on the device since the last backward."""
        self._plan: tuple[tuple[int, bool], ...] = ()
        """Size of each replicated tensor of the last forward, and whether it stays whole."""
        self.has_planned = False
        """Whether ranks have planned the next forward in the current backward."""
        self.was_read = False
        """Whether a tensor was read since the last save: the next save is of another forward."""
        self.is_first_forward = True

    @property
    def needed(self) -> int:
        """The smallest budget for what was saved since the last backward."""
        headroom = 2 * max(self._sizes, default=0)
        return self.rank_local + min(sum(self._sizes), sum(self._shares) + headroom)

    @property
    def headroom(self) -> int:
        """Bytes that are left for restoring tensors ahead of time."""
        return self.limit - self.kept - 2 * max(self._sizes, default=0)

    @property
    def signature(self) -> int:
        return crc32(repr(self._sizes).encode())

    def stays_whole(self, size: int, share: int) -> bool:
        """Count one more replicated tensor; whether it stays whole."""
        self._start_forward()
        number = len(self._sizes)
        self._sizes.append(size)
        self._shares.append(share)
        whole = number < len(self._plan) and self._plan[number] == (size, True)
        self.kept += size if whole else share
        return whole

    def should_offload(self, size: int, can_offload: bool) -> bool:
        """Count one more rank-local tensor; whether it moves to the host."""
        self._start_forward()
        if can_offload and size > self.headroom:
            return True
        self.rank_local += size
        self.kept += size
        return False

    def plan(self, rank_local: int, is_same: bool) -> None:
        """Choose what stays whole in the next forward: nothing if ranks have saved other sizes.

        ``rank_local`` is the most of any rank.
        """
        self.has_planned, self.is_first_forward = True, False
        whole = choose_whole(self._sizes, self._shares, rank_local, self.limit)
        self._plan = tuple(zip(self._sizes, whole, strict=True)) if is_same else ()

    def reset(self) -> None:
        self._sizes, self._shares, self.rank_local, self.kept = [], [], 0, 0

    def check(self, needed: int) -> None:
        if needed > self.limit:
            raise MemoryCapError(
                f"a budget of {format_bytes(self.limit)} ({self.limit} bytes) for saved "
                f"activations is too small: the smallest that works here is {needed} bytes "
                f"({format_bytes(needed)}); give at least that, or use more ranks"
            )

    def _start_forward(self) -> None:
        if self.was_read:
            self.has_planned = self.was_read = False
            self.reset()


def choose_whole(
    sizes: Sequence[int], shares: Sequence[int], rank_local: int, budget: int
) -> tuple[bool, ...]:
    """Which replicated tensors stay whole: the newest, as many as fit.

    >>> choose_whole([4, 4, 4, 4], [1, 1, 1, 1], 2, 18)
    (True, True, True, True)
    >>> choose_whole([4, 4, 4, 4], [1, 1, 1, 1], 2, 17)
    (False, False, False, True)
    """
    if sum(sizes) + rank_local <= budget:
        return (True,) * len(sizes)
    total = sum(shares) + rank_local + 2 * max(sizes, default=0)
    chosen = []
    for size, share in zip(reversed(sizes), reversed(shares), strict=True):
        fits = total + size - share <= budget
        total += size - share if fits else 0
        chosen.append(fits)
    return tuple(reversed(chosen))


Packed = Callable[[], torch.Tensor]
"""What autograd holds in place of a saved tensor; calling it gives the tensor."""


@not_compiled
def _unpack(packed: Packed) -> torch.Tensor:
    return packed()


class _Active(threading.local):
    """The hooks that a thread has entered, the innermost last."""

    stack: tuple[SavedTensorHooks, ...] = ()


_active = _Active()
_calls = count(1)


class SavedTensorHooks:
    """Applies a policy to the tensors that autograd saves inside a with statement.

    Call `finish` after the statement.
    """

    def __init__(
        self, policy: Policy, inputs: ReplicatedInputs, label: str, check: bool = False
    ) -> None:
        self._policy, self._inputs, self._label = policy, inputs, label
        self._below: Any = None
        """Pack and unpack of the hooks below, if there are any: they keep what these do not."""
        self._is_checkpointed = False
        """Whether checkpointing below discards what is saved here and computes it again."""
        self._call = 0
        """The number of the outermost call that contains this one."""
        self._checksums: list[tuple[str, int, int]] | None = [] if check else None
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    @not_compiled
    def __enter__(self) -> SavedTensorHooks:
        outer = _active.stack[-1] if _active.stack else None
        self._call = next(_calls) if outer is None else outer._call
        if outer is None:
            self._policy.before_forward()
        self._below = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack = None if self._below is None else self._below[0]
        is_checkpointing = pack is not None and pack.__module__ == torch.utils.checkpoint.__name__
        self._is_checkpointed = is_checkpointing or bool(outer and outer._is_checkpointed)
        self._hooks.__enter__()
        _active.stack = (*_active.stack, self)
        return self

    @not_compiled
    def __exit__(self, *error: object) -> None:
        _active.stack = tuple(one for one in _active.stack if one is not self)
        self._hooks.__exit__(*error)

    @not_compiled
    def finish(self) -> bool:
        """Raise if the budget is too small, or if checksums differ between ranks.

        Returns whether any were compared. Ranks on which nothing was saved take part.
        """
        if self._is_checkpointed or torch._C._current_graph_task_id() != -1:
            return False
        if not _active.stack:
            self._policy.after_forward()
        if self._checksums is None:
            return False
        with self._policy.restorer.reset_on_failure():
            self._compare(self._checksums)
        return bool(self._checksums)

    def _compare(self, checksums: list[tuple[str, int, int]]) -> None:
        restorer = self._policy.restorer
        for sums in zip_longest(*restorer.gather(checksums, self._policy.timeout)):
            pairs = zip(restorer.ranks, sums, strict=True)
            different = [rank for rank, one in pairs if one != sums[0]]
            if different:
                label = next(one[0] for one in sums if one is not None)
                raise DisagreementError(
                    f"{label} is not the same on all ranks: ranks {different} have other values "
                    f"than rank {restorer.ranks[0]}, so it must not be kept as shares; do not "
                    "reshard this module, or make its inputs equal"
                )

    @not_compiled
    def _pack(self, saved: torch.Tensor) -> Packed:
        if not self._is_checkpointed:
            view = self._policy.pack(saved, self._inputs, self._label, self._call)
            if view is not None:
                if self._checksums is not None and view.region.is_replicated:
                    self._checksums.append((view.region.label, *_checksum(saved)))
                return view
        if self._below is not None:
            pack, unpack = self._below
            return partial(unpack, pack(saved))
        return SavedTensor(saved)


def _checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Two sums over the bytes of a local tensor, one of them weighted by position.

    >>> x = torch.tensor([1, 2], dtype=torch.int64)
    >>> _checksum(x), _checksum(x.flip(0))
    ((3, 7), (3, 5))
    """
    local = wait_ready(tensor._local_tensor) if isinstance(tensor, DTensor) else tensor
    memory = local.detach().contiguous().reshape(-1).view(torch.uint8)
    padded = torch.zeros(-(-memory.numel() // 8) * 8, dtype=torch.uint8, device=memory.device)
    padded[: memory.numel()] = memory
    numbers = padded.view(torch.int64)
    # Odd weights are invertible modulo 2**64, so that a change of one number changes the sum.
    weights = torch.arange(1, 2 * numbers.numel(), 2, device=memory.device)
    return int(numbers.sum()), int((numbers * weights).sum())
