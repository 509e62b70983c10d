"""Several processes that convert together and communicate only through the file system.

Every rank makes the same plan and copies its share of the chunks. Rank 0 prepares the files, and
publishes them when the journals show that all chunks are done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from reshard.checkpoint.publish.journal import read_journals
from reshard.checkpoint.publish.workplace import Workplace
from reshard.errors import CheckpointError, UnfinishedError
from reshard.layout.mesh import format_ranks

__all__ = ["ALONE", "Team", "team_of"]

POLL = 0.25


@dataclass(frozen=True, slots=True)
class Team:
    """The rank of this process, the number of processes, and the longest wait for another."""

    rank: int = 0
    size: int = 1
    timeout: float = 600.0

    @property
    def leads(self) -> bool:
        """Whether this process prepares and publishes."""
        return self.rank == 0

    def takes(self, chunk: int) -> bool:
        """Whether this process copies a chunk."""
        return chunk % self.size == self.rank

    def note_failure(self, place: Workplace, error: BaseException) -> None:
        """Leave a file that tells the other ranks of a failure."""
        known = place.folder.glob("failed.*") if place.folder.exists() else (place.folder,)
        if self.size > 1 and not any(known):
            text = str(error) or type(error).__name__
            (place.folder / f"failed.{self.rank}").write_text(text, encoding="utf-8")

    def forget(self, place: Workplace) -> None:
        """As rank 0, remove the files with which the ranks of an earlier attempt communicated."""
        for pattern in ("prepared", "failed.*", "waits.*"):
            for path in place.folder.glob(pattern):
                path.unlink(missing_ok=True)

    def wait_for_leader(self, place: Workplace, fingerprint: str) -> int:
        """Wait until rank 0 has prepared the files; returns the window size that it chose."""
        return self._wait(
            lambda: _prepared(place, fingerprint),
            lambda: 0,
            lambda: "rank 0 has not prepared the output: is it running, with the same arguments?",
        )

    def wait_for_all(self, place: Workplace, num_chunks: int) -> None:
        """Wait until all chunks are in the journals and all other ranks wait for the output."""
        done: set[int] = set()
        others = range(1, self.size)

        def finished() -> int | None:
            _check_failures(place)
            records = read_journals(place.folder)
            done.update(record["chunk"] for record in records if "chunk" in record)
            here = all((place.folder / f"waits.{rank}").exists() for rank in others)
            return 1 if here and len(done) == num_chunks else None

        def late() -> str:
            missing = {number % self.size for number in set(range(num_chunks)) - done}
            missing |= {r for r in others if not (place.folder / f"waits.{r}").exists()}
            return f"ranks {format_ranks(sorted(missing))} have not finished their chunks"

        self._wait(finished, lambda: len(done), late)

    def wait_for_publish(self, place: Workplace) -> None:
        """Wait until rank 0 has published the output."""

        def published() -> int | None:
            if place.request() is None:
                return 1
            _check_failures(place)
            with suppress(FileNotFoundError):
                (place.folder / f"waits.{self.rank}").touch()
            if not place.is_held() and place.request() is not None:
                raise UnfinishedError("rank 0 is gone; start all ranks again with --resume")
            return None

        self._wait(published, lambda: 0, lambda: "rank 0 has not published the output")
        if not place.target.exists():
            raise UnfinishedError(f"{place.target} is not there: rank 0 gave up")

    def _wait(
        self,
        ready: Callable[[], int | None],
        progress: Callable[[], int],
        complaint: Callable[[], str],
    ) -> int:
        """Poll until there is an answer; raise when there was no progress for the timeout."""
        last, since = progress(), time.monotonic()
        while (answer := ready()) is None:
            if progress() != last:
                last, since = progress(), time.monotonic()
            if time.monotonic() - since > self.timeout:
                raise UnfinishedError(
                    f"{complaint()} (waited {self.timeout:g} s without progress); start all ranks "
                    "again with --resume"
                )
            time.sleep(POLL)
        return answer


ALONE = Team()


def team_of(environment: Mapping[str, str] = os.environ, timeout: float = 600.0) -> Team:
    """The processes that torchrun or Slurm started, or this process alone.

    >>> team_of({"RANK": "3", "WORLD_SIZE": "8"})
    Team(rank=3, size=8, timeout=600.0)
    >>> team_of({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}).rank
    1
    """
    by_slurm = "SLURM_STEP_ID" in environment  # a batch script is not a step: it runs once
    names = [("RANK", "WORLD_SIZE")] + [("SLURM_PROCID", "SLURM_NTASKS")] * by_slurm
    for rank_name, size_name in names:
        if rank_name in environment and size_name in environment:
            try:
                rank, size = int(environment[rank_name]), int(environment[size_name])
            except ValueError:
                rank, size = -1, 0
            if not 0 <= rank < size:
                raise CheckpointError(
                    f"{rank_name}={environment[rank_name]} of {size_name}="
                    f"{environment[size_name]} in the environment is no rank: unset both to "
                    "convert with one process"
                )
            return Team(rank, size, timeout)
    return Team(timeout=timeout)


def _prepared(place: Workplace, fingerprint: str) -> int | None:
    request = place.request()
    if not request or request.get("fingerprint") != fingerprint:
        return None
    is_ready = (place.folder / "prepared").exists() and place.is_held()
    return int(request["window"]) if is_ready else None


def _check_failures(place: Workplace) -> None:
    """Raise the failure that another rank reported."""
    for path in sorted(place.folder.glob("failed.*")):
        with suppress(FileNotFoundError):
            text = path.read_text(encoding="utf-8")
            raise UnfinishedError(
                f"rank {path.suffix[1:]} failed: {text}; start all ranks again with --resume"
            )
