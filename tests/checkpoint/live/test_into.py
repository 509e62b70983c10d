"""Tensors that a load fills, or a save reads, and that are unusual in memory or in kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

from reshard import checkpoint
from reshard.errors import TensorError
from tests.ranks.meshes import mesh_of
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group


@pytest.fixture(name="stored")
def _stored(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    tensors = {
        "a": torch.arange(48.0).reshape(6, 8),
        "v": torch.full((2, 8), 5.0),
        "t": torch.full((8, 6), 9.0),
        "one": torch.tensor([7.0]),
    }
    save_file(tensors, path)
    return path


def test_one_element_may_have_any_stride(stored: Path, tmp_path: Path) -> None:
    into = {"one": torch.zeros(4, 3)[1:2, 1]}
    assert into["one"].stride() == (3,)
    checkpoint.load(stored, into=into)
    assert into["one"].tolist() == [7.0]
    checkpoint.save(into, tmp_path / "saved")
    again = {"one": torch.zeros(1)}
    assert checkpoint.load(tmp_path / "saved", into=again).checked
    assert again["one"].tolist() == [7.0]


def test_memory_that_overlaps_is_not_loaded_into(stored: Path) -> None:
    whole = torch.zeros(6, 8)
    for into, named in (
        ({"a": torch.zeros(13).as_strided((6, 8), (1, 1))}, '"a"'),
        ({"v": torch.zeros(1, 8).expand(2, 8)}, '"v"'),
        ({"a": whole, "v": whole[2:4]}, '"a" and "v"'),
        ({"a": whole, "t": whole.t()}, '"a" and "t"'),
    ):
        with pytest.raises(TensorError, match=f"{named} overlap"):
            checkpoint.load(stored, into=into)
    assert not whole.any()
    checkpoint.load(stored, into={"a": whole, "row": whole[2]}, strict=False)
    assert torch.equal(whole, torch.arange(48.0).reshape(6, 8))


def load_overlapping(rank: int, path: str) -> str:
    """What a rank is told if the tensors of rank 1 overlap; its own are unchanged."""
    whole = torch.zeros(6, 8)
    into = {"a": whole, "v": whole[2:4] if rank == 1 else torch.zeros(2, 8)}
    with pytest.raises(TensorError) as caught:
        checkpoint.load(path, into=into, group=pool_group(2))
    assert not any(one.any() for one in into.values())
    return str(caught.value)


def test_all_ranks_learn_of_memory_that_overlaps(pool: Pool, stored: Path) -> None:
    told = pool.run(load_overlapping, str(stored), ranks=range(2))
    assert told[0] == told[1]
    assert 'on rank 1 the destinations "a" and "v" overlap' in told[0]


def test_views_that_do_not_overlap_are_loaded_into(stored: Path, tmp_path: Path) -> None:
    memory = torch.zeros(8, 8)
    into = {"a": memory[:6], "v": memory[6:]}
    checkpoint.load(stored, into=into)
    assert torch.equal(into["a"], torch.arange(48.0).reshape(6, 8))
    assert (into["v"] == 5).all()
    mixed = torch.zeros(6, 16)
    into = {"a": mixed[:, ::2], "v": mixed[:2, 1::2]}
    checkpoint.load(stored, into=into)
    assert torch.equal(into["a"], torch.arange(48.0).reshape(6, 8))
    assert (into["v"] == 5).all()
    views = {"a": mixed, "b": mixed[2:4], "c": mixed[:1].expand(3, 16)}
    assert checkpoint.save(views, tmp_path / "saved").num_tensors == 3


def load_versions(rank: int, path: str) -> list[bool]:
    """Whether versions of tensors are higher after a load: of a shard and of a replica."""
    shard = zeros(6, 8, device_mesh=mesh_of(2), placements=[Shard(0)])
    into = {"a": shard, "v": torch.zeros(2, 8)}
    watched = [shard, shard._local_tensor, into["v"]]
    before = [one._version for one in watched]
    checkpoint.load(path, into=into, group=pool_group(2))
    return [one._version > old for one, old in zip(watched, before, strict=True)]


def test_autograd_knows_that_a_load_changes_tensors(pool: Pool, stored: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(6, 8))
    loss = (weight * weight).sum()
    checkpoint.load(stored, into={"a": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        into = {"a": torch.zeros(6, 8)}
    checkpoint.load(stored, into=into)
    assert torch.equal(into["a"], weight)
    assert pool.run(load_versions, str(stored), ranks=range(2)) == [[True] * 3] * 2


def load_on_half(rank: int, path: str) -> list[Any]:
    """Load on two ranks into tensors that are sharded over four, or replicated on them."""
    if rank > 1:
        return []
    rows, columns, whole = (
        DTensor.from_local(
            torch.zeros(local),
            mesh_of(4),
            [placement],
            run_check=False,
            shape=(6, 8),
            stride=(8, 1),
        )
        for local, placement in (((2, 8), Shard(0)), ((6, 2), Shard(1)), ((6, 8), Replicate()))
    )
    into = {"a": rows, "b": columns, "c": whole}
    report = checkpoint.load(path, into=into, group=pool_group(2))
    return [report.unique_bytes, *(one.to_local().tolist() for one in into.values())]


@pytest.mark.parametrize("checksums", [False, True])
def test_ranks_that_do_not_load_may_have_a_part(
    pool: Pool, tmp_path: Path, checksums: bool
) -> None:
    numbers = torch.arange(48.0).reshape(6, 8)
    state = {"a": numbers, "b": numbers + 1, "c": numbers + 2}
    checkpoint.save(state, tmp_path / "all", checksums=checksums)
    for rank, told in enumerate(pool.run(load_on_half, str(tmp_path / "all"), ranks=range(4))[:2]):
        num_bytes, rows, columns, whole = told
        assert num_bytes == 4 * (4 * 8 + 6 * 4 + 6 * 8)
        assert rows == numbers[2 * rank : 2 * rank + 2].tolist()
        assert columns == (numbers[:, 2 * rank : 2 * rank + 2] + 1).tolist()
        assert whole == (numbers + 2).tolist()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_plain_memory_are_named(stored: Path, tmp_path: Path) -> None:
    lazy = torch.nn.LazyLinear(3).weight
    nested = torch.nested.nested_tensor([torch.ones(2)])
    jagged = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    masked = torch.masked.masked_tensor(torch.ones(6, 8), torch.ones(6, 8).bool())
    for tensor, kind in (
        (lazy, "not initialized: run the model first"),
        (nested, "a nested tensor: pad it first"),
        (jagged, "a nested tensor: pad it first"),
        (masked, "a MaskedTensor: give a tensor that has its own memory"),
    ):
        with pytest.raises(TensorError, match=f'"a" is {kind}'):
            checkpoint.load(stored, into={"a": tensor})
        with pytest.raises(TensorError, match=f'"a" is {kind}'):
            checkpoint.save({"a": tensor}, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
