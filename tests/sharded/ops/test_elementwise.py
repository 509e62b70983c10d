"""Operations on sharded tensors: right, or an error that says what to do."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from reshard.errors import OperationError
from reshard.sharded import (
    ChunkShardingSpec,
    ShardedTensor,
    allclose,
    custom_sharded_op_impl,
    custom_sharding_spec_op,
    equal,
    shard_tensor,
)
from reshard.sharded.ops import functions
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import (
    FOUR,
    boxes,
    check_close,
    check_lies_like,
    chunk,
    sharded,
    specs,
    values,
)
from tests.soak import soaking

Op = Callable[..., Any]
F64 = torch.float64

ELEMENTWISE: dict[str, Op] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "sub a number": lambda x, y: 3 - x,
    "power": lambda x, y: x.abs() ** 0.5 + 2**x,
    "relu": lambda x, y: x.relu(),
    "gelu": lambda x, y: F.gelu(x),
    "compare": lambda x, y: x == y,
    "less": lambda x, y: x < y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 7.0),
    "promote bool": lambda x, y: (x > 0) + y,
    "promote int": lambda x, y: (x > 0).int() * 2.5,
    "promote 0-d": lambda x, y: x.float() * torch.tensor(2.0, dtype=F64),
    "0-d first": lambda x, y: torch.tensor(2.0, dtype=F64) * x,
    "float": lambda x, y: x.float(),
    "half": lambda x, y: x.half(),
    "plain": lambda x, y: torch.ones(7, 9, dtype=F64) - x,
    "row": lambda x, y: x + torch.arange(9.0, dtype=F64),
    "column": lambda x, y: torch.arange(7.0, dtype=F64)[:, None] * x,
    "lerp": lambda x, y: x.lerp(y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "clamp": lambda x, y: x.clamp(min=y),
    "type_as": lambda x, y: x.type_as(torch.ones(1)),
    "zeros_like": lambda x, y: torch.zeros_like(x),
    "full_like": lambda x, y: torch.full_like(x, 2.0, dtype=torch.int64),
    "dropout of nothing": lambda x, y: F.dropout(x, 0.0),
    "isnan": lambda x, y: torch.isnan(x / x.clamp(min=0)),
    "clone": lambda x, y: x.clone(),
    "contiguous": lambda x, y: x.contiguous(),
    "data": lambda x, y: x.data,
    "mse": lambda x, y: F.mse_loss(x, y, reduction="none"),
}


def elementwise(rank: int) -> None:
    A, B = values(7, 9), values(7, 9, seed=1)
    given = [*specs(7, 9).values()]
    left, right = ([sharded(full, spec) for spec in given] for full in (A, B))
    for at, (name, op) in enumerate(ELEMENTWISE.items()):
        wanted = op(A, B)
        for number, (own, x) in enumerate(zip(given, left, strict=True)):
            if (number - at) % 4 > 1 and not soaking():
                continue  # two layouts take turns
            for y in (right[number], right[1])[: 1 + (own == chunk(0))]:
                found = op(x, y)
                check_lies_like(found, x)
                assert found.dtype == wanted.dtype, name
                check_close(found, wanted)


def test_B72_D18_elementwise_on_equal_and_different_layouts(pool: Pool) -> None:
    pool.run(elementwise, ranks=FOUR)


MIXING: dict[str, Op] = {
    "sum": lambda x: x.sum(),
    "sum of a dim": lambda x: x.sum(0),
    "mean": lambda x: x.mean(1, keepdim=True),
    "std": lambda x: x.std(),
    "max": lambda x: x.max(),
    "min of a dim": lambda x: x.min(0)[0],
    "argmax": lambda x: x.argmax(),
    "amax": lambda x: x.amax(1),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: x.norm(1),
    "largest": lambda x: x.norm(math.inf),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, dim=1),
    "prod": lambda x: x.prod(),
    "any": lambda x: (x > 0).any(),
    "all": lambda x: (x > 0).all(),
    "logsumexp": lambda x: x.logsumexp(1),
    "t": lambda x: x.t(),
    "product": lambda x: x @ x.t(),
    "a row": lambda x: x[0],
    "rows": lambda x: x[1:3],
    "a column": lambda x: x[:, 2],
    "rows by index": lambda x: x[torch.tensor([0, 3, 0])],
    "by mask": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "linear": lambda x: F.linear(x, x),
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "stack": lambda x: torch.stack([x, x + 1]),
    "cat": lambda x: torch.cat([x, x], 1),
    "softmax": lambda x: x.softmax(0),
    "sort": lambda x: x.sort(0)[0],
    "cumsum": lambda x: x.cumsum(0),
    "item": lambda x: x.max().item(),
    "tolist": lambda x: x.tolist(),
    "numel": lambda x: x.numel(),
    "len": lambda x: len(x),
    "stride": lambda x: x.stride(),
    "is_sparse": lambda x: x.is_sparse,
    "element_size": lambda x: x.element_size(),
    "nbytes": lambda x: x.nbytes,
    "is_complex": lambda x: x.is_complex(),
    "size": lambda x: (x.size(), x.size(-1), x.dim(), x.ndim),
}
MAY_REFUSE: dict[str, Op] = {
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(x.shape[1], x.shape[0]),
    "unbind": lambda x: x.unbind(0)[0],
    "cdist": lambda x: torch.cdist(x, x),
}


def check_works_or_says_why(op: Op, x: ShardedTensor, full: torch.Tensor) -> None:
    said = ""
    try:
        check_close(op(x), op(full))
    except OperationError as error:
        said = str(error)
    assert not said or all(text in said for text in ("aten.", f'"{x.cut}"', "full_tensor()"))


def mixing(rank: int) -> None:
    # 6 rows and 5 columns leave the last rank with none; 9 are uneven.
    for number, (rows, columns) in enumerate(((8, 9), (6, 5))):
        full = values(rows, columns)
        for dim in (0, 1) if soaking() else (number,):
            x = sharded(full, chunk(dim))
            for op in MIXING.values():
                check_close(op(x), op(full))
            for op in MAY_REFUSE.values():
                check_works_or_says_why(op, x, full)


def test_D18_what_was_missing_works_or_says_why_not(pool: Pool) -> None:
    pool.run(mixing, ranks=FOUR)


def other_layouts(rank: int) -> str:
    full = values(7, 9)
    for spec in (boxes(7, 9), chunk(0, [2, 1])):
        x = sharded(full, spec)
        for op in (torch.Tensor.t, lambda x: x @ x.t(), lambda x: x[0]):
            with pytest.raises(OperationError, match="not supported for ShardedTensor") as info:
                op(x)
            assert isinstance(info.value, RuntimeError | TypeError)
            assert str(x.cut) in str(info.value)
            assert "reshard it first, to a ChunkShardingSpec" in str(info.value)
            assert "\n" not in str(info.value)
        check_close((x * 2).relu(), (full * 2).relu())
        check_close(x.sum(0), full.sum(0))
        check_close(x.norm(), full.norm())
    return str(info.value)


def test_B42_D18_layouts_that_dtensor_cannot_say(pool: Pool) -> None:
    assert len({*pool.run(other_layouts, ranks=FOUR)}) == 1


def with_plain(rank: int) -> None:
    A, B = values(7, 9), values(7, 9, seed=1)
    for spec in specs(7, 9).values():
        x, w = sharded(A, spec).requires_grad_(), A.clone().requires_grad_()
        plain, same = B.clone().requires_grad_(), B.clone().requires_grad_()
        row, line = values(9, seed=3).requires_grad_(), values(9, seed=3).requires_grad_()
        found = x * plain
        wanted = w * same
        if spec in (chunk(0), chunk(1)):
            found, wanted = found + row, wanted + line
        sharded_weight = sharded(values(7, 9, seed=4), chunk(1))
        torch.autograd.backward(found, sharded_weight)
        wanted.backward(values(7, 9, seed=4))
        check_lies_like(x.grad, x)
        check_close(x.grad, w.grad)
        for one, other in ((plain, same), (row, line)):
            assert not isinstance(one.grad, ShardedTensor)
            assert (one.grad is None) == (other.grad is None)
            if other.grad is not None:
                check_close(one.grad, other.grad)
        target = torch.zeros(7, 9, dtype=F64)
        with torch.no_grad():
            check_close(target.add_(x), A)
            target += x
            assert torch.add(x, 1, out=target) is target
            target[0] = x.detach()[0] if spec in (chunk(0), chunk(1)) else 0
    assert not isinstance(target, ShardedTensor)


def test_mixing_with_plain_tensors_with_gradients(pool: Pool) -> None:
    pool.run(with_plain, ranks=FOUR)


def lists(rank: int) -> None:
    A, B, C = values(7, 9), values(7, 9, seed=1), values(3, seed=2)
    for spec in specs(7, 9).values():
        x, y = sharded(A, spec), sharded(B, chunk(1))
        for one, two in zip(
            torch._foreach_add([x, C], [y, C], alpha=2),
            torch._foreach_add([A, C], [B, C], alpha=2),
            strict=True,
        ):
            check_close(one, two)
        torch._foreach_mul_([x], 3)
        torch._foreach_addcdiv_([x], [y], [(y * y + 1)], value=2.0)
        check_close(x, A * 3 + 2 * B / (B * B + 1))
        torch._foreach_lerp_([x], [y], 1.0)
        check_close(x, B)
        torch._foreach_copy_([x, torch.zeros(7, 9, dtype=F64)], [A, y])
        check_close(x, A)
        check_lies_like(torch._foreach_neg([x])[0], x)
        check_close(torch._foreach_pow(2.0, [x])[0], torch.pow(2.0, A))
        (half,) = torch._foreach_div([x.to(torch.int32)], 2)
        assert half.dtype == torch.float32  # also on a rank without parts
        check_close(half, A.to(torch.int32) / 2)
    x = sharded(A, chunk(0))
    scale = x.sum()
    torch._foreach_mul_([x, C], scale)
    check_close(x, A * A.sum())
    check_close(C, values(3, seed=2) * A.sum())
    for found, plain in zip(
        torch._foreach_norm([x, C], 2), torch._foreach_norm([A * A.sum(), C], 2), strict=True
    ):
        check_close(found, plain)


def test_D18_foreach_operations(pool: Pool) -> None:
    pool.run(lists, ranks=FOUR)


def odd_sizes(rank: int) -> None:
    for shape, dim in (((0, 4), 0), ((4, 0), 0), ((1, 3), 0), ((2,), 0), ((3, 1, 2), 2)):
        full = values(*shape)
        x = sharded(full, chunk(dim)).requires_grad_()
        check_close(x * 2 + 1, full * 2 + 1)
        check_close(x.sum(), full.sum())
        x.sum().backward()
        check_lies_like(x.grad, x)
        check_close(x.grad, torch.ones(shape, dtype=F64))
    scalar = sharded(values(4), chunk(0)).sum()
    assert scalar.shape == ()
    assert float(scalar * 2) == pytest.approx(float(values(4).sum() * 2))
    check_close(scalar.add_(1), values(4).sum() + 1)
    with pytest.raises(RuntimeError, match="broadcast"):
        sharded(values(4, 4), chunk(0)) + values(3, 3)


def test_empty_tensors_and_scalars(pool: Pool) -> None:
    pool.run(odd_sizes, ranks=FOUR)


def copies(rank: int) -> None:
    full = values(7, 9)
    for spec in specs(7, 9).values():
        x = sharded(full, spec).requires_grad_()
        assert all(shard.tensor.requires_grad for shard in x.local_shards())
        assert not x.detach().requires_grad
        x.detach().zero_()
        check_close(x.detach(), torch.zeros(7, 9, dtype=F64))
        with torch.no_grad():
            x.copy_(sharded(full, chunk(1)))
        x.grad = torch.ones_like(x)
        twin = copy.deepcopy(x)
        assert twin.requires_grad
        assert equal(twin.grad, x.grad)
        twin.detach().zero_()
        check_close(x.detach(), full)
        assert x.clone().requires_grad
        other = sharded(full, spec)
        with torch.no_grad():
            assert other.copy_(x) is other
        assert not other.requires_grad
        assert x.to(F64) is x
        assert x.cpu() is x
        check_lies_like(x.to(torch.float32), x)
        assert x.double().dtype == F64
        other.grad = None
        assert repr(other).startswith("ShardedTensor([7, 9], torch.float64")
        assert hash(other) == id(other)


def test_B72_clone_detach_deepcopy_copy_(pool: Pool) -> None:
    pool.run(copies, ranks=FOUR)


def losses_into_a_tensor(rank: int) -> None:
    x, y = values(7, 9), values(7, 9, seed=1)
    one, other = (sharded(full, boxes(7, 9)) for full in (x, y))
    out = torch.zeros_like(one)
    torch._C._nn.mse_loss(one, other, 0, out=out)
    check_close(out, F.mse_loss(x, y, reduction="none"))


def test_a_loss_into_a_tensor(pool: Pool) -> None:
    pool.run(losses_into_a_tensor, ranks=FOUR)


def copied_views(rank: int) -> None:
    full = values(8, 6)
    for copied in (torch.alias_copy, torch.detach_copy):
        check_close(copied(sharded(full, boxes(8, 6))), full)
    x = sharded(full, chunk(1))
    for found, row in zip(torch.unbind_copy(x), full, strict=True):
        check_close(found, row)
    flat = torch.view_copy(sharded(full, chunk(0)), (-1,))
    check_close(flat.add_(1), full.view(-1) + 1)


def test_copies_of_views(pool: Pool) -> None:
    pool.run(copied_views, ranks=FOUR)


def comparisons(rank: int) -> None:
    full = values(7, 9)
    x = sharded(full, chunk(0))
    assert equal(x, x.clone())
    assert torch.equal(x, x.clone())
    assert allclose(x, x + 1e-12)
    assert torch.allclose(x, x + 1e-12)
    last = full.clone()
    last[-1, -1] += 1
    assert not equal(x, sharded(last, chunk(0)))  # on every rank, though one alone sees it
    assert not allclose(x, sharded(last, chunk(0)))
    for other in (sharded(full, chunk(1)), x.float(), sharded(full[:6], chunk(0))):
        assert not equal(x, other)
        assert not allclose(x, other)
    for compare in (equal, allclose, torch.equal, torch.allclose):
        for pair in ((x, full), (full, x)):
            with pytest.raises(TypeError, match="ShardedTensor is compared with a"):
                compare(*pair)


def test_B73_equal_and_allclose(pool: Pool) -> None:
    pool.run(comparisons, ranks=FOUR)


def inits(rank: int) -> None:
    init = torch.nn.init
    ways = {
        "uniform": lambda t: init.uniform_(t, -1, 2),
        "normal": lambda t: init.normal_(t, 1, 3),
        "kaiming": lambda t: init.kaiming_uniform_(t, a=0, nonlinearity="leaky_relu"),
        "constant": lambda t: init.constant_(t, 3.0),
        "truncated": lambda t: init.trunc_normal_(t),
    }
    for fill in ways.values():
        x, local = sharded(torch.empty(8, 6, dtype=F64), chunk(0)), torch.empty(2, 6, dtype=F64)
        torch.manual_seed(7 + rank)
        assert fill(x) is x
        torch.manual_seed(7 + rank)
        assert torch.equal(x.local_tensor(), fill(local))
    # How wide xavier spreads depends on the rows of the whole tensor.
    x = sharded(torch.empty(4000, 6, dtype=F64), chunk(0))
    torch.manual_seed(rank)
    init.xavier_uniform_(x)
    assert float(x.abs().max()) == pytest.approx(math.sqrt(6 / 4006), rel=0.01)


def test_B74_init_functions_fill_the_shards(pool: Pool) -> None:
    pool.run(inits, ranks=FOUR)


class OwnSpec(ChunkShardingSpec):
    """A spec of a user."""


def custom(rank: int) -> None:
    try:

        @custom_sharded_op_impl(torch.sinh)
        def _general(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
            assert process_group is pool_group(4)
            return "general"

        @custom_sharding_spec_op(OwnSpec, torch.sinh)
        def _own(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
            return "own"

        full = values(8, 4)
        assert torch.sinh(sharded(full, chunk(0))) == "general"
        assert torch.sinh(sharded(full, OwnSpec(0, chunk(0).placements))) == "own"
        check_close(torch.sinh(full), full.sinh())
        for register in (custom_sharded_op_impl(torch.sinh),):
            with pytest.raises(TypeError, match="expects signature"):
                register(lambda types, args: None)
    finally:
        functions._registered.clear()


def test_B69_B70_B71_custom_operations(pool: Pool) -> None:
    pool.run(custom, ranks=FOUR)


def test_a_function_that_gets_a_sharded_tensor_inside_an_object() -> None:
    one = shard_tensor(values(6, 2), chunk(0, [0]))

    bias = torch.ones(2, requires_grad=True)
    handle = torch.overrides.handle_torch_function
    assert handle(lambda inputs, bias: inputs["x"], (one,), {"x": one}, bias) is one


def channels_last(rank: int) -> int:
    """Memory formats have four dims; a rank without parts has none to lay out."""
    full = values(2, 3, 4, 4)
    tensor = sharded(full, chunk(0, [0, 1]))
    copied = tensor.clone(memory_format=torch.channels_last)
    check_close(copied, full)
    parts = copied._content.parts
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in parts)
    return len(parts)


def test_a_memory_format_on_a_rank_without_parts(pool: Pool) -> None:
    assert pool.run(channels_last, ranks=FOUR) == [1, 1, 0, 0]
