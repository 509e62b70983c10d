"""What a plan promises as a whole: ranks agree, nothing is written twice or too early, figures are
what happens, and the digest changes with anything that changes the plan.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

import reshard as rs
from reshard.planning.cells.transfers import Transfers
from reshard.planning.rank import RankPlan, Rows, Steps
from tests import generate, moves, strategies
from tests.cases import Side
from tests.checks import build
from tests.soak import cases, soaking
from tests.state_cases import StateCase, names_argument, random_state, specs

EXAMPLES = settings(max_examples=cases(40, 60), derandomize=True, deadline=None)


def layout(mesh: str, text: str) -> rs.Layout:
    return rs.Layout(rs.Mesh.parse(mesh), text)


@cache
def random_plan(number: int) -> rs.Plan:
    """A plan for one tensor, with sums, caps and topologies among them, or for a state dict."""
    rng = Random(number)
    if number % 3 == 0:
        case: StateCase = random_state(rng)
        options = {"names": names_argument(case), "memory": case.memory}
        return rs.plan(specs(case.have), specs(case.want), **options)
    drawn = generate.random_case(rng)
    while drawn.error:
        drawn = generate.random_case(rng)
    sides = build(drawn.have, drawn.shape), build(drawn.want, drawn.shape)
    topology = rs.Topology(ranks_per_host=rng.randint(1, 5)) if rng.random() < 0.4 else None
    options = {"shape": drawn.shape, "dtype": drawn.dtype, "memory": drawn.memory}
    return rs.plan(*sides, topology=topology, **options)


def messages(plan: rs.Plan) -> tuple[dict, dict]:
    """What every rank says it sends, and receives, by round and pair, in order."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank in plan.ranks:
        mine = plan.for_rank(rank)
        for step in mine.sends:
            assert step.source == rank != step.destination
            sent[step.round, step.source, step.destination].append(step)
        for step in mine.receives:
            assert step.destination == rank != step.source
            received[step.round, step.source, step.destination].append(step)
        for step in mine.copies:
            assert step.source == step.destination == rank
    return dict(sent), dict(received)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_ranks_agree_on_every_message(first: int) -> None:
    """Sender and receiver derive the same boxes in the same order, each by itself."""
    for number in range(first, first + 25):
        plan = random_plan(number)
        sent, received = messages(plan)
        assert sent == received, f"plan {number}"
        steps = [step for message in sent.values() for step in message]
        summary = plan.summary()
        assert sum(step.num_bytes for step in steps) == summary.wire_bytes
        assert len(sent) == summary.num_messages
        assert all(0 <= step.round < plan.num_rounds for step in steps)
        assert all(step.box.size and step.box.shape for step in steps if step.box.start)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_the_summary_is_what_the_rows_add_up_to(first: int) -> None:
    for number in range(first, first + 25):
        plan = random_plan(number)
        summary, by_hop = plan.summary(), (Counter(), Counter())
        for rank in plan.ranks:
            mine = plan.for_rank(rank)
            assert mine.sends.num_bytes == sum(step.num_bytes for step in mine.sends)
            for step in mine.sends:
                by_hop[step.hop > 0 or step.again][rank] += step.num_bytes
        first_hand, passed = ([*hop.values()] for hop in by_hop)
        assert summary.busiest_sender_bytes == max(first_hand, default=0)
        assert summary.busiest_relay_bytes == max(passed, default=0)
        assert summary.mean_sender_bytes == pytest.approx(
            sum(first_hand) / len(first_hand) if first_hand else 0.0
        )
        if plan.topology is not None:
            sent, _ = messages(plan)
            between = sum(
                step.num_bytes
                for (_, source, destination), steps in sent.items()
                for step in steps
                if plan.topology.host_of(source) != plan.topology.host_of(destination)
            )
            assert summary.between_hosts_bytes == between


