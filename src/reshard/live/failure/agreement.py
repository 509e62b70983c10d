"""Ranks meet in the session's store, and compare their plans before the first move along a plan.

Each rank posts a signature of its plan and options. Equal signatures are not compared again.
Otherwise each rank posts a description of every tensor, and all ranks raise the same error, which
names the tensors and the ranks that differ.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from reshard.layout.mesh import format_ranks
from reshard.live.failure.watch import FIRST_PAUSE, LOOK_EVERY, Watch
from reshard.live.session.control import (
    CallAheadError,
    Cause,
    Tag,
    compare_codes,
    describe_code,
    ranks_with,
)
from reshard.live.session.store import Store, poll_until
from reshard.planning.plans import Plan
from reshard.text import and_more, format_bytes

STORE_PAUSE = 0.02
"""The longest pause between two looks at the store for keys of other ranks."""
MAX_DETAIL = 64 << 20
"""Bytes that a description may decompress to: a peer may be broken."""
DETAIL_SECONDS = 1.0
"""How long to wait for the descriptions of other ranks, once signatures are known to differ."""
MAX_NAMED = 3
"""Tensors that an error names."""
GRAD_CODES = {None: 0, False: 1, True: 2}
"""The field ``grad`` of a Hello: whether the source requires gradients, if the rank knows."""


def await_all(
    watch: Watch, name: str, what: Callable[[int], str], value: str = "here"
) -> list[str]:
    """Post a value in the store and wait for those of all ranks; returns all keys.

    ``what`` says what a peer is waited for.
    """
    client, rank = watch.connections.client, watch.connections.rank
    keys = {one: f"{name}/{one}" for one in watch.connections.ranks}
    names = list(keys.values())
    client.set(keys[rank], value)
    left: Collection[int] = keys.keys() - {rank}
    looked = time.monotonic()

    def missing() -> Collection[int]:
        nonlocal left, looked
        if client.check(names):
            return ()
        if time.monotonic() - looked > LOOK_EVERY:
            left, looked = keys.keys() - client.values(keys).keys(), time.monotonic()
        return left

    watch.wait(missing, what, FIRST_PAUSE, STORE_PAUSE)
    return names


def delete_keys(watch: Watch, name: str, keys: Sequence[str]) -> None:
    """Delete keys of the store when no rank needs them any more.

    The rank that serves the store waits for all others: they may be about to exit.
    """
    connections = watch.connections
    if connections.rank != connections.leader:
        connections.client.set(f"{name}/done/{connections.rank}", "1")
        return
    done = await_all(watch, f"{name}/done", lambda peer: f"it to have read what {watch.what} is")
    connections.client.request(lambda store: [store.delete_key(key) for key in (*keys, *done)])


def barrier(watch: Watch, name: str) -> None:
    """Wait until every rank of the session has come this far in the call."""
    name = f"{name}/{watch.call}"
    delete_keys(watch, name, await_all(watch, name, lambda peer: "it to have all of its part"))


@dataclass(frozen=True, slots=True)
class Signature:
    """What all ranks of a call must have in common."""

    plan: Plan
    transport: str
    atomic: bool
    devices: str
    """Where this rank's tensors are: ``cpu``, ``cuda``, ...; may differ."""
    grad: int = 0
    """Whether the source requires gradients, as in a Hello."""
    tag: Tag | None = None

    def to_json(self) -> str:
        shared, code = (self.plan.digest, self.transport, self.atomic), self.tag and self.tag.code
        return json.dumps([shared, self.devices, self.grad, code or 0])


