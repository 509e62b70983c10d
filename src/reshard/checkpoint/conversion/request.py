"""Stage 1 of a conversion, the request: the arguments of ``convert``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint.conversion.layouts import LayoutRequest
from reshard.checkpoint.conversion.processes import ALONE, Team
from reshard.checkpoint.publish.remote import Remote
from reshard.checkpoint.publish.workplace import Workplace, check_places
from reshard.checkpoint.storage.base import Storage, plain_path
from reshard.checkpoint.transfer.workers import Budget

if TYPE_CHECKING:
    from reshard.layout.layout import Layout
    from reshard.layout.mesh import Mesh
    from reshard.planning.names import Names
    from reshard.rules import Rules

__all__ = ["Request"]

COPIERS = 4
"""Copying threads, on any number of cores: some wait for the disk while others compute."""


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of ``convert``, under the same names."""

    src: Any
    dst: Any
    mesh: Mesh | str | None = None
    rules: Rules | str | Path | None = None
    layouts: Mapping[str, str | Layout] | None = None
    fsdp: str | None = None
    replicate: str | None = None
    format: str | None = None
    dtype: object = None
    names: Names | None = None
    drop: Sequence[str] = ()
    source_mesh: Mesh | str | None = None
    source_rules: Rules | str | Path | None = None
    memory: int | str = "256MiB"
    workers: int | None = None
    checksums: bool = True
    compare_replicas: bool = True
    max_shard_size: int | str = "5GB"
    resume: bool = False
    overwrite: bool = False
    dry_run: bool = False
    progress: Callable[[int, int], None] | None = None
    team: Team = ALONE

    def __post_init__(self) -> None:
        for name in ("src", "dst"):
            object.__setattr__(self, name, plain_path(getattr(self, name)))

    def layout_request(self) -> LayoutRequest:
        """How the output tensors are sharded and cast."""
        return LayoutRequest.of(
            self.mesh, self.rules, self.layouts, self.dtype, self.fsdp, self.replicate
        )

    def budget(self, storage: Storage) -> Budget:
        """The workers and windows that fit into the memory."""
        if self.workers is None and not storage.is_local:
            return Budget.for_reading(self.memory, storage)
        return Budget.of(self.memory, self.workers or COPIERS)

    @property
    def remote(self) -> Remote | None:
        """The destination, if it is reached through fsspec."""
        return Remote(self.dst) if "://" in self.dst else None

    def place(self) -> Workplace:
        """The folder in which the output is built."""
        remote = self.remote
        return remote.place() if remote is not None else Workplace.beside(Path(self.dst))

    def check_destination(self, place: Workplace, files: Sequence[str]) -> tuple[str, ...]:
        """Refuse a destination that cannot be written; the names of other files there, kept."""
        remote = self.remote
        if remote is not None:
            remote.check_absent(self.src, self.overwrite or self.resume)
            return ()
        check_places(self.src, place.target)
        return place.check_target(self.overwrite, files).kept
