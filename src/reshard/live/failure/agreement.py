"""Before the first move along a plan, all ranks compare what they were given.

Each posts a digest. Equal digests end the matter; it is not asked again for that plan. Otherwise
each posts what it knows of every tensor, and all ranks raise the same error, which names the tensor
and the ranks that differ.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from reshard.layout.mesh import format_ranks
from reshard.live.failure.watch import Watch, done_key
from reshard.live.session.cause import Cause
from reshard.live.session.store import Store, poll_pauses
from reshard.live.session.tags import CallAheadError, Tag, compare_codes, describe_code
from reshard.planning.plans import Plan
from reshard.text import format_bytes

__all__ = ["Signature", "check_hellos", "compare", "join_comparison"]

MAX_DETAIL = 64 << 20
"""Bytes that a description may decompress to: a peer may be broken."""

DETAIL_SECONDS = 1.0
"""How long to wait for the descriptions of others, once it is known that they differ."""

DIFFER_EVERY = 0.2
"""Seconds between two looks whether another rank has found a difference."""

MAX_NAMED = 3

NO_GRAD, GRAD = 1, 2
"""What a rank that knows says of gradients."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What all ranks of a call must have in common."""

    plan: Plan
    options: Mapping[str, object]
    """Options that must be equal: transport, atomic."""
    devices: str
    """Where this rank's tensors are: ``cpu``, ``cuda``, ...; may differ."""
    grad: int = 0
    """What this rank says of gradients; one that cannot know says 0."""
    tag: Tag | None = None

    def to_json(self) -> str:
        """The signature as it is compared."""
        shared = [self.plan.digest, dict(self.options)]
        code = 0 if self.tag is None else self.tag.code
        return json.dumps([*shared, self.devices, self.grad, code], sort_keys=True)


def compare(watch: Watch, signature: Signature) -> dict[int, str]:
    """Compare with all ranks of the session; gives where each has its tensors."""
    connections, call = watch.connections, watch.call
    watch.compared = True
    keys = {rank: f"terms/{call}/{rank}" for rank in connections.ranks}
    everyone = list(keys.values())
    client = connections.client

    def post(store: Store) -> None:
        store.set(keys[connections.rank], signature.to_json())
        store.set(_comparing(watch), watch.digest.hex())

    client.request(post)
    first = f'"{next(iter(signature.plan.want))}"' if signature.plan.want else "nothing"
    looked = time.monotonic()

    def check() -> None:
        """Fail if a rank runs another plan, which was compared before, or found a difference."""
        nonlocal looked
        check_hellos(watch, lambda: signature)
        if time.monotonic() - looked > DIFFER_EVERY:
            looked = time.monotonic()
            if client.check([_differ(watch)]):
                _raise_disagreement(watch, signature)

    watch.wait_keys(keys, lambda peer: f"it to compare what is moved, with {first}", check)
    values = client.request(lambda store: store.multi_get(everyone))
    found = {rank: _read_signature(text) for rank, text in zip(keys, values, strict=True)}
    _check_tags(watch, {rank: int(one[4]) for rank, one in found.items()})
    if len({json.dumps(one[:2]) for one in found.values()}) > 1:
        _raise_disagreement(watch, signature)
    _check_grad(watch, {rank: int(one[3]) for rank, one in found.items()})
    watch.forget(f"compared/{call}", [*everyone, _comparing(watch)])
    return {rank: str(one[2]) for rank, one in found.items()}


def _read_signature(text: bytes) -> list[Any]:
    """A peer's signature; one that cannot be read differs from all others."""
    try:
        digest, options, devices, grad, tag = json.loads(text)
        return [digest, options, str(devices), int(grad), int(tag)]
    except (ValueError, TypeError):
        return [repr(text[:200]), {}, "", 0, 0]


def check_hellos(watch: Watch, signature: Callable[[], Signature]) -> None:
    """Fail unless the peers that have sent a Hello make the same call."""
    hellos = watch.inbox.hellos
    for hello in tuple(hellos.values()):
        if hello.tag != watch.tag_code:
            _check_tags(watch, {peer: one.tag for peer, one in tuple(hellos.items())})
        if hello.digest != watch.digest:
            # A peer whose plan was compared before does not look for ours: let it know.
            for peer in watch.connections.peers.keys() & hellos.keys() if watch.compared else ():
                watch.mailbox.send(peer, watch.hello())
            _raise_disagreement(watch, signature())
        if hello.grad not in (0, watch.grad):
            grads = {peer: one.grad for peer, one in tuple(hellos.items())}
            _check_grad(watch, {**grads, watch.connections.rank: watch.grad})


