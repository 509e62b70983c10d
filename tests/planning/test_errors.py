"""Bad input: each kind has its error, on one line, with both numbers, the name and what to try."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

import reshard as rs
from reshard.rules import Rules
from tests.moves import check_move

MESH = rs.Mesh(dp=2, tp=4)


def layout(text: str, mesh: rs.Mesh = MESH) -> rs.Layout:
    return rs.Layout(mesh, text)


def spec(text: str | rs.Layout, shape: tuple[int, ...] = (8, 4)) -> rs.TensorSpec:
    return rs.TensorSpec(shape, "float32", text if isinstance(text, rs.Layout) else layout(text))


def plan(
    have: str | rs.Layout, want: str | rs.Layout, shape: tuple[int, ...] = (8, 4), **options: object
) -> rs.Plan:
    """A plan of one tensor with a telling name."""
    specs = ({"layers.3.wq": spec(side, shape)} for side in (have, want))
    return rs.plan(*specs, **options)


def boxes(shape: tuple[int, ...], *spans: tuple[tuple[int, ...], tuple[int, ...]]) -> rs.Layout:
    return rs.Layout.from_boxes(shape, {0: [rs.Box(*span) for span in spans]})


NAME = "layers.3.wq"
# What is wrong; how to do it; the error; and what its message must say, "try" words last.
BAD: list[tuple[str, Callable[[], object], type[rs.ReshardError], tuple[str, ...]]] = [
    ("axis twice in dims", lambda: layout("tp tp"), rs.NotationError,
     ("tp tp", '"tp"', "twice", "one place")),
    ("axis twice in a word", lambda: layout("(dp tp dp) -"), rs.NotationError,
     ('"dp"', "twice", "one place")),
    ("axis twice by a suffix", lambda: layout("tp - | sum tp"), rs.NotationError,
     ('"tp"', "twice", "one place")),
    ("a mesh of a text", lambda: rs.Mesh("dp=2 tp=4"), rs.MeshError,
     ("'dp=2 tp=4'", "by name", "Mesh.parse")),
    ("a mesh of a number", lambda: rs.Mesh(4), rs.MeshError,
     ("Mesh(4)", "by name", "Mesh.parse")),
    ("a rank that is none", lambda: rs.Mesh(tp=2, ranks=[0, "b"]), rs.MeshError,
     ("'b'", "whole numbers")),
    ("a layout of two texts", lambda: rs.Layout("dp=2", "dp -"), rs.LayoutError,
     ("Layout('dp=2', 'dp -')", "a mesh and then a text", "Layout.parse")),
    ("a layout without a text", lambda: rs.Layout(rs.Mesh(tp=2), 3), rs.LayoutError,
     ("Layout(Mesh(tp=2), 3)", "a mesh and then a text")),
    ("a rank outside", lambda: layout("tp -").local_shape(9, (8, 4)), rs.LayoutError,
     ("rank 9", "dp=2 tp=4", "0-7")),
    ("axis twice in a mesh", lambda: rs.Mesh.parse("tp=2 tp=4"), rs.MeshError,
     ('"tp"', "twice", "once")),
    ("unknown axis", lambda: layout("ep -"), rs.LayoutError,
     ('"ep"', "dp=2 tp=4", "dp, tp", "use one")),
    ("unknown axis of a suffix", lambda: layout("- | on pp=0"), rs.LayoutError,
     ('"pp"', "dp, tp", "use one")),
    ("unknown axis without axes", lambda: layout("tp", rs.Mesh()), rs.LayoutError,
     ('"tp"', "no axis")),
    ("coordinate that does not exist", lambda: layout("- | on dp=2"), rs.LayoutError,
     ("dp=2", "0 to 1", "exists")),
    ("lost rank that does not exist", lambda: layout("- | without 9"), rs.LayoutError,
     ("9", "0-7")),
    ("too few words", lambda: layout("tp").pieces(0, (8, 4)), rs.LayoutError,
     ('"tp"', "1 word", "(8, 4)", "2 dims", '"..."')),
    ("too many words", lambda: layout("tp - -").local_shape(0, (8, 4)), rs.LayoutError,
     ("3 words", "2 dims", '"..."')),
    ("words in a plan", lambda: plan("tp -", "tp"), rs.LayoutError,
     (NAME, "1 word", "(8, 4)", "2 dims", '"..."')),
    ("words of the source in a plan", lambda: plan("tp - -", "tp -"), rs.LayoutError,
     (NAME, "3 words", "2 dims", '"..."')),
    ("segments of different axes in a plan", lambda: plan("tp -", "{4 (dp tp), 5 dp} -"),
     rs.LayoutError, (NAME, 'layout "{4 (dp tp), 5 dp} -" on mesh dp=2 tp=4', "9", "8", "equal")),
    ("ragged sizes in a plan", lambda: plan("tp -", "tp[1,2,3,4] -"), rs.LayoutError,
     (NAME, "tp[1,2,3,4]", "10", "8", "equal")),
    ("packed sizes in a plan", lambda: plan("- tp{2,1}", "tp -"), rs.LayoutError,
     (NAME, "tp{2,1}", "3", "4", "equal")),
    ("flat sizes in a plan", lambda: plan("- - | flat dp[1,2]", "tp -"), rs.LayoutError,
     (NAME, "dp[1,2]", "3", "32", "equal")),
    ("ragged sizes", lambda: layout("tp[1,2,3,4]").pieces(0, (8,)), rs.LayoutError,
     ("tp[1,2,3,4]", "10", "8", "equal")),
    ("number of sizes", lambda: layout("tp[4,4] -"), rs.LayoutError,
     ("tp[4,4]", "2 sizes", "tp=4", "one size per rank")),
    ("boxes that overlap", lambda: boxes((8, 4), ((0, 0), (2, 2)), ((1, 1), (3, 3))),
     rs.LayoutError, ("[0:2, 0:2]", "[1:3, 1:3]", "[1:2, 1:2]", "rank 0", "cut one")),
    ("a box outside", lambda: boxes((8, 4), ((0, 0), (2, 5))), rs.LayoutError,
     ("[0:2, 0:5]", "[0:8, 0:4]", "rank 0", "inside")),
    ("a box of other dims", lambda: boxes((8, 4), ((0,), (2,))), rs.LayoutError,
     ("[0:2]", "[0:8, 0:4]", "rank 0")),
    ("boxes on a negative rank", lambda: rs.Layout.from_boxes((4,), {-1: []}), rs.LayoutError,
     ("-1", "from 0")),
    ("boxes of another shape", lambda: plan(boxes((8, 5), ((0, 0), (8, 5))), "tp -"),
     rs.LayoutError, (NAME, "(8, 5)", "(8, 4)")),
    ("nobody holds it", lambda: plan(boxes((8, 4), ((0, 0), (8, 3))), "tp -"), rs.CoverageError,
     (NAME, "[0:2, 3:4]", "(8, 4)", "hold it")),
    ("lost", lambda: plan("tp - | without 3,7", "- tp"), rs.CoverageError,
     (NAME, "[6:8, 0:1]", "(8, 4)", "[3, 7]", "lost")),
    ("nobody is left", lambda: plan("- - | without 0-7", "- tp"), rs.CoverageError,
     (NAME, "[0:8, 0:1]", "lost")),
    ("an addend is lost", lambda: plan("- - | sum dp | without 4-7", "- tp"), rs.CoverageError,
     (NAME, "addend 1", "[0:8, 0:4]", "lost")),
    ("ranks twice", lambda: rs.Mesh(tp=3, ranks=[4, 9, 4]), rs.MeshError, ("4", "twice")),
    ("ranks twice in text", lambda: rs.Mesh.parse("tp=3 @ 4-5,5"), rs.MeshError, ("5", "twice")),
    ("number of ranks", lambda: rs.Mesh(tp=3, ranks=[1, 2]), rs.MeshError,
     ("tp=3", "3 ranks", "got 2", "as many")),
    ("a negative rank", lambda: rs.Mesh(tp=2, ranks=[0, -1]), rs.MeshError, ("-1", "from 0")),
    ("an axis of size zero", lambda: rs.Mesh(tp=0), rs.MeshError, ('"tp"', "0", "at least 1")),
    ("an axis of size zero in text", lambda: rs.Mesh.parse("dp=2 tp=0"), rs.MeshError,
     ('"tp"', "0", "at least 1")),
    ("a negative axis", lambda: rs.Mesh(tp=-2), rs.MeshError, ('"tp"', "-2", "at least 1")),
    ("a negative axis in text", lambda: rs.Mesh.parse("tp=-2"), rs.ReshardError, ("tp=-2", "tp=4")),
    ("a reserved axis", lambda: rs.Mesh(flat=2), rs.MeshError, ('"flat"', "letters")),
    ("shapes disagree", lambda: rs.plan({NAME: spec("tp -")}, {NAME: spec("tp -", (8, 5))}),
     rs.PlanError, (NAME, "(8, 4)", "(8, 5)", "crop=", "pad=")),
    ("a shard is wanted", lambda: rs.plan({NAME: spec("tp -")}, {NAME: spec("...", (2, 4))}),
     rs.PlanError, (NAME, "(8, 4)", "(2, 4)", "whole tensor", "rs.TensorSpec((8, 4)")),
    ("a shard as a source", lambda: rs.plan({NAME: spec("- -", (8, 1))}, {NAME: spec("tp -")}),
     rs.PlanError, (NAME, "(8, 4)", "(8, 1)", "whole tensor", "rs.TensorSpec((8, 4)")),
    ("numbers of dims disagree", lambda: rs.plan({NAME: spec("tp -")}, {NAME: spec("tp", (8,))}),
     rs.PlanError, (NAME, "(8, 4)", "(8,)")),
    ("a negative size", lambda: spec("tp -", (8, -4)), rs.LayoutError, ("(8, -4)", "-4", ">= 0")),
    ("a negative size in a plan",
     lambda: rs.plan(layout("tp"), layout("tp"), shape=(-4,)), rs.LayoutError, ("-4", ">= 0")),
    ("a negative size of boxes", lambda: rs.Layout.from_boxes((-4,), {}), rs.LayoutError,
     ("-4", ">= 0")),
    ("more elements than can be counted", lambda: plan("tp -", "- tp", (10**10, 10**10)),
     rs.ReshardError, (NAME, "10000000000")),
    ("a box that ends early", lambda: rs.Box((3, 0), (2, 4)), rs.BoxError, ("3", "2", "dim 0")),
    ("a cap too small", lambda: plan("tp -", "- tp", memory=3), rs.MemoryCapError,
     (NAME, "3 bytes", "smallest that works is", "memory=")),
    ("a negative cap", lambda: plan("tp -", "- tp", memory=-1), rs.SizeError, ("-1",)),
    ("a cap that is no amount", lambda: plan("tp -", "- tp", memory="much"), rs.SizeError,
     ('"much"', "256MiB")),
    ("a pending sum", lambda: plan("tp -", "tp - | sum dp"), rs.PlanError,
     (NAME, "tp - | sum dp", "pending sum", "none", "take it out")),
    ("another pending reduction", lambda: plan("tp - | max dp", "tp - | sum dp"), rs.PlanError,
     (NAME, "pending sum", "pending max", "take it out")),
    ("more addends than there are", lambda: plan("- - | sum dp", "- - | sum tp"), rs.PlanError,
     (NAME, "4 addends", "has 2", "multiple")),
    ("a text that cannot be read", lambda: layout("tp - |"), rs.NotationError,
     ("tp - |", "the end", "expected one of on, sum")),
    ("a mesh that cannot be read", lambda: rs.Mesh.parse("tp:4"), rs.NotationError,
     ('"tp:4"', "tp=4")),
    ("ranks that cannot be read", lambda: rs.Mesh.parse("tp=2 @ one"), rs.NotationError,
     ('"one"', "8-11")),
    ("a dtype", lambda: rs.TensorSpec((4,), "float33", layout("tp")), rs.ReshardError,
     ("float33", "float32")),
    ("a rank of no mesh", lambda: MESH.coords(8), rs.MeshError, ("8", "0-7")),
    ("no shape", lambda: rs.plan(layout("tp"), layout("tp")), rs.PlanError, ("shape=",)),
    ("one layout and one dict", lambda: rs.plan(layout("tp"), {}), rs.PlanError, ("one of each",)),
    ("a shape for a dict", lambda: rs.plan({}, {}, shape=(4,)), rs.PlanError, ("shape=",)),
    ("a host twice", lambda: rs.Topology(hosts=((0, 1), (1, 2))), rs.TopologyError, ("rank 1",)),
    ("no host", lambda: plan("tp -", "- tp", topology=rs.Topology(hosts=((0, 1, 2),))),
     rs.TopologyError, ("rank 3", "add it")),
    ("hosts without ranks", lambda: rs.Topology(ranks_per_host=0), rs.TopologyError,
     ("0", "at least 1")),
    ("one lost rank", lambda: layout("tp -").without(1), rs.ArgumentTypeError,
     ("got 1", "without([3])")),
    ("a shape that is a number", lambda: rs.plan(layout("tp"), layout("tp"), shape=2.5),
     rs.PlanError, ("2.5", "shape=")),
    ("names that are no dict", lambda: rs.plan({NAME: spec("tp")}, {}, names="x"),
     rs.ArgumentTypeError, ("names= got 'x'", "give a dict")),
    ("a name that is no text", lambda: rs.plan({NAME: spec("tp")}, {}, names={5: NAME}),
     rs.ArgumentTypeError, ("a name in names= got 5", "give a dict")),
    ("several ranks", lambda: plan("tp -", "- tp").for_rank([0]), rs.ArgumentTypeError,
     ("for_rank()", "of type list", "the number of a rank")),
    ("a crop without a dim", lambda: rs.take("w", crop=3), rs.ArgumentTypeError,
     ("crop= got 3", "crop={0: (0, 4)}")),
    ("a crop without a stop", lambda: rs.take("w", crop={0: 3}), rs.ArgumentTypeError,
     ("crop= got 3", "crop={0: (0, 4)}")),
    ("a crop of three", lambda: rs.take("w", crop={0: (0, 1, 2)}), rs.PlanError,
     ("(0, 1, 2)", "a start and a stop")),
    ("padding without a dim", lambda: rs.take("w", pad=[1]), rs.ArgumentTypeError,
     ("pad= got", "of type list", "pad={0: 16}")),
    ("half an index", lambda: rs.take("w", index={0: 1.5}), rs.ArgumentTypeError,
     ("index= got 1.5", "index={0: 3}")),
    ("a crop by name", lambda: rs.take("w", crop={0: (0, 1), "x": (0, 1)}), rs.ArgumentTypeError,
     ("crop= got 'x'", "crop={0: (0, 4)}")),
    ("a join in a dim by name", lambda: rs.join("w", dim="0"), rs.ArgumentTypeError,
     ("dim= got '0'", "dim=0")),
    ("no plan to simulate", lambda: rs.simulate(None, {}), rs.ArgumentTypeError,
     ("got None", "rs.plan")),
    ("arrays of no rank", lambda: rs.simulate(plan("tp -", "- tp"), [1]), rs.ArgumentTypeError,
     ("of type list", "{rank: {name: array}}")),
    ("a config that is no dict", lambda: Rules.load("llama", config=3), rs.ArgumentTypeError,
     ("config= got 3", "config.json", "to_dict()")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "error", "words"), [b[1:] for b in BAD], ids=[b[0].replace(" ", "_") for b in BAD]
)
def test_bad_input(make: Callable[[], object], error: type, words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        make()
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert "\n" not in message
    assert isinstance(caught.value, ValueError)
    assert caught.value.__cause__ is None


def test_one_error_names_what_both_sides_lack() -> None:
    have = {name: spec("tp -") for name in ("both", "old.a", "old.b")}
    want = {name: spec("- tp") for name in ("both", "new.a", "new.b", "new.c")}
    with pytest.raises(rs.NamesError) as caught:
        rs.plan(have, want)
    message = str(caught.value)
    for part in ("old.a", "old.b", "new.a", "new.b", "new.c", "3 of 4", "2 of 3", "strict=False"):
        assert part in message
    assert '"both"' not in message
    assert "\n" not in message


def test_many_missing_names_are_counted() -> None:
    want = {f"layers.{i}.w": spec("tp -") for i in range(1000)}
    with pytest.raises(rs.NamesError, match="1000 of 1000 wanted") as caught:
        rs.plan({}, want)
    assert len(str(caught.value)) < 500
    assert "992 more" in str(caught.value)


def test_a_join_names_the_part_that_lacks() -> None:
    with pytest.raises(rs.NamesError, match=r"wqk.*needs.*wk"):
        rs.plan({"wq": spec("tp -")}, {"wqk": spec("tp -", (16, 4))},
                names={"wqk": rs.join("wq", "wk", dim=0)})  # fmt: skip


def test_the_error_of_a_cap_tells_of_no_other_error() -> None:
    have, want = rs.Layout(rs.Mesh(x=8), "x -"), rs.Layout(rs.Mesh(y=8, ranks=range(8, 16)), "- y")
    with pytest.raises(rs.MemoryCapError) as caught:
        rs.plan(have, want, shape=(64, 64), dtype="float32", memory=1)
    assert caught.value.__context__ is None


def smallest_cap(make: Callable[[int], rs.Plan]) -> int:
    """The cap that the error for no memory at all names; 0 where none is needed."""
    try:
        make(0)
    except rs.MemoryCapError as error:
        return int(re.search(r"smallest that works is (\d+) bytes", str(error))[1])
    return 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("have", "want", "shape"),
    [
        ("tp -", "- tp", (12, 9)),
        ("(dp tp) -", "- -", (9, 5)),
        ("(dp tp) -", "- (tp dp)", (9, 5)),
        ("dp:3 tp~", "tp*2 dp", (9, 7)),
        ("- - | flat (dp tp)", "tp dp", (5, 7)),
        ("- - | sum dp", "- -", (5, 3)),
        ("dp - | sum tp", "- dp", (5, 3)),
        ("- - | sum dp tp", "- -", (3, 3)),
        ("- -", "tp -", (9, 5)),  # nothing travels
    ],
)
def test_the_smallest_cap_works(have: str, want: str, shape: tuple[int, int], dtype: str) -> None:
    def make(memory: int) -> rs.Plan:
        sides = layout(have), layout(want)
        return rs.plan(*sides, shape=shape, dtype=dtype, memory=memory)

    least = smallest_cap(make)
    plan_of_least = make(least)
    assert plan_of_least.summary().peak_bytes <= least
    if "sum" not in have:
        check_move(plan_of_least)
    if least:
        with pytest.raises(rs.MemoryCapError, match=f"smallest that works is {least} bytes"):
            make(least - 1)


def test_the_smallest_cap_of_a_state_dict_works_for_all_of_it() -> None:
    have = {"a": spec("tp -"), "b": spec("- - | sum dp"), "c": spec("(dp tp) -")}
    want = {"a": spec("- tp"), "b": spec("- -"), "c": spec("- -")}
    least = smallest_cap(lambda memory: rs.plan(have, want, memory=memory))
    assert rs.plan(have, want, memory=least).summary().peak_bytes <= least
    with pytest.raises(rs.MemoryCapError):
        rs.plan(have, want, memory=least - 1)


def one(mesh: str, text: str) -> rs.Layout:
    return rs.Layout(rs.Mesh.parse(mesh), text)


# What is not an error: source, destination, shape.
FINE: dict[str, tuple[rs.Layout, rs.Layout, tuple[int, ...]]] = {
    "zero rows": (layout("tp -"), layout("- tp"), (0, 4)),
    "zero columns": (layout("(dp tp) -"), layout("- -"), (4, 0)),
    "all zero": (layout("tp - -"), layout("- - dp"), (0, 0, 0)),
    "a number": (layout("..."), one("x=2 @ 8-9", "..."), ()),
    "a number on one rank": (one("x=1 @ 3", "..."), layout("..."), ()),
    "a flat number": (layout("... | flat tp"), layout("..."), ()),
    "empty shards": (layout("(dp tp)"), one("x=7 @ 3-9", "x"), (3,)),
    "empty ragged shards": (layout("tp[0,5,0,0]"), layout("dp[0,5]"), (5,)),
    "one rank": (one("tp=1", "tp -"), one("tp=1", "- tp"), (3, 2)),
    "one rank to another": (one("tp=1", "tp -"), one("tp=1 @ 5", "- tp"), (3, 2)),
    "ranks that hold nothing": (layout("tp | on dp=1"), layout("- | on tp=2"), (6,)),
    "ranks with no boxes": (
        rs.Layout.from_boxes((4,), {0: [rs.Box((0,), (4,))], 1: []}),
        rs.Layout.from_boxes((4,), {0: [], 5: [rs.Box((1,), (3,))], 6: []}),
        (4,),
    ),
    "nobody wants anything": (layout("tp"), rs.Layout.from_boxes((6,), {}), (6,)),
    "nobody is left to want": (layout("tp"), layout("- | without 0-7"), (6,)),
    "replicas": (layout("- -"), one("dp=3 tp=2 @ 4-9", "tp -"), (5, 3)),
    "a part": (layout("tp -"), rs.Layout.from_boxes((8, 4), {9: [rs.Box((1, 1), (5, 3))]}), (8, 4)),
    "holes nobody wants": (layout("tp | without 3,7"), one("x=1", "- | without 0"), (8,)),
    "a lost replica": (layout("tp | without 3"), layout("-"), (8,)),
    "boxes that overlap across ranks": (
        rs.Layout.from_boxes((6,), {0: [rs.Box((0,), (4,))], 1: [rs.Box((2,), (6,))]}),
        layout("-"),
        (6,),
    ),
    "the same on both sides": (layout("(dp tp) -"), layout("(dp tp) -"), (8, 4)),
    "an axis nobody uses": (one("a=2 b=1 c=3", "c"), layout("dp"), (7,)),
    "more addends than ranks want": (layout("- | sum dp tp"), one("x=1 @ 9", "-"), (5,)),
}


@pytest.mark.parametrize("kind", FINE)
@pytest.mark.parametrize("memory", [None, 4096])
def test_not_an_error(kind: str, memory: int | None) -> None:
    have, want, shape = FINE[kind]
    plan = rs.plan(have, want, shape=shape, dtype="int64", memory=memory)
    if have.reduce is None:
        check_move(plan)
        return
    total = np.full(shape, have.mesh.num_ranks)
    ones = {rank: {"tensor": np.ones(shape, np.int64)} for rank in have.mesh.ranks}
    assert (rs.simulate(plan, ones)[9]["tensor"] == total).all()


def test_state_dicts_without_tensors() -> None:
    plan = rs.plan({}, {})
    plan.check()
    assert plan.summary().wire_bytes == plan.num_rounds == 0
    assert rs.simulate(plan, {}) == {}
    assert plan.ranks == []


def test_arrays_that_do_not_fit_their_layout() -> None:
    plan = rs.plan(layout("tp -"), layout("- tp"), shape=(8, 4), dtype="float32")
    rows = {rank: {"tensor": np.zeros((2, 4), np.float32)} for rank in range(8)}
    for wrong in (np.zeros((3, 4), np.float32), np.zeros((2, 4), np.float64)):
        with pytest.raises(rs.PlanError, match=r'rank 5.*"tensor".*\(2, 4\).*float32'):
            rs.simulate(plan, {**rows, 5: {"tensor": wrong}})
    del rows[6]
    with pytest.raises(rs.PlanError, match=r'rank 6.*"tensor"'):
        rs.simulate(plan, rows)


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
import reshard as rs
from reshard import checkpoint
plan = rs.plan(rs.Layout(rs.Mesh(tp=2), "tp"), rs.Layout(rs.Mesh(tp=2), "-"), shape=(4,))
uses = [
    lambda: rs.move, lambda: rs.exchange, lambda: checkpoint.load, lambda: plan.run({}),
    lambda: __import__("reshard.sharded"), lambda: __import__("reshard.nn"),
]
for use in uses:
    try:
        use()
    except ImportError as error:
        print(error)
"""


def test_what_needs_torch_says_so_in_one_line() -> None:
    words = [sys.executable, "-c", WITHOUT_TORCH]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    advice = "needs torch: it is not installed; try pip install torch"
    names = ["reshard.move", "reshard.exchange", "reshard.checkpoint.load", "running a plan"]
    assert said == [f"{name} {advice}" for name in [*names, "reshard.sharded", "reshard.nn"]]


def test_names_of_a_plan_are_strings_and_ranks_hold_dicts() -> None:
    spec = rs.TensorSpec((4,), "float32", "tp=2: tp")
    with pytest.raises(rs.ArgumentTypeError, match="the name 0 is a int"):
        rs.plan({0: spec, "a": spec}, {0: spec, "a": spec})  # type: ignore[dict-item]
    plan = rs.plan({"a": spec}, {"a": spec})
    with pytest.raises(rs.PlanError, match=r'rank 0 holds a list.*{"a": array}'):
        rs.simulate(plan, {0: [1.0, 2.0]})  # type: ignore[dict-item]
