"""What becomes of sharded tensors in the outputs of modules."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from reshard.nn.outputs import (
    OutputHook,
    collect_local_shard,
    map_sharded,
    remove_output_hooks,
    reshard_output,
)
from reshard.sharded.api import shard_tensor
from reshard.sharded.splits import ChunkShardingSpec
from reshard.sharded.tensor import ShardedTensor
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group

FOUR = range(4)
PLACES = [f"rank:{rank}/cpu" for rank in FOUR]
ROWS, COLUMNS = ChunkShardingSpec(0, PLACES), ChunkShardingSpec(1, PLACES)
ALONE = ChunkShardingSpec(0, ["rank:0/cpu"])

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True, slots=True)
class Frozen:
    tensor: Any
    label: str = "a"


@dataclass
class ModelOutput(OrderedDict):
    """As transformers has it: a dataclass and a dict, kept in step."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for name in ("logits", "hidden"):
            OrderedDict.__setitem__(self, name, getattr(self, name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self) -> Any:
        return ModelOutput, (self.logits, self.hidden)


class Give(nn.Module):
    """A module whose output is what it was given."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self) -> Any:
        return self.output


def numbered(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


def sharded(rows: int, columns: int, spec: ChunkShardingSpec) -> ShardedTensor:
    return shard_tensor(numbered(rows, columns), spec, process_group=pool_group(4))


def run_reshard(rank: int) -> None:
    tensor = sharded(24, 12, ROWS)
    module = Give(tensor)
    assert reshard_output(module, COLUMNS) is module
    found, explicit = module(), tensor.resharded(COLUMNS)
    assert found.local_tensor().shape == (24, 3)
    assert torch.equal(found.local_tensor(), explicit.local_tensor())
    assert found.metadata() == explicit.metadata()
    assert torch.equal(found.local_tensor(), numbered(24, 12)[:, 3 * rank : 3 * rank + 3])


def test_B17_the_output_is_resharded(pool: Pool) -> None:
    pool.run(run_reshard, ranks=FOUR)


def run_not_mutated(rank: int) -> None:
    tensor = sharded(24, 12, ROWS)
    module = reshard_output(Give({"out": [tensor]}), COLUMNS)
    assert module()["out"][0].sharding_spec() == COLUMNS
    assert module.output["out"][0] is tensor
    assert tensor.sharding_spec() == ROWS
    assert tensor.local_tensor().shape == (6, 12)


def test_D19_the_modules_own_tensor_stays(pool: Pool) -> None:
    pool.run(run_not_mutated, ranks=FOUR)


def run_collect(rank: int) -> None:
    tensor = sharded(23, 15, ROWS)
    module = Give(tensor)
    assert collect_local_shard(module) is module
    found = module()
    assert type(found) is torch.Tensor
    assert torch.equal(found, numbered(23, 15)[6 * rank : 6 * rank + 6])


def test_B18_the_output_is_the_local_tensor(pool: Pool) -> None:
    pool.run(run_collect, ranks=FOUR)


def run_squeeze(rank: int) -> None:
    assert torch.equal(collect_local_shard(Give(sharded(4, 16, ROWS)))(), numbered(4, 16)[rank])
    kept = collect_local_shard(Give(sharded(4, 16, ROWS)), squeeze=False)()
    assert kept.shape == (1, 16)
    negative = ChunkShardingSpec(-2, PLACES)
    assert collect_local_shard(Give(sharded(4, 16, negative)))().shape == (16,)


def test_B19_one_row_each_is_squeezed(pool: Pool) -> None:
    pool.run(run_squeeze, ranks=FOUR)


def run_uneven(rank: int) -> tuple[int, ...]:
    forced = collect_local_shard(Give(sharded(7, 16, ROWS)), squeeze=True)()
    assert forced.shape == ((16,) if rank == 3 else (2, 16))
    few = collect_local_shard(Give(sharded(1, 16, ROWS)))()
    assert few.dim() == 2
    return tuple(collect_local_shard(Give(sharded(7, 16, ROWS)))().shape)


def test_D20_all_ranks_squeeze_or_none(pool: Pool) -> None:
    assert pool.run(run_uneven, ranks=FOUR) == [(2, 16), (2, 16), (2, 16), (1, 16)]


def run_reshard_then_collect(rank: int) -> None:
    module = reshard_output(Give((sharded(8, 8, ROWS), 3)), COLUMNS)
    local, number = collect_local_shard(module)()
    assert number == 3
    assert torch.equal(local, numbered(8, 8)[:, 2 * rank : 2 * rank + 2])
    assert remove_output_hooks(module) == 2
    assert module() is module.output


def test_hooks_run_in_order_and_are_removed(pool: Pool) -> None:
    pool.run(run_reshard_then_collect, ranks=FOUR)


@pytest.fixture
def alone() -> ShardedTensor:
    """A sharded tensor that needs no other ranks."""
    return shard_tensor(torch.ones(3, 2), ALONE)


def whole(tensor: ShardedTensor) -> torch.Tensor:
    return tensor.local_tensor()


def is_plain(value: object) -> bool:
    return type(value) is torch.Tensor


def test_D20_tuples_lists_and_dicts(alone: ShardedTensor) -> None:
    given = (1, [alone, None], {"a": alone, "b": OrderedDict(c=alone)})
    one, (two, nothing), three = map_sharded(given, whole)
    assert (one, nothing) == (1, None)
    assert is_plain(two)
    assert is_plain(three["a"])
    assert type(three["b"]) is OrderedDict
    assert is_plain(three["b"]["c"])
    assert given[1][0] is alone
    assert given[2]["b"]["c"] is alone


def test_D20_namedtuples_and_dataclasses(alone: ShardedTensor) -> None:
    pair = map_sharded(Pair(alone, 2), whole)
    assert type(pair) is Pair
    assert is_plain(pair.first)
    frozen = map_sharded(Frozen(alone), whole)
    assert is_plain(frozen.tensor)
    assert frozen.label == "a"


def test_D20_outputs_as_transformers_has_them(alone: ShardedTensor) -> None:
    given = ModelOutput(logits=alone, hidden=(alone,))
    found = map_sharded(given, whole)
    assert type(found) is ModelOutput
    assert is_plain(found.logits)
    assert found["logits"] is found.logits
    assert is_plain(found.hidden[0])
    assert given.logits is alone
    assert given["logits"] is alone


def test_a_tensor_that_comes_twice_is_changed_once(alone: ShardedTensor) -> None:
    one, (two,) = map_sharded((alone, [alone]), lambda tensor: whole(tensor).clone())
    assert one is two


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(2),
        None,
        "text",
        [torch.ones(2), (1, 2)],
        {"a": {"b": 1}},
        Pair(1, 2),
        Frozen(torch.ones(1)),
        ModelOutput(logits=torch.ones(1)),
        torch.ones(2, 2).max(dim=0),
        torch.Size([1, 2]),
    ],
)
def test_B20_everything_else_is_passed_on(output: object) -> None:
    module = collect_local_shard(reshard_output(Give(output), ROWS))
    assert module() is output


def test_bad_arguments_leave_no_hook() -> None:
    module = Give(None)
    with pytest.raises(TypeError, match="takes a ShardingSpec, found int"):
        reshard_output(module, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='squeeze is "auto", True or False, found "yes"'):
        collect_local_shard(module, squeeze="yes")  # type: ignore[arg-type]
    assert not module._forward_hooks


def test_other_hooks_are_left_alone() -> None:
    module = reshard_output(Give(None), ROWS)
    module.register_forward_hook(lambda *_: 5)
    assert remove_output_hooks(module) == 1
    assert module() == 5


def test_a_module_with_hooks_pickles() -> None:
    copied = pickle.loads(pickle.dumps(collect_local_shard(reshard_output(nn.ReLU(), ROWS))))
    assert all(isinstance(hook, OutputHook) for hook in copied._forward_hooks.values())
    assert remove_output_hooks(copied) == 2
