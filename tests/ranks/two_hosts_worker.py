"""What ranks on two hosts do, for test_two_hosts.py; torchrun starts it with a task and a folder.

Ranks and test tell each other things by files in the folder: ``moving.2.json`` is rank 2's word
that it is in the middle of a move, ``moved.2.json`` what came of it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import reshard as rs
from tests import moves
from tests.ranks.live import Arrays, difference, numbered, tensors_of

SECONDS = 50.0
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

    def hear(self, word: str) -> None:
        """Wait for a word of the test."""
        while not (self.folder / word).exists():
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


def long_move(me: Rank) -> None:
    """A move that takes seconds: what comes of it, and when."""
    shape = (2048, 2048)
    have, want = ({"weight": rs.TensorSpec(shape, "float32", at)} for at in (ROWS, COLUMNS))
    plan = rs.plan(have, want, memory="64KiB")
    full = numbered(shape)
    handle = plan.start({"weight": full.chunk(4)[me.rank]}, timeout=TIMEOUT)
    while len(handle.report.rounds) <= ROUNDS_BEFORE:
        time.sleep(0.01)
    me.tell("moving")
    try:
        result = handle.wait()
    except Exception as error:
        ended = time.monotonic()
        me.tell("moved", kind=type(error).__name__, message=str(error), ended=ended)
    else:
        right = torch.equal(result["weight"], full.chunk(4, dim=1)[me.rank])
        me.tell("moved", right=right, ended=time.monotonic())


def cut_move(me: Rank) -> None:
    """A move that is cut off, another one when the link is back, and an end without it."""
    long_move(me)
    me.hear("link is back")
    full = numbered((512, 256))
    try:
        result = rs.move(full.chunk(4)[me.rank], ROWS, COLUMNS, shape=(512, 256), timeout=8)
        me.tell("again", right=torch.equal(result, full.chunk(4, dim=1)[me.rank]))
    except Exception as error:
        me.tell("again", kind=type(error).__name__, message=str(error))
    me.hear("link is cut")


TASKS = {"moves": check_moves, "long": long_move, "cut": cut_move}


def main(task: str, folder: str) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    dist.init_process_group("gloo")
    TASKS[task](Rank(dist.get_rank(), Path(folder)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
