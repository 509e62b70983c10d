"""Every exception reshard raises, as one tree.

    ReshardError                      catch this to catch all of them
    +-- NotationError                 a text that does not follow the grammar
    +-- MeshError                     axes or ranks of a mesh that make no sense
    +-- BoxError                      a box whose stop is before its start
    +-- LayoutError                   a layout that does not fit its mesh or a shape
    +-- DtypeError                    an unknown dtype
    +-- SizeError                     an amount of bytes that cannot be read
    +-- ArgumentError                 an argument whose value does not work
        +-- ArgumentTypeError         an argument of a wrong type (also a TypeError)
        +-- PathError                 a path that names nothing in a module (also an AttributeError)
    +-- StateError                    a call that is not possible now (also a RuntimeError)
    +-- RulesError                    a wrong rules file, or a name that no rule matches
    +-- TopologyError                 a topology file or its numbers
    +-- FormatError                   JSON that is not a plan, a layout or a topology
    +-- PlanError                     a move that cannot be planned
        +-- NamesError                names that one side has and the other lacks
        +-- CoverageError             a destination wants what no source holds
        +-- MemoryCapError            a memory cap under which no round fits
        +-- ProofError                a plan that does not do what it promises
    +-- LiveError                     a move between processes that failed (also a RuntimeError)
        +-- DisagreementError         ranks that were given different tensors, layouts or plans
        +-- PeerLostError             a rank that is gone (also a ConnectionError)
        +-- MoveTimeoutError          a rank that made no progress in time (also a TimeoutError)
        +-- TensorError               a tensor given to a move that does not fit
    +-- OperationError                an operation that a sharded tensor lacks in its layout
                                      (also a RuntimeError)
    +-- CheckpointError               a checkpoint that cannot be read or written (also an OSError)
        +-- DamageError               files that are truncated, changed or inconsistent
        +-- UnsupportedError          valid files that are not read (also a NotImplementedError)
        +-- TargetError               a destination that cannot be written, or exists
        +-- UnfinishedError           a conversion that stopped midway and can be resumed

Each is also a ValueError, so that callers need not import reshard to catch them.
A message is one line: what is wrong, both numbers, where, and what to try.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "ArgumentError", "ArgumentTypeError", "BoxError", "CheckpointError", "CoverageError",
    "DamageError", "DisagreementError", "DtypeError", "FormatError", "LayoutError", "LiveError",
    "MemoryCapError", "MeshError", "MoveTimeoutError", "NamesError", "NotationError",
    "OperationError", "PathError", "PeerLostError", "PlanError", "ProofError", "ReshardError",
    "RulesError", "SizeError", "StateError", "TargetError", "TensorError", "TopologyError",
    "UnfinishedError", "UnsupportedError",
]  # fmt: skip


def require_type(value: object, kind: type, what: str, advice: str) -> None:
    """Refuse an argument of another type; the advice says what to give."""
    if not isinstance(value, kind):
        is_short = value is None or isinstance(value, int | float | str | bytes)
        shown = f"{value!r:.60}" if is_short else f"a value of type {type(value).__name__}"
        raise ArgumentTypeError(f"{what} got {shown}: {advice}")


@contextmanager
def needing_torch(what: str) -> Iterator[None]:
    """Turn a failed import of torch into one line that says what needs it and how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        advice = "it is not installed; try pip install torch"
        raise ModuleNotFoundError(f"{what} needs torch: {advice}", name="torch") from None


class ReshardError(ValueError):
    """Something reshard was given, or was asked to do, is wrong; the message says what to try."""


class NotationError(ReshardError):
    """A mesh or layout text does not follow the grammar."""


class MeshError(ReshardError):
    """The axes or ranks of a mesh make no sense."""


class BoxError(ReshardError):
    """A box has a stop before its start, or two boxes have different numbers of dims."""


class LayoutError(ReshardError):
    """A layout does not fit its mesh or the shape of a tensor."""


class DtypeError(ReshardError):
    """A name is not the name of a dtype."""


class SizeError(ReshardError):
    """A text such as ``256MiB`` cannot be read as an amount of bytes."""


class ArgumentError(ReshardError):
    """An argument of a call has a value that does not work."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of a call has a wrong type."""


class PathError(ArgumentError, AttributeError):
    """A path names no module, parameter or buffer of a module."""


class StateError(ReshardError, RuntimeError):
    """A call is not possible in the present state of an object or of this process."""


class RulesError(ReshardError):
    """A rules file is wrong, or no rule matches a name."""


class TopologyError(ReshardError):
    """A topology file is wrong."""


class FormatError(ReshardError):
    """A JSON text is not a plan, a layout or a topology of a version this library reads."""


class PlanError(ReshardError):
    """A move cannot be planned."""


class NamesError(PlanError):
    """One side has tensor names that the other lacks."""


class CoverageError(PlanError):
    """A destination wants a box that no source rank holds."""


class MemoryCapError(PlanError):
    """The memory cap is too small for even the smallest round."""


class ProofError(PlanError):
    """A plan misses a box, writes one twice, or sends what the sender does not hold."""


class LiveError(ReshardError, RuntimeError):
    """A move between processes failed."""


class DisagreementError(LiveError):
    """Ranks were given different tensors, layouts or plans."""


class PeerLostError(LiveError, ConnectionError):
    """A rank that takes part in a move is gone."""


class MoveTimeoutError(LiveError, TimeoutError):
    """A rank that takes part in a move made no progress in time."""


class TensorError(LiveError):
    """A tensor given to a move does not fit its spec, or is no tensor."""


class OperationError(ReshardError, RuntimeError):
    """A sharded tensor does not have an operation, or not in the layout that it has."""


class CheckpointError(ReshardError, OSError):
    """A checkpoint cannot be read or written."""


class DamageError(CheckpointError):
    """A file of a checkpoint is cut short, was changed, or says what cannot be."""


class UnsupportedError(CheckpointError, NotImplementedError):
    """A checkpoint is sound, as far as can be seen, but of a kind that reshard does not read."""


class TargetError(CheckpointError):
    """A checkpoint cannot be written there: something stands there, or there is no room."""


class UnfinishedError(CheckpointError):
    """A conversion stopped midway; it can be resumed."""