def _check_tags(watch: Watch, codes: Mapping[int, int]) -> None:
    """Ranks must be in calls with the same tag.

    Where tags are numbers, the ranks with the lower one wait in vain: their call fails. A rank with
    the highest one left it out, and goes on to meet the others in their next call.
    """
    mine = watch.tag_code
    others = {rank: code for rank, code in codes.items() if code != mine}
    if not others:
        return
    orders = [compare_codes(mine, code) for code in others.values()]
    codes = {**others, watch.connections.rank: mine}
    first = min(codes.values())
    parts = ", ".join(f"rank {rank} is in {_call_with(codes[rank])}" for rank in sorted(codes))
    text = f"ranks are in different calls: {parts}; one of them has left out a call"
    cause = Cause("disagree", text, first if None not in orders else 0)
    if set(orders) == {1}:
        raise CallAheadError(watch.abort.post(cause))
    watch.fail(cause)


def _call_with(code: int) -> str:
    return f"the call with {describe_code(code)}" if code else "a call without a tag"


def _check_grad(watch: Watch, grads: Mapping[int, int]) -> None:
    """Ranks that know whether gradients are wanted must say the same."""
    no, yes = ([rank for rank, one in grads.items() if one == code] for code in (NO_GRAD, GRAD))
    if no and yes:
        watch.fail(
            Cause(
                "disagree",
                f"the source requires gradients on ranks {format_ranks(sorted(yes))} and not on "
                f"{format_ranks(sorted(no))}: set requires_grad alike, or call under no_grad on "
                "all ranks",
            )
        )


def join_comparison(watch: Watch, signature: Signature) -> None:
    """A rank whose plan was compared before waits for others: do they compare a plan?

    If it is the same one, they have forgotten: an earlier call failed on them and not here, or this
    rank was late for it. They get what they wait for.
    """
    client = watch.connections.client
    if client.check([_differ(watch)]):
        _raise_disagreement(watch, signature)
    if watch.compared or not client.check([_comparing(watch)]):
        return
    compared = client.request(lambda store: store.get(_comparing(watch)))
    if compared.decode() != watch.digest.hex():
        _raise_disagreement(watch, signature)
    watch.compared = True
    call, rank = watch.call, watch.connections.rank

    def join(store: Store) -> None:
        store.set(f"terms/{call}/{rank}", signature.to_json())
        store.set(done_key(f"compared/{call}", rank), "1")

    client.request(join)


def _differ(watch: Watch) -> str:
    """The key that says that the ranks of a call do different things."""
    return f"differ/{watch.call}"


def _comparing(watch: Watch) -> str:
    """The key that says that ranks compare in a call, and the digest of what they compare."""
    return f"comparing/{watch.call}"


def _raise_disagreement(watch: Watch, signature: Signature) -> NoReturn:
    """Post what this rank was given, read what the others were, and name the difference."""
    connections, client = watch.connections, watch.connections.client
    keys = {rank: f"detail/{watch.call}/{rank}" for rank in connections.ranks}
    text = zlib.compress(json.dumps(_describe(signature)).encode(), 1).hex()

    def post(store: Store) -> None:
        store.set(keys[connections.rank], text)
        store.set(_differ(watch), "1")

    client.request(post)
    end = time.monotonic() + DETAIL_SECONDS
    for pause in poll_pauses():
        if client.check(list(keys.values())) or time.monotonic() > end:
            break
        time.sleep(pause)
    there = {rank: key for rank, key in keys.items() if client.check([key])}
    values = client.request(lambda store: store.multi_get(list(there.values())))
    details = {rank: _read_detail(value) for rank, value in zip(there, values, strict=True)}
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
    settings = {key: str(value) for key, value in signature.options.items()}
    if signature.tag is not None:
        settings["tag"] = signature.tag.text
    memory = format_bytes(signature.plan.memory)
    settings |= {"memory cap": memory, "plan": signature.plan.digest}
    return {"tensors": tensors, "settings": settings}


def _read_detail(value: bytes) -> dict[str, dict[str, str]]:
    """A peer's description, however broken, as text to text."""
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
    """Where descriptions of ranks differ, in words: the tensors first, then the settings."""
    for part in ("tensors", "settings"):
        found = _differing(details, part)
        if found:
            more = f"; and {len(found) - MAX_NAMED} more differ" if len(found) > MAX_NAMED else ""
            return "ranks were given different moves: " + "; ".join(found[:MAX_NAMED]) + more
    return (
        "ranks were given different moves: plan digests differ although tensors and settings agree"
    )


def _differing(details: Mapping[int, Mapping[str, Mapping[str, str]]], part: str) -> Sequence[str]:
    names = sorted({name for detail in details.values() for name in detail[part]})
    found = []
    for name in names:
        texts = {rank: detail[part].get(name, "nothing") for rank, detail in details.items()}
        if len(set(texts.values())) > 1:
            found.append(f"{name}: {_by_text(texts)}")
    return found


def _by_text(texts: Mapping[int, str]) -> str:
    """Which ranks have which text, the most common one first."""
    parts = []
    for text, _ in Counter(texts.values()).most_common():
        ranks = [rank for rank, one in texts.items() if one == text]
        noun, verb = ("rank", "has") if len(ranks) == 1 else ("ranks", "have")
        parts.append(f"{noun} {format_ranks(ranks)} {verb} {text}")
    return ", ".join(parts)
