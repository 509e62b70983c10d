"""Before the first move along a plan, all ranks compare what they were given.

Each posts a digest. Equal digests end the matter; it is not asked again for that plan. Otherwise
each posts what it knows of every tensor, and all ranks raise the same error, which names the tensor
and the ranks that differ.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from reshard.bytesize import format_bytes
from reshard.mesh import format_ranks
from reshard.planning.plan import Plan
from reshard.run.live.c10d import Store
from reshard.run.live.cause import Cause
from reshard.run.live.faults import Watch
from reshard.run.live.mailbox import Kind, Message
from reshard.run.live.meeting import await_keys
from reshard.run.live.tags import AheadError, Tag, order, shown
from reshard.run.live.team import done_key

__all__ = ["Terms", "agree", "check_tags", "check_words", "raise_disagreement", "suspect_comparing"]

MOST_DETAIL = 64 << 20
"""Bytes that a description may unpack to: a peer may be broken."""

DETAIL_SECONDS = 1.0
"""How long to wait for the descriptions of others, once it is known that they differ."""

MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Terms:
    """What all ranks must have in common to run a plan."""

    plan: Plan
    options: Mapping[str, object]
    """Settings that must be equal: transport, gradients."""
    devices: str
    """Where this rank's tensors are: ``cpu``, ``cuda``, ``both`` or ``none``; may differ."""
    word: int = 0
    """What it says about gradients; ranks that cannot know say 0."""
    tag: Tag | None = None
    """What the user calls this call."""

    def to_json(self) -> str:
        """The terms as they are compared."""
        shared = [self.plan.digest, dict(self.options)]
        code = 0 if self.tag is None else self.tag.code
        return json.dumps([*shared, self.devices, self.word, code], sort_keys=True)


def agree(watch: Watch, terms: Terms) -> dict[int, str]:
    """Compare with all ranks of the team; gives where each has its tensors."""
    team, call = watch.team, watch.call
    watch.compared = True
    keys = {rank: f"terms/{call}/{rank}" for rank in team.ranks}
    everyone = list(keys.values())

    def post(store: Store) -> None:
        store.set(keys[team.rank], terms.to_json())
        store.set(_comparing(watch), watch.digest.hex())

    team.line.ask(post)
    watch.wait(
        lambda: _missing(watch, terms, keys),
        lambda peer: f"it to compare what is moved, with {_first_tensor(terms.plan)}",
    )
    found = dict(zip(keys, team.line.ask(lambda store: store.multi_get(everyone)), strict=True))
    texts = {rank: _terms_of(text) for rank, text in found.items()}
    check_tags(watch, {rank: int(text[4]) for rank, text in texts.items()})
    if len({json.dumps(text[:2]) for text in texts.values()}) > 1:
        raise_disagreement(watch, terms)
    check_words(watch, {rank: int(text[3]) for rank, text in texts.items()})
    team.forget(watch, f"compared/{call}", [*everyone, _comparing(watch)])
    return {rank: str(text[2]) for rank, text in texts.items()}


def _terms_of(text: bytes) -> list[Any]:
    """A peer's terms; where they cannot be read they differ from all others."""
    try:
        digest, options, devices, word, tag = json.loads(text)
        return [digest, options, str(devices), int(word), int(tag)]
    except (ValueError, TypeError):
        return [repr(text[:200]), {}, "", 0, 0]


def check_tags(watch: Watch, said: Mapping[int, int]) -> None:
    """Ranks must be in calls with the same tag.

    Where tags are numbers, it is the ranks with the lower one that wait in vain: their call fails.
    A rank with the highest one left it out, and goes on to meet the others in their next call.
    """
    mine = watch.tag_code
    others = {rank: code for rank, code in said.items() if code != mine}
    if not others:
        return
    orders = [order(mine, code) for code in others.values()]
    codes = {**others, watch.team.rank: mine}
    first = min(codes.values())
    parts = ", ".join(f"rank {rank} is in {_call_of(codes[rank])}" for rank in sorted(codes))
    text = f"ranks are in different calls: {parts}; one of them has left out a call"
    cause = Cause("disagree", text, first if None not in orders else 0)
    if set(orders) == {1}:
        raise AheadError(watch.post(cause))
    watch.fail(cause)


def _call_of(code: int) -> str:
    return f"the call with {shown(code)}" if code else "a call without a tag"


def check_words(watch: Watch, said: Mapping[int, int]) -> None:
    """Ranks that know whether gradients are wanted must say the same."""
    no, yes = ([rank for rank, word in said.items() if word == code] for code in (1, 2))
    if no and yes:
        watch.fail(
            Cause(
                "disagree",
                f"the source requires gradients on ranks {format_ranks(sorted(yes))} and not on "
                f"{format_ranks(sorted(no))}: set requires_grad alike, or call under no_grad on "
                "all ranks",
            )
        )


