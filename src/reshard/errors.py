"""Every exception that reshard raises, as one tree below `ReshardError`.

Each is also a ValueError, and the builtin that fits, so that callers need not import reshard to
catch them. A message is one line: what is wrong, both numbers, where, and what to try.
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
        text = f"{what} needs torch: it is not installed; try pip install torch"
        raise ModuleNotFoundError(text, name="torch") from None


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
