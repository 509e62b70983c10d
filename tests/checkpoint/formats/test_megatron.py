"""Megatron-Core's ``torch_dist``: torch's distributed checkpoint, with more in its ``.metadata``.

Megatron adds the plans of all ranks and what it knows of each tensor, of classes of its own. Here
small classes stand in for these, under their names, while the metadata is pickled.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from reshard import checkpoint
from tests.checkpoint.torch_writers import write_distcp

HOME = "megatron.core.dist_checkpointing.strategies.torch"


@dataclasses.dataclass(frozen=True)
class MCoreSavePlan(SavePlan):
    mcore_data: Any = None


@dataclasses.dataclass
class MCoreMetadata(Metadata):
    mcore_data: Any = None


class MCoreUnknown:
    """A class of a later version."""

    def __init__(self) -> None:
        self.more = {"a": [1, 2]}


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let pickle find these classes where Megatron has them."""
    home = ModuleType(HOME)
    parts = HOME.split(".")
    names = [".".join(parts[: at + 1]) for at in range(len(parts))]
    sys.modules |= {name: ModuleType(name) for name in names[:-1]} | {HOME: home}
    kinds = (MCoreSavePlan, MCoreMetadata, MCoreUnknown)
    for kind in kinds:
        setattr(home, kind.__name__, kind)
        kind.__module__ = HOME
    try:
        yield
    finally:
        for kind in kinds:
            kind.__module__ = __name__
        for name in names:
            del sys.modules[name]


MCORE = {"rows": {"nd_reformulated_orig_global_shape": (4, 3)}, "norm": {}}


def by_attribute(metadata: Metadata, plans: list[SavePlan]) -> Metadata:
    """0.13: attributes of torch's own class."""
    metadata.mcore_data = MCORE
    metadata.all_local_plans = [
        MCoreSavePlan(plan.items, plan.storage_data, plan.planner_data, mcore_data=MCORE)
        for plan in plans
    ]
    return metadata


def by_subclass(metadata: Metadata, plans: list[SavePlan]) -> Metadata:
    """0.15: a subclass."""
    made = MCoreMetadata(mcore_data=MCORE, **vars(metadata))
    return by_attribute(made, plans)


def plans_alone(metadata: Metadata, plans: list[SavePlan]) -> Metadata:
    """0.16: torch's plans, and nothing of its own."""
    metadata.all_local_plans = plans
    return metadata


def of_a_later_version(metadata: Metadata, plans: list[SavePlan]) -> Metadata:
    made = by_subclass(metadata, plans)
    made.later = MCoreUnknown()
    return made


VERSIONS = {"0.13": by_attribute, "0.15": by_subclass, "0.16": plans_alone,
            "later": of_a_later_version}  # fmt: skip


def tensors() -> dict[str, tuple[torch.Tensor, int | None]]:
    return {
        "rows": (torch.arange(12.0).reshape(4, 3), 0),
        "norm": (torch.arange(5).bfloat16(), None),
    }


def write(folder: Path, change: Callable[[Metadata, list[SavePlan]], Metadata]) -> None:
    """What Megatron writes of two ranks: boxes, bytes of objects, and the files beside them."""
    kept: list[list[SavePlan]] = []
    create = dcp.DefaultSavePlanner.create_global_plan

    def noting(self: Any, plans: list[SavePlan]) -> Any:
        kept.append(plans)
        return create(self, plans)

    extra = {"layers.extra_state/shard_0_1": io.BytesIO(b"packed")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp.DefaultSavePlanner, "create_global_plan", noting)
        write_distcp(folder, 2, {**tensors(), **extra})
    path = folder / ".metadata"
    with stand_ins():
        metadata = change(pickle.loads(path.read_bytes()), kept[0])
        path.write_bytes(pickle.dumps(metadata))
    torch.save({"iteration": 3}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))


@pytest.mark.parametrize("version", VERSIONS)
def test_what_megatron_writes_is_read_and_written_again(tmp_path: Path, version: str) -> None:
    write(tmp_path / "src", VERSIONS[version])
    report = checkpoint.inspect(tmp_path / "src")
    assert report.ok
    assert {(t.name, t.shape) for t in report.tensors} == {("rows", (4, 3)), ("norm", (5,))}
    done = checkpoint.convert(tmp_path / "src", tmp_path / "out", format="distcp")
    assert done.left_out == ()
    assert checkpoint.verify(tmp_path / "src", tmp_path / "out").ok
    assert {"common.pt", "metadata.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    metadata = pickle.loads((tmp_path / "out" / ".metadata").read_bytes())  # torch's classes alone
    assert type(metadata) is Metadata
    assert getattr(metadata, "mcore_data", None) == (None if version == "0.16" else MCORE)
    found = {name: torch.zeros_like(tensor) for name, (tensor, _) in tensors().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, (tensor, _) in tensors().items())


def test_what_is_kept_of_tensors_that_are_renamed_is_listed(tmp_path: Path) -> None:
    write(tmp_path / "src", by_attribute)
    names = {"lines": "rows", "norm": "norm"}
    report = checkpoint.convert(tmp_path / "src", tmp_path / "out", format="distcp", names=names)
    assert report.left_out == ("mcore_data of rows",)
    report = checkpoint.convert(tmp_path / "src", tmp_path / "full")
    assert "mcore_data" in report.left_out


def test_plans_of_many_ranks_take_memory_of_their_size(tmp_path: Path) -> None:
    def many(metadata: Metadata, plans: list[SavePlan]) -> Metadata:
        metadata.all_local_plans = [dataclasses.replace(plans[0]) for _ in range(3_000)]
        return metadata

    write(tmp_path / "src", many)
    size = (tmp_path / "src" / ".metadata").stat().st_size
    tracemalloc.start()
    try:
        assert checkpoint.inspect(tmp_path / "src").ok
        assert tracemalloc.get_traced_memory()[1] < 30 * size + (8 << 20)
    finally:
        tracemalloc.stop()


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit",)


def test_nothing_of_the_plans_is_run(tmp_path: Path) -> None:
    def evil(metadata: Metadata, plans: list[SavePlan]) -> Metadata:
        metadata.all_local_plans = [Evil()]
        return metadata

    write(tmp_path / "src", plans_alone)
    path = tmp_path / "src" / ".metadata"
    path.write_bytes(pickle.dumps(evil(pickle.loads(path.read_bytes()), [])))
    [line] = checkpoint.inspect(tmp_path / "src").unsupported
    assert "builtins.exec" in line
    assert "nothing was run" in line
