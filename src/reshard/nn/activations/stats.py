"""What resharding of activations has done so far, in numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from reshard.text import format_bytes

__all__ = ["Stats"]


@dataclass(slots=True)
class Stats:
    """What resharding of activations has done so far; each memory counts once.

    >>> print(Stats(bytes_seen=4 << 20, bytes_kept=1 << 20, restores=4, collectives=2))
    kept 1.0 MiB of 4.0 MiB, saved 3.0 MiB; 4 restores in 2 collectives, 0.000 s waiting
    """

    bytes_seen: int = 0
    """Bytes of the tensors that were taken to be kept."""
    bytes_kept: int = 0
    """Bytes of them that stayed in the memory of this rank's device."""
    bytes_offloaded: int = 0
    """Bytes of them that went to the memory of the host."""
    restores: int = 0
    """Tensors that were made whole again."""
    collectives: int = 0
    """Exchanges between ranks that this took."""
    seconds_waiting: float = 0.0
    """Seconds in which backward waited for them."""

    @property
    def bytes_saved(self) -> int:
        """Bytes that this rank's device did not have to keep."""
        return self.bytes_seen - self.bytes_kept

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps({**asdict(self), "bytes_saved": self.bytes_saved})

    def __str__(self) -> str:
        kept, seen = format_bytes(self.bytes_kept), format_bytes(self.bytes_seen)
        return (
            f"kept {kept} of {seen}, saved {format_bytes(self.bytes_saved)}; {self.restores} "
            f"restores in {self.collectives} collectives, {self.seconds_waiting:.3f} s waiting"
        )
