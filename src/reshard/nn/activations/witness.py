"""Saved tensors that were changed in place raise, though their memory is kept elsewhere."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Witness"]


class Witness:
    """Knows how often a tensor was changed in place, without keeping its memory.

    >>> x = torch.zeros(3)
    >>> witness = Witness(x)
    >>> witness.check()
    >>> _ = x.add_(1)
    >>> witness.check()
    Traceback (most recent call last):
    RuntimeError: one of the variables needed for gradient computation has been modified by ...
    """

    __slots__ = ("_alias", "_kind", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = tensor._version
        self._kind = f"{type(tensor).__name__} {list(tensor.shape)} of {tensor.dtype}"
        # An alias counts changes together with its tensor, also when other memory is put into it.
        self._alias = tensor.detach()
        nothing = torch.empty(0, dtype=tensor.dtype)
        if isinstance(self._alias, DTensor):
            self._alias._local_tensor = nothing
        else:
            self._alias.data = nothing.to(tensor.device)

    def check(self) -> None:
        """Raise as autograd does if the tensor was changed since."""
        check_version(self._alias._version, self._version, self._kind)


def check_version(found: int, expected: int, kind: str) -> None:
    """Raise as autograd does if a saved tensor was changed."""
    if found != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{kind}] is at version {found}; expected version {expected} instead"
        )
