"""Every rank of a group says something, and every rank hears all of it."""

from __future__ import annotations

import json
import zlib

import torch.distributed as dist

from reshard.errors import LiveError, ReshardError
from reshard.run.live.call import told
from reshard.run.live.cause import Cause
from reshard.run.live.faults import Watch
from reshard.run.live.session import Ticket, counted, session_of

__all__ = ["everyone_says"]

MOST_TEXT = 1 << 28
"""Bytes that a text may unpack to: a peer may be broken."""


def everyone_says(
    text: str, group: dist.ProcessGroup | None, timeout: float, what: str
) -> dict[int, str]:
    """The texts of all ranks of a group, by rank; ``what`` they are about must be the same."""
    group = group or dist.group.WORLD
    return counted(group, None, lambda ticket: _everyone_says(ticket, text, timeout, what))


def _everyone_says(ticket: Ticket, text: str, timeout: float, what: str) -> dict[int, str]:
    assert ticket.group is not None
    session = session_of(ticket.group, sorted(dist.get_process_group_ranks(ticket.group)))
    session.begin(ticket)
    try:
        team = session.connect(ticket, timeout, what)
        status = f"on rank {team.rank}: no round begun"
        watch = Watch(
            team,
            ticket.number,
            b"",
            timeout=timeout,
            deadline=None,
            status=lambda: status,
            move=what,
        )
        ticket.watch_of = lambda: watch
        with told(watch):
            found = _exchanged(watch, zlib.compress(json.dumps([what, text]).encode(), 1).hex())
        watch.close()
    except ReshardError:
        if ticket.watch_of is not None:
            ticket.watch_of().close()
        ticket.finish()
        raise
    ticket.finish()
    return found


def _exchanged(watch: Watch, mine: str) -> dict[int, str]:
    team = watch.team
    keys = {rank: f"says/{watch.call}/{rank}" for rank in team.ranks}
    team.line.ask(lambda store: store.set(keys[team.rank], mine))
    watch.wait(lambda: team.missing(keys), lambda peer: f"it to say its part of {watch.move}")
    values = team.line.ask(lambda store: store.multi_get(list(keys.values())))
    found = {rank: _unpacked(rank, value) for rank, value in zip(keys, values, strict=True)}
    other = {rank: what for rank, (what, _) in found.items() if what != watch.move}
    if other:
        rank, what = min(other.items())
        text = f"rank {team.rank} is in {watch.move} and rank {rank} in {what}"
        watch.fail(Cause("disagree", f"ranks are in different calls: {text}"))
    # Every rank has read before any goes on, so that the keys can go.
    watch.barrier("heard")
    team.line.ask(lambda store: store.delete_key(keys[team.rank]))
    return {rank: text for rank, (_, text) in found.items()}


def _unpacked(rank: int, value: bytes) -> tuple[str, str]:
    try:
        data = zlib.decompressobj().decompress(bytes.fromhex(value.decode()), MOST_TEXT)
        what, text = json.loads(data)
        return str(what), str(text)
    except (ValueError, TypeError, zlib.error) as error:
        raise LiveError(f"what rank {rank} said cannot be read: {error}") from None
