"""Which saved tensors are kept as shares: inputs, their views and marked tensors, nothing else."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from reshard.nn import (
    input_reshard,
    mark_replicated,
    resharding_of,
)
from tests.nn.activations.blocks import MLP, Parallel
from tests.nn.activations.compare import (
    FOUR,
    HIDDEN,
    Cube,
    check_same,
    numbers,
)
from tests.ranks.meshes import mesh_of
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group


def only_what_is_equal(rank: int) -> None:
    """Parameters, statistics of norms and rank-local tensors stay, and are not gathered."""
    mesh = mesh_of(4)
    model = Parallel(HIDDEN, mesh, 1)
    input_reshard(model, mesh, 0)
    x = numbers(8, HIDDEN).requires_grad_()
    out = model(x)
    assert resharding_of(model).stats().bytes_seen == 8 * HIDDEN * 4
    out.sum().backward()
    assert resharding_of(model).stats().collectives == 1


def test_D26_only_inputs_are_kept_as_shares(pool: Pool) -> None:
    pool.run(only_what_is_equal, ranks=FOUR)


class SavesViews(nn.Module):
    """Saves views of its inputs, with all kinds of strides."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        one = x.t() * x.t().exp()
        two = (x.reshape(-1) * x.flatten()).sum() * scale
        three = x[:, ::2].square().sum() + x[1:].pow(3).sum() + (x * mask).sin().sum()
        return (one * one).sum() + two.exp() + three


def views_and_strides(rank: int) -> None:
    group = pool_group(4)
    mask = numbers(6, 8) > 0
    for like in (numbers(6, 8), numbers(8, 6).t(), numbers(12, 8)[::2]):
        check_same(
            SavesViews,
            lambda one: input_reshard(one, group, 1),
            like,
            partial(with_strides, stride=like.stride(), mask=mask),
        )


def with_strides(
    model: nn.Module, x: torch.Tensor, stride: tuple[int, ...], mask: torch.Tensor
) -> torch.Tensor:
    strided = torch.empty_strided(x.shape, stride).copy_(x)
    found: torch.Tensor = model(strided, mask, torch.tensor(0.001))
    return found


def test_D24_views_strides_masks_and_scalars(pool: Pool) -> None:
    pool.run(views_and_strides, ranks=FOUR)


def marked(rank: int) -> None:
    group = pool_group(4)

    class Normed(MLP):
        def __init__(self) -> None:
            super().__init__(HIDDEN, 64, group)
            self.norm = nn.LayerNorm(HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(mark_replicated(self.norm(x)))

    model = check_same(Normed, lambda one: input_reshard(one, group, 0), numbers(8, HIDDEN))
    # The norm saves the input, and the first layer what is marked; two turns.
    assert resharding_of(model).stats().bytes_seen == 2 * 2 * 8 * HIDDEN * 4


def test_marked_tensors_are_kept_as_shares(pool: Pool) -> None:
    pool.run(marked, ranks=FOUR)


def marked_in_other_orders_of_dims(rank: int) -> None:
    """The same elements, marked as they are and transposed, are kept once, in one order of dims."""
    group = pool_group(4)

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = mark_replicated((2 * x)[:, ::2])  # elements with gaps
            one = y * y.sin()
            mark_replicated(y.t())
            mark_replicated(y)
            return one.sum() + (y * y.exp()).sum()

    check_same(Twice, lambda one: input_reshard(one, group, 0), numbers(6, 8))


def test_a_tensor_that_is_marked_in_other_orders_of_dims(pool: Pool) -> None:
    pool.run(marked_in_other_orders_of_dims, ranks=FOUR)


def beside_an_input(rank: int) -> None:
    """What a rank has for itself may lie in one storage with what is equal."""
    group = pool_group(4)

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kv = nn.Parameter(numbers(HIDDEN, HIDDEN, seed=1))
            self.q = nn.Parameter(numbers(HIDDEN, HIDDEN, seed=10 + rank))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, kv = F.linear(x, torch.cat([self.q, self.kv])).split(HIDDEN, -1)
            return q * mark_replicated(kv)

    check_same(Fused, lambda one: input_reshard(one, group, 0), numbers(6, HIDDEN))

    class Half(nn.Module):
        def __init__(self, other: torch.Tensor) -> None:
            super().__init__()
            self.other = other

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.other.exp()

    def with_half(wrap: bool) -> torch.Tensor:
        both = torch.stack([numbers(4, 8), numbers(4, 8, seed=rank)])
        model = Half(both[1])
        if wrap:
            input_reshard(model, group, 0)
        given = both[0].requires_grad_()
        model(given).square().sum().backward()
        return given.grad

    assert torch.equal(with_half(True), with_half(False))


def test_rank_local_memory_beside_an_input_stays(pool: Pool) -> None:
    pool.run(beside_an_input, ranks=FOUR)


def memory_of_others(rank: int) -> None:
    """A saved tensor is gone, and the next one has its place: they are not the same."""
    mesh = mesh_of(4)

    class Many(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = x.sum() * 0
            for factor in range(1, 13):
                spread = DTensor.from_local(x * factor, mesh, [Replicate()])
                total = total + (spread * spread).to_local().sum()
                del spread
            return total

    check_same(Many, lambda one: input_reshard(one, mesh, 0), numbers(6, 8))
    check_same(Many, lambda one: input_reshard(one, mesh, 0, budget="1MiB"), numbers(6, 8))


def test_memory_that_is_given_to_others(pool: Pool) -> None:
    pool.run(memory_of_others, ranks=FOUR)


def marked_for_long(rank: int) -> None:
    from reshard.nn.activations.replicated import _marked

    before, kept = len(_marked), numbers(4, 8)
    for _ in range(50):
        mark_replicated(kept)
        mark_replicated(numbers(4, 8))
    assert len(_marked) <= before + 3
    assert len(_marked[kept.untyped_storage()._cdata]) == 1


def test_marks_do_not_pile_up(pool: Pool) -> None:
    pool.run(marked_for_long, ranks=[0])


def filled_again(rank: int) -> None:
    """Memory that is filled again behind autograd's back is another tensor in the next call."""
    model = Cube()
    input_reshard(model, pool_group(4), 0)
    x = numbers(4, 8).requires_grad_()
    kept = model(x)
    x.data.copy_(numbers(4, 8, seed=5))
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)
    del kept


def test_memory_that_is_filled_again(pool: Pool) -> None:
    pool.run(filled_again, ranks=FOUR)


def buffers(rank: int) -> None:
    """A buffer that is given as an argument is one all the same."""
    group = pool_group(4)

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask.exp()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.register_buffer("mask", numbers(6, HIDDEN, seed=rank))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x, self.mask)
            return found

    check_same(Outer, lambda one: input_reshard(one, group, 0, modules="inner"), numbers(6, HIDDEN))


