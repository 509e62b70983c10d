"""Names or shapes that differ: joins, stacks, parts, padding, and casts on the way."""

from __future__ import annotations

import numpy as np
import pytest

import reshard as rs
from reshard.planning.names import names_of
from tests.moves import check_move, counting, values_of

HAVE = rs.Mesh(dp=2, tp=2)
WANT = rs.Mesh(dp=2, tp=3, ranks=range(2, 8))
Specs = dict[str, rs.TensorSpec]


def have(shape: tuple[int, ...], text: str = "...", dtype: str = "int32") -> rs.TensorSpec:
    return rs.TensorSpec(shape, dtype, rs.Layout(HAVE, text))


def want(shape: tuple[int, ...], text: str = "...", dtype: str = "int32") -> rs.TensorSpec:
    return rs.TensorSpec(shape, dtype, rs.Layout(WANT, text))


def check(
    source: Specs, destination: Specs, names: dict, expected: dict[str, np.ndarray], **options
) -> rs.Plan:
    """Every way to cap memory moves the same values; bytes stay at the lower bound."""
    for memory in (None, 256):
        plan = rs.plan(source, destination, names=names, memory=memory, **options)
        check_move(plan, values_of(source), expected)
        assert plan.summary().wire_bytes == plan.summary().lower_bound_bytes
    return plan


QKV = {"q": have((8, 6), "tp -"), "k": have((4, 6), "dp -"), "v": have((4, 6), "- (dp tp)")}


@pytest.mark.parametrize("text", ["tp{8,4,4} -", "- tp", "tp -", "- - | flat (dp tp)", "tp:3 dp"])
def test_join(text: str) -> None:
    values = values_of(QKV)
    joined = np.concatenate([values[name] for name in "qkv"])
    names = {"qkv": rs.join("q", "k", "v", dim=0)}
    check(QKV, {"qkv": want((16, 6), text)}, names, {"qkv": joined})


def test_join_in_another_dim_and_order() -> None:
    source = {"a": have((3, 2, 4), "- dp -"), "b": have((3, 5, 4), "tp - -")}
    values = values_of(source)
    joined = np.concatenate([values["b"], values["a"]], axis=1)
    names = {"ba": rs.join("b", "a", dim=1)}
    check(source, {"ba": want((3, 7, 4), "- tp -")}, names, {"ba": joined})


@pytest.mark.parametrize("text", ["tp*4 -", "tp -", "- dp"])
def test_interleaved_join(text: str) -> None:
    """q, k and v by groups of heads: 2 rows of q, 1 of k and 1 of v, four times."""
    values = values_of(QKV)
    groups = [
        values[part][g * rows : (g + 1) * rows]
        for g in range(4)
        for part, rows in (("q", 2), ("k", 1), ("v", 1))
    ]
    names = {"qkv": rs.join(dim=0, q=2, k=1, v=1)}
    check(QKV, {"qkv": want((16, 6), text)}, names, {"qkv": np.concatenate(groups)})


def test_patterns_stand_for_layers() -> None:
    source = {
        f"layers.{i}.attn.{part}.bias": have((rows,), "tp")
        for i in (0, 1, 10)
        for part, rows in (("q", 8), ("k", 4))
    }
    destination = {f"blocks.{i}.qk": want((12,), "tp") for i in (0, 1, 10)}
    values = values_of(source)
    names = {"blocks.{i}.qk": rs.join(dim=0, source="layers.{i}.attn.{part}.bias", q=4, k=2)}
    expected = {
        f"blocks.{i}.qk": np.concatenate(
            [
                values[f"layers.{i}.attn.{part}.bias"][g * rows : (g + 1) * rows]
                for g in range(2)
                for part, rows in (("q", 4), ("k", 2))
            ]
        )
        for i in (0, 1, 10)
    }
    check(source, destination, names, expected)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_stack(dim: int) -> None:
    source = {f"expert.{e}": have((4, 5), "tp -" if e % 2 else "- dp") for e in range(3)}
    stacked = np.stack([values_of(source)[f"expert.{e}"] for e in range(3)], axis=dim)
    text = " ".join("tp" if d == dim else "-" for d in range(3))
    names = {"experts": rs.stack(*source, dim=dim)}
    check(source, {"experts": want(stacked.shape, text)}, names, {"experts": stacked})


def test_stack_counts_experts_of_every_layer() -> None:
    source = {
        f"layers.{i}.expert.{e}.w": have((2, 3), "- tp | on dp=1" if e else "- -")
        for i in range(2)
        for e in range(3)
    }
    values = values_of(source)
    destination = {f"layers.{i}.experts": want((3, 2, 3), "tp - -") for i in range(2)}
    expected = {
        f"layers.{i}.experts": np.stack([values[f"layers.{i}.expert.{e}.w"] for e in range(3)])
        for i in range(2)
    }
    check(
        source, destination, {"layers.{i}.experts": rs.stack("layers.{i}.expert.{e}.w")}, expected
    )


