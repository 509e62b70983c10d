"""The types of a live run in `Plan.run` and `Plan.start`, which ``reshard.live`` implements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

if TYPE_CHECKING:
    import torch

__all__ = ["Handle", "RunOptions"]


class RunOptions(TypedDict, total=False):
    """The keyword options of `Plan.run`, `Plan.start` and `rs.move`.

    ``reshard/live/inputs/request.py`` says what each of them means.
    """

    group: torch.distributed.ProcessGroup | None
    device: torch.device | str | None
    timeout: float
    deadline: float | None
    transport: Literal["auto", "peer", "shared", "network"]
    check: Literal["first", "always", "never"]
    atomic: bool
    donate: bool
    progress: bool | None
    tag: int | str | None
    sync: bool


class Handle(Protocol):
    """A move in flight."""

    report: Any
    """The `RunReport` of the move on this rank."""

    def done(self) -> bool:
        """Whether the move has completed or failed."""

    def wait(self) -> dict[str, torch.Tensor]:
        """Wait for the move; returns this rank's destination tensors, or raises its error."""
