"""Replicas that differ are found by load, save and verify, whichever rank has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, zeros

from reshard import checkpoint
from reshard.checkpoint.integrity.checksums import SIDECAR
from reshard.checkpoint.live import shared_reads
from reshard.errors import DamageError, DisagreementError
from reshard.layout.box import Box
from tests.checkpoint.live.test_load_save import bytes_read, mesh_of
from tests.checkpoint.making import header, write_sharded
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group

Array = np.ndarray[Any, Any]


def write_shards(folder: Path, shards: list[tuple[tuple[int, ...], Array]]) -> None:
    """Boxes of one tensor called z, each in a file of its own, as torch writes them."""
    folder.mkdir()
    for number, (start, array) in enumerate(shards, 1):
        said = json.dumps({"z": {"saved_offsets": list(start)}})
        data = array.astype(np.float32).tobytes()
        first = header({"z": ("F32", array.shape, len(data))}, {"DCP_SHARDING_INFO": said})
        path = folder / f"shard-{number:05d}-model-00001-of-00001.safetensors"
        path.write_bytes(first + data)


def test_overlapping_shards_that_disagree_are_not_loaded(tmp_path: Path) -> None:
    changed = np.arange(3.0, 9)
    changed[2] += 1
    write_shards(tmp_path / "bad", [((0,), np.arange(6.0)), ((3,), changed)])
    into = {"z": torch.full((9,), -1.0)}
    with pytest.raises(DamageError, match=r'tensor "z" \[5:6\].*compare_replicas=False\) takes'):
        checkpoint.load(tmp_path / "bad", into=into)
    assert (into["z"] == -1).all()
    checkpoint.load(tmp_path / "bad", into=into, compare_replicas=False)
    assert into["z"].tolist() == [*range(9)]


def test_replicas_that_agree_are_read_once_each(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", [((0,), np.arange(6.0)), ((3,), np.arange(3.0, 9))])
    into = {"z": torch.zeros(9)}
    report = checkpoint.load(tmp_path / "a", into=into)
    assert into["z"].tolist() == [*range(9)]
    assert (report.bytes_read, report.unique_bytes) == (12 * 4, 9 * 4)
    report = checkpoint.load(tmp_path / "a", into=into, compare_replicas=False)
    assert report.bytes_read == 9 * 4


@pytest.mark.parametrize("shape", [(), (1,), (64, 33), (5, 6, 7)])
@pytest.mark.parametrize("scratch", [64, 1 << 20])
def test_every_element_is_compared(
    tmp_path: Path, shape: tuple[int, ...], scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one copy, at any place, also where a copy is longer than the scratch buffer."""
    monkeypatch.setattr(shared_reads, "SCRATCH", scratch)
    array = np.arange(float(np.prod(shape))).reshape(shape)
    origin = (0,) * len(shape)
    for number, at in enumerate(np.random.default_rng(0).integers(0, array.size, 5)):
        other = array.copy()
        other.reshape(-1)[at] += 0.5
        folder = tmp_path / str(number)
        write_shards(folder, [(origin, array), (origin, other)])
        with pytest.raises(DamageError, match="1 elements differ"):
            checkpoint.load(folder, into={"z": torch.zeros(shape)})
    write_shards(tmp_path / "good", [(origin, array), (origin, array)])
    into = {"z": torch.zeros(shape)}
    checkpoint.load(tmp_path / "good", into=into)
    assert (into["z"].numpy() == array).all()


def test_a_digest_saves_the_second_read(tmp_path: Path) -> None:
    array = np.arange(32, dtype=np.float32)
    cuts = {"z": [Box((0,), (20,)), Box((10,), (32,))]}
    write_sharded(tmp_path / "a", {"z": ("float32", array)}, cuts, checksums=1 << 20)
    into = {"z": torch.zeros(32)}
    report = checkpoint.load(tmp_path / "a", into=into)
    assert report.checked
    assert report.bytes_read == report.unique_bytes == 32 * 4
    (tmp_path / "a" / SIDECAR).unlink()
    assert checkpoint.load(tmp_path / "a", into=into).bytes_read == (20 + 22) * 4


def load_rows(rank: int, folder: str) -> tuple[int, str]:
    """What this rank reads of a tensor that two ranks have by rows, and what it is told."""
    into = {"z": zeros(64, 16, device_mesh=mesh_of(2), placements=[Shard(0)])}
    with bytes_read() as counted:
        try:
            checkpoint.load(folder, into=into, group=pool_group(2))
        except DamageError as error:
            return counted[0], str(error)
    whole = into["z"]
    assert isinstance(whole, DTensor)
    assert torch.equal(whole.full_tensor().reshape(-1), torch.arange(64.0 * 16))
    return counted[0], ""