def test_buffers_as_arguments_stay(pool: Pool) -> None:
    pool.run(buffers, ranks=FOUR)


def strides(rank: int) -> None:
    """Inputs with gaps come back with their strides, and are kept once."""
    group = pool_group(4)

    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x.exp()).sum() + (x.t() * x.t().sin()).sum() + x.chunk(2, -1)[0].exp().sum()

    seen: list[tuple[int, ...]] = []

    def called(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        big = torch.cat([x, x], -1)
        found: torch.Tensor = model(big[:, : x.shape[1]])
        seen.append(big.stride())
        return found

    model = check_same(Views, lambda one: input_reshard(one, group, 0), numbers(8, HIDDEN), called)
    # In each of two steps: x once, though x and x.t() are saved.
    assert resharding_of(model).stats().bytes_seen == 2 * 8 * HIDDEN * 4
    dense = check_same(Views, lambda one: input_reshard(one, group, 0), numbers(8, HIDDEN))
    assert resharding_of(dense).stats().bytes_seen == 2 * 8 * HIDDEN * 4


def test_views_with_gaps(pool: Pool) -> None:
    pool.run(strides, ranks=FOUR)


def changed_inside(rank: int) -> None:
    """An input that the module itself has changed is not equal on all ranks any more."""
    group = pool_group(4)

    class Mixes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            return Local()(y) * x

    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x.add_(dist.get_rank())
            return x.exp() * x

    def wrap(model: nn.Module) -> None:
        input_reshard(model, group, 0)

    check_same(Mixes, wrap, numbers(4, HIDDEN))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.local = Local()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.local(x * 1.5)
            return found

    check_same(Outer, lambda one: input_reshard(one, group, 0, modules="local"), numbers(4, HIDDEN))


def test_an_input_changed_in_forward_stays_whole(pool: Pool) -> None:
    pool.run(changed_inside, ranks=FOUR)


class Reinterpreted(nn.Module):
    """Saves a view of its input with larger elements, which begins or ends inside the input."""

    def forward(self, x: torch.Tensor, w: torch.Tensor, start: int) -> torch.Tensor:
        return x[start : start + 38].view(torch.float32) * w


def larger_elements(rank: int) -> None:
    model = Reinterpreted()
    input_reshard(model, pool_group(4), 0)
    base = torch.arange(41, dtype=torch.int16)
    for x, start in ((base[1:40], 1), (base[:39], 0), (base[2:41], 0)):
        w = torch.ones(19, requires_grad=True)
        model(x, w, start).sum().backward()
        assert w.grad is not None
        assert torch.equal(w.grad.view(torch.int16), x[start : start + 38])


def test_views_with_larger_elements(pool: Pool) -> None:
    pool.run(larger_elements, ranks=FOUR)
