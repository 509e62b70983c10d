"""Which call of one rank matches which call of another, however calls are disturbed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reshard as rs
from tests.live.failure.faults import COLUMNS, ROWS, Tried, check_same, check_soon, plan_of, tried
from tests.live.session import interrupts, matching, opcodes
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import pool_group
from tests.soak import cases, soaking, within

FOUR = range(4)
ODD = 1
SOON = 2.0
WINDOW = 3


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def interrupted_twice(rank: int) -> list[Any]:
    """Rank 1 is interrupted in two calls in a row, and rank 2 comes late to both."""
    mesh = rs.Mesh(x=3)
    rows, columns = rs.Layout(mesh, "x -"), rs.Layout(mesh, "- x")
    signal.signal(signal.SIGALRM, raise_interrupt)
    late = {(2, 1): 1.5, (2, 2): 1.5}
    seen: list[Any] = []
    for iteration in range(8):
        time.sleep(late.get((rank, iteration), 0.0))
        if rank == 1 and iteration in (1, 2):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            mine = torch.full((2, 6), float(iteration))
            found = rs.move(mine, rows, columns, shape=(6, 6), timeout=10)
            seen.append(sorted(set(found.unique().tolist())))
        except (rs.LiveError, KeyboardInterrupt) as error:
            seen.append(type(error).__name__)
    return seen


def test_interrupts_in_two_calls_in_a_row() -> None:
    with fresh_ranks(3) as ranks:
        told = ranks.run(interrupted_twice)
    expected = [[0.0], "LiveError", "LiveError", *([float(n)] for n in range(3, 8))]
    assert told[0] == told[2] == expected
    assert told[1] == [[0.0], "KeyboardInterrupt", "KeyboardInterrupt", *expected[3:]]


@pytest.mark.parametrize("num_ranks", [3, 4])
@pytest.mark.parametrize("anywhere", [False, True], ids=["in calls", "anywhere, with tags"])
def test_random_interrupts(num_ranks: int, anywhere: bool) -> None:
    """Soak: 1,000 and more interrupts in all."""
    for seed in range(cases(1, 16)):
        num_calls = cases(15, 40)
        with fresh_ranks(num_ranks) as ranks:
            args = (num_ranks, seed, num_calls, anywhere)
            told = ranks.run(interrupts.run_on_rank, *args, timeout=100)
        for iteration, seen in enumerate(zip(*told, strict=True)):
            check_iteration(iteration, list(seen), anywhere)
        if not anywhere:
            check_against_model(told)


@lru_cache(maxsize=1024)
def allowed(num_ranks: int, interrupted: frozenset[tuple[int, int]]) -> set[matching.Met]:
    """The calls that may meet, by the model, when these calls are interrupted."""
    return matching.explore(matching.Program(num_ranks, WINDOW, interrupted=interrupted)).met


def check_against_model(told: list[list[interrupts.Seen]]) -> None:
    """What completed together on the ranks completes together in the model."""
    num_ranks = len(told)
    for first in range(len(told[0]) - WINDOW + 1):
        seen = [one[first : first + WINDOW] for one in told]
        places = [(rank, n) for rank in range(num_ranks) for n in range(WINDOW)]
        raised = frozenset((rank, n) for rank, n in places if seen[rank][n].raised)
        met = allowed(num_ranks, raised)
        for n in range(WINDOW):
            moved = {(rank, n) for rank in range(num_ranks) if seen[rank][n].outcome == "moved"}
            assert not moved or any(moved <= one for one in met), (first + n, seen)


def check_iteration(iteration: int, seen: list[interrupts.Seen], anywhere: bool) -> None:
    where = (iteration, seen)
    for one in seen:
        assert one.outcome != "moved" or one.numbers == [float(iteration)], where
    raised = [moment for one in seen for moment in one.raised]
    if anywhere:
        return  # calls that are left out let others wait for them
    if not raised:
        assert all(one.outcome == "moved" for one in seen), where
    else:
        for one in seen:
            heard = one.ended - max(min(raised), one.began)
            assert one.outcome == "moved" or heard < within(SOON), where


BYTECODES = {
    "move": 3700, "large": 9000, "run": 10200, "start": 3100, "gather": 1500, "same": 700,
    "local": 1200,
}  # fmt: skip
"""About as many as a call of each kind executes, on a machine that is not busy. The kinds: a small
and a large tensor, a plan of a caller, three calls in flight, bytes without a plan, and moves
without messages: of nothing, and of what each rank already has."""


def disturbed(rank: int, num_ranks: int, cases: list[tuple[str, bool, list[int]]]) -> list[Any]:
    return [
        opcodes.disturb(rank, num_ranks, kind, ODD, twice, which) for kind, twice, which in cases
    ]


def test_an_exception_at_any_bytecode() -> None:
    """Soak: at every bytecode of a call, and of what is done when an exception leaves it."""
    few = 12
    cases = [
        (kind, twice, list(range(1, count, 1 if soaking() else count // few)))
        for kind, most in BYTECODES.items()
        for twice, count in ((False, most), (True, 400))
        if not (twice and kind in ("start", "same", "local"))  # these do not wait
    ]
    with fresh_ranks(3) as ranks:
        told = ranks.run(disturbed, 3, cases, timeout=3000)
    for number, (kind, twice, which) in enumerate(cases):
        for n, at in enumerate(which):
            first, then = ([told[rank][number][n][turn] for rank in range(3)] for turn in (0, 1))
            where = (kind, twice, at, first, then)
            for one in first:
                assert one.outcome != "moved" or one.numbers == [2.0 * n + 10], where
                if first[ODD].raised and one.outcome != "moved":
                    assert one.ended - max(first[ODD].raised[0], one.began) < within(SOON), where
            assert {one.outcome for one in then} == {"moved"}, where
            assert all(one.numbers == [2.0 * n + 11] for one in then), where


def same_layout_on_one_rank(rank: int, warm: bool) -> tuple[Tried, Tried]:
    """One rank is given a move in which nothing moves."""
    group, shape = pool_group(4), (16, 44 + 4 * warm)
    mine = torch.full((4, shape[1]), float(rank))
    if warm:
        for want in (ROWS, COLUMNS):
            rs.move(mine, ROWS, want, shape=shape, group=group)

    def move(want: rs.Layout, **options: Any) -> Callable[[], Any]:
        return lambda: rs.move(mine, ROWS, want, shape=shape, group=group, timeout=6, **options)

    first = tried(move(ROWS if rank == ODD else COLUMNS))
    return first, tried(move(COLUMNS))


def test_a_rank_that_has_nothing_to_exchange_is_compared(pool: Pool) -> None:
    told = pool.run(same_layout_on_one_rank, False, ranks=FOUR)
    check_same([first for first, _ in told], "DisagreementError", "rank 1", '"x -"')
    check_soon([first for first, _ in told], SOON)
    assert {second.kind for _, second in told} == {"moved"}


def test_a_rank_that_passes_by_is_noticed_in_its_next_call(pool: Pool) -> None:
    told = pool.run(same_layout_on_one_rank, True, ranks=FOUR)
    (passed, waits), *others = told[ODD], *(one for rank, one in enumerate(told) if rank != ODD)
    assert passed.kind == "moved"
    # Either the ranks that wait see that rank 1 is further, or all see who waits for whom.
    assert {first.kind for first, _ in others} == {"DisagreementError"}
    assert all("rank 1 " in first.message for first, _ in others), others
    for first, _ in others:
        assert first.ended - waits.called < within(SOON)
    assert {second.kind for _, second in told} == {"moved"}


WRONG: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "shape": lambda mine, group: rs.move(mine, ROWS, COLUMNS, shape=(16, 24, 1), group=group),
    "option": lambda mine, group: rs.move(
        mine, ROWS, COLUMNS, shape=(16, 24), group=group, timout=3
    ),
    "destination": lambda mine, group: rs.move(
        mine, ROWS, COLUMNS, to=COLUMNS, shape=(16, 24), group=group
    ),
    "plan option": lambda mine, group: plan_of((16, 24)).run(
        {"tensor": mine}, group=group, transport="carrier pigeon"
    ),
    "tag": lambda mine, group: rs.move(mine, ROWS, COLUMNS, shape=(16, 24), group=group, tag=1.5),
}


def wrong_on_one_rank(rank: int, what: str, fresh: bool) -> tuple[Tried, Tried]:
    """One rank fails before it has a session."""
    group = None if fresh else pool_group(4)
    mine = torch.full((4, 24), float(rank))

    def move() -> Any:
        return rs.move(mine, ROWS, COLUMNS, shape=(16, 24), group=group, timeout=8)

    if not fresh:
        move()
    first = tried_any((lambda: WRONG[what](mine, group)) if rank == ODD else move)
    return first, tried(move)


def tried_any(action: Callable[[], Any]) -> Tried:
    called = time.monotonic()
    try:
        action()
    except rs.ReshardError as error:
        return Tried(type(error).__name__, str(error), called, time.monotonic())
    return Tried("moved", "", called, time.monotonic())


def check_wrong(told: list[tuple[Tried, Tried]]) -> None:
    first = [one for one, _ in told]
    check_soon(first, SOON)
    kinds = {one.kind for one in first}
    assert len(kinds) == 1, first
    assert "moved" not in kinds
    for rank, one in enumerate(first):
        assert first[ODD].message in one.message or rank == ODD, first
    assert {second.kind for _, second in told} == {"moved"}, told


@pytest.mark.parametrize("what", WRONG)
def test_a_rank_that_fails_before_it_has_a_session(pool: Pool, what: str) -> None:
    check_wrong(pool.run(wrong_on_one_rank, what, False, ranks=FOUR))


@pytest.mark.parametrize("what", WRONG if soaking() else ["shape"])
def test_a_rank_that_fails_in_the_first_call_of_all(what: str) -> None:
    with fresh_ranks(4) as ranks:
        check_wrong(ranks.run(wrong_on_one_rank, what, True))


def start_while_one_is_late(rank: int) -> float:
    plan = plan_of((16, 24))
    mine = {"tensor": torch.full((4, 24), float(rank))}
    if rank == ODD:
        time.sleep(1.5)
    began = time.monotonic()
    handles = [plan.start(mine, timeout=10) for _ in range(3)]
    seconds = time.monotonic() - began
    for handle in handles:
        assert handle.wait()["tensor"].shape == (16, 6)
    return seconds


def test_start_returns_at_once_in_the_first_call() -> None:
    with fresh_ranks(4) as ranks:
        told = ranks.run(start_while_one_is_late)
    assert max(told) < within(0.3), told


def refused_while_another_connects(rank: int) -> tuple[Tried, Tried]:
    """Rank 1 refuses its second call before the first, in flight, has connected the session."""
    plan = plan_of((16, 24))
    mine = {"tensor": torch.full((4, 24), float(rank))}
    if rank == 3:
        time.sleep(1.0)
    first = plan.start(mine, timeout=10)
    second = tried_any(
        (lambda: plan.start(mine, timeout=10, transport="pigeon"))
        if rank == ODD
        else (lambda: plan.run(mine, timeout=10))
    )
    first.wait()
    return second, tried(lambda: plan.run(mine, timeout=10))


def test_a_call_that_is_refused_while_another_connects() -> None:
    with fresh_ranks(4) as ranks:
        told = ranks.run(refused_while_another_connects)
    assert {second.kind for second, _ in told} == {"LiveError"}
    assert all("pigeon" in second.message for second, _ in told), told
    check_soon([second for second, _ in told], SOON)
    assert {third.kind for _, third in told} == {"moved"}


def two_groups_in_two_threads(rank: int) -> list[list[float]]:
    """Each rank begins with another group: no order between threads is the same on both."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    mesh = rs.Mesh(x=2)
    layouts = rs.Layout(mesh, "x -"), rs.Layout(mesh, "- x")
    found: list[list[float]] = [[], []]
    order = [threading.Event() for _ in groups]
    order[rank].set()

    def move(which: int) -> None:
        order[which].wait(0.3)
        for number in range(20):
            mine = torch.full((2, 4), float(10 * number + which))
            moved = rs.move(mine, *layouts, shape=(4, 4), group=groups[which], timeout=5)
            found[which] += moved.unique().tolist()

    threads = [threading.Thread(target=move, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_two_groups_in_two_threads() -> None:
    expected = [[10.0 * number + which for number in range(20)] for which in range(2)]
    with fresh_ranks(2) as ranks:
        assert ranks.run(two_groups_in_two_threads) == [expected, expected]


def leave_out_a_call(rank: int, tags: bool) -> list[Any]:
    """Rank 1 leaves out iteration 2."""
    group = pool_group(4)
    seen: list[Any] = []
    # Texts bring no rank back in step: there the rank makes up for the call at the end.
    for iteration in range(6 if tags or rank != ODD else 7):
        if rank == ODD and iteration == 2:
            seen.append("left out")
            continue
        tag: Any = iteration if tags else f"step {iteration}"
        mine = torch.full((4, 24), float(iteration))
        try:
            found = rs.move(mine, ROWS, COLUMNS, shape=(16, 24), group=group, timeout=5, tag=tag)
            seen.append(found.unique().tolist())
        except rs.LiveError as error:
            seen.append(str(error))
    return seen


def test_a_call_that_is_left_out_is_an_error_where_calls_have_tags(pool: Pool) -> None:
    told = pool.run(leave_out_a_call, True, ranks=FOUR)
    for rank, seen in enumerate(told):
        assert seen[:2] == [[0.0], [1.0]]
        if rank == ODD:
            assert seen[2] == "left out"
        else:
            assert "rank 1 is in the call with tag 3" in seen[2]
        # The rank that is ahead waits for the others, and all are in step again.
        assert seen[3:] == [[3.0], [4.0], [5.0]], seen


def test_tags_that_are_texts_have_no_order(pool: Pool) -> None:
    for seen in pool.run(leave_out_a_call, False, ranks=FOUR):
        assert seen[:2] == [[0.0], [1.0]]
        assert all("ranks are in different calls" in one for one in seen[3:5]), seen
