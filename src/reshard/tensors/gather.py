"""Collect a text of every rank on every rank: for ranks that must agree, or all raise."""

from __future__ import annotations

import json
import zlib

import torch.distributed as dist

from reshard.errors import LiveError, ReshardError
from reshard.live.call import observe_waits
from reshard.live.failure.cleanup import with_ticket
from reshard.live.failure.watch import Watch
from reshard.live.session.cause import Cause
from reshard.live.session.session import Ticket, session_of

__all__ = ["gather_texts"]

MAX_TEXT = 1 << 28
"""Bytes that a text may decompress to: a peer may be broken."""


def gather_texts(
    text: str, group: dist.ProcessGroup | None, timeout: float, what: str
) -> dict[int, str]:
    """The texts of all ranks of a group, by rank; ``what`` they are about must be the same."""
    group = group or dist.group.WORLD
    return with_ticket(group, None, lambda ticket: _gather(ticket, text, timeout, what))


def _gather(ticket: Ticket, text: str, timeout: float, what: str) -> dict[int, str]:
    assert ticket.group is not None
    session = session_of(ticket.group, sorted(dist.get_process_group_ranks(ticket.group)))
    session.begin(ticket)
    try:
        connections = session.connect(ticket, timeout, what, observe_waits)
        number = ticket.number
        watch = Watch(session, connections, number, b"", timeout=timeout, what=what)
        ticket.watch = watch
        try:
            mine = zlib.compress(json.dumps([what, text]).encode(), 1).hex()
            found = _exchange_texts(watch, mine)
        except ReshardError as error:
            watch.fail_with(error)
        watch.close()
    except ReshardError:
        if ticket.watch is not None:
            ticket.watch.close()
        ticket.finish()
        raise
    ticket.finish()
    return found


def _exchange_texts(watch: Watch, mine: str) -> dict[int, str]:
    connections = watch.connections
    client, rank = connections.client, connections.rank
    keys = {one: f"says/{watch.call}/{one}" for one in connections.ranks}
    client.request(lambda store: store.set(keys[rank], mine))
    watch.wait_keys(keys, lambda peer: f"it to say its part of {watch.what}")
    values = client.request(lambda store: store.multi_get(list(keys.values())))
    found = {one: _decoded(one, value) for one, value in zip(keys, values, strict=True)}
    other = {one: what for one, (what, _) in found.items() if what != watch.what}
    if other:
        one, what = min(other.items())
        text = f"rank {rank} is in {watch.what} and rank {one} in {what}"
        watch.fail(Cause("disagree", f"ranks are in different calls: {text}"))
    # Every rank has read before any goes on, so that the keys can go.
    watch.barrier("heard")
    client.request(lambda store: store.delete_key(keys[rank]))
    return {one: text for one, (_, text) in found.items()}


def _decoded(rank: int, value: bytes) -> tuple[str, str]:
    try:
        data = zlib.decompressobj().decompress(bytes.fromhex(value.decode()), MAX_TEXT)
        what, text = json.loads(data)
        return str(what), str(text)
    except (ValueError, TypeError, zlib.error) as error:
        raise LiveError(f"what rank {rank} sent cannot be read: {error}") from None