def check_order(plan: rs.Plan) -> None:
    """Every element is written once, and passed on only in a later round than it was written."""
    written: dict[tuple[int, str], np.ndarray] = {}
    summed: dict[tuple[int, str], np.ndarray] = {}
    for rank in plan.ranks:
        for name, spec in plan.want.items():
            written[rank, name] = np.zeros(spec.shape, dtype=np.int64)
            summed[rank, name] = np.zeros(spec.shape, dtype=bool)
    ranks = {rank: plan.for_rank(rank) for rank in plan.ranks}
    for number in range(plan.num_rounds):
        for mine in ranks.values():
            for step in mine.sends.of_round(number):
                if step.hop:
                    have = written[mine.rank, step.name][_at(step.box)]
                    assert have.all(), f"round {number}: {step} is sent before it is there"
        for mine in ranks.values():
            for step in (*mine.copies.of_round(number), *mine.receives.of_round(number)):
                key, at = (mine.rank, step.name), _at(step.box)
                if step.addend < 0 or not summed[key][at].all():
                    written[key][at] += 1
                summed[key][at] |= step.addend >= 0
    for (rank, name), count in written.items():
        spec = plan.want[name]
        wanted = np.zeros(math.prod(spec.shape), dtype=np.int64)
        at = moves.held(spec.layout, spec.shape).get(rank)
        if at is not None:
            wanted[at.reshape(-1)] = 1
        for fill in plan.for_rank(rank).fills:
            if fill.name == name:
                wanted.reshape(spec.shape)[_at(fill.box)] = 0
        assert (count.reshape(-1) == wanted).all(), f'rank {rank} "{name}"'


def _at(box: rs.Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.start, box.stop))


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_written_once_and_passed_on_later(first: int) -> None:
    for number in range(first, first + 25):
        check_order(random_plan(number))


def state_dict() -> tuple[dict[str, rs.TensorSpec], dict[str, rs.TensorSpec]]:
    have, want = {}, {}
    for i in range(4):
        for name, shape, old, new in (
            ("wq", (24, 16), "(dp tp) -", "tp -"),
            ("wo", (16, 24), "- tp", "- tp"),
            ("norm", (16,), "-", "-"),
        ):
            key = f"layers.{i}.{name}"
            have[key] = rs.TensorSpec(shape, "float32", layout("dp=2 tp=4", old))
            want[key] = rs.TensorSpec(shape, "bfloat16", layout("dp=3 tp=2 @ 6-11", new))
    return have, want


NAMES = {"head": "layers.0.wq", "both": rs.join("layers.0.wq", "layers.1.wq")}


def big_plan(seed: int | None = None) -> rs.Plan:
    """A plan of many parts; with a seed, the same from dicts in another order."""
    have, want = state_dict()
    want["head"] = rs.TensorSpec((24, 16), "float32", layout("dp=3 tp=2 @ 6-11", "- tp"))
    want["both"] = rs.TensorSpec((48, 16), "float32", layout("dp=3 tp=2 @ 6-11", "tp -"))
    dicts = [have, want, NAMES]
    if seed is not None:
        dicts = [_shuffled(one, Random(seed)) for one in dicts]
    have, want, names = dicts
    return rs.plan(have, want, names=names, memory=2048, topology=rs.Topology(ranks_per_host=4))


def _shuffled(items: dict, rng: Random) -> dict:
    return dict(rng.sample(list(items.items()), len(items)))


def rows_of(plan: rs.Plan) -> str:
    """All rows of all ranks, in order, as text."""
    lines = [plan.digest]
    for rank in plan.ranks:
        mine = plan.for_rank(rank)
        lines += [repr(step) for kind in (mine.sends, mine.receives, mine.copies) for step in kind]
    return "\n".join(lines)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_dicts_does_not_matter(seed: int) -> None:
    assert rows_of(big_plan(seed)) == rows_of(big_plan())


def hash_of_plans() -> str:
    plans = [big_plan(7), *map(random_plan, range(12))]
    return hashlib.sha256("".join(map(rows_of, plans)).encode()).hexdigest()


def test_another_process_makes_the_same_plan() -> None:
    code = "from tests.planning.test_plans import hash_of_plans\nprint(hash_of_plans())\n"
    found = {f"{hash_of_plans()}\n"}
    for seed in ("1", "77") if soaking() else ("77",):
        path = os.pathsep.join([*filter(None, sys.path), str(Path.cwd())])
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def test_a_rank_is_derived_without_the_others() -> None:
    """Asking for one rank, for all, or twice, before or after the summary, changes nothing."""
    plan = big_plan()
    alone = repr(list(big_plan().for_rank(9).receives))
    everything = rows_of(plan)
    plan.summary()
    plan.check()
    assert repr(list(plan.for_rank(9).receives)) == alone
    assert rows_of(plan) == everything


def test_ranks_that_have_no_part() -> None:
    plan = big_plan()
    stranger = plan.for_rank(99)
    assert not len(stranger.sends) + len(stranger.receives) + len(stranger.copies)
    assert stranger.fills == ()


