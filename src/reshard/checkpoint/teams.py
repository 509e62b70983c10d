"""Several processes that convert together, with nothing between them but the file system.

Every rank makes the same plan and copies the chunks that fall to it. Rank 0 prepares the files and
publishes them once the journals say that all chunks are done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reshard.checkpoint.journal import read_journals
from reshard.checkpoint.publish import Workplace
from reshard.errors import CheckpointError, UnfinishedError
from reshard.mesh import format_ranks

__all__ = ["ALONE", "Team", "team_of"]

POLL = 0.25


@dataclass(frozen=True, slots=True)
class Team:
    """Which of how many processes this is, and how long one waits for another."""

    rank: int = 0
    size: int = 1
    timeout: float = 600.0

    @property
    def leads(self) -> bool:
        """Whether this process prepares and publishes."""
        return self.rank == 0

    def takes(self, chunk: int) -> bool:
        """Whether a chunk falls to this process."""
        return chunk % self.size == self.rank

    def note_failure(self, place: Workplace, error: BaseException) -> None:
        """Tell the other ranks that this one gives up."""
        if self.size > 1:
            text = str(error) or type(error).__name__
            (place.folder / f"failed.{self.rank}").write_text(text, encoding="utf-8")

    def forget_failures(self, place: Workplace) -> None:
        """Forget what earlier attempts wrote down: all of them, or this rank's."""
        for path in place.folder.glob("failed.*" if self.leads else f"failed.{self.rank}"):
            path.unlink(missing_ok=True)

    def wait_for_leader(self, place: Workplace, fingerprint: str) -> int:
        """Wait until rank 0 has prepared the files; the size of the windows it chose."""
        return self._wait(
            lambda: _prepared(place, fingerprint),
            lambda: 0,
            lambda: "rank 0 has not prepared the output: is it running, with the same arguments?",
        )

    def wait_for_all(self, place: Workplace, num_chunks: int) -> None:
        """Wait until all chunks are in the journals."""
        done: set[int] = set()

        def finished() -> int | None:
            _check_failures(place)
            records = read_journals(place.folder)
            done.update(record["chunk"] for record in records if "chunk" in record)
            return 1 if len(done) == num_chunks else None

        def late() -> str:
            missing = {number % self.size for number in set(range(num_chunks)) - done}
            return f"ranks {format_ranks(sorted(missing))} have not finished their chunks"

        self._wait(finished, lambda: len(done), late)

    def wait_for_publish(self, place: Workplace) -> None:
        """Wait until rank 0 has put the output in its place."""

        def published() -> int | None:
            if place.request() is None:
                return 1
            _check_failures(place)
            return None

        self._wait(published, lambda: 0, lambda: "rank 0 has not published the output")

    def _wait(
        self,
        ready: Callable[[], int | None],
        progress: Callable[[], int],
        complaint: Callable[[], str],
    ) -> int:
        """Ask until there is an answer, as long as something moves."""
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
    """The team that torchrun or Slurm started, or this process alone.

    >>> team_of({"RANK": "3", "WORLD_SIZE": "8"})
    Team(rank=3, size=8, timeout=600.0)
    >>> team_of({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}).rank
    1
    """
    by_slurm = "SLURM_STEP_ID" in environment  # a batch script is no step: it runs once
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
    return int(request["window"]) if (place.folder / "prepared").exists() else None


def _check_failures(place: Workplace) -> None:
    """Raise what another rank wrote down when it failed."""
    for path in sorted(place.folder.glob("failed.*")):
        raise UnfinishedError(
            f"rank {path.suffix[1:]} failed: {path.read_text(encoding='utf-8')}; start all ranks "
            "again with --resume"
        )
