"""All ranks of a process group agree, or all of them raise the same error.

A rank that raised alone would leave the others waiting for it in their next collective. So where a
step may fail on one rank, or where all ranks must have been given the same, every rank of the group
goes through an `Agreement`:

    saving = Agreement(group, "saving a checkpoint", timeout, error=CheckpointError)
    sizes = saving.run(lambda: measure(state_dict))     # {rank: result}, or one error on all ranks
    folder = saving.run_on_first(prepare_folder)        # the first rank runs it, all get the result
    names = saving.gather(list(state_dict))             # {rank: value}
    saving.check_gathered(saving.gather({"path": path}))  # or a DisagreementError on all ranks

Each method is collective: all ranks of the group call the same methods in the same order. Without a
process group, or in one of a single rank, nothing is sent.

Values are those of JSON (a tuple arrives as a list). Ranks of one host exchange them through shared
memory (`reshard.live.gather`); ranks of several hosts as live moves of one row of bytes per rank,
two if a value is long. Both have the guarantees of `rs.move`. Nothing that arrives is executed, and
no value may be longer than `MAX_BYTES`. The group only carries addresses: a group of NCCL needs no
backend for CPUs.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from reshard import errors
from reshard.errors import DisagreementError, LiveError, ReshardError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.layout.spec import TensorSpec
from reshard.live.failure.agreement import ranks_by_text
from reshard.live.gather import gather_bytes
from reshard.planning.plans import Plan, plan
from reshard.tensors.kinds import this_rank
from reshard.tensors.state_dicts import run
from reshard.text import quoted

MAX_BYTES = 256 << 20
"""Bytes that a rank's value may have, and may decompress to: a peer may be broken."""

FIRST_BYTES = 2048
"""Bytes of a rank's row in the first move; longer values need a second one."""

MAX_MESSAGE = 4096
"""Characters of an error message that are sent to the other ranks."""

MAX_VALUES = 4

IN_CALLS = ("is in", "are in")
ROW = "a row of bytes from each rank"
_LENGTH = struct.Struct("<Q")

BUILTINS = (KeyError, AttributeError, TypeError, NotImplementedError, OSError)
"""Builtin classes that an error keeps on other ranks, besides ValueError and RuntimeError."""