def test_steps_by_round() -> None:
    mine = big_plan().for_rank(7)
    steps = list(mine.receives)
    assert [step.round for step in steps] == sorted(step.round for step in steps)
    for number in {step.round for step in steps}:
        assert mine.receives.of_round(number) == [step for step in steps if step.round == number]
    assert mine.receives[0] == steps[0]
    assert mine.receives[-2:] == steps[-2:]
    assert len(mine.receives) == len(steps)


BASE = {"shape": (24, 16), "dtype": "float32", "memory": 4096}
TP, ROWS = layout("dp=2 tp=4", "tp -"), layout("dp=2 tp=4", "- tp")
CHANGES = {
    "shape": lambda: rs.plan(TP, ROWS, **{**BASE, "shape": (24, 17)}),
    "dtype": lambda: rs.plan(TP, ROWS, **{**BASE, "dtype": "int32"}),
    "memory": lambda: rs.plan(TP, ROWS, **{**BASE, "memory": 4095}),
    "topology": lambda: rs.plan(TP, ROWS, **BASE, topology=rs.Topology(ranks_per_host=4)),
    "another topology": lambda: rs.plan(TP, ROWS, **BASE, topology=rs.Topology(ranks_per_host=2)),
    "have": lambda: rs.plan(layout("dp=2 tp=4", "dp -"), ROWS, **BASE),
    "want": lambda: rs.plan(TP, layout("dp=2 tp=4", "- dp"), **BASE),
    "sides": lambda: rs.plan(ROWS, TP, **BASE),
    "ranks": lambda: rs.plan(layout("dp=2 tp=4 @ 1-8", "tp -"), ROWS, **BASE),
    "order of ranks": lambda: rs.plan(layout("dp=2 tp=4 @ 1,0,2-7", "tp -"), ROWS, **BASE),
    "losses": lambda: rs.plan(TP.without([0]), ROWS, **BASE),
    "a sum": lambda: rs.plan(layout("dp=2 tp=4", "tp - | sum dp"), ROWS, **BASE),
    "a max": lambda: rs.plan(layout("dp=2 tp=4", "tp - | max dp"), ROWS, **BASE),
    "a name": lambda: rs.plan(
        {"w": rs.TensorSpec((24, 16), "float32", TP)},
        {"w": rs.TensorSpec((24, 16), "float32", ROWS)},
        memory=4096,
    ),
    "a cast": lambda: rs.plan(
        {"tensor": rs.TensorSpec((24, 16), "float32", TP)},
        {"tensor": rs.TensorSpec((24, 16), "bfloat16", ROWS)},
        memory=4096,
    ),
    "a crop": lambda: _part(rs.take("tensor", crop={0: (0, 12)})),
    "another crop": lambda: _part(rs.take("tensor", crop={0: (12, 24)})),
    "a pad": lambda: _padded(32),
    "another pad": lambda: _padded(40),
}


def _part(source: object) -> rs.Plan:
    return rs.plan(
        {"tensor": rs.TensorSpec((24, 16), "float32", TP)},
        {"tensor": rs.TensorSpec((12, 16), "float32", ROWS)},
        names={"tensor": source},
        memory=4096,
    )


def _padded(rows: int) -> rs.Plan:
    return rs.plan(
        {"tensor": rs.TensorSpec((24, 16), "float32", TP)},
        {"tensor": rs.TensorSpec((rows, 16), "float32", ROWS)},
        names={"tensor": rs.take("tensor", pad={0: rows})},
        memory=4096,
    )


def test_the_digest_changes_with_anything() -> None:
    base = rs.plan(TP, ROWS, **BASE)
    digests = {kind: make().digest for kind, make in CHANGES.items()}
    digests["base"] = base.digest
    twice = [kind for kind, digest in digests.items() if [*digests.values()].count(digest) > 1]
    assert not twice
    assert rs.plan(TP, ROWS, **BASE).digest == base.digest


def test_the_digest_of_a_dict_changes_with_its_names() -> None:
    have, want = state_dict()
    base = rs.plan(have, want).digest
    swapped = dict(want)
    swapped["layers.0.wq"], swapped["layers.0.wo"] = want["layers.0.wq"], want["layers.0.wo"]
    assert rs.plan(have, swapped).digest == base
    crossed = {"layers.0.wq": "layers.1.wq", "layers.1.wq": "layers.0.wq"}
    assert rs.plan(have, want, names=crossed).digest != base
    fewer = {name: spec for name, spec in want.items() if name != "layers.3.norm"}
    assert rs.plan(have, fewer, strict=False).digest != base


