"""The oracle itself, against numbers written down by hand from the tables of the notation."""

import numpy as np
import pytest

from tests import bounds, oracle


def held(mesh: str, layout: str, shape: tuple[int, ...]) -> dict[int, list]:
    return {
        rank: local.tolist() for rank, local in oracle.local_indices(mesh, layout, shape).items()
    }


def sizes(mesh: str, layout: str, length: int) -> list[int]:
    return [len(local) for local in oracle.local_indices(mesh, layout, (length,)).values()]


@pytest.mark.parametrize(
    ("mesh", "layout", "length", "expected"),
    [
        ("tp=4", "tp", 10, [3, 3, 3, 1]),  # torch.chunk
        ("tp=4", "tp", 5, [2, 2, 1, 0]),  # a trailing shard is empty
        ("tp=4", "tp", 0, [0, 0, 0, 0]),
        ("tp=3", "tp*4", 20, [8, 8, 4]),  # 5 units, chunked 2, 2, 1
        ("tp=2", "tp*4", 10, [8, 2]),  # 3 units, the last of 2
        ("tp=4", "tp*3", 7, [3, 3, 1, 0]),
        ("tp=2", "tp:2", 7, [4, 3]),
        ("tp=4", "tp[3,1,4,2]", 10, [3, 1, 4, 2]),
        ("tp=3", "tp[0,5,0]", 5, [0, 5, 0]),
        ("cp=2", "cp~", 8, [4, 4]),
        ("cp=2", "cp~", 7, [3, 4]),  # blocks 2, 2, 2, 1
        ("cp=3", "cp~", 8, [2, 2, 4]),  # blocks 2, 2, 2, 2, 0, 0
        ("tp=2", "tp{6,2,2}", 10, [5, 5]),
        ("dp=3 tp=2", "(tp dp)", 13, [3, 2, 3, 2, 1, 2]),  # tp leaves 7 and 6
        ("dp=2 tp=2", "(dp tp)", 7, [2, 2, 2, 1]),  # dp leaves 4 and 3
    ],
)
def test_sizes(mesh: str, layout: str, length: int, expected: list[int]) -> None:
    assert sizes(mesh, layout, length) == expected


