"""Saved-tensor hooks of one forward call.

Autograd asks only the top of the stack of saved-tensor hooks. What our hooks do not keep they hand
to the hooks below: of an outer module, of activation checkpointing, of the user. Inside of
checkpointing nothing is kept; around it, the inputs that checkpointing saves are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any
from zlib import crc32

import torch
import torch.utils.checkpoint
from torch.distributed.tensor import DTensor

from reshard.errors import DisagreementError
from reshard.nn.activations.policy import Policy
from reshard.nn.activations.region import SavedTensor, SavedView
from reshard.nn.activations.replicated import ReplicatedInputs
from reshard.tensors.kinds import not_compiled, wait_ready

__all__ = ["SavedTensorHooks"]

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


class _PackedBelow:
    """A saved tensor that the hooks below keep."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, unpack: Unpack, packed: Any) -> None:
        self._unpack, self._packed = unpack, packed

    def tensor(self) -> torch.Tensor:
        """The tensor that the hooks below return."""
        return self._unpack(self._packed)


class _Active(threading.local):
    """The hooks that a thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[SavedTensorHooks] = []


_active = _Active()
_calls = count(1)


class SavedTensorHooks:
    """Applies a policy to the tensors that autograd saves inside a with statement.

    with SavedTensorHooks(policy, inputs, "layers.0.mlp") as hooks:
        out = forward(x)
    hooks.finish()
    """

    def __init__(
        self, policy: Policy, inputs: ReplicatedInputs, label: str, check: bool = False
    ) -> None:
        self._policy, self._inputs, self._label = policy, inputs, label
        self._below: tuple[Pack, Unpack] | None = None
        self._is_checkpointed = False
        """Whether checkpointing below discards what is saved here and computes it again."""
        self._call = 0
        """The number of the outermost call that contains this one."""
        self._checksums: list[tuple[str, tuple[int, int]]] | None = [] if check else None
        """Labels and checksums of replicated tensors."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @not_compiled
    def __enter__(self) -> SavedTensorHooks:
        outer = _active.stack[-1] if _active.stack else None
        self._call = next(_calls) if outer is None else outer._call
        if outer is None:
            self._policy.before_forward()
        self._below = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._is_checkpointed = _is_checkpointing(self._below) or (
            outer is not None and outer._is_checkpointed
        )
        self._hooks.__enter__()
        _active.stack.append(self)
        return self

    @not_compiled
    def __exit__(self, *error: object) -> None:
        _active.stack.remove(self)
        self._hooks.__exit__(*error)

    @not_compiled
    def finish(self) -> bool:
        """After forward, raise if a budget is too small or checksums differ between ranks.

        Returns whether checksums were compared.
        """
        if self._is_checkpointed or torch._C._current_graph_task_id() != -1:
            return False
        if self._call and not _active.stack:
            self._policy.after_forward()
        if not self._checksums:
            return False
        self._compare(self._checksums)
        return True

    @not_compiled
    def _pack(self, saved: torch.Tensor) -> SavedView | SavedTensor | _PackedBelow:
        if not self._is_checkpointed:
            view = self._policy.pack(saved, self._inputs, self._label, self._call)
            if view is not None:
                if self._checksums is not None and view.region.is_replicated:
                    self._checksums.append((view.region.label, _checksum(saved)))
                return view
        if self._below is not None:
            pack, unpack = self._below
            return _PackedBelow(unpack, pack(saved))
        return SavedTensor(saved)

    @not_compiled
    def _unpack(self, packed: SavedView | SavedTensor | _PackedBelow) -> torch.Tensor:
        return packed.tensor()

    def _compare(self, checksums: list[tuple[str, tuple[int, int]]]) -> None:
        """Raise on all ranks if a tensor that should be replicated differs between ranks."""
        restorer = self._policy.restorer
        numbers = [one for label, sums in checksums for one in (crc32(label.encode()), *sums)]
        gathered = restorer.gather(numbers, self._policy.timeout)
        for at, (label, _) in enumerate(checksums):
            by_rank = [numbers[3 * at : 3 * at + 3] for numbers in gathered]
            pairs = zip(restorer.ranks, by_rank, strict=True)
            different = [rank for rank, numbers in pairs if numbers != by_rank[0]]
            if different:
                raise DisagreementError(
                    f"{label} is not the same on all ranks: ranks {different} have other values "
                    f"than rank {restorer.ranks[0]}, so it must not be kept as shares; do not "
                    "reshard this module, or make its inputs equal"
                )


def _is_checkpointing(hooks: tuple[Pack, Unpack] | None) -> bool:
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


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
