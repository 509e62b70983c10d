"""Ranks that wait for each other in moves of different ranks, as when one is given another mesh.

Such ranks never meet: each waits in a team that the others do not think of. So a rank that has
waited a while for others to call says in the store of the caller's group whom it waits for and in
which move. When these words go round in a circle, and stay so, nobody in it will ever call.

Only a move that the main thread waits for counts, and only if it is the only one: a rank that goes
on in another thread may still call.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from reshard.errors import PeerLostError
from reshard.mesh import format_ranks
from reshard.run.live.c10d import PrefixStore, Store
from reshard.run.live.line import Line

__all__ = ["Crossing"]

T = TypeVar("T")

LOOK_AFTER = 0.4
LOOK_EVERY = 0.25
ASK_SECONDS = 1.0

_open: set[int] = set()
"""The moves of this process that wait for others, by identity."""


@dataclass(frozen=True, slots=True)
class Word:
    """What a rank says about whom it waits for."""

    ranks: tuple[int, ...]
    awaits: tuple[int, ...]
    what: str
    call: int
    """The number of the call."""
    token: str
    """Which move of the rank it is."""
    beat: int
    """How often it has said so."""

    @classmethod
    def read(cls, text: bytes) -> Word | None:
        """None for anything that is not such a word."""
        try:
            data = json.loads(text)
            ranks, awaits = (tuple(int(rank) for rank in data[key]) for key in ("ranks", "awaits"))
            rest = str(data["what"]), int(data["call"]), str(data["token"]), int(data["beat"])
            return cls(ranks, awaits, *rest)
        except (ValueError, TypeError, KeyError):
            return None

    def says_the_same(self, earlier: Word | None) -> bool:
        """Whether this is a later word of one who still waits for the same ranks."""
        if earlier is None or self.beat <= earlier.beat:
            return False
        return (self.token, self.awaits) == (earlier.token, earlier.awaits)


class Crossing:
    """Looks out for that, while one move waits for its ranks to call."""

    def __init__(
        self, store: Store, rank: int, ranks: tuple[int, ...], what: str, call: int
    ) -> None:
        self._store = store
        self._rank, self._ranks, self._what, self._call = rank, ranks, what, call
        self._token = secrets.token_hex(8)
        self._began = self._looked = time.monotonic()
        self._line: Line | None = None
        self._beat = 0
        self._words: dict[int, Word] = {}
        """What ranks said last."""
        self.given_up: list[tuple[tuple[int, ...], int]] = []
        """The calls of the circle, which all fail, by the ranks of their moves."""
        self._counts = threading.current_thread() is threading.main_thread()
        _open.add(id(self))

    @property
    def is_due(self) -> bool:
        """Whether it is time to look."""
        now = time.monotonic()
        return now - self._began > LOOK_AFTER and now - self._looked > LOOK_EVERY

    def look(self, awaited: Collection[int]) -> str | None:
        """What the circle is that this rank cannot get out of, in words, if it is in one."""
        if not self.is_due:
            return None
        self._looked = time.monotonic()
        if not self._counts or len(_open) > 1:
            return None
        with contextlib.suppress(PeerLostError):
            self._say(sorted(awaited))
            return self._verdict() or self._judge()
        return None

    def get(self, store: Store, key: str) -> bytes | None:
        """What stands under a key of another part of the group's store; None if nothing does."""
        with contextlib.suppress(PeerLostError):
            return self._ask(lambda _: store.get(key) if store.check([key]) else None)
        return None

    def told(self) -> str | None:
        """What another rank has found, if it has told this one."""
        if self._line is None:
            return None
        with contextlib.suppress(PeerLostError):
            return self._verdict()
        return None

    def _judge(self) -> str | None:
        """Look for a circle; whoever finds it tells everyone in it."""
        before, words = self._words, self._hear()
        self._words = words
        sure = {r: w for r, w in words.items() if w.says_the_same(before.get(r))}
        if not _leads_to_a_circle(self._rank, sure):
            return None
        first = words[min(words)].token
        calls = [(word.ranks, word.call) for word in words.values()]
        # Of one session, the others come to the later call when they have given up the first one.
        doomed = sorted({(ranks, min(c for r, c in calls if r == ranks)) for ranks, _ in calls})
        text = json.dumps({"text": _describe(words), "calls": doomed})

        def tell(store: Store) -> None:
            found: Any = store.compare_set(f"first/{first}", "", text)
            for word in words.values():
                if (word.ranks, word.call) in doomed:
                    store.set(f"verdict/{word.token}", found)

        self._ask(tell)
        return self._verdict()

    def _verdict(self) -> str | None:
        """What this rank or another has found."""
        key = f"verdict/{self._token}"

        def look(store: Store) -> bytes | None:
            return store.get(key) if store.check([key]) else None

        found = self._ask(look)
        if found is None:
            return None
        try:
            data = json.loads(found)
            self.given_up = [(tuple(ranks), int(call)) for ranks, call in data["calls"]]
            return str(data["text"])
        except (ValueError, TypeError, KeyError):
            return "ranks were given different moves and wait for each other"

    def _say(self, awaited: list[int]) -> None:
        self._beat += 1
        word = {"ranks": self._ranks, "awaits": awaited, "what": self._what, "call": self._call}
        text = json.dumps({**word, "token": self._token, "beat": self._beat})
        self._ask(lambda store: store.set(f"word/{self._rank}", text))

    def _hear(self) -> dict[int, Word]:
        """The words of all ranks that have to do with this one's, found from rank to rank."""
        found: dict[int, Word] = {}
        left, asked = set(self._ranks), set[int]()
        while left:
            asked |= left
            new = self._words_of(left)
            found |= new
            left = {rank for word in new.values() for rank in word.ranks} - asked
        return found

    def _words_of(self, ranks: Iterable[int]) -> dict[int, Word]:
        keys = {rank: f"word/{rank}" for rank in ranks}

        def read(store: Store) -> dict[int, bytes]:
            return {rank: store.get(key) for rank, key in keys.items() if store.check([key])}

        words = {rank: Word.read(text) for rank, text in self._ask(read).items()}
        return {rank: word for rank, word in words.items() if word is not None}

    def _ask(self, question: Callable[[Store], T]) -> T:
        if self._line is None:
            store = PrefixStore("reshard/waits", self._store)
            self._line = Line(store, self._ranks[0], ASK_SECONDS)
        return self._line.ask(question, ASK_SECONDS)

    def close(self) -> None:
        """The others have called, or this rank has given up."""
        _open.discard(id(self))
        if self._line is not None:
            with contextlib.suppress(PeerLostError):
                self._ask(lambda store: store.set(f"word/{self._rank}", ""))
                self._ask(lambda store: store.delete_key(f"verdict/{self._token}"))
            self._line.close()


