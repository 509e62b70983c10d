"""Torch's operator database on ShardedTensors: right, or refused with OperationError on all ranks.

    python -m tests.sharded.ops.operators --ranks 2 --samples 3     # prints the table; exit code 1
    python -m tests.sharded.ops.operators --ops matmul,sgn          # if anything is wrong

Every sample of every operator runs on plain tensors, and then on ShardedTensors of several
layouts, forward and backward. After each case the ranks compare what became of it through the
store: an error on one rank alone cannot disturb the cases that follow.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._pytree import tree_flatten, tree_unflatten

from reshard.errors import OperationError
from reshard.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    shard_tensor,
)
from reshard.sharded import move as engine
from tests.ranks.outcome import RankError
from tests.ranks.pool import Ranks
from tests.ranks.rank import pool_group

RIGHT, REFUSED, WRONG, RAISED, APART = "right", "refused", "wrong", "raised", "one-sided"
CRASHED, HUNG = "crashed", "hung"
OUTCOMES = (RIGHT, REFUSED, WRONG, RAISED, APART, CRASHED, HUNG)
ALL_RIGHT = {RIGHT, REFUSED}
LAYOUTS = ("rows", "last, reversed", "grid", "uneven", "two each")
DTYPES = {"float64": torch.float64, "complex128": torch.complex128, "int64": torch.int64}
CASE_TIMEOUT, OPERATOR_TIMEOUT = 60.0, 1200.0

DRAWN = {"bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "multinomial",
         "rand_like", "randint_like", "randn_like", "uniform", "empty_like", "new_empty",
         "new_empty_strided", "pca_lowrank", "svd_lowrank", "nn.functional.rrelu"}  # fmt: skip
"""Operators whose values are random or not initialized: only shapes and dtypes are compared."""


@dataclass(frozen=True)
class Outcome:
    """What became of one case."""

    case: str
    kind: str
    text: str = ""


# ---- on a rank


def spec_of(layout: str, shape: Sequence[int], ranks: int) -> ShardingSpec | None:
    """A spec of this kind for a tensor; None where its shape allows none."""
    places = [f"rank:{rank}/cpu" for rank in range(ranks)]
    if not shape:
        return None
    if layout == "rows":
        return ChunkShardingSpec(0, places)
    if layout == "last, reversed":
        return ChunkShardingSpec(len(shape) - 1, places[::-1])
    if layout == "two each":
        return ChunkShardingSpec(0, places + places[::-1])
    if layout == "uneven":
        return EnumerableShardingSpec(_uneven(shape, ranks))
    if len(shape) < 2:
        return None
    splits = [2, *[1] * (len(shape) - 2), 2]
    return GridShardingSpec(splits, places if ranks == 4 else [*places, *places[::-1]])


def _uneven(shape: Sequence[int], ranks: int) -> list[ShardMetadata]:
    """The last rank has most, the first has one row, and those between have nothing."""
    first = min(1, shape[0])
    zeros, rest = [0] * (len(shape) - 1), list(shape[1:])
    return [
        ShardMetadata([0, *zeros], [first, *rest], "rank:0/cpu"),
        ShardMetadata([first, *zeros], [shape[0] - first, *rest], f"rank:{ranks - 1}/cpu"),
    ]


@cache
def database() -> dict[str, Any]:
    """The operators, by name and variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}


