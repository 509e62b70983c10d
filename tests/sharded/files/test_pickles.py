"""Sharded tensors saved and loaded: on the same ranks, on fewer, on more, and from strangers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reshard import Layout, Mesh
from reshard.nn import ShardingPlan, shard_module
from reshard.sharded import (
    LayoutShardingSpec,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    equal,
    load_files,
    load_with_process_group,
    rebuild_sharded_tensor,
    shard_tensor,
)
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import (
    FOUR,
    boxes,
    check_close,
    check_lies_like,
    chunk,
    group_of,
    sharded,
    specs,
    values,
)

F64 = torch.float64


def stored(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def loaded(file: io.BytesIO, group: Any = None) -> Any:
    with load_with_process_group(pool_group(4) if group is None else group):
        return torch.load(file, weights_only=True)


def test_B27_metadata_is_pickled_and_compares_equal() -> None:
    shards = (ShardMetadata([0, 0], [2, 4], "rank:0/cpu"), ShardMetadata([2, 0], [2, 4], "rank:1"))
    kinds = (torch.float16, torch.bfloat16, torch.float32, F64, torch.int8, torch.int16,
             torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64,
             torch.complex128)  # fmt: skip
    for kind in kinds:
        for layout in (torch.strided, torch.sparse_coo):
            for flag in (False, True):
                for memory in (torch.contiguous_format, torch.channels_last):
                    common = TensorProperties(kind, layout, flag, memory, not flag)
                    made = ShardedTensorMetadata(shards, torch.Size([4, 4]), common)
                    assert pickle.loads(pickle.dumps(made)) == made
                    assert copy.deepcopy(made) == made


def round_trips(rank: int) -> None:
    for dtype in (F64, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        full = values(7, 9).mul(3).to(dtype)
        some = [boxes(7, 9)] if dtype != F64 else [*specs(7, 9).values(), chunk(-1, [3, 1, 0, 2])]
        for spec in some:
            tensor = sharded(full, spec)
            found = loaded(stored(tensor))
            assert isinstance(found, ShardedTensor)
            assert equal(found, tensor)
            check_lies_like(found, tensor)
            assert found.process_group is pool_group(4)
            assert found.metadata() == tensor.metadata()
    parameter = nn.Parameter(sharded(values(7, 9), chunk(0)))
    found = loaded(stored(parameter))
    assert isinstance(found, nn.Parameter)
    assert found.requires_grad
    assert not loaded(stored(nn.Parameter(parameter.detach(), False))).requires_grad
    (found * found).sum().backward()
    check_lies_like(found.grad, found)
    product = parameter.detach() @ parameter.detach().t()  # lies as words say, and not as a spec
    assert equal(loaded(stored(product)), product)
    with load_with_process_group(pool_group(4)):
        assert equal(pickle.loads(pickle.dumps(product)), product)


def test_D18_tensors_and_parameters_with_weights_only(pool: Pool) -> None:
    pool.run(round_trips, ranks=FOUR)


def small(rank: int) -> None:
    tensor = sharded(values(1000, 64), chunk(0))
    assert len(stored(tensor).getvalue()) < 1000 * 64 * 8 / 4 + 8192
    boxed = sharded(values(1000, 64), chunk(0, [0, 1, 2, 3] * 2))
    assert len(stored(boxed).getvalue()) < 1000 * 64 * 8 / 4 + 8192
    twins = loaded(stored({"a": tensor, "b": tensor}))
    assert twins["a"] is twins["b"]


def test_a_file_holds_the_shards_of_its_rank_and_nothing_else(pool: Pool) -> None:
    pool.run(small, ranks=FOUR)


def model(seed: int = 0) -> nn.Module:
    made = nn.Sequential(
        nn.Linear(9, 7), nn.Sequential(nn.Linear(7, 5)), nn.BatchNorm1d(5)
    ).double()
    with torch.no_grad():
        for at, one in enumerate(made.parameters()):
            one.copy_(values(*one.shape, seed=seed + at))
    return made


def sharded_model(seed: int, plan: dict[str, Any], group: Any) -> nn.Module:
    made = model(seed)
    shard_module(made, ShardingPlan(plan), process_group=group)
    return made


def state_dicts(rank: int) -> None:
    plan = {"0.weight": chunk(0), "1.0.weight": boxes(5, 7), "2.running_mean": chunk(0)}
    one, other = (sharded_model(seed, plan, pool_group(4)) for seed in (0, 40))
    state = one.state_dict()
    assert list(state) == list(model().state_dict())
    assert [name for name, value in state.items() if isinstance(value, ShardedTensor)] == [*plan]
    assert not other.load_state_dict(loaded(stored(state))).missing_keys
    for name, value in other.state_dict().items():
        check_close(value, model().state_dict()[name])
    twin = copy.deepcopy(one)
    with torch.no_grad():
        one[0].weight.zero_()
    check_close(twin[0].weight.detach(), model()[0].weight.detach())
    # Into other layouts, into plain tensors, and from plain ones.
    moved = sharded_model(40, {"0.weight": chunk(1)}, pool_group(4))
    moved.load_state_dict(other.state_dict())
    check_close(moved[0].weight.detach(), model()[0].weight.detach())
    plain = model(40)
    plain.load_state_dict(other.state_dict())
    assert not isinstance(plain[0].weight, ShardedTensor)
    check_close(plain[0].weight.detach(), model()[0].weight.detach())
    moved.load_state_dict(model(80).state_dict())
    check_close(moved[0].weight.detach(), model(80)[0].weight.detach())
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        other.load_state_dict({"0.weight": sharded(values(9, 9), chunk(0))}, strict=False)


def test_B47_B49_state_dicts_of_modules(pool: Pool) -> None:
    pool.run(state_dicts, ranks=FOUR)


def on_a_sub_group(rank: int) -> None:
    group, full = pool_group(2), values(5, 4)
    tensor = shard_tensor(full, chunk(0, [1, 0]), process_group=group, scatter=False)
    found = loaded(stored(tensor), group)
    assert found.process_group is group
    assert equal(found, tensor)
    for other in (pool_group(4), pool_group(8)):
        with pytest.raises(RuntimeError, match="Local world size at save time was 2"):
            loaded(stored(tensor), other)


def test_B48_B51_saved_and_loaded_on_a_sub_group(pool: Pool) -> None:
    pool.run(on_a_sub_group, ranks=range(2))


def files_of_others(rank: int) -> None:
    file = stored(sharded(values(8, 4), chunk(0)))
    files: list[Any] = [None] * 4
    dist.all_gather_object(files, file.getvalue(), group=pool_group(4))
    with pytest.raises(RuntimeError, match="Local rank at save time was") as info:
        loaded(io.BytesIO(files[(rank + 1) % 4]))
    assert "reshard.sharded.load_files" in str(info.value)


def test_B50_the_file_of_another_rank_is_refused(pool: Pool) -> None:
    pool.run(files_of_others, ranks=FOUR)


def test_B52_nothing_is_loaded_before_init_process_group() -> None:
    with pytest.raises(RuntimeError, match="Need to initialize default process group"):
        rebuild_sharded_tensor([], {})
    with pytest.raises(RuntimeError, match="init_process_group"):
        load_files(["model.pt"])


def names_with_dots(rank: int, folder: str) -> None:
    one, two = values(6, 3), values(5, 2, seed=1)
    state = {"a.b": sharded(one, chunk(0)), "a": {"b": sharded(two, chunk(1))}}
    torch.save(state, f"{folder}/{rank}.pt")
    dist.barrier(pool_group(4))
    joined = load_files([f"{folder}/{number}.pt" for number in FOUR], pool_group(4))
    check_close(joined["a.b"], one)
    check_close(joined["a"]["b"], two)


def test_names_that_read_alike_with_dots(pool: Pool, tmp_path: Path) -> None:
    pool.run(names_with_dots, str(tmp_path), ranks=FOUR)


def save(rank: int, folder: str, plan: dict[str, Any]) -> None:
    made = sharded_model(0, plan, pool_group(4))
    optimizer = torch.optim.Adam(made.parameters(), lr=0.1)
    (made[0].weight * 2).sum().backward()
    optimizer.step()
    made.load_state_dict(model().state_dict())
    replicas = LayoutShardingSpec(Layout(Mesh(dp=2, tp=2), "tp -"))
    one, twice = (sharded(values(6, 3), spec) for spec in (chunk(0, [2]), replicas))
    state = {
        "model": made.state_dict(),
        "optim": optimizer.state_dict(),
        "more": [one, {"step": 3, "replicas": twice}],
    }
    torch.save(state, f"{folder}/state.{rank}.pt")


def load(rank: int, paths: list[str], size: int) -> int:
    group = dist.group.WORLD if size not in (2, 4) else pool_group(size)
    if size == 1:
        group = group_of(0)
    state = load_files(paths, group)
    held = sum(shard.tensor.numel() for shard in state["model"]["0.weight"].local_shards())
    spec = chunk(1, [size - 1, 0])
    plan = {"0.weight": spec, "1.0.weight": chunk(0, range(size)), "0.bias": chunk(0, [0])}
    made = sharded_model(40, plan, group)
    made.load_state_dict(state["model"])
    assert made[0].weight.sharding_spec() == spec
    for name, value in made.state_dict().items():
        check_close(value, model().state_dict()[name])
    assert state["more"][1]["step"] == 3
    for tensor in (state["more"][0], state["more"][1]["replicas"]):
        check_close(tensor, values(6, 3))
    optimizer = torch.optim.Adam(made.parameters(), lr=0.7)
    optimizer.load_state_dict(state["optim"])
    assert optimizer.param_groups[0]["lr"] == 0.1
    moment = optimizer.state[made[0].weight]["exp_avg"]
    check_close(moment, torch.full((7, 9), 0.2, dtype=F64))
    (made[0].weight * 2).sum().backward()
    optimizer.step()
    return held


PLAN = {"0.weight": chunk(0), "1.0.weight": boxes(5, 7), "2.running_mean": chunk(0)}


@pytest.fixture
def saved(pool: Pool, tmp_path: Path) -> list[str]:
    pool.run(save, str(tmp_path), PLAN, ranks=FOUR)
    return [str(tmp_path / f"state.{rank}.pt") for rank in FOUR]


def test_B51_T10_D32_saved_on_4_and_loaded_on_4_2_1_and_8(pool: Pool, saved: list[str]) -> None:
    for size in (4, 2, 1, 8):
        held = pool.run(load, saved, size, ranks=range(size))
        assert sum(held) == 7 * 9
        assert held[4:] == [0] * (size - 4)  # no file was left for them


def test_T10_saved_on_4_and_loaded_on_3(saved: list[str]) -> None:
    with fresh_ranks(3) as ranks:
        assert sum(ranks.run(load, saved, 3)) == 7 * 9


def refused(rank: int, paths: Sequence[str]) -> str:
    with pytest.raises(ValueError, match="the file") as info:
        load_files(paths, pool_group(2))
    return str(info.value)


def refusal(pool: Pool, paths: Sequence[str]) -> str:
    (message,) = {*pool.run(refused, paths, ranks=range(2))}
    return message


class Hostile:
    def __reduce__(self) -> Any:
        return (print, ("I was run",))


def forged(rank: int, path: str, changes: dict[str, Any]) -> None:
    """A file whose tensor says of itself what is not so."""
    tensor = sharded(values(8, 4), chunk(0))
    function, (parts, state) = tensor.__reduce_ex__(2)

    class Forged:
        def __reduce__(self) -> Any:
            return function, (changes.get("parts", parts), {**state, **changes})

    torch.save({"w": Forged()}, path)


LIES: dict[str, dict[str, Any]] = {
    "parts": {"parts": [torch.zeros(3, 4, dtype=F64)]},
    "no parts": {"parts": []},
    "dtype": {"dtype": "float32"},
    "no dtype": {"dtype": "load"},
    "rank": {"rank": 7},
    "shape": {"shape": [4, 4]},
    "negative": {"shards": [[[-1, 0], [2, 4], "rank:0/cpu"]]},
    "gap": {"shards": [[[0, 0], [2, 4], "rank:0/cpu"], [[4, 0], [2, 4], "rank:1/cpu"]]},
    "nothing": {"shards": None, "layout": None},
}


def test_D32_wrong_files_are_refused_by_name_on_all_ranks(pool: Pool, saved: list[str]) -> None:
    folder = Path(saved[0]).parent
    bad = str(folder / "bad.pt")
    torch.save({"w": Hostile()}, bad)
    assert "bad.pt" in refusal(pool, [saved[0], bad])
    Path(bad).write_bytes(b"not a file of torch")
    assert 'bad.pt" cannot be read' in refusal(pool, [saved[0], saved[1], saved[2], bad])
    assert 'none.pt" cannot be read' in refusal(pool, [saved[0], str(folder / "none.pt")])
    torch.save([1], bad)
    assert "holds a list" in refusal(pool, [bad, saved[1]])
    torch.save({"w": 1}, bad)
    assert "differs from" in refusal(pool, [saved[0], bad])
    missing = refusal(pool, saved[:3])
    assert "do not make up" in missing
    for changes in LIES.values():
        pool.run(forged, bad, changes, ranks=[0])
        assert "bad.pt" in refusal(pool, [bad])


def test_D32_plain_entries_must_agree(pool: Pool, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.pt") for number in range(2)]
    for number, path in enumerate(paths):
        torch.save({"same": torch.ones(2), "step": number}, path)
    assert 'another "step"' in refusal(pool, paths)
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn):
        for number, path in enumerate(paths):
            x = torch.tensor([1.0, torch.nan, torch.nan if number else 0.0]).to(dtype)
            torch.save({"same": x[:2].clone(), "one is no number": x}, path)
        assert 'another "one is no number"' in refusal(pool, paths)
    with pytest.raises(ValueError, match="no files"):
        load_files([])