SPELLINGS = [
    (("tp=4", "tp -"), ("x=4", "x[6,6,6,6] ...")),
    (("dp=2 tp=2", "(dp tp) -"), ("x=4", "x -")),
    (("dp=2 tp=2", "tp -"), ("tp=2 dp=2 @ 0,2,1,3", "tp -")),
    (("dp=2 tp=2", "tp - | sum dp"), ("b=2 a=2 @ 0,2,1,3", "b - | sum a")),
    (("pp=2 tp=2", "tp - | on pp=1"), ("tp=2 @ 2-3", "tp -")),
    (("tp=4", "tp - | without 1"), ("tp=4", "tp[6,6,6,6] - | without 1")),
]


@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_plans_with_one_digest_have_the_same_rows(one: tuple, other: tuple) -> None:
    """Ranks that compare digests must not differ in what they do: spelling changes neither."""
    want = layout("x=3 @ 2-4", "- x" if "without" not in one[1] else "- x | without 2-4")
    shape = (24, 16)
    plans = [rs.plan(layout(*side), want, shape=shape, dtype="int32") for side in (one, other)]
    assert plans[0].digest == plans[1].digest
    assert rows_of(plans[0]) == rows_of(plans[1])
    back = [rs.plan(want, layout(*side), shape=shape, dtype="int32") for side in (one, other)
            if "sum" not in side[1] and "without" not in side[1]]  # fmt: skip
    assert len({plan.digest for plan in back}) <= 1
    assert len(set(map(rows_of, back))) <= 1


def test_mixed_spellings_in_one_dict() -> None:
    """Tensors that are cut alike are planned alike, however each of them is written."""
    have = {f"w{i}": rs.TensorSpec((24, 16), "int32", layout("tp=4", "tp -")) for i in range(6)}
    want = {
        name: rs.TensorSpec((24, 16), "int32", layout("dp=2 tp=2 @ 4-7", "- tp")) for name in have
    }
    mixed = dict(have)
    for name in ("w1", "w4"):
        mixed[name] = rs.TensorSpec((24, 16), "int32", layout("x=4", "x[6,6,6,6] ..."))
    plans = rs.plan(have, want), rs.plan(mixed, want)
    assert have == mixed
    assert plans[0].digest == plans[1].digest
    assert rows_of(plans[0]) == rows_of(plans[1])


@EXAMPLES
@given(strategies.cases(sums=False))
def test_equal_digests_mean_equal_rows(case) -> None:
    """Renamed axes, and boxes in place of words: if digests are equal, so are all rows."""
    if case.error is not None:
        return
    axes = re.compile(r"\b(dp|tp|pp|cp|ep|x)(?=\b|_)")
    sides = [case.have, case.want]
    others = [
        side if side.boxes else Side(axes.sub(r"a_\1", side.mesh), axes.sub(r"a_\1", side.layout))
        for side in sides
    ]
    options = {"shape": case.shape, "dtype": case.dtype, "memory": case.memory}
    plans = [
        rs.plan(*(build(side, case.shape) for side in both), **options) for both in (sides, others)
    ]
    listed = [_as_boxes(layout, case.shape) for layout in (plans[0].have, plans[0].want)]
    if all(listed):
        plans.append(rs.plan(*listed, **options))
    assert plans[0].digest == plans[1].digest
    rows = {}
    for plan in plans:
        assert rows.setdefault(plan.digest, rows_of(plan)) == rows_of(plan)


def _as_boxes(side: dict[str, rs.TensorSpec], shape: tuple[int, ...]) -> rs.Layout | None:
    """The same layout as boxes, where every rank has at most one."""
    layout = side["tensor"].layout
    pieces = {rank: layout.pieces(rank, shape) for rank in layout.ranks}
    if layout.words.flat or any(len(mine) > 1 for mine in pieces.values()):
        return None
    return rs.Layout.from_boxes(shape, {r: [p.box for p in mine] for r, mine in pieces.items()})