def compare(watch: Watch, signature: Signature) -> dict[int, str]:
    """Compare the signatures of all ranks; returns where each rank has its tensors."""
    client = watch.connections.client
    watch.compared = True
    client.set(_key(watch, "comparing"), watch.digest.hex())
    first = f'"{next(iter(signature.plan.want))}"' if signature.plan.want else "nothing"
    what = f"it to compare what is moved, with {first}"
    name = _key(watch, "signature")
    keys = await_all(watch, name, lambda peer: what, signature.to_json())
    values = client.request(lambda store: store.multi_get(keys))
    ranks = watch.connections.ranks
    signatures = {rank: _read_signature(text) for rank, text in zip(ranks, values, strict=True)}
    _check_tags(watch, {rank: tag for rank, (*_, tag) in signatures.items()})
    if len({shared for shared, *_ in signatures.values()}) > 1:
        _raise_disagreement(watch, signature)
    _check_grad(watch, {rank: grad for rank, (_, _, grad, _) in signatures.items()})
    delete_keys(watch, name, [*keys, _key(watch, "comparing")])
    return {rank: devices for rank, (_, devices, _, _) in signatures.items()}


def _read_signature(text: bytes) -> tuple[str, str, int, int]:
    """Decode a peer's signature; a malformed one differs from all others."""
    try:
        shared, devices, grad, tag = json.loads(text)
        return json.dumps(shared), str(devices), int(grad), int(tag)
    except (ValueError, TypeError):
        return repr(text[:200]), "", 0, 0


def check_hellos(watch: Watch, signature: Callable[[], Signature]) -> None:
    """Fail unless the peers that have sent a Hello make the same call."""
    hellos = watch.inbox.hellos
    for hello in tuple(hellos.values()):
        if hello.tag != watch.tag_code:
            _check_tags(watch, {peer: one.tag for peer, one in tuple(hellos.items())})
        if hello.digest != watch.digest:
            # Peers whose plan was compared before do not look for our signature: send a Hello.
            for peer in watch.connections.peers.keys() & hellos.keys() if watch.compared else ():
                watch.mailbox.send(peer, watch.hello())
            _raise_disagreement(watch, signature())
        if hello.grad not in (0, watch.grad):
            grads = {peer: one.grad for peer, one in tuple(hellos.items())}
            _check_grad(watch, {**grads, watch.connections.rank: watch.grad})


def _check_tags(watch: Watch, codes: Mapping[int, int]) -> None:
    """Fail unless all ranks are in calls with the same tag.

    Where tags are numbers, the call of the ranks with the lower one fails. A rank with the highest
    one left that call out, and meets the others in their next call.
    """
    mine = watch.tag_code
    others = {rank: code for rank, code in codes.items() if code != mine}
    if not others:
        return
    orders = [compare_codes(mine, code) for code in others.values()]
    codes = {**others, watch.connections.rank: mine}
    first = min(codes.values())
    names = {code: f"the call with {describe_code(code)}" for code in codes.values()}
    names[0] = "a call without a tag"
    parts = ", ".join(f"rank {rank} is in {names[code]}" for rank, code in sorted(codes.items()))
    text = f"ranks are in different calls: {parts}; one of them has left out a call"
    cause = Cause("disagree", text, first if None not in orders else 0)
    if set(orders) == {1}:
        raise CallAheadError(watch.post(cause))
    watch.fail(cause)


def _check_grad(watch: Watch, grads: Mapping[int, int]) -> None:
    """Fail if the source requires gradients on some ranks and not on others."""
    no, yes = (sorted(r for r, one in grads.items() if one == code) for code in (1, 2))
    if no and yes:
        text = (
            f"the source requires gradients on ranks {format_ranks(yes)} and not on "
            f"{format_ranks(no)}: set requires_grad alike, or call under no_grad on all ranks"
        )
        watch.fail(Cause("disagree", text))


def check_comparison(watch: Watch, signature: Callable[[], Signature]) -> None:
    """Fail if ranks have found that their plans differ, or join those that compare this plan again.

    They compare it again because an earlier call failed on them and not here, or because this rank
    was late for it: then this rank posts its signature.
    """
    check_hellos(watch, signature)
    client, rank = watch.connections.client, watch.connections.rank
    if client.is_stuck:
        return
    # With a short limit: a rank whose Hellos are all there must not wait for a silent store.
    if client.get(_key(watch, "differ")) is not None:
        _raise_disagreement(watch, signature())
    compared = None if watch.compared else client.get(_key(watch, "comparing"))
    if compared is None:
        return
    if compared.decode() != watch.digest.hex():
        _raise_disagreement(watch, signature())
    watch.compared = True
    name, text = _key(watch, "signature"), signature().to_json()

    def join(store: Store) -> None:
        store.set(f"{name}/{rank}", text)
        store.set(f"{name}/done/{rank}", "1")

    client.request(join)


