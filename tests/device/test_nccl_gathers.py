"""Which plans are all-gathers: decided on every rank alone, and alike on all of them."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

import reshard as rs
from reshard.live.compiled import CompiledPlan
from reshard.live.program.rounds import Program, Transfer
from tests import checks, generate
from tests.soak import cases

LINE, GRID = rs.Mesh(tp=4), rs.Mesh(dp=2, tp=2)


def gathers(have: str, want: str, mesh: rs.Mesh = LINE, **options: object) -> bool:
    plan = rs.plan(rs.Layout(mesh, have), rs.Layout(mesh, want), shape=(8, 12), **options)
    return CompiledPlan(plan, 0).gathers


@pytest.mark.parametrize("have", ["tp -", "- tp", "tp:1 -", "... | flat tp"])
@pytest.mark.parametrize("memory", ["1MiB", "200"])
def test_shares_without_replicas_that_all_ranks_want_are_gathered(have: str, memory: str) -> None:
    assert gathers(have, "- -", memory=memory)


@pytest.mark.parametrize(
    ("have", "want"),
    [("dp -", "- -"), ("tp dp", "- tp"), ("- - | sum tp", "- -"), ("tp dp", "- - | on tp=0")],
)
def test_other_plans_are_not(have: str, want: str) -> None:
    assert not gathers(have, want, GRID)


def test_parts_of_tensors_are_not_gathered() -> None:
    whole, rows = rs.Layout(LINE, "- -"), rs.Layout(LINE, "tp -")
    have = {"a": rs.TensorSpec((8, 4), "int64", rows)}
    cropped = {"b": rs.TensorSpec((4, 4), "int64", whole)}
    names = {"b": rs.take("a", crop={0: (0, 4)})}
    assert not CompiledPlan(rs.plan(have, cropped, names=names), 0).gathers


def content(transfers: Sequence[Transfer]) -> list[object]:
    """What a message carries: where its blocks are on the sender, and where in the message."""
    return [
        (one.dtype, one.num_bytes, *(np.array(c).tolist() for c in (one.width, one.at, *place)))
        for one in transfers
        for place in [(one.source.base, one.source.offset, one.source.strides)]
    ]


def test_every_rank_sends_the_same_to_all_others() -> None:
    """Random layouts: what one rank sends is the same for all peers, as sender and receiver see."""
    found = 0
    for seed in range(cases(90, 4000)):
        rng = Random(seed)
        case = generate.random_case(rng, within=range(4))
        whole = rs.Layout(LINE, "...")
        if case.error is not None:
            continue
        memory = {"memory": rng.choice([400, 1000])} if rng.random() < 0.5 else {}
        try:
            plan = rs.plan(
                checks.build(case.have, case.shape),
                whole,
                shape=case.shape,
                dtype="int32",
                **memory,
            )
        except rs.ReshardError:
            continue
        if not CompiledPlan(plan, plan.parties[0]).gathers or not plan.num_rounds:
            continue
        programs = {rank: Program(plan, rank, {}) for rank in plan.parties}
        for number in range(min(plan.num_rounds, 12)):
            rounds = {rank: program.round(number) for rank, program in programs.items()}
            for rank, round_ in rounds.items():
                sent = {peer: content(transfers) for peer, transfers in round_.sends.items()}
                assert all(one == next(iter(sent.values())) for one in sent.values()), seed
                assert not sent or sent.keys() == set(plan.parties) - {rank}, seed
                for peer, one in sent.items():
                    assert content(rounds[peer].receives[rank]) == one, seed
        found += 1
    assert found > cases(12, 20), found
