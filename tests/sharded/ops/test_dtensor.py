"""Products, norms, embeddings, attention and losses on sharded tensors, as on plain ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from reshard import Layout, Mesh, OperationError
from reshard.nn import ShardingPlan, shard_module
from reshard.sharded import (
    LayoutShardingSpec,
    ShardedTensor,
)
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.sharded.specs_and_values import (
    FOUR,
    boxes,
    check_close,
    check_lies_like,
    chunk,
    numbered,
    sharded,
    values,
    whole,
)
from tests.soak import cases, soaking

Op = Callable[..., torch.Tensor]
F64 = torch.float64


def check_op(op: Op, shapes: Sequence[Sequence[int]], dims: Sequence[int | None]) -> None:
    """Values and gradients, with each tensor sharded along its dim, or plain where that is None."""
    plain = [values(*shape, seed=at).requires_grad_() for at, shape in enumerate(shapes)]
    given = [
        one.detach().clone().requires_grad_()
        if dim is None
        else sharded(one.detach(), chunk(dim)).requires_grad_()
        for one, dim in zip(plain, dims, strict=True)
    ]
    wanted, found = op(*plain), op(*given)
    check_close(found, wanted)
    weight = values(*wanted.shape, seed=9)
    (wanted * weight).sum().backward()
    (found * weight).sum().backward()
    for one, other in zip(given, plain, strict=True):
        if isinstance(one, ShardedTensor):
            check_lies_like(one.grad, one)
        else:
            assert not isinstance(one.grad, ShardedTensor)
        check_close(one.grad, other.grad)


def products(rank: int, size: int) -> None:
    rows, inner, columns = size, size + 3, size + 1
    for dim in (0, 1):
        for x_dim in (None, 1 - dim):
            check_op(F.linear, [(rows, inner), (columns, inner), (columns,)], [x_dim, dim, None])
            check_op(torch.matmul, [(rows, inner), (inner, columns)], [x_dim, dim])
        check_op(F.linear, [(2, rows, inner), (columns, inner), (columns,)], [None, dim, 0])
        check_op(torch.matmul, [(2, rows, inner), (inner, columns)], [None, dim])
        check_op(torch.addmm, [(columns,), (rows, inner), (inner, columns)], [0, None, dim])
        check_op(
            lambda x, y: torch.einsum("ij,kj->ik", x, y), [(rows, inner), (4, inner)], [dim, 0]
        )
    check_op(torch.bmm, [(4, rows, inner), (4, inner, columns)], [0, 0])
    check_op(torch.mv, [(rows, inner), (inner,)], [0, None])


# With 5 sides of 5, 6 and 8: some ranks have less than others, or nothing.
@pytest.mark.parametrize("size", [5, 8][: cases(1, 2)])
def test_linear_and_matmul(pool: Pool, size: int) -> None:
    pool.run(products, size, ranks=FOUR)


def norms(rank: int, size: int) -> None:
    wide = (size + 2,)
    for dim in (0, 1):
        shape = (size, *wide)
        check_op(lambda x: F.layer_norm(x, wide), [shape], [dim])
        check_op(lambda x: F.rms_norm(x, wide), [shape], [dim])
        for own in (None, 0):
            check_op(
                lambda x, w, b: F.layer_norm(x, wide, w, b), [shape, wide, wide], [dim, own, None]
            )
            check_op(lambda x, w: F.rms_norm(x, wide, w), [shape, wide], [dim, own])
        for along in (0, 1):
            check_op(lambda x, along=along: x.softmax(along), [shape], [dim])
            check_op(lambda x, along=along: x.log_softmax(along), [shape], [dim])
    check_op(lambda x, w: F.layer_norm(x, wide, w), [(2, *wide), wide], [None, 0])


@pytest.mark.parametrize("size", [6, 7][: cases(1, 2)])
def test_layer_norm_rms_norm_and_softmax(pool: Pool, size: int) -> None:
    pool.run(norms, size, ranks=FOUR)


def embeddings(rank: int) -> None:
    index = torch.tensor([[0, 3, 9, 9], [1, 10, 2, 0]])
    for rows, width in ((12, 8), (11, 7), (11, 3)):
        for dim in (0, 1):
            check_op(lambda w: F.embedding(index, w), [(rows, width)], [dim])
            check_op(lambda w: F.embedding(index, w, padding_idx=3), [(rows, width)], [dim])
    module = nn.Embedding(11, 6, dtype=F64)
    with torch.no_grad():
        module.weight.copy_(values(11, 6))
    wanted = module(index)
    shard_module(module, ShardingPlan({"weight": chunk(0)}), process_group=pool_group(4))
    check_close(module(index), wanted)


def test_B75_embedding_with_gradients(pool: Pool) -> None:
    pool.run(embeddings, ranks=FOUR)


def attention(rank: int) -> None:
    for heads in (4, 6):
        for dim in (0, 1, 2):
            for causal in (False, True)[heads == 6 :] if soaking() else (dim != heads // 4,):
                check_op(
                    lambda q, k, v, causal=causal: F.scaled_dot_product_attention(
                        q, k, v, is_causal=causal
                    ),
                    [(4, heads, 5, 6)] * 3,
                    [dim] * 3,
                )
    mask = values(5, 5) > 0
    mask[:, 0] = True
    check_op(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), [(2, 4, 5, 6)] * 3, [1] * 3
    )

    def eager(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        q, k, v = ((x @ one).view(3, 5, 4, 2).transpose(1, 2) for one in w.unbind(0))
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~mask, -torch.inf).softmax(-1)
        return (scores @ v).transpose(1, 2).reshape(3, 5, 8) @ out

    check_op(eager, [(3, 5, 8), (3, 8, 8), (8, 8)], [None, 2, 0])


def test_attention_by_heads_and_in_steps(pool: Pool) -> None:
    pool.run(attention, ranks=FOUR)


def losses(rank: int) -> None:
    target, classes = values(6, 8, seed=5).sigmoid(), torch.arange(6)
    each: list[Op] = [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss]
    each += [F.binary_cross_entropy_with_logits]
    for dim in (0, 1):
        for how in ("mean", "sum")[: 2 - dim]:
            for loss in each:
                check_op(
                    lambda x, loss=loss, how=how: loss(x, target, reduction=how), [(6, 8)], [dim]
                )
            check_op(lambda x, how=how: F.cross_entropy(x, classes, reduction=how), [(6, 8)], [dim])
        check_op(lambda x: F.binary_cross_entropy(x.sigmoid(), target), [(6, 8)], [dim])
        for rows in (6, 7, 8):
            check_op(F.mse_loss, [(rows, 8)] * 2, [dim, 1 - dim])
        check_op(F.mse_loss, [(6, 8)] * 2, [None, dim])


def test_losses_average_over_all_elements(pool: Pool) -> None:
    pool.run(losses, ranks=FOUR)


def twice(rank: int) -> None:
    full, x = values(7, 7), values(3, 7, seed=1)
    for dim in (0, 1):
        weight, plain = sharded(full, chunk(dim)).requires_grad_(), full.clone().requires_grad_()
        given, same = x.clone().requires_grad_(), x.clone().requires_grad_()
        for w, one in ((weight, given), (plain, same)):
            out = F.linear(F.linear(one, w).tanh(), w.t()) + (w * w).sum()
            (out.sum() * 2).backward(retain_graph=True)
            out.sum().backward()
        check_lies_like(weight.grad, weight)
        check_close(weight.grad, plain.grad)
        check_close(given.grad, same.grad)


def test_a_parameter_used_twice_and_gradients_added_up(pool: Pool) -> None:
    pool.run(twice, ranks=FOUR)


def second_order(rank: int) -> None:
    full, x = values(5, 6), values(3, 6, seed=1)

    def penalty(w: torch.Tensor, way: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        out = (F.linear(x, way(w)).tanh() ** 2).sum()
        (gradient,) = torch.autograd.grad(out, w, create_graph=True)
        return (gradient**2).sum()

    for spec in (chunk(0), chunk(1), chunk(0, [3, 1, 0, 2])):
        ways: list[Callable[[Any], torch.Tensor]] = [
            whole,
            lambda w: w.resharded(chunk(1)) if isinstance(w, ShardedTensor) else w,
            lambda w: (
                ShardedTensor.from_dtensor(w.resharded(chunk(0)).to_dtensor(), pool_group(4))
                if isinstance(w, ShardedTensor)
                else w
            ),
        ]
        if spec in (chunk(0), chunk(1)):
            ways.append(lambda w: w)
        for way in ways:
            weight, plain = sharded(full, spec).requires_grad_(), full.clone().requires_grad_()
            penalty(weight, way).backward()
            penalty(plain, way).backward()
            check_close(weight.grad, plain.grad)


def test_gradients_of_gradients(pool: Pool) -> None:
    pool.run(second_order, ranks=FOUR)


def through_local(rank: int) -> None:
    full = values(8, 6)
    weight, plain = sharded(full, chunk(0)).requires_grad_(), full.clone().requires_grad_()
    (g,) = torch.autograd.grad((weight.local_tensor() ** 3).sum(), weight, create_graph=True)
    check_close(g.detach(), 3 * full**2)
    (g**2).sum().backward()
    (h,) = torch.autograd.grad((plain**3).sum(), plain, create_graph=True)
    (h**2).sum().backward()
    check_close(weight.grad, plain.grad)


def test_gradients_of_gradients_through_the_local_tensor(pool: Pool) -> None:
    pool.run(through_local, ranks=FOUR)


def any_layout(rank: int) -> None:
    """What DTensor cannot express computes after a reshard, and gradients come back as boxes."""
    full, x = values(6, 9), values(4, 9, seed=1)
    for spec in (boxes(6, 9), chunk(0, [2, 1]), chunk(0, [3, 1, 0, 2])):
        weight, plain = sharded(full, spec).requires_grad_(), full.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="reshard it first"):
            torch.mm(weight, x.t())
        check_close(F.linear(x, weight), F.linear(x, plain))
        found = F.linear(x, weight.resharded(chunk(0))).tanh().sum() + (weight**2).sum()
        wanted = F.linear(x, plain).tanh().sum() + (plain**2).sum()
        check_close(found, wanted)
        found.backward()
        wanted.backward()
        check_lies_like(weight.grad, weight)
        check_close(weight.grad, plain.grad)


def test_B42_computing_after_a_reshard(pool: Pool) -> None:
    pool.run(any_layout, ranks=FOUR)


def along_negative_dims(rank: int) -> None:
    full = torch.linspace(-1, 1, 35, dtype=torch.float64).reshape(5, 7)
    for spec in (chunk(0), chunk(1)):
        one = sharded(full, spec)
        for operation in (torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.softmax):
            for dim in (0, 1, -1, -2):
                found = operation(one, dim).full_tensor()
                torch.testing.assert_close(found, operation(full, dim), rtol=0, atol=1e-12)


def test_dims_counted_from_the_end(pool: Pool) -> None:
    pool.run(along_negative_dims, ranks=FOUR)


def averaged_losses(rank: int) -> None:
    logits = torch.sin(numbered(8, 5))
    target = torch.tensor([0, 1, -100, 3, 4, -100, -100, 2])
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=torch.float64)
    for options in ({}, {"weight": weight}):
        whole = logits.clone().requires_grad_()
        expected = F.cross_entropy(whole, target, **options)
        expected.backward()
        for spec in (chunk(0), chunk(1)):
            one = sharded(logits, spec).requires_grad_()
            found = F.cross_entropy(one, target, **options)
            found.backward()
            assert abs(found.item() - expected.item()) < 1e-12
            torch.testing.assert_close(one.grad.full_tensor(), whole.grad, rtol=0, atol=1e-12)


def test_cross_entropy_counts_elements_and_not_ranks(pool: Pool) -> None:
    pool.run(averaged_losses, ranks=FOUR)


def ranks_without_rows(rank: int) -> None:
    full = torch.sin(numbered(5, 8))
    one = sharded(full, chunk(0))
    ids = torch.tensor([[0, 4], [2, 3]])
    assert torch.equal(F.embedding(ids, one).full_tensor(), F.embedding(ids, full))
    found = F.max_pool1d(one.unsqueeze(0), 2).full_tensor()
    assert torch.equal(found, F.max_pool1d(full.unsqueeze(0), 2))
    torch.testing.assert_close((one @ one.t()).full_tensor(), full @ full.t())


def test_ranks_without_elements_do_not_stop_the_others(pool: Pool) -> None:
    pool.run(ranks_without_rows, ranks=FOUR)


def attention_by_name(rank: int) -> None:
    shape = (2, 4, 3, 8)
    parts = [torch.sin(numbered(*shape) + n) for n in range(3)]
    names = ("query", "key", "value")
    expected = F.scaled_dot_product_attention(*parts)
    spec = LayoutShardingSpec(Layout(Mesh(tp=4), "- tp - -"))
    given = {name: sharded(part, spec) for name, part in zip(names, parts, strict=True)}
    found = F.scaled_dot_product_attention(**given)
    torch.testing.assert_close(found.full_tensor(), expected)
    half = LayoutShardingSpec(Layout(Mesh(tp=2), "- tp - -"))
    try:
        F.scaled_dot_product_attention(*(sharded(part, half) for part in parts))
    except RuntimeError:
        return  # on all ranks alike: the others would wait


def test_attention_by_name_and_on_some_ranks(pool: Pool) -> None:
    pool.run(attention_by_name, ranks=FOUR)


def attention_of_other_layouts(rank: int) -> None:
    """Replicas, heads on some ranks, flattened tensors, and heads dealt in turn."""
    q, k, v = (torch.sin(numbered(2, heads, 3, 8) + heads) for heads in (8, 4, 4))
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for mesh, words in ((Mesh(tp=4), "- tp:1 - -"), (Mesh(dp=2, tp=2), "- tp - - | on dp=1")):
        given = [sharded(one, LayoutShardingSpec(Layout(mesh, words))) for one in (q, k, v)]
        try:
            found = F.scaled_dot_product_attention(*given, enable_gqa=True)
        except OperationError:
            continue  # on all ranks alike
        torch.testing.assert_close(found.full_tensor(), expected)
    flat = sharded(q, LayoutShardingSpec(Layout(Mesh(dp=2, tp=2), "- tp - - | flat dp")))
    with suppress(OperationError):
        check_close(F.scaled_dot_product_attention(flat, flat, flat), attended(q))
    torch.manual_seed(rank)
    replicas = sharded(q, LayoutShardingSpec(Layout(Mesh(dp=2, tp=2), "- tp - -")))
    dropped = F.scaled_dot_product_attention(replicas, replicas, replicas, dropout_p=0.5)
    (part,) = (shard.tensor for shard in dropped.local_shards())
    parts = [torch.empty_like(part) for _ in FOUR]
    dist.all_gather(parts, part.contiguous(), group=pool_group(4))
    assert torch.equal(parts[0], parts[2])
    assert torch.equal(parts[1], parts[3])


def attended(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def test_attention_of_layouts_that_ranks_do_not_compute_alone(pool: Pool) -> None:
    pool.run(attention_of_other_layouts, ranks=FOUR)


def norms_of_uneven_tensors(rank: int) -> None:
    full = torch.sin(numbered(5, 7))
    for spec in (chunk(0), chunk(1)):
        for order in (2, 1, float("inf")):
            whole, one = full.clone().requires_grad_(), sharded(full, spec).requires_grad_()
            whole.norm(order).backward()
            one.norm(order).backward()
            torch.testing.assert_close(one.grad.full_tensor(), whole.grad, rtol=0, atol=1e-12)
        found = sharded(full, spec).sum(dim=[], keepdim=True)
        torch.testing.assert_close(found.full_tensor(), full.sum(dim=[], keepdim=True))


def test_gradients_of_norms_over_all_dims(pool: Pool) -> None:
    pool.run(norms_of_uneven_tensors, ranks=FOUR)