def _key(watch: Watch, name: str) -> str:
    """A key of this call: signature, comparing (the digest of the plan), differ or detail."""
    return f"{name}/{watch.call}"


def _raise_disagreement(watch: Watch, signature: Signature) -> NoReturn:
    """Post a description of this rank's plan, read those of the others, and name the difference."""
    connections, client = watch.connections, watch.connections.client
    keys = {rank: f"{_key(watch, 'detail')}/{rank}" for rank in connections.ranks}
    text = zlib.compress(json.dumps(_describe(signature)).encode(), 1).hex()

    def post(store: Store) -> None:
        store.set(keys[connections.rank], text)
        store.set(_key(watch, "differ"), "1")

    client.request(post)
    for in_time in poll_until(DETAIL_SECONDS):
        if client.check(list(keys.values())) or not in_time:
            break
    details = {rank: _read_detail(value) for rank, value in client.values(keys).items()}
    watch.fail(Cause("disagree", _difference(details)))


def _describe(signature: Signature) -> dict[str, Any]:
    sides = {"source": signature.plan.have, "destination": signature.plan.want}
    layouts: dict[int, str] = {}
    tensors = {}
    for side, specs in sides.items():
        for name, spec in specs.items():
            key = id(spec.layout)
            if key not in layouts:
                layouts[key] = f'"{spec.layout}" on {spec.layout.mesh}'
            tensors[f'{side} "{name}"'] = f"{spec.dtype}{list(spec.shape)} {layouts[key]}"
    settings = {"transport": signature.transport, "atomic": str(signature.atomic)}
    if signature.tag is not None:
        settings["tag"] = signature.tag.text
    memory = format_bytes(signature.plan.memory)
    settings |= {"memory cap": memory, "plan": signature.plan.digest}
    return {"tensors": tensors, "settings": settings}


def _read_detail(value: bytes) -> dict[str, dict[str, str]]:
    """Decode a peer's description, which may be malformed."""
    try:
        unpacked = zlib.decompressobj().decompress(bytes.fromhex(value.decode()), MAX_DETAIL)
        data = json.loads(unpacked)
        return {
            part: {str(key): str(text) for key, text in data[part].items()}
            for part in ("tensors", "settings")
        }
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error):
        return {"tensors": {}, "settings": {"description": "cannot be read"}}


def _difference(details: Mapping[int, Mapping[str, Mapping[str, str]]]) -> str:
    """Name the tensors that differ between ranks, or else the settings."""
    for part in ("tensors", "settings"):
        differing = []
        for name in sorted({name for detail in details.values() for name in detail[part]}):
            texts = {rank: detail[part].get(name, "nothing") for rank, detail in details.items()}
            if len(set(texts.values())) > 1:
                differing.append(f"{name}: {ranks_by_text(texts)}")
        if differing:
            more = len(differing) - MAX_NAMED
            tail = f"; and {more} more differ" if more > 0 else ""
            return "ranks were given different moves: " + "; ".join(differing[:MAX_NAMED]) + tail
    return (
        "ranks were given different moves: plan digests differ although tensors and settings agree"
    )


def ranks_by_text(
    texts: Mapping[int, str], verbs: tuple[str, str] = ("has", "have"), most: int | None = None
) -> str:
    """Which ranks have which text, the most common one first, and so many texts at most."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks_of.setdefault(texts[rank], []).append(rank)
    groups = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
    parts = [f"{ranks_with(ranks, *verbs)} {text}" for text, ranks in groups]
    return and_more(parts, most or len(parts), "values")