def samples_of(name: str, dtype: torch.dtype, limit: int) -> Iterator[Any]:
    """The samples of an operator, the same on every rank and in every run."""
    op = database()[name]
    seed = hashlib.blake2b(f"{name} {dtype}".encode(), digest_size=4).digest()
    torch.manual_seed(int.from_bytes(seed, "big"))
    found = list(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd))
    step = max(1, len(found) // limit)
    return iter(found[::step][:limit])


def cases_of(name: str, dtype: str, ranks: int, limit: int) -> Iterator[tuple[str, Any]]:
    """The cases of an operator: their names, and what each does."""
    op = database()[name]
    if DTYPES[dtype] not in op.supported_dtypes("cpu"):
        return
    for at, sample in enumerate(samples_of(name, DTYPES[dtype], limit)):
        for layout in LAYOUTS:
            for every in (False, True):
                given = _given(sample, layout, ranks, every)
                if given is not None:
                    which = "all" if every else "first"
                    yield f"{name} {dtype} sample {at}, {layout}, {which}", (op, sample, given)


def _given(sample: Any, layout: str, ranks: int, every: bool) -> Any:
    """How each tensor of a sample is sharded; None where ``every`` adds nothing to the first."""
    leaves, _ = tree_flatten((sample.input, sample.args, sample.kwargs))
    specs = [
        spec_of(layout, leaf.shape, ranks)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
        else None
        for leaf in leaves
    ]
    sharded = [at for at, spec in enumerate(specs) if spec is not None]
    count = len(tree_flatten(sample.input)[0])
    first = [at for at in sharded if at < count]
    if not first or (every and len(first) == len(sharded)):
        return None
    return specs if every else [spec if at in first else None for at, spec in enumerate(specs)]


def outcome_of(op: Any, sample: Any, specs: Sequence[Any], ranks: int) -> tuple[str, str] | None:
    """What becomes of a sample on sharded tensors; None where plain ones do not work either."""
    plain, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
    own = [_leaf(leaf, None, ranks) for leaf in plain]
    try:
        torch.manual_seed(0)
        wanted = gathered(computed(op.op, own, tree))
    except Exception:
        return None
    try:
        given = [_leaf(leaf, spec, ranks) for leaf, spec in zip(plain, specs, strict=True)]
        torch.manual_seed(0)
        found = gathered(computed(op.op, given, tree))
        compare(found, wanted, op.name not in DRAWN and "dropout" not in op.name)
    except OperationError as error:
        return REFUSED, str(error)
    except AssertionError as error:
        return WRONG, str(error)
    except Exception as error:
        return RAISED, f"{type(error).__name__}: {error}"
    return RIGHT, ""


def _leaf(leaf: Any, spec: ShardingSpec | None, ranks: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    made = leaf.detach().clone()
    if spec is not None:
        made = shard_tensor(made, spec, process_group=pool_group(ranks), scatter=False)
    return made.requires_grad_(leaf.requires_grad)


def computed(op: Callable[..., Any], leaves: list[Any], tree: Any) -> tuple[Any, list[Any]]:
    """The results of an operator, and the gradients of its tensors."""
    first, args, kwargs = tree_unflatten(leaves, tree)
    results = op(first, *args, **kwargs)
    outputs = [one for one in tree_flatten(results)[0] if _has_gradient(one)]
    inputs = [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]
    if not outputs or not inputs:
        return results, []
    weights = [_weight(one) for one in outputs]
    return results, list(torch.autograd.grad(outputs, inputs, weights, allow_unused=True))


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _weight(output: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(output.shape, dtype=output.dtype, generator=generator)
    if not isinstance(output, ShardedTensor):
        return made
    return ShardedTensor.__torch_function__(  # laid out as the output is
        torch.Tensor.copy_, (ShardedTensor,), (torch.zeros_like(output.detach()), made)
    )


def gathered(values: Any) -> list[Any]:
    """Results with all their elements on every rank; gathered before any rank compares them."""

    def whole(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        return value.full_tensor() if isinstance(value, ShardedTensor) else value

    return [whole(one) for one in tree_flatten(values)[0]]


def compare(found: list[Any], wanted: list[Any], exact: bool) -> None:
    """Shapes, dtypes and, where they are not random, values."""
    assert len(found) == len(wanted), f"{len(found)} results for {len(wanted)}"
    for one, other in zip(found, wanted, strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other or (one != one and other != other), f"{one} for {other}"
            continue
        assert isinstance(one, torch.Tensor), f"{one} for a tensor"
        assert one.shape == other.shape, f"shape {one.shape} for {other.shape}"
        assert one.dtype == other.dtype, f"dtype {one.dtype} for {other.dtype}"
        if exact:
            torch.testing.assert_close(
                one, other, rtol=1e-6, atol=1e-6, equal_nan=True, check_stride=False
            )


_rounds: Counter[int] = Counter()


def _told(value: Any, ranks: int) -> list[Any]:
    """What every rank says, through the store: an operation that waits cannot disturb it."""
    store = dist.PrefixStore(f"operators/{ranks}/{_rounds[ranks]}", _get_default_store())
    _rounds[ranks] += 1
    store.set(str(dist.get_rank()), json.dumps(value))
    return [json.loads(store.get(str(rank))) for rank in range(ranks)]


def run_operator(
    rank: int, name: str, dtype: str, ranks: int, limit: int, folder: str | None, start: int
) -> list[Outcome]:
    """All cases of an operator from this one on; each is noted in the folder as it begins."""
    found = []
    database()
    _told(None, ranks)  # all ranks have what they need: from here on, waiting counts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for at, (case, given) in enumerate(cases_of(name, dtype, ranks, limit)):
            if at < start:
                continue
            with _watched(folder, rank, f"{at} {case}"):
                with counted_moves() as moves:
                    ended = outcome_of(*given, ranks)
                if folder is not None:
                    Path(folder, f"stack {rank}").write_text(f"rank {rank}: {ended}\n")
                told = _told((ended, len(moves)), ranks)
            found += _agreed(case, told)
    return found


@contextmanager
def counted_moves() -> Iterator[list[Any]]:
    """What is moved: a rank that moves more than another would wait for it in some later case."""
    moves: list[Any] = []
    move = engine.with_ticket

    def counted(group: Any, *rest: Any) -> Any:
        moves.append(group)
        return move(group, *rest)

    with patch.object(engine, "with_ticket", counted):
        yield moves


@contextmanager
def _watched(folder: str | None, rank: int, case: str) -> Iterator[None]:
    """Note that a case begins; a rank that does not end it in time writes its stack and exits."""
    if folder is None:
        yield
        return
    Path(folder, f"case {rank}").write_text(case)
    Path(folder, f"stack {rank}").write_text("")
    with Path(folder, f"stack {rank}").open("a") as stack:
        faulthandler.dump_traceback_later(CASE_TIMEOUT, exit=True, file=stack)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _agreed(case: str, told: list[tuple[tuple[str, str] | None, int]]) -> list[Outcome]:
    """One outcome of all ranks."""
    ended = {outcome and tuple(outcome) for outcome, _ in told}
    if len({outcome and outcome[0] for outcome in ended}) > 1:
        return [Outcome(case, APART, " | ".join(str(one) for one in told))]
    outcome = told[0][0]
    if outcome is None:
        return []
    if len({moves for _, moves in told}) > 1 or (outcome[0] == REFUSED and len(ended) > 1):
        return [Outcome(case, APART, " | ".join(str(one) for one in told))]
    return [Outcome(case, *outcome)]


# ---- in the process that starts the ranks


def run_all(
    names: Sequence[str], dtypes: Sequence[str], ranks: int, limit: int
) -> Iterator[Outcome]:
    """Run the operators on ranks of their own; ranks that crash or hang are started again."""
    team: Ranks | None = None
    with TemporaryDirectory() as folder:
        for name in names:
            for dtype in dtypes:
                start: int | None = 0
                while start is not None:
                    team = team or Ranks(ranks)
                    found, start = _run(team, name, dtype, ranks, limit, folder, start)
                    yield from found
                    if start is not None:
                        team.kill_all()
                        team = None
    if team is not None:
        team.close()


def _run(
    team: Ranks, name: str, dtype: str, ranks: int, limit: int, folder: str, start: int
) -> tuple[list[Outcome], int | None]:
    """The outcomes of an operator, and the case to go on with if one ended the ranks."""
    job = team.begin(run_operator, name, dtype, ranks, limit, folder, start)
    try:
        ended = job.results(OPERATOR_TIMEOUT)
    except RankError as error:
        notes = [path.read_text() for path in sorted(Path(folder).glob("case *"))]
        at, _, case = min(notes, key=lambda note: int(note.split()[0])).partition(" ")
        stacks = [path.read_text() for path in sorted(Path(folder).glob("stack *"))]
        if any("Timeout" in stack for stack in stacks):
            return [Outcome(case, HUNG, "\n".join(stacks)[:4000])], int(at) + 1
        return [Outcome(case, CRASHED, str(error)[:3000])], int(at) + 1
    return ended[0], None


def table(outcomes: Sequence[Outcome]) -> str:
    """How many cases ended how, in all and per layout."""
    lines = [f"{'layout':16}" + "".join(f"{kind:>11}" for kind in OUTCOMES)]
    for layout in (*LAYOUTS, "all"):
        mine = [one for one in outcomes if layout == "all" or f", {layout}, " in one.case]
        counts = Counter(one.kind for one in mine)
        lines.append(f"{layout:16}" + "".join(f"{counts[kind]:>11}" for kind in OUTCOMES))
    return "\n".join(lines)


def main() -> int:
    """Run operators and print the table and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--samples", type=int, default=1000, help="per operator, spread evenly")
    parser.add_argument("--ops", default="", help="names of operators, with commas; default all")
    parser.add_argument("--dtypes", default="float64,complex128")
    parser.add_argument("--part", default="0/1", help="the part I/N of the operators")
    parser.add_argument("--verbose", action="store_true", help="print refusals as well")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    names = given.ops.split(",") if given.ops else sorted(database())[part::parts]
    outcomes, begun = [], time.monotonic()
    try:
        for one in run_all(names, given.dtypes.split(","), given.ranks, given.samples):
            outcomes.append(one)
            if one.kind not in ALL_RIGHT or (given.verbose and one.kind == REFUSED):
                print(f"{one.kind}: {one.case}: {one.text}", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted in {outcomes[-1].case.split()[0] if outcomes else names[0]}")
    print(table(outcomes))
    print(f"{len(outcomes)} cases on {given.ranks} ranks in {time.monotonic() - begun:.0f} s")
    return int(any(one.kind not in ALL_RIGHT for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