def test_split_by_crop_and_by_index() -> None:
    """What joins and stacks put together is taken apart again."""
    source = {"qkv": have((16, 6), "tp{8,4,4} -"), "experts": have((3, 4, 5), "- tp -")}
    values = values_of(source)
    destination = {
        "q": want((8, 6), "tp -"),
        "k": want((4, 6), "- tp"),
        "v": want((4, 3), "tp -"),
        "expert.2": want((4, 5), "dp -"),
        "row": want((5,), "tp"),
    }
    names = {
        "q": rs.take("qkv", crop={0: (0, 8)}),
        "k": rs.take("qkv", crop={0: (8, 12)}),
        "v": rs.take("qkv", crop={0: (12, 16), 1: (3, 6)}),
        "expert.2": rs.take("experts", index={0: 2}),
        "row": rs.take("experts", index={0: 1, 1: 3}),
    }
    expected = {
        "q": values["qkv"][:8],
        "k": values["qkv"][8:12],
        "v": values["qkv"][12:, 3:],
        "expert.2": values["experts"][2],
        "row": values["experts"][1, 3],
    }
    check(source, destination, names, expected)


def test_rename() -> None:
    source = {"lm_head.weight": have((6, 4), "tp -"), "layers.7.w": have((4,), "dp")}
    destination = {"head.weight": want((6, 4), "- tp"), "h.7.weight": want((4,), "-")}
    values = values_of(source)
    names = {"head.weight": "lm_head.weight", "h.{i}.weight": "layers.{i}.w"}
    expected = {"head.weight": values["lm_head.weight"], "h.7.weight": values["layers.7.w"]}
    check(source, destination, names, expected)


@pytest.mark.parametrize("text", ["tp -", "- tp", "tp[0,9,2] -"])
def test_pad(text: str) -> None:
    """Padding is zeros, at the end, wherever it lies, on ranks with and without data."""
    source = {"embed": have((7, 4), "tp -")}
    padded = np.pad(values_of(source)["embed"], ((0, 4), (0, 2)))
    names = {"embed": rs.take("embed", pad={0: 11, 1: 6})}
    check(source, {"embed": want((11, 6), text)}, names, {"embed": padded})


def test_crop_away_padding() -> None:
    source = {"embed": have((11, 4), "tp -")}
    names = {"embed": rs.take("embed", crop={0: (0, 7)})}
    cropped = values_of(source)["embed"][:7]
    check(source, {"embed": want((7, 4), "tp -")}, names, {"embed": cropped})


def test_crop_and_pad_at_once() -> None:
    source = {"a": have((6, 4), "tp -")}
    names = {"b": rs.take("a", crop={0: (1, 5)}, pad={0: 8})}
    expected = np.pad(values_of(source)["a"][1:5], ((0, 4), (0, 0)))
    check(source, {"b": want((8, 4), "tp -")}, names, {"b": expected})


def test_crop_to_nothing() -> None:
    source = {"a": have((6, 4), "tp -")}
    names = {"b": rs.take("a", crop={0: (3, 3)})}
    check(source, {"b": want((0, 4), "tp -")}, names, {"b": np.zeros((0, 4), np.int32)})


def test_one_source_for_several_names() -> None:
    """Tied embeddings: both names get all of it, cut their own way."""
    source = {"embed": have((6, 4), "tp -")}
    value = values_of(source)["embed"]
    destination = {"embed": want((6, 4), "tp -"), "head": want((6, 4), "- tp"), "top": want((2, 4))}
    names = {"head": "embed", "top": rs.take("embed", crop={0: (0, 2)})}
    check(source, destination, names, {"embed": value, "head": value, "top": value[:2]})


def test_a_join_of_one_source_with_itself() -> None:
    source = {"a": have((4, 2), "tp -")}
    value = values_of(source)["a"]
    names = {"aa": rs.join("a", "a", dim=0)}
    check(source, {"aa": want((8, 2), "tp -")}, names, {"aa": np.concatenate([value, value])})


def test_a_join_of_different_dtypes() -> None:
    source = {"a": have((4,), "tp", "int8"), "b": have((2,), "-", "int64")}
    joined = np.concatenate([values_of(source)["a"], values_of(source)["b"]]).astype(np.int32)
    check(source, {"ab": want((6,), "tp")}, {"ab": rs.join("a", "b")}, {"ab": joined})


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even, element by element."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    upper, lower = bits >> np.uint64(16), bits & np.uint64(0xFFFF)
    up = (lower > 0x8000) | ((lower == 0x8000) & (upper % np.uint64(2) == 1))
    return (upper + up).astype(np.uint16)


FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.5, 1 / 3, 1.00390625, 1.01171875, 65504, 3e38, 1e-40, np.inf, -np.inf],
    dtype=np.float32,
)


def moved(values: np.ndarray, old: str, new: str) -> np.ndarray:
    """A 1-d tensor of one dtype moved to another, put together from the ranks' parts."""
    plan = rs.plan(
        {"x": have(values.shape, "tp", old)}, {"x": want(values.shape, "tp", new)}
    )  # fmt: skip
    half = -(-len(values) // 2)
    parts = {rank: {"x": values[rank % 2 * half :][:half]} for rank in range(4)}
    out = rs.simulate(plan, parts)
    return np.concatenate([out[rank]["x"] for rank in (2, 3, 4)])


def test_float32_to_bfloat16_rounds_to_even() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([FLOATS, rng.normal(size=88).astype(np.float32)])
    assert (moved(values, "float32", "bfloat16") == bfloat16(values)).all()
    nan = moved(np.full(12, np.nan, np.float32), "float32", "bfloat16")
    assert np.isnan((nan.astype(np.uint32) << 16).view(np.float32)).all()


def test_bfloat16_to_float32_is_exact() -> None:
    values = np.arange(0, 1 << 16, 11, dtype=np.uint16)
    wide, exact = moved(values, "bfloat16", "float32"), values.astype(np.uint32) << 16
    nan = np.isnan(exact.view(np.float32))
    assert (wide.view(np.uint32) == exact)[~nan].all()
    assert np.isnan(wide[nan]).all()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_float32_to_float16() -> None:
    with np.errstate(over="ignore"):
        expected = FLOATS.astype(np.float16)
    assert (moved(FLOATS, "float32", "float16").view(np.uint16) == expected.view(np.uint16)).all()


def test_int8_to_float32() -> None:
    values = np.arange(-128, 128, dtype=np.int8)
    assert (moved(values, "int8", "float32") == values.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("old", "new", "itemsize"),
    [("float32", "bfloat16", 2), ("bfloat16", "float32", 2), ("int8", "float64", 1)],
)
def test_casts_travel_in_the_narrower_dtype(old: str, new: str, itemsize: int) -> None:
    plan = rs.plan(
        {"x": rs.TensorSpec((64,), old, rs.Layout(rs.Mesh(a=1), "-"))},
        {"x": rs.TensorSpec((64,), new, rs.Layout(rs.Mesh(b=1, ranks=[1]), "-"))},
    )
    assert plan.summary().wire_bytes == 64 * itemsize


def test_casts_pass_through_replicas_unchanged() -> None:
    """Replicas that pass on what they have already cast give the same bits as the first."""
    values = np.linspace(-3, 3, 60, dtype=np.float32)
    plan = rs.plan(
        {"x": rs.TensorSpec((60,), "float32", rs.Layout(rs.Mesh(a=2), "a"))},
        {"x": rs.TensorSpec((60,), "bfloat16", rs.Layout(rs.Mesh(b=4), "-"))},
    )
    out = rs.simulate(plan, {0: {"x": values[:30]}, 1: {"x": values[30:]}})
    for rank in range(4):
        assert (out[rank]["x"] == bfloat16(values)).all()


def test_not_strict_moves_what_both_have() -> None:
    source = {"both": have((4,), "tp"), "old": have((4,), "tp"), "q": have((4,), "tp")}
    destination = {"both": want((4,), "tp"), "new": want((4,)), "qk": want((8,))}
    names = {"qk": rs.join("q", "k")}
    plan = rs.plan(source, destination, names=names, strict=False)
    plan.check()
    moving = {step.name for rank in plan.ranks for step in plan.for_rank(rank).receives}
    assert moving == {"both"}
    values = values_of(source)
    out = rs.simulate(plan, {r: {n: v[2 * (r % 2) :][:2] for n, v in values.items()}
                             for r in range(4)})  # fmt: skip
    assert out[2]["both"].tolist() == values["both"][:2].tolist()


def test_strict_lists_both_sides() -> None:
    source = {"both": have((4,)), "old": have((4,))}
    destination = {"both": want((4,)), "new": want((4,))}
    with pytest.raises(rs.NamesError, match=r'"new".*"old"'):
        rs.plan(source, destination)
    assert rs.plan(source, destination, strict=False).summary().wire_bytes > 0


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"b": rs.join("a", "a", dim=0)}, r'"b".*8.*12'),
        ({"b": rs.join("a", dim=1)}, r'"a".*\(6, 4\).*"b".*\(8, 4\)'),
        ({"b": rs.join("a", dim=7)}, r'"b".*\(8, 4\).*dim 7.*0 to 1'),
        ({"b": rs.join("a", "a", dim=-1)}, r'"b".*\(8, 4\).*dim -1.*0 to 1'),
        ({"b": rs.take("a", crop={0: (2, 4)}, index={0: 0})}, r'"b" crops dim 0 of "a"'),
        ({"b": rs.join(dim=0, a=4)}, r'"b".*8.*2 groups.*"a".*6.*1.5 groups'),
        ({"b": rs.stack("a", "a", dim=0)}, r'"b".*\(8, 4\).*2 sources'),
        ({"b": rs.take("a", crop={0: (2, 9)})}, r'"b".*2 to 9.*"a".*\(6, 4\)'),
        ({"b": rs.take("a", crop={5: (0, 1)})}, r'"b".*dim 5.*"a".*\(6, 4\)'),
        ({"b": rs.take("a", index={0: 6})}, r'"b".*6 to 7.*\(6, 4\)'),
        ({"b": rs.take("a", pad={0: 9})}, r'"a".*\(6, 4\).*"b".*\(8, 4\)'),
        ({"b": rs.take("a", pad={1: 8})}, r'"a".*\(6, 4\).*"b".*\(8, 4\)'),
        ({"b": "a"}, r'"a".*\(6, 4\).*"b".*\(8, 4\).*crop.*pad'),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(names: dict, message: str) -> None:
    with pytest.raises(rs.PlanError, match=message):
        rs.plan({"a": have((6, 4), "tp -")}, {"b": want((8, 4), "tp -")}, names=names)