@dataclass(frozen=True, eq=False)
class Agreement:
    """The ranks of a process group that must agree on something, or all raise."""

    group: dist.ProcessGroup | None
    what: str
    """What the ranks are doing, for error messages: "saving a checkpoint"."""
    timeout: float = 60.0
    """The longest wait without a heartbeat from another rank, in seconds."""
    error: type[ReshardError] = LiveError
    """The class of errors on all ranks where the one that was raised is no ReshardError."""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks, in the order of the group."""
        if not dist.is_initialized():
            return (0,)
        if dist.get_rank(self.group) < 0:
            raise self.error(
                f"rank {dist.get_rank()} is not in the process group that was given for "
                f"{self.what}: call this on the ranks of the group only"
            )
        return tuple(dist.get_process_group_ranks(self.group or dist.group.WORLD))

    @cached_property
    def rank(self) -> int:
        return this_rank()

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the group, which does what is done once for all."""
        return self.rank == self.ranks[0]

    def gather(self, value: Any) -> dict[int, Any]:
        """The values of all ranks, in the order of the group. Equal values are one object: do not
        modify it."""
        if len(self.ranks) == 1:
            return {self.rank: value}
        return self._gather(json.dumps(value))

    def _gather(self, text: str) -> dict[int, Any]:
        """The values of all ranks; this rank gives its own as JSON."""
        data = zlib.compress(f"[{json.dumps(self.what)}, {text}]".encode(), 1)
        rows = self._exchange(data)
        decoded = {row: self._decode(rank, row) for rank, row in rows.items()}
        others = {rank: decoded[row][0] for rank, row in rows.items()}
        if len(set(others.values())) > 1:
            raise DisagreementError(
                f"ranks are in different calls: {describe_values(others, IN_CALLS)}; make the same "
                "calls in the same order on all ranks"
            )
        return {rank: decoded[rows[rank]][1] for rank in self.ranks}

    def run(self, step: Callable[[], Any]) -> dict[int, Any]:
        """Run a step on every rank; gives its result on each, by rank.

        If it raises on any rank, all ranks raise one error: that of the first rank that failed,
        with its number in front, unless all failed alike. The error is of the same class, as far
        as that is one of `reshard.errors` and a common builtin. On a rank that failed, the original
        is its cause. An interrupt stays one on the rank that it interrupted.
        """
        if len(self.ranks) == 1:
            return {self.rank: step()}
        result, problem = "null", None
        try:
            result = json.dumps(step())
        except BaseException as error:
            problem = error
        failure = None if problem is None else _describe(problem)
        answers = self._gather(f"[{result}, {json.dumps(failure)}]")
        if problem is not None and not isinstance(problem, Exception):
            raise problem
        failures = {rank: failure for rank, (_, failure) in answers.items() if failure is not None}
        if failures:
            raise self._common_error(failures) from problem
        return {rank: result for rank, (result, _) in answers.items()}

    def run_on_first(self, step: Callable[[], Any]) -> Any:
        """Run a step on the first rank of the group; gives its result, or raises, on all ranks."""
        return self.run(lambda: step() if self.is_first else None)[self.ranks[0]]

    def check_gathered(self, gathered: Mapping[int, Mapping[str, Any]]) -> None:
        """Raise a DisagreementError unless all ranks gave the same value under each name."""
        for name in dict.fromkeys(name for one in gathered.values() for name in one):
            values = {rank: one.get(name) for rank, one in gathered.items()}
            if any(value != values[self.ranks[0]] for value in values.values()):
                raise DisagreementError(
                    f"{self.what} has different {name}: {describe_values(values)}; give the same "
                    "on all ranks"
                )

    def _exchange(self, data: bytes) -> dict[int, bytes]:
        # Of bytes that are too long only their number is sent: all ranks raise the same error.
        frame = _LENGTH.pack(len(data)) + (data if len(data) <= MAX_BYTES else b"")
        group: Any = self.group or dist.group.WORLD
        limit = _LENGTH.size + MAX_BYTES
        try:
            rows = gather_bytes(group, frame, timeout=self.timeout, what=self.what, limit=limit)
            if rows is None:
                rows = self._move_rows(group, frame, FIRST_BYTES)
                longest = max(map(_length, rows.values())) + _LENGTH.size
                if FIRST_BYTES < longest <= limit:
                    # Powers of two, so that there are few plans.
                    rows = self._move_rows(group, frame, 1 << (longest - 1).bit_length())
        except LiveError as error:
            raise type(error)(f"{error}, in {self.what}") from None
        for rank, row in rows.items():
            if _length(row) > MAX_BYTES:
                raise self.error(
                    f"rank {rank} has {_length(row)} bytes to send in {self.what}: at most "
                    f"{MAX_BYTES} work"
                )
        begin = _LENGTH.size
        return {rank: row[begin : begin + _length(row)] for rank, row in rows.items()}

    def _move_rows(self, group: dist.ProcessGroup, frame: bytes, size: int) -> dict[int, bytes]:
        """Move one row of bytes from each rank to all of them, between hosts."""
        ranks, plans = sorted(self.ranks), _plans.setdefault(group, {})
        if size not in plans:
            mesh, shape = Mesh(rank=len(ranks), ranks=ranks), (len(ranks), size)
            layouts = Layout(mesh, "rank -"), Layout(mesh, "- -")
            have, want = ({ROW: TensorSpec(shape, "uint8", layout)} for layout in layouts)
            plans[size] = plan(have, want)
        row = np.frombuffer(bytearray(frame[:size].ljust(size, b"\0")), dtype=np.uint8)[None]
        rows = torch.from_numpy(np.empty((len(ranks), size), dtype=np.uint8))
        run(
            plans[size], {ROW: torch.from_numpy(row)}, into={ROW: rows}, group=self.group,
            timeout=self.timeout, progress=False,
        )  # fmt: skip
        return {rank: rows[at].numpy().tobytes() for at, rank in enumerate(ranks)}

    def _decode(self, rank: int, data: bytes) -> tuple[str, Any]:
        try:
            what, value = json.loads(zlib.decompressobj().decompress(data, MAX_BYTES))
            return str(what), value
        except (ValueError, TypeError, RecursionError, zlib.error) as error:
            raise self.error(
                f"what rank {rank} sent in {self.what} cannot be read: {error}"
            ) from None

    def _common_error(self, failures: Mapping[int, list[Any]]) -> ReshardError:
        rank, (kind, builtin, text) = next(iter(failures.items()))
        is_same = all(failure == failures[rank] for failure in failures.values())
        if not is_same or len(failures) < len(self.ranks):
            text = f"on rank {rank}: {text}"
        base: type[ReshardError] = getattr(errors, kind) if kind in errors.__all__ else self.error
        other = next((one for one in BUILTINS if one.__name__ == builtin), None)
        if other is not None and not issubclass(base, other):
            with suppress(TypeError):  # the two cannot be combined
                base = type(base.__name__, (base, other), {"__str__": Exception.__str__})
        return base(text)


def _length(row: bytes) -> int:
    """The number of bytes that a rank has to send, with which its row begins."""
    return int(_LENGTH.unpack_from(row)[0])


def describe_values(values: Mapping[int, Any], verbs: tuple[str, str] = ("has", "have")) -> str:
    """Which ranks have which value, the most common one first.

    >>> describe_values({0: "a", 1: "b", 2: "a"})
    'ranks 0,2 have "a", rank 1 has "b"'
    """
    texts = {
        rank: quoted(value) if isinstance(value, str) else quoted(json.dumps(value))[1:-1]
        for rank, value in values.items()
    }
    return ranks_by_text(texts, verbs, MAX_VALUES)


def _describe(error: BaseException) -> list[str]:
    """An error as JSON: its class in `reshard.errors`, its builtin class, its message."""
    known = (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in errors.__all__)
    is_ours = isinstance(error, ReshardError)
    builtin = next((kind.__name__ for kind in BUILTINS if isinstance(error, kind)), "")
    # str() of a KeyError puts quotes around its message.
    shown = error.args[0] if isinstance(error, KeyError) and error.args else error
    text = " ".join(str(shown).split())[:MAX_MESSAGE]
    is_common = is_ours or builtin or isinstance(error, ValueError | RuntimeError)
    if not is_common or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return [next(known, "") if is_ours else "", builtin, text]


_plans: WeakKeyDictionary[dist.ProcessGroup, dict[int, Plan]] = WeakKeyDictionary()
"""The plans that gather rows on all ranks of a group, by size: a power of two. They go with it."""