@pytest.mark.parametrize(
    ("mesh", "layout", "shape", "expected"),
    [
        ("tp=2", "-", (3,), {0: [0, 1, 2], 1: [0, 1, 2]}),
        ("tp=2", "- tp", (2, 3), {0: [[0, 1], [3, 4]], 1: [[2], [5]]}),
        ("tp=2", "tp -", (3, 2), {0: [[0, 1], [2, 3]], 1: [[4, 5]]}),
        # The axes run row-major over the ranks: tp is the fast one, whatever the word's order.
        ("dp=2 tp=2", "(dp tp)", (4,), {0: [0], 1: [1], 2: [2], 3: [3]}),
        ("dp=2 tp=2", "(tp dp)", (4,), {0: [0], 1: [2], 2: [1], 3: [3]}),
        ("dp=2 tp=2", "tp", (4,), {0: [0, 1], 1: [2, 3], 2: [0, 1], 3: [2, 3]}),
        ("dp=2 tp=2", "tp dp", (2, 2), {0: [[0]], 1: [[2]], 2: [[1]], 3: [[3]]}),
        ("tp=2 @ 9,4", "tp", (3,), {9: [0, 1], 4: [2]}),
        ("tp=4 @ 8-10,3", "tp", (4,), {8: [0], 9: [1], 10: [2], 3: [3]}),
        ("tp=2", "tp*2", (5,), {0: [0, 1, 2, 3], 1: [4]}),
        ("tp=2", "tp:2", (7,), {0: [0, 1, 4, 5], 1: [2, 3, 6]}),
        ("tp=3", "tp:1", (5,), {0: [0, 3], 1: [1, 4], 2: [2]}),
        ("tp=3", "tp[1,0,2]", (3,), {0: [0], 1: [], 2: [1, 2]}),
        ("cp=2", "cp~", (8,), {0: [0, 1, 6, 7], 1: [2, 3, 4, 5]}),
        ("cp=2", "cp~", (7,), {0: [0, 1, 6], 1: [2, 3, 4, 5]}),
        ("cp=2", "cp~", (2,), {0: [0], 1: [1]}),
        # Packed: 4 + 2 + 2, each cut in two, a rank's parts joined.
        ("tp=2", "tp{4,2,2}", (8,), {0: [0, 1, 4, 6], 1: [2, 3, 5, 7]}),
        ("tp=2", "tp~{4,4}", (8,), {0: [0, 3, 4, 7], 1: [1, 2, 5, 6]}),
        ("tp=2", "tp*2{4,3}", (7,), {0: [0, 1, 4, 5], 1: [2, 3, 6]}),
        ("tp=2", "tp[1,2]{3,3}", (6,), {0: [0, 3], 1: [1, 2, 4, 5]}),
        ("dp=2 tp=2", "(tp dp){4,2}", (6,), {0: [0, 4], 1: [2, 5], 2: [1], 3: [3]}),
        # A cut after packed segments acts on the joined parts: FSDP over packed tensor parallel.
        ("dp=2 tp=2", "(tp{4,2} dp)", (6,), {0: [0, 1], 1: [2, 3], 2: [4], 3: [5]}),
        # Own words: 4 q heads over kv and rep, 2 k heads over kv and so equal along rep, 1 whole.
        (
            "kv=2 rep=2",
            "{4 (kv rep), 2 kv, 1}",
            (7,),
            {0: [0, 4, 6], 1: [1, 4, 6], 2: [2, 5, 6], 3: [3, 5, 6]},
        ),
        (
            "a=2 b=2",
            "{2 a, 2 b, 1 -}",
            (5,),
            {0: [0, 2, 4], 1: [0, 3, 4], 2: [1, 2, 4], 3: [1, 3, 4]},
        ),
        ("a=2", "{2 a, 3 a[0,3]}", (5,), {0: [0], 1: [1, 2, 3, 4]}),
        ("a=2", "{4 {2 a, 2}, 1 a}", (5,), {0: [0, 2, 3, 4], 1: [1, 2, 3]}),
        # Nesting acts on what the word before left: cyclic, then zig-zag of the joined blocks.
        ("a=2 b=2", "(a:1 b~)", (8,), {0: [0, 6], 1: [2, 4], 2: [1, 7], 3: [3, 5]}),
        ("a=2 b=2", "(a[3,5] b)", (8,), {0: [0, 1], 1: [2], 2: [3, 4, 5], 3: [6, 7]}),
        ("tp=2", "...", (), {0: 0, 1: 0}),
        ("tp=2", "...", (2, 1), {0: [[0], [1]], 1: [[0], [1]]}),
        ("tp=2", "... tp", (1, 2, 2), {0: [[[0], [2]]], 1: [[[1], [3]]]}),
        ("tp=2", "tp ...", (2, 2), {0: [[0, 1]], 1: [[2, 3]]}),
        ("tp=2", "tp ...", (2,), {0: [0], 1: [1]}),  # '...' may stand for no dim
        ("a=2 b=2", "a ... b", (2, 1, 2), {0: [[[0]]], 1: [[[1]]], 2: [[[2]]], 3: [[[3]]]}),
        ("pp=3 tp=2", "tp | on pp=1", (2,), {2: [0], 3: [1]}),
        ("pp=3", "- | on pp=0,2", (1,), {0: [0], 2: [0]}),
        ("pp=2 ep=2", "- | on pp=1 ep=0", (1,), {2: [0]}),
        # Flat: the local tensor so far, row-major, cut as one dim.
        ("dp=2", "... | flat dp", (3, 3), {0: [0, 1, 2, 3, 4], 1: [5, 6, 7, 8]}),
        (
            "dp=2 tp=2",
            "- tp | flat dp",
            (3, 2),
            {0: [0, 2], 1: [1, 3], 2: [4], 3: [5]},
        ),
        ("dp=3", "... | flat dp[0,1,3]", (2, 2), {0: [], 1: [0], 2: [1, 2, 3]}),
        ("dp=2", "... | flat dp*2", (3,), {0: [0, 1], 1: [2]}),
        ("dp=2", "... | flat dp", (), {0: [0], 1: []}),
        ("tp=2", "- | without 0", (2,), {1: [0, 1]}),
        ("tp=4", "tp | without 1-2", (4,), {0: [0], 3: [3]}),
        ("tp=2", "- tp", (2, 1), {0: [[0], [1]], 1: [[], []]}),
        ("tp=2", "tp -", (2, 0), {0: [[]], 1: [[]]}),
    ],
)
def test_indices(mesh: str, layout: str, shape: tuple[int, ...], expected: dict) -> None:
    assert held(mesh, layout, shape) == expected


def test_shape_of_empty_shards() -> None:
    local = oracle.local_indices("tp=2", "- tp", (2, 1))
    assert [array.shape for array in local.values()] == [(2, 1), (2, 0)]
    assert oracle.local_indices("dp=2", "... | flat dp", ())[1].shape == (0,)


@pytest.mark.parametrize(
    ("mesh", "layout", "length"),
    [
        ("tp=2", "tp[1,2]", 4),
        ("tp=2", "tp[1,1,1]", 3),
        ("tp=2", "tp{2,2}", 5),
        ("tp=2", "{1 tp}", 2),
    ],
)
def test_sizes_that_do_not_add_up(mesh: str, layout: str, length: int) -> None:
    with pytest.raises(ValueError, match="do not"):
        oracle.local_indices(mesh, layout, (length,))


