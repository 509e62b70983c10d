"""The ranks that load or save together: what one finds wrong, all raise alike.

A rank that raised alone would leave the others waiting for it, so every step that may fail on one
rank ends with a word from each. Without a process group a circle is one process, and nothing is
said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from reshard import errors
from reshard.errors import CheckpointError, DisagreementError, ReshardError
from reshard.sharded.content import Group, members
from reshard.tensors.agreement import Agreement
from reshard.tensors.meshes import this_rank
from reshard.text import quoted

__all__ = ["Circle"]

Failure = tuple[str, str]
"""The class of an error, and its message."""


class Circle:
    """The ranks of a group, and the longest that one waits for another."""

    def __init__(self, group: Group, timeout: float) -> None:
        self.group, self.timeout = group, timeout
        self.ranks = members(group)
        """Global ranks, in the order of the group."""
        self.rank = this_rank()
        self.is_alone = len(self.ranks) == 1
        self._num_steps = 0

    @property
    def leads(self) -> bool:
        """Whether this rank does what is done once for all."""
        return self.rank == self.ranks[0]

    def all_do(self, do: Callable[[], Any]) -> dict[int, Any]:
        """What every rank makes, by rank, as JSON carries it; if one fails, all raise its error."""
        if self.is_alone:
            return {self.rank: do()}
        made, problem = None, None
        try:
            made = do()
        except BaseException as error:
            problem = error
        said = json.dumps([made, problem and _described(problem)])
        if problem is not None and not isinstance(problem, Exception):
            self._say(said)  # an interrupt stays one here, and ends the others as well
            raise problem
        heard = {rank: json.loads(text) for rank, text in self._say(said).items()}
        failures = {rank: failure for rank, (_, failure) in heard.items() if failure}
        if failures:
            raise _error(failures, len(heard)) from problem
        return {rank: one for rank, (one, _) in heard.items()}

    def first_does(self, do: Callable[[], Any]) -> Any:
        """What the first rank makes, on every rank."""
        return self.all_do(lambda: do() if self.leads else None)[self.ranks[0]]

    def check_alike(self, said: Mapping[int, Mapping[str, Any]], what: str) -> None:
        """Refuse arguments that differ between ranks."""
        first = said[self.ranks[0]]
        for rank in self.ranks:
            for key, value in said[rank].items():
                if value != first[key]:
                    raise DisagreementError(
                        f"{what} has {key}={quoted(first[key])} on rank {self.ranks[0]} and "
                        f"{quoted(value)} on rank {rank}: give the same on all ranks"
                    )

    def _say(self, text: str) -> dict[int, str]:
        self._num_steps += 1
        what = f"step {self._num_steps} of loading or saving a checkpoint"
        return Agreement(self.group, what, self.timeout).gather(text)


def _described(error: BaseException) -> Failure:
    text = " ".join(str(error).split())
    if isinstance(error, ReshardError):
        return type(error).__name__, text
    return CheckpointError.__name__, f"{type(error).__name__}: {text}"


def _error(failures: Mapping[int, Failure], num_ranks: int) -> ReshardError:
    """The error of the first rank that has one; what all found alike needs no rank."""
    rank, (kind, text) = next(iter(failures.items()))
    found = getattr(errors, kind) if kind in errors.__all__ else CheckpointError
    alike = len(failures) == num_ranks and len({tuple(one) for one in failures.values()}) == 1
    made: ReshardError = found(text if alike else f"on rank {rank}: {text}")
    return made
