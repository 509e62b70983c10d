"""A model of how calls are matched: every order of events, for few calls and ranks.

The model knows nothing of messages. A rank makes its calls one after the other, and each has a
number. A call is entered, left by an exception, complete because all ranks have entered it, or it
raises because it was given up. The rules of docs/live.md ("How calls are matched") are in `enter`,
`leave`, `end` and `disagree`. `explore` walks through all states that can be reached and collects
which calls met.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["Program", "State", "explore"]


@dataclass(frozen=True)
class Program:
    """What the ranks do: the same calls, but for what disturbs them."""

    num_ranks: int
    num_calls: int
    interrupted: frozenset[tuple[int, int]] = frozenset()
    """Calls, by rank and iteration, that an exception may leave at any time."""
    left_out: frozenset[tuple[int, int]] = frozenset()
    dead: frozenset[tuple[int, int]] = frozenset()
    """The call that a rank may die in."""
    tags: bool = False
    forgets_numbers: bool = False
    """A mistake, to see that the model finds it: a call that is interrupted before it has begun
    uses up no number."""


@dataclass(frozen=True)
class Rank:
    """Where one rank is."""

    iteration: int = 0
    number: int = 0
    """The number of the call that it makes now or next."""
    inside: bool = False
    lives: bool = True


@dataclass(frozen=True)
class State:
    """Where all ranks are, and what is known of calls by number."""

    ranks: tuple[Rank, ...]
    entered: frozenset[tuple[int, int, int]] = frozenset()
    """Number, rank and iteration of calls that were entered."""
    failed: tuple[tuple[int, int], ...] = ()
    """Numbers that were given up, and the iteration (the tag) of the rank that did."""

    def change(self, rank: int, **changed: object) -> tuple[Rank, ...]:
        now = list(self.ranks)
        now[rank] = replace(now[rank], **changed)  # type: ignore[arg-type]
        return tuple(now)


Met = frozenset[tuple[int, int]]
"""Rank and iteration of all calls that completed together."""


def steps(program: Program, state: State) -> Iterator[tuple[State, Met | None]]:
    """Everything that can happen next; and the calls that met, where one completes."""
    for rank, one in enumerate(state.ranks):
        if not one.lives or one.iteration >= program.num_calls:
            continue
        here = (rank, one.iteration)
        if here in program.left_out and not one.inside:
            yield replace(state, ranks=state.change(rank, iteration=one.iteration + 1)), None
            continue
        if here in program.dead:
            yield replace(state, ranks=state.change(rank, lives=False)), None
        if here in program.interrupted:
            yield leave(program, state, rank), None
        yield from (enter if not one.inside else end)(program, state, rank)


def next_call(state: State, rank: int) -> tuple[Rank, ...]:
    """A call is over: the program goes on to its next iteration, and the number is used up."""
    one = state.ranks[rank]
    return state.change(rank, iteration=one.iteration + 1, number=one.number + 1, inside=False)


def enter(program: Program, state: State, rank: int) -> Iterator[tuple[State, Met | None]]:
    """A call begins: from now on other ranks may complete it with this one."""
    one = state.ranks[rank]
    entered = state.entered | {(one.number, rank, one.iteration)}
    yield replace(state, ranks=state.change(rank, inside=True), entered=entered), None


def leave(program: Program, state: State, rank: int) -> State:
    """An exception leaves a call, before or after it was entered: it fails for all."""
    one = state.ranks[rank]
    if program.forgets_numbers and not one.inside:
        return replace(state, ranks=state.change(rank, iteration=one.iteration + 1))
    return replace(state, ranks=next_call(state, rank), failed=_failed(state, rank))


def _failed(state: State, rank: int) -> tuple[tuple[int, int], ...]:
    """The first cause of a call stands."""
    one, known = state.ranks[rank], dict(state.failed)
    known.setdefault(one.number, one.iteration)
    return tuple(sorted(known.items()))


def end(program: Program, state: State, rank: int) -> Iterator[tuple[State, Met | None]]:
    """How a call that was entered ends without an exception of its own."""
    one, failed = state.ranks[rank], dict(state.failed)
    others = {r: i for n, r, i in state.entered if n == one.number}
    if one.number in failed:
        if program.tags and one.iteration > failed[one.number]:
            yield (
                replace(state, ranks=state.change(rank, number=one.number + 1, inside=False)),
                None,
            )
        else:
            yield replace(state, ranks=next_call(state, rank)), None
    elif program.tags and len(set(others.values())) > 1:
        yield disagree(state, rank, others), None
    elif len(others) == program.num_ranks:
        yield replace(state, ranks=next_call(state, rank)), frozenset(others.items())
    elif any(not other.lives for other in state.ranks):
        yield replace(state, ranks=next_call(state, rank), failed=_failed(state, rank)), None


def disagree(state: State, rank: int, others: dict[int, int]) -> State:
    """Ranks with different tags have met: the call of the lower one fails."""
    one, lowest = state.ranks[rank], min(others.values())
    known = dict(state.failed)
    known.setdefault(one.number, lowest)
    return replace(state, failed=tuple(sorted(known.items())))


@dataclass
class Explored:
    """What was found."""

    num_states: int
    met: set[Met]
    stuck: list[State]
    """States in which a rank that lives waits and nothing can happen."""
    ends: set[tuple[int, ...]]
    """The numbers of calls that the ranks have used up when all have ended."""


def explore(program: Program) -> Explored:
    """Walk through all states that can be reached."""
    first = State(tuple(Rank() for _ in range(program.num_ranks)))
    seen, left = {first}, [first]
    found = Explored(0, set(), [], set())
    while left:
        state = left.pop()
        following = list(steps(program, state))
        if not following:
            waits = [r for r in state.ranks if r.lives and r.iteration < program.num_calls]
            if waits:
                found.stuck.append(state)
            found.ends.add(tuple(one.number for one in state.ranks))
        for after, met in following:
            if met is not None:
                found.met.add(met)
            if after not in seen:
                seen.add(after)
                left.append(after)
    found.num_states = len(seen)
    return found