def _leads_to_a_circle(rank: int, words: Mapping[int, Word]) -> bool:
    """Whether who waits for whom leads from a rank round a circle, through more than one move."""
    path: list[int] = []
    done: set[int] = set()

    def follow(at: int) -> bool:
        if at in path:
            round_it = [words[other] for other in path[path.index(at) :]]
            return len({(word.ranks, word.call) for word in round_it}) > 1
        if at in done or at not in words:
            return False
        path.append(at)
        found = any(follow(other) for other in words[at].awaits)
        path.pop()
        done.add(at)
        return found

    return follow(rank)


def _describe(words: Mapping[int, Word]) -> str:
    """Who waits for whom, those in one move together."""
    moves: dict[tuple[tuple[int, ...], int, str], list[int]] = {}
    for rank in sorted(words):
        word = words[rank]
        moves.setdefault((word.ranks, word.call, word.what), []).append(rank)
    parts = [
        f"rank{'s' if len(waiting) > 1 else ''} {format_ranks(waiting)} "
        f"{'are' if len(waiting) > 1 else 'is'} in call {call} among ranks {format_ranks(ranks)}, "
        f"{what}"
        for (ranks, call, what), waiting in moves.items()
    ]
    return "ranks were given different moves and wait for each other: " + "; ".join(parts)