def test_addends() -> None:
    # dp=2 cp=2 tp=2: rank = 4 dp + 2 cp + tp; addends are row-major over the axes as listed.
    mesh = "dp=2 cp=2 tp=2"
    by_dp_cp = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3}
    by_cp_dp = {0: 0, 1: 0, 2: 2, 3: 2, 4: 1, 5: 1, 6: 3, 7: 3}
    assert oracle.addends(mesh, "tp | sum dp cp") == ("sum", by_dp_cp)
    assert oracle.addends(mesh, "tp | avg cp dp") == ("avg", by_cp_dp)
    assert oracle.addends(mesh, "tp | on dp=1 | max cp") == ("max", {4: 0, 5: 0, 6: 1, 7: 1})
    assert oracle.addends("tp=2", "tp") == (None, {0: 0, 1: 0})
    assert oracle.num_addends(mesh, "tp | sum dp cp") == 4
    assert held("dp=2", "- | sum dp", (2,)) == {0: [0, 1], 1: [0, 1]}


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [9, 12]), ("avg", [3, 4]), ("max", [6, 8]), ("min", [1, 2]), ("prod", [12, 32])],
)
def test_reduce_addends(op: str, expected: list[int]) -> None:
    values = np.array([[1, 2], [2, 2], [6, 8]], dtype=np.float64)
    assert oracle.reduce_addends(op, values).tolist() == expected


def test_boxes() -> None:
    boxes = {
        0: [((0, 1), (2, 3))],  # one box keeps its shape
        2: [((2, 0), (3, 2)), ((0, 0), (1, 1))],  # several are joined flat, in the order given
        5: [],
    }
    local = oracle.local_indices_of_boxes((3, 3), boxes)
    assert local[0].tolist() == [[1, 2], [4, 5]]
    assert local[2].tolist() == [6, 7, 0]
    assert local[5].shape == (0,)


def test_cut() -> None:
    array = np.array([[10, 11], [20, 21]])
    local = oracle.cut(array, oracle.local_indices("tp=2", "- tp", (2, 2)))
    assert {rank: part.tolist() for rank, part in local.items()} == {
        0: [[10], [20]],
        1: [[11], [21]],
    }


def test_lower_bound() -> None:
    rows = oracle.local_indices("tp=2", "tp -", (2, 2))  # 0: 0 1   1: 2 3
    columns = oracle.local_indices("tp=2", "- tp", (2, 2))  # 0: 0 2   1: 1 3
    elsewhere = oracle.local_indices("tp=2 @ 2-3", "- -", (2, 2))
    assert bounds.needed_elements(rows, columns, 4) == 2
    assert bounds.needed_elements(rows, elsewhere, 4) == 8  # each replica wants all four
    assert bounds.needed_elements(rows, rows, 4) == 0


def test_missing_by_holders() -> None:
    rows = oracle.local_indices("dp=2 tp=2", "tp -", (2, 2))
    whole = oracle.local_indices("x=3 @ 0,8-9", "- -", (2, 2))
    # Ranks 0 and 2 hold elements 0 and 1, ranks 1 and 3 hold 2 and 3; 8 and 9 lack all.
    assert bounds.missing_by_holders(rows, whole, 4) == {(0, 2): 2, (1, 3): 2}
    only_rank_0 = oracle.local_indices("x=1", "- -", (2, 2))
    assert bounds.missing_by_holders(rows, only_rank_0, 4) == {(1, 3): 2}


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ({}, 0),
        ({(0,): 6}, 6),
        ({(0, 1): 6}, 3),
        ({(0,): 6, (0, 1): 2}, 6),  # rank 1 takes the two shared ones
        ({(0,): 1, (0, 1): 2, (1, 2): 6}, 3),
        ({(0, 1): 3, (1, 2): 3, (0, 2): 3}, 3),
    ],
)
def test_lp_balance(missing: dict[tuple[int, ...], int], expected: float) -> None:
    assert bounds.lp_balance(missing) == pytest.approx(expected)


def test_coverage() -> None:
    lost = oracle.local_indices("dp=2 tp=2", "tp | without 0,2", (4,))
    assert not bounds.covered(lost, oracle.local_indices("x=1", "-", (4,)), 4)
    one_lost = oracle.local_indices("dp=2 tp=2", "tp | without 0", (4,))
    assert bounds.covered(one_lost, oracle.local_indices("x=1", "-", (4,)), 4)
    assert bounds.covered(lost, oracle.local_indices_of_boxes((4,), {0: [((2,), (4,))]}), 4)


def test_bounds_of_sums() -> None:
    have = oracle.local_indices("dp=3", "- | sum dp", (6,))
    scattered = oracle.local_indices("dp=3", "dp", (6,))
    # Reduce-scatter alone: each of 6 elements travels twice. Demanded: at most once more each.
    assert bounds.fewest_elements_of_sum(3, have, scattered, 6) == 12
    assert bounds.most_elements_of_sum(3, scattered, 6) == 18
    everywhere = oracle.local_indices("dp=3", "-", (6,))
    assert bounds.fewest_elements_of_sum(3, have, everywhere, 6) == 24  # an all-reduce
    away = oracle.local_indices("x=1 @ 7", "-", (6,))
    assert bounds.fewest_elements_of_sum(3, have, away, 6) == 18