def _missing(watch: Watch, terms: Terms, keys: Mapping[int, str]) -> list[int]:
    """The ranks whose terms are not there; asks the store, patiently."""
    hellos = tuple(watch.inbox.hellos.items())
    check_tags(watch, {peer: hello.tag for peer, hello in hellos})
    others = [peer for peer, hello in hellos if hello.digest != watch.digest]
    if others:
        # They compare nothing, because they run a plan that was compared before: let them know.
        for peer in others:
            hello = Message(Kind.HELLO, watch.call, watch.digest, watch.word, tag=watch.tag_code)
            watch.team.mailbox.send(peer, hello)
        raise_disagreement(watch, terms)
    left = watch.team.missing(keys)
    if left and watch.team.line.check([_differ(watch)]):
        raise_disagreement(watch, terms)
    return left


def _differ(watch: Watch) -> str:
    """The key that says that the ranks of a call do different things."""
    return f"differ/{watch.call}"


def suspect_comparing(watch: Watch, terms: Terms) -> None:
    """A rank that has compared its plan before waits for others: do they compare another one?

    If it is the same one, they have forgotten: a call before failed on them and not here, or this
    rank was late for it. They get what they wait for.
    """
    line = watch.team.line
    if line.check([_differ(watch)]):
        raise_disagreement(watch, terms)
    if watch.compared or not line.check([_comparing(watch)]):
        return
    if line.ask(lambda store: store.get(_comparing(watch))).decode() != watch.digest.hex():
        raise_disagreement(watch, terms)
    watch.compared = True

    def join(store: Store) -> None:
        store.set(f"terms/{watch.call}/{watch.team.rank}", terms.to_json())
        store.set(done_key(f"compared/{watch.call}", watch.team.rank), "1")

    line.ask(join)


def _comparing(watch: Watch) -> str:
    """The key that says that ranks compare in a call."""
    return f"comparing/{watch.call}"


def _first_tensor(plan: Plan) -> str:
    return f'"{next(iter(plan.want))}"' if plan.want else "nothing"


def raise_disagreement(watch: Watch, terms: Terms) -> NoReturn:
    """Post what this rank was given, read what the others were, and name the difference."""
    team, call = watch.team, watch.call
    keys = {rank: f"detail/{call}/{rank}" for rank in team.ranks}
    packed = zlib.compress(json.dumps(_describe(terms)).encode(), 1)
    text = packed.hex()
    team.line.ask(lambda store: store.set(keys[team.rank], text))
    team.line.ask(lambda store: store.set(_differ(watch), "1"))
    left = set(await_keys(team.line, keys.values(), DETAIL_SECONDS))
    there = {rank: key for rank, key in keys.items() if key not in left}
    values = team.line.ask(lambda store: store.multi_get(list(there.values())))
    details = {rank: _read(value) for rank, value in zip(there, values, strict=True)}
    watch.fail(Cause("disagree", difference(details)))


def _describe(terms: Terms) -> dict[str, Any]:
    sides = {"source": terms.plan.have, "destination": terms.plan.want}
    layouts: dict[int, str] = {}
    tensors = {}
    for side, specs in sides.items():
        for name, spec in specs.items():
            key = id(spec.layout)
            if key not in layouts:
                layouts[key] = f'"{spec.layout}" on {spec.layout.mesh}'
            tensors[f'{side} "{name}"'] = f"{spec.dtype}{list(spec.shape)} {layouts[key]}"
    settings = {key: str(value) for key, value in terms.options.items()}
    if terms.tag is not None:
        settings["tag"] = terms.tag.text
    settings |= {"memory cap": format_bytes(terms.plan.memory), "plan": terms.plan.digest}
    return {"tensors": tensors, "settings": settings}


def _read(value: bytes) -> dict[str, dict[str, str]]:
    """A peer's description, however broken, as text to text."""
    try:
        unpacked = zlib.decompressobj().decompress(bytes.fromhex(value.decode()), MOST_DETAIL)
        data = json.loads(unpacked)
        return {
            part: {str(key): str(text) for key, text in data[part].items()}
            for part in ("tensors", "settings")
        }
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error):
        return {"tensors": {}, "settings": {"description": "cannot be read"}}


def difference(details: Mapping[int, Mapping[str, Mapping[str, str]]]) -> str:
    """Where descriptions of ranks differ, in words: the tensors first, then the settings."""
    for part in ("tensors", "settings"):
        found = _differing(details, part)
        if found:
            more = f"; and {len(found) - MOST_NAMED} more differ" if len(found) > MOST_NAMED else ""
            return "ranks were given different moves: " + "; ".join(found[:MOST_NAMED]) + more
    return "ranks were given different moves, in something that no tensor shows"


def _differing(details: Mapping[int, Mapping[str, Mapping[str, str]]], part: str) -> Sequence[str]:
    names = sorted({name for detail in details.values() for name in detail[part]})
    found = []
    for name in names:
        said = {rank: detail[part].get(name, "nothing") for rank, detail in details.items()}
        if len(set(said.values())) > 1:
            found.append(f"{name}: {_who_says_what(said)}")
    return found


def _who_says_what(said: Mapping[int, str]) -> str:
    """The common word first, then the ranks that differ."""
    counted = Counter(said.values()).most_common()
    parts = []
    for text, _ in counted:
        ranks = [rank for rank, word in said.items() if word == text]
        verb = "rank" if len(ranks) == 1 else "ranks"
        parts.append(f"{verb} {format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {text}")
    return ", ".join(parts)