def test_copies_of_a_plan() -> None:
    for plan in (big_plan(), *map(random_plan, range(20))):
        for again in (rs.Plan.from_json(plan.to_json()), pickle.loads(pickle.dumps(plan))):
            assert again == plan
            assert hash(again) == hash(plan)
            assert again.digest == plan.digest
            assert again.summary() == plan.summary()
    assert rows_of(rs.Plan.from_json(big_plan().to_json(indent=2))) == rows_of(big_plan())
    assert json.loads(big_plan().to_json())["schema"] == "reshard.plan/1"


def _changed(change) -> str:
    data = json.loads(big_plan().to_json())
    change(data)
    return json.dumps(data)


BROKEN = {
    "nothing": "",
    "no object": "[1, 2]",
    "half": '{"schema": "reshard.plan/1"',
    "another schema": _changed(lambda data: data.update(schema="reshard.plan/99")),
    "another digest": _changed(lambda data: data.update(digest="0" * 32)),
    "another cap": _changed(lambda data: data.update(memory=2049)),
    "no memory": _changed(lambda data: data.pop("memory")),
    "memory of another type": _changed(lambda data: data.update(memory=[])),
    "a layout that is not there": _changed(lambda data: data.update(layouts=[])),
    "a source of no kind": _changed(lambda data: data["names"].update(head={"fold": 1})),
    "sides of another type": _changed(lambda data: data.update(have=3)),
    "a shape of another type": _changed(
        lambda data: data["have"].update({"layers.0.wq": [["x", 16], "float32", 0]})
    ),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_json_that_is_no_plan(kind: str) -> None:
    with pytest.raises(rs.ReshardError) as caught:
        rs.Plan.from_json(BROKEN[kind])
    assert "\n" not in str(caught.value)


def _damaged(plan: rs.Plan, rank: int, kind: str, change) -> rs.Plan:
    """The plan with the rows of one kind of one rank changed."""
    whole = plan.for_rank

    def for_rank(asked: int) -> RankPlan:
        mine = whole(asked)
        if asked != rank:
            return mine
        rows = [Rows(one.flow, one.slot, change(one.transfers)) for one in getattr(mine, kind).rows]
        return replace(mine, **{kind: Steps(rows)})

    plan.for_rank = for_rank  # type: ignore[method-assign]
    return plan


def _all_but_first(transfers: Transfers) -> Transfers:
    return transfers.take(np.arange(1, len(transfers)))


def _first_twice(transfers: Transfers) -> Transfers:
    return transfers.take(np.append(np.arange(len(transfers)), 0))


def _from(rank: int):
    return lambda transfers: replace(transfers, source=np.full(len(transfers), rank))


DAMAGES = {
    "a row is missing": ("receives", _all_but_first),
    "a row comes twice": ("receives", _first_twice),
    "a row is not sent": ("sends", _all_but_first),
    "a row is sent twice": ("sends", _first_twice),
    "a copy is missing": ("copies", _all_but_first),
    "a row comes from a rank that does not send it": ("receives", _from(3)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_proof_notices(kind: str) -> None:
    which, change = DAMAGES[kind]
    have, want = layout("tp=4", "tp -"), layout("tp=4", "- tp")
    plan = rs.plan(have, want, shape=(24, 16), dtype="float32")
    plan.check()
    with pytest.raises(rs.ProofError, match=r"rank|tensor") as caught:
        _damaged(plan, 1, which, change).check()
    assert "\n" not in str(caught.value)


def test_the_proof_notices_rounds_that_are_missing() -> None:
    """A slot without rounds for passing on: half of it never moves, though every row is right."""
    have, want = layout("x=1", "-"), layout("y=3 @ 1-3", "-")
    plan = rs.plan(have, want, shape=(96,), dtype="float32")
    plan.check()
    slots = tuple(replace(slot, slices=slot.slices + 1, hops=0) for slot in plan.schedule.slots)
    assert plan.num_rounds == 2
    plan.schedule = replace(plan.schedule, slots=slots)
    with pytest.raises(rs.ProofError):
        plan.check()


def test_plans_are_values() -> None:
    one, same, other = big_plan(), big_plan(3), rs.plan(TP, ROWS, **BASE)
    assert one == same
    assert one != other
    assert one != one.digest
    assert len({one, same, other}) == 2
    assert one.digest in repr(one)
    assert str(one)


def test_summary_as_data() -> None:
    figures = big_plan().summary().to_dict()
    assert json.loads(json.dumps(figures)) == figures
    assert figures["wire_bytes"] == big_plan().summary().wire_bytes