def test_ranks_share_the_comparing_and_raise_alike(pool: Pool, tmp_path: Path) -> None:
    array = np.arange(64.0 * 16).reshape(64, 16)
    other = array.copy()
    other[50, 3] += 1
    write_shards(tmp_path / "good", [((0, 0), array), ((0, 0), array)])
    write_shards(tmp_path / "bad", [((0, 0), array), ((0, 0), other)])
    told = pool.run(load_rows, str(tmp_path / "good"), ranks=range(2))
    headers = sum(p.stat().st_size for p in (tmp_path / "good").iterdir()) - 2 * array.size * 4
    read = sum(count for count, _ in told)
    # The first rank has read the beginnings of both files for their headers.
    assert 2 * array.size * 4 <= read <= 4 * array.size * 4 + headers
    told = pool.run(load_rows, str(tmp_path / "bad"), ranks=range(2))
    assert told[0][1] == told[1][1]
    assert "[50:51, 3:4]" in told[0][1]


def load_column(rank: int, folder: str) -> list[float]:
    into = {"w": torch.zeros(1000)}
    checkpoint.load(folder, into=into, group=pool_group(2), check=False)
    return into["w"].tolist()


def test_a_small_view_of_a_large_storage_is_loaded_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    """Its elements would fit into the last agreement; the range that they span would not."""
    matrix = torch.arange(1000.0 * 1000).reshape(1000, 1000)
    torch.save({"w": matrix[:, 5]}, tmp_path / "model.pt")
    columns = pool.run(load_column, str(tmp_path), ranks=range(2))
    assert columns == [matrix[:, 5].tolist()] * 2


def save_copies(rank: int, folder: str, dtype: torch.dtype, numel: int, at: int) -> str:
    """Save a plain tensor of which the last rank may have one other element."""
    state = {"small": torch.ones(3), "z": torch.zeros(numel, 1, 2, dtype=dtype)[..., 0]}
    state[f"own.{rank}"] = torch.full((3,), float(rank))
    if rank == 1 and at >= 0:
        state["z"][at] = 1
    try:
        group = pool_group(2)
        checkpoint.save(state, folder, group=group, format="distcp", overwrite=True)
    except DisagreementError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex128])
def test_plain_tensors_that_differ_are_not_saved(
    pool: Pool, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Small ones are compared as a whole, large ones in evenly spaced elements."""
    large = (4 << 20) // dtype.itemsize + 1
    for numel, at in ((1, 0), (1000, 577), (large, 0), (large, large - 1)):
        told = pool.run(save_copies, str(tmp_path / "a"), dtype, numel, at, ranks=range(2))
        assert told[0] == told[1]
        assert '"z" is a plain tensor that differs between ranks 0 and 1: broadcast' in told[0]
        assert not [*tmp_path.iterdir()]
    for numel in (0, 1, large):
        told = pool.run(save_copies, str(tmp_path / "a"), dtype, numel, -1, ranks=range(2))
        assert told == ["", ""]
    assert checkpoint.inspect(tmp_path / "a").num_tensors == 4


def save(folder: Path, **entries: object) -> Path:
    checkpoint.save({"w": torch.arange(4.0), **entries}, folder, format="distcp")
    return folder


def test_verify_compares_entries_that_are_no_tensors(tmp_path: Path) -> None:
    seven, again = save(tmp_path / "7", step=7), save(tmp_path / "7b", step=7)
    eight = save(tmp_path / "8", step=8)
    more, none = save(tmp_path / "m", step=7, lr=0.1), save(tmp_path / "n")
    assert checkpoint.verify(seven, again).ok
    report = checkpoint.verify(seven, eight)
    assert [problem.kind for problem in report.problems] == ["object"]
    assert 'entry "step", which is no tensor, differs' in str(report)
    report = checkpoint.verify(seven, more)
    assert [problem.message for problem in report.problems] == [
        f'entry "lr" is in {more} and not in {seven}'
    ]
    assert checkpoint.verify(seven, none).ok  # as with a format that has no place for them
    for one, two in ((seven, again), (seven, eight), (seven, more), (seven, none)):
        assert checkpoint.verify(one, two).ok == checkpoint.diff(one, two).equal
