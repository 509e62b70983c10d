"""What ranks on two hosts do, for test_two_hosts.py; torchrun starts it with a folder.

Ranks and test tell each other things by files in the folder: in the end ``moved.2.json`` is what
rank 2 moved, and the test makes a file ``cut`` to say that the link is about to be cut.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import reshard as rs
from tests import moves
from tests.ranks.live import Arrays, difference, numbered, same_bits, tensors_of

Tensors = dict[str, torch.Tensor]

SECONDS = 200.0
"""A rank that has not ended by then prints its stacks, and ends."""
TIMEOUT = 3.0
ROUNDS_BEFORE = 5
"""Rounds after which a move is under way: of about a hundred."""

FOUR, GRID = rs.Mesh(tp=4), rs.Mesh(dp=2, tp=2)
ROWS, COLUMNS = rs.Layout(FOUR, "tp -"), rs.Layout(FOUR, "- tp")
ACROSS = rs.Mesh(tp=2, dp=2, ranks=[0, 2, 1, 3])
"""A grid whose first axis goes from host to host."""


def cases() -> Iterator[tuple[str, rs.Plan]]:
    """Moves in which every rank has peers on both hosts."""
    yield "rows to columns", rs.plan(ROWS, COLUMNS, shape=(512, 256), dtype="float32")
    yield "gather", rs.plan(ROWS, rs.Layout(FOUR, "- -"), shape=(512, 256), dtype="float32")
    yield "uneven", rs.plan(ROWS, COLUMNS, shape=(37, 13), dtype="float64")
    yield "sums", rs.plan(rs.Layout(FOUR, "- - | sum tp"), ROWS, shape=(40, 24), dtype="float32")
    have = {
        "replicated": rs.TensorSpec((64, 48), "float32", rs.Layout(GRID, "tp -")),
        "grid": rs.TensorSpec((30, 22), "bfloat16", rs.Layout(GRID, "dp tp")),
        "addends": rs.TensorSpec((24, 18), "float32", rs.Layout(GRID, "- tp | sum dp")),
    }
    want = {
        "replicated": rs.TensorSpec((64, 48), "float32", rs.Layout(ACROSS, "- tp")),
        "grid": rs.TensorSpec((30, 22), "float32", rs.Layout(ACROSS, "tp dp")),
        "addends": rs.TensorSpec((24, 18), "float32", rs.Layout(ACROSS, "dp -")),
    }
    yield "state dict", rs.plan(have, want)
    yield "in rounds", rs.plan(have, want, memory="4KiB")


@dataclass(frozen=True)
class Rank:
    """This rank, and where it and the test tell each other things."""

    rank: int
    folder: Path

    def tell(self, word: str, **what: Any) -> None:
        """Write a file; renamed when it is complete, as the test reads it at once."""
        draft = self.folder / f"draft.{self.rank}"
        draft.write_text(json.dumps({"rank": self.rank, "pid": os.getpid(), **what}))
        draft.rename(self.folder / f"{word}.{self.rank}.json")

    @contextmanager
    def telling(self, word: str) -> Iterator[None]:
        """Do something, and tell when it ended and what it raised."""
        raised = {}
        try:
            yield
        except Exception as error:
            raised = {"kind": type(error).__name__, "message": str(error)}
        self.tell(word, ended=time.monotonic(), **raised)

    def hear(self, *words: str) -> str:
        """Wait for a word of the test."""
        while True:
            for word in words:
                if (self.folder / word).exists():
                    return word
            time.sleep(0.01)


def check_moves(me: Rank) -> None:
    """Every case twice, each compared with the simulator to the last bit."""
    reached: dict[str, dict[int, str]] = {}
    problems: dict[str, str] = {}
    for name, plan in cases():
        given = given_to(plan)
        expected = rs.simulate(plan, given)[me.rank]
        for _ in range(2):
            handle = plan.start(tensors_of(given[me.rank], plan.have), timeout=20)
            problem = difference(handle.wait(), expected)
            problems |= {name: problem} if problem else {}
        reached[name] = handle.report.transports
    me.tell("moved", reached=reached, problems=problems)


def given_to(plan: rs.Plan) -> Arrays:
    """What every rank holds; addends differ from rank to rank."""
    given = moves.given(plan.have, moves.values_of(plan.have))
    for rank, arrays in given.items():
        for name, spec in plan.have.items():
            if spec.layout.reduce:
                arrays[name] = arrays[name] * np.float32(rank + 1)
    return given


def long_move(me: Rank, word: str) -> None:
    """A move that takes seconds and a hundred rounds; everybody talks to everybody."""
    shape = (2048, 2048)
    have, want = ({"weight": rs.TensorSpec(shape, "float32", at)} for at in (ROWS, COLUMNS))
    full = numbered(shape)
    mine, wanted = full.chunk(4)[me.rank], full.chunk(4, dim=1)[me.rank]
    slow_move(me, word, rs.plan(have, want, memory="64KiB"), {"weight": mine}, {"weight": wanted})


def chain_move(me: Rank, word: str) -> None:
    """Ranks 0 and 1, 1 and 3, 3 and 2 swap halves: 0 and 2 only talk to their neighbours."""
    pairs = {"first": (0, 1), "between": (1, 3), "second": (3, 2)}
    have = {name: halves(pair) for name, pair in pairs.items()}
    want = {name: halves(pair[::-1]) for name, pair in pairs.items()}
    mine = {name: torch.zeros(512, 1024) for name, pair in pairs.items() if me.rank in pair}
    slow_move(me, word, rs.plan(have, want, memory="64KiB"), mine, mine)


def halves(ranks: tuple[int, ...]) -> rs.TensorSpec:
    layout = rs.Layout(rs.Mesh(tp=2, ranks=ranks), "tp -")
    return rs.TensorSpec((1024, 1024), "float32", layout)


def slow_move(me: Rank, word: str, plan: rs.Plan, mine: Tensors, wanted: Tensors) -> None:
    """When the test says so, run a plan; tell when it is under way, and what comes of it."""
    me.hear(word)
    handle = plan.start(mine, timeout=TIMEOUT)
    while len(handle.report.rounds) <= ROUNDS_BEFORE:
        time.sleep(0.01)
    me.tell(f"{word}, moving")
    with me.telling(word):
        same_bits(handle.wait(), wanted)


def short_move(me: Rank, word: str) -> None:
    """A move of one round."""
    full = numbered((512, 256))
    me.hear(word)
    with me.telling(word):
        result = rs.move(full.chunk(4)[me.rank], ROWS, COLUMNS, shape=(512, 256), timeout=8)
        assert torch.equal(result, full.chunk(4, dim=1)[me.rank])


def main(folder: str) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    dist.init_process_group("gloo")
    me = Rank(dist.get_rank(), Path(folder))
    check_moves(me)
    long_move(me, "blink")
    long_move(me, "cut")
    short_move(me, "back")
    if me.hear("chain", "end") == "chain":
        chain_move(me, "chain")
        me.hear("end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
