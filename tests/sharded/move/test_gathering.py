"""The whole tensor on one rank: every spec, every dtype exact, and errors that all ranks hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reshard import Layout, Mesh
from reshard.sharded import (
    EnumerableShardingSpec,
    GridShardingSpec,
    LayoutShardingSpec,
    RaggedShardingSpec,
    ShardingSpec,
    ones,
    shard_tensor,
    zeros,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import (
    FOUR,
    box,
    check_shards,
    chunk,
    numbered,
    places,
    refusal,
    sharded,
)


def check_gathered(full: torch.Tensor, spec: ShardingSpec, dst: int) -> None:
    """With ``out`` on all ranks, on ``dst`` only, and on none."""
    st, here = shard_tensor(full, spec, None, pool_group(4)), torch.distributed.get_rank() == dst
    everywhere = torch.full_like(full, -1)
    untouched = everywhere.clone()
    assert st.gather(dst, everywhere) is (everywhere if here else None)
    assert torch.equal(everywhere, full if here else untouched)
    there = torch.empty_like(full) if here else None
    assert st.gather(dst=dst, out=there) is there
    assert there is None or torch.equal(there, full)
    found = st.gather(dst)
    assert (found is not None) == here
    if found is not None:
        assert torch.equal(found, full)
        found.zero_()
    check_shards(st, full)


def even_chunks(rank: int) -> None:
    for dim in (0, 1):
        for dst in FOUR:
            check_gathered(numbered(8, 12), chunk(dim), dst)


def test_B36_even_chunks(pool: Pool) -> None:
    pool.run(even_chunks, ranks=FOUR)


def uneven_chunks(rank: int) -> None:
    full = numbered(9, 7)
    specs: list[ShardingSpec] = [
        chunk(0),
        chunk(1, [3, 1, 0, 2]),
        chunk(0, [1, 3]),
        chunk(1, [0, 2, 0, 2, 1]),
        chunk(0, [2]),
        chunk(0, [2, 2]),
        RaggedShardingSpec(0, [1, 0, 8], places([3, 0, 1])),
        LayoutShardingSpec(Layout(Mesh(tp=4), "- tp")),
    ]
    for spec in specs:
        for dst in (0, 2):
            check_gathered(full, spec, dst)
    replicas = shard_tensor(
        full, LayoutShardingSpec(Layout(Mesh(tp=4), "- -")), None, pool_group(4)
    )
    found = replicas.gather(1)
    assert (found is not None) == (rank == 1)
    assert found is None or found.data_ptr() != replicas.local_tensor().data_ptr()
    check_gathered(numbered(0, 6), chunk(0), 1)
    check_gathered(numbered(1, 6), chunk(0), 3)


def test_B37_uneven_chunks_several_per_rank_and_ranks_without_any(pool: Pool) -> None:
    pool.run(uneven_chunks, ranks=FOUR)


def listed_boxes(rank: int) -> None:
    even = [
        box([4 * row, 3 * column], [4, 3], 2 * row + column) for row in (0, 1) for column in (0, 1)
    ]
    uneven = [box([0, 0], [2, 4], 3), box([0, 4], [4, 2], 1), box([2, 0], [4, 4], 1)]
    uneven.append(box([4, 4], [2, 2], 0))
    check_gathered(numbered(8, 6), EnumerableShardingSpec(even), 1)
    check_gathered(numbered(6, 6), EnumerableShardingSpec(uneven), 0)
    check_gathered(numbered(6, 6), EnumerableShardingSpec(uneven), 2)
    check_gathered(numbered(6, 6), GridShardingSpec([3, 2], places([0, 1, 2, 3, 0, 1])), 3)
    check_gathered(torch.tensor(5.0), EnumerableShardingSpec([box([], [], 1)]), 3)


def test_B38_listed_boxes_even_and_uneven(pool: Pool) -> None:
    pool.run(listed_boxes, ranks=FOUR)


VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "int64": lambda: numbered(5, 3, dtype=torch.int64) + 2**40 + 1,
    "float64": lambda: numbered(5, 3) / 3 + 1e-12,
    "complex64": lambda: torch.complex(numbered(5, 3).float(), -numbered(5, 3).float()),
    "complex128": lambda: torch.complex(numbered(5, 3) / 3, -numbered(5, 3)),
    "bool": lambda: numbered(5, 3, dtype=torch.int64) % 2 == 0,
    "uint8": lambda: numbered(5, 3, dtype=torch.uint8) + 240,
    "bfloat16": lambda: numbered(5, 3).bfloat16(),
    "float8_e4m3fn": lambda: numbered(5, 3).to(torch.float8_e4m3fn),
}


def exactly(rank: int) -> None:
    for name, make in VALUES.items():
        full = make()
        st = shard_tensor(full, chunk(0), None, pool_group(4))
        out = torch.empty_like(full)
        found = st.gather(3, out=out)
        assert (found is out) == (rank == 3), name
        if found is not None:
            assert found.dtype == full.dtype
            assert torch.equal(found.view(torch.uint8), full.view(torch.uint8)), name
        whole = st.full_tensor()
        assert torch.equal(whole.view(torch.uint8), full.view(torch.uint8)), name


def test_D15_every_dtype_comes_exact_also_with_out_on_all_ranks(pool: Pool) -> None:
    pool.run(exactly, ranks=FOUR)


def other_dtypes(rank: int) -> None:
    full = numbered(5, 3)
    st = shard_tensor(full, chunk(0), None, pool_group(4)).requires_grad_()
    found = st.gather(dtype=torch.float32)
    assert found is None or (found.dtype, found.requires_grad) == (torch.float32, False)
    wide = torch.empty(5, 3, dtype=torch.complex128)
    assert st.gather(out=wide, enforce_dtype=True) is (wide if rank == 0 else None)
    assert rank != 0 or torch.equal(wide.real, full)
    strided = torch.empty(3, 5, dtype=torch.float64).t()
    assert rank != 0 or torch.equal(st.gather(out=strided), full)
    if rank:
        st.gather()


def test_D15_another_dtype_where_it_is_asked_for(pool: Pool) -> None:
    pool.run(other_dtypes, ranks=FOUR)


def wrong_on_one_rank(rank: int, what: str) -> tuple[str, str]:
    st = zeros(chunk(0), 5, 3, process_group=pool_group(4))
    usual: dict[str, Any] = {"dst": 1}
    odd: dict[str, Any] = {
        "shape": {"out": torch.zeros(5, 4)},
        "type": {"out": [0.0]},
        "dst": {"dst": 4},
        "other dst": {"dst": 2},
    }[what]
    kind, text = refusal(lambda: st.gather(**usual | (odd if rank == 1 else {})))
    check_gathered(numbered(5, 3), chunk(0), 1)
    return kind, text.partition(" (on rank")[0]


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("shape", "TensorError", "out has shape [5, 4] and the tensor [5, 3]"),
        ("type", "TensorError", "out is of type list"),
        ("dst", "TensorError", "dst=4 is no rank of a group of 4: give 0 to 3"),
        ("other dst", "DisagreementError", "ranks were given different moves"),
    ],
)
def test_T4_what_is_wrong_on_one_rank_is_an_error_on_all(
    pool: Pool, what: str, kind: str, message: str
) -> None:
    found = pool.run(wrong_on_one_rank, what, ranks=FOUR)
    assert {name for name, _ in found} == {kind}
    assert all(message in text for _, text in found)


def wrong_on_all_ranks(rank: int) -> None:
    st = zeros(chunk(0), 5, 3, process_group=pool_group(4))
    for dst in (4, -1, "0"):
        with pytest.raises(ValueError, match=f"dst={dst} is no rank of a group of 4"):
            st.gather(dst)  # type: ignore[arg-type]
    check_gathered(numbered(5, 3), chunk(0), 1)


def test_a_destination_that_no_rank_has(pool: Pool) -> None:
    pool.run(wrong_on_all_ranks, ranks=FOUR)


def compared_outside(rank: int) -> list[bool]:
    """Ranks outside of a group may compare its tensors, as in torch; they hold no parts."""
    group = dist.new_group([2, 3])
    one, two = (ones(chunk(0, [2, 3]), 6, 4, process_group=group) for _ in range(2))
    other = ones(chunk(1, [2, 3]), 6, 4, process_group=group)
    return [torch.equal(one, two), torch.allclose(one, two), torch.equal(one, other)]


def test_tensors_of_a_group_are_compared_on_ranks_outside_of_it(pool: Pool) -> None:
    assert pool.run(compared_outside) == [[True, True, False]] * 8


def run_not_comparable(rank: int) -> str:
    """Only rank 3 has a part, so only there torch refuses the tolerance."""
    one = sharded(numbered(10, 8), chunk(0, [3]))
    with pytest.raises(RuntimeError) as raised:
        torch.allclose(one, one, rtol=-1.0)
    assert torch.allclose(one, one)
    return str(raised.value)


def test_what_one_rank_cannot_compare_is_an_error_of_all(pool: Pool) -> None:
    (text,) = set(pool.run(run_not_comparable, ranks=FOUR))
    assert text.startswith("on rank 3: rtol")
