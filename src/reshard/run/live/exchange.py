"""Every rank of a group says something, and every rank hears all of it."""

from __future__ import annotations

import zlib

import torch.distributed as dist

from reshard.errors import LiveError
from reshard.run.live.call import told
from reshard.run.live.faults import Watch
from reshard.run.live.teams import team_of

__all__ = ["everyone_says"]

MOST_TEXT = 1 << 28
"""Bytes that a text may unpack to: a peer may be broken."""


def everyone_says(text: str, group: dist.ProcessGroup | None, timeout: float) -> dict[int, str]:
    """The texts of all ranks of a group, by rank."""
    group = group or dist.group.WORLD
    assert group is not None
    team = team_of(group, dist.get_process_group_ranks(group), timeout, "an exchange of layouts")
    watch = Watch(team, team.next_call(), b"", timeout=timeout, deadline=None, status=lambda: "")
    keys = {rank: f"says/{watch.call}/{rank}" for rank in team.ranks}
    packed = zlib.compress(text.encode(), 1).hex()

    try:
        with told(watch):
            team.line.ask(lambda store: store.set(keys[team.rank], packed))
            watch.wait(lambda: team.missing(keys), lambda peer: "it to say what it holds and wants")
            values = team.line.ask(lambda store: store.multi_get(list(keys.values())))
            found = {rank: _unpacked(rank, value) for rank, value in zip(keys, values, strict=True)}
            # Everyone has read before anyone goes on, so that the keys can go.
            watch.barrier("heard")
            team.line.ask(lambda store: store.delete_key(keys[team.rank]))
            return found
    finally:
        watch.close()


def _unpacked(rank: int, value: bytes) -> str:
    try:
        return zlib.decompressobj().decompress(bytes.fromhex(value.decode()), MOST_TEXT).decode()
    except (ValueError, zlib.error) as error:
        raise LiveError(f"what rank {rank} said cannot be read: {error}") from None