def test_a_shard_is_not_told_to_crop() -> None:
    """Every rank would get the same part of the tensor."""
    shard = {"w": want((4, 2), "...")}
    with pytest.raises(rs.PlanError) as caught:
        rs.plan({"w": have((8, 2), "tp -")}, shard)
    assert str(caught.value) == (
        '"w" gives shape (8, 2) and "w" wants (4, 2): both must be shapes of the whole tensor, '
        "and a plain tensor counts as whole; describe a shard as "
        'rs.TensorSpec((8, 2), "int32", rs.Layout(mesh, words))'
    )
    # Not a shard: padding, a layout that is cut in that dim, a part that was asked for.
    for source, destination, names in [
        (have((7, 2)), want((8, 2)), {}),
        (have((8, 2)), want((4, 2), "tp -"), {}),
        (have((8, 2)), want((2, 2), "..."), {"w": rs.take("w", crop={0: (0, 4)})}),
    ]:
        with pytest.raises(rs.PlanError, match=r"shapes must agree; try take\(..., crop="):
            rs.plan({"w": source}, {"w": destination}, names=names)


@pytest.mark.parametrize(("names", "rows"), [((), {}), (("a",), {"q": 2}), ((), {"q": 0})])
def test_joins_that_say_nothing(names: tuple[str, ...], rows: dict[str, int]) -> None:
    with pytest.raises(rs.PlanError, match="join"):
        rs.join(*names, **rows)


def test_a_hole_that_only_one_part_wants() -> None:
    """Coverage is of what is taken: lost rows outside a crop do no harm, inside they do."""
    lost = rs.TensorSpec((8, 2), "int32", rs.Layout(rs.Mesh(tp=2), "tp - | without 1"))
    whole = {"a": want((4, 2), "tp -")}
    plan = rs.plan({"w": lost}, whole, names={"a": rs.take("w", crop={0: (0, 4)})})
    value = counting((8, 2), "int32")
    out = rs.simulate(plan, {0: {"w": value[:4]}})
    assert out[2]["a"].tolist() == value[:2].tolist()
    with pytest.raises(rs.CoverageError, match=r'"a".*\[3:4, 0:2\]'):
        rs.plan({"w": lost}, whole, names={"a": rs.take("w", crop={0: (1, 5)})})


@pytest.mark.parametrize("more", [{"rows": [1]}, {"pad": {"0": 9}}])
def test_a_stack_in_a_table_takes_only_a_dim(more: dict) -> None:
    with pytest.raises(rs.FormatError, match="beside join or stack only dim is known"):
        names_of({"a": {"stack": ["b"], "dim": 0, **more}})


SERVERS = rs.Layout(rs.Mesh(tp=2, ranks=[8, 9]), "tp -")


def test_not_strict_moves_only_what_both_have() -> None:
    one = rs.TensorSpec((4, 4), "int8", SERVERS)
    plan = rs.plan({"a": one, "x": one}, {"a": one, "z": one}, strict=False)
    assert set(plan.want) == {"a"}
    with pytest.raises(rs.NamesError, match=r'"z".*"x"'):
        rs.plan({"a": one, "x": one}, {"a": one, "z": one})


def test_a_name_that_matches_nothing_is_an_error() -> None:
    one = rs.TensorSpec((4, 4), "int8", SERVERS)
    with pytest.raises(rs.NamesError, match=r"layers\.0\.qq"):
        rs.plan({"layers.0.q": one}, {"layers.0.q": one}, names={"layers.0.qq": "layers.0.q"})
