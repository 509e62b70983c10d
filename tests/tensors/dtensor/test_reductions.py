"""What DTensor's `redistribute` does and no layout says: on four ranks, values and gradients."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import _MaskPartial

import reshard as rs
from tests.ranks.outcome import Raised
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.tensors.dtensor.random_redistributions import mesh_on_four
from tests.tensors.test_gradients import raised
from tests.tensors.worlds import numbered

LINE, SQUARE = (4,), (2, 2)
FULL = numbered(10, 6).double() - 20
TIMEOUT = 20.0


def on_four(tried: int) -> list[int]:
    """What eight ranks tell, of which the first four have tried so many cases."""
    return [tried] * 4 + [0] * 4


def masked_lookups(rank: int) -> int:
    """Rows of an embedding that is cut by rows: each rank has some, and masks the others."""
    mesh, tried = mesh_on_four(LINE), 0
    if rank > 3:
        return tried
    indices = torch.tensor([[0, 8, 3, 3], [5, 1, 7, 2]])
    expected = F.embedding(indices, FULL)
    given = distribute_tensor(indices, mesh, [Replicate()])
    for target in ([Replicate()], [Shard(0)], [Shard(2)], [Replicate()]):
        weight = distribute_tensor(FULL, mesh, [Shard(0)]).requires_grad_()
        found = F.embedding(given, weight)
        assert isinstance(found.placements[0], _MaskPartial)
        before = found.to_local().detach().clone()
        moved = rs.move(found, to=(mesh, target), timeout=TIMEOUT)
        assert moved.placements == tuple(target)
        assert torch.equal(moved.detach().full_tensor(), expected)
        assert torch.equal(found.to_local(), before)
        (moved * moved.detach()).sum().backward()
        whole = FULL.clone().requires_grad_()
        (F.embedding(indices, whole) * expected).sum().backward()
        assert torch.equal(weight.grad.full_tensor(), whole.grad)
        tried += 1
    return tried


def test_masked_lookups(pool: Pool) -> None:
    assert pool.run(masked_lookups) == on_four(4)


def lookup(mesh: object) -> DTensor:
    weight = distribute_tensor(FULL, mesh, [Shard(0)])
    return F.embedding(distribute_tensor(torch.tensor([1, 4, 8]), mesh, [Replicate()]), weight)


def used_up(rank: int) -> None:
    mesh = mesh_on_four(LINE)
    if rank < 4:
        found = lookup(mesh)
        rs.move(found, to=(mesh, [Replicate()]), timeout=TIMEOUT)
        rs.move(found, to=(mesh, [Replicate()]), timeout=TIMEOUT)


def test_a_mask_is_used_once(pool: Pool) -> None:
    raised(pool.outcomes(used_up)[:4], "TensorError", "was used up", "compute the tensor again")
    assert pool.run(masked_lookups) == on_four(4)


def norms(rank: int) -> int:
    mesh, square, tried = mesh_on_four(LINE), mesh_on_four(SQUARE), 0
    if rank > 3:
        return tried
    expected = torch.linalg.vector_norm(FULL, dim=0)
    for on, placements in ((mesh, [Shard(0)]), (square, [Shard(0), Shard(0)])):
        weight = distribute_tensor(FULL, on, placements).requires_grad_()
        found = torch.linalg.vector_norm(weight, dim=0)
        assert {type(one) for one in found.placements} == {_NormPartial}
        moved = rs.move(found, to=(on, [Replicate()] * on.ndim), timeout=TIMEOUT)
        torch.testing.assert_close(moved.to_local(), expected)
        moved.sum().backward()
        torch.testing.assert_close(weight.grad.full_tensor(), FULL / expected)
        # Elsewhere it is reduced first.
        layout = rs.Layout(rs.Mesh(x=2, ranks=[1, 3]), "x")
        local = rs.move(found.detach(), to=layout, group=pool_group(4), timeout=TIMEOUT)
        assert (local is not None) == (rank in (1, 3))
        if local is not None:
            torch.testing.assert_close(local, expected.chunk(2)[rank // 2])
        tried += 1
    return tried


def test_norms(pool: Pool) -> None:
    assert pool.run(norms) == on_four(2)


def mixed(rank: int) -> int:
    """Sums and averages are added up and divided in float32, and rounded once."""
    mesh = mesh_on_four(SQUARE)
    if rank > 3:
        return 0
    addends = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(3)).bfloat16()
    source = DTensor.from_local(
        addends[rank].clone(), mesh, [Partial("avg"), Partial("sum")], run_check=False
    )
    expected = (addends.float().sum(0) / 2).bfloat16()
    moved = rs.move(source, to=(mesh, [Shard(1), Replicate()]), timeout=TIMEOUT)
    assert torch.equal(moved.to_local(), expected.chunk(2, dim=1)[rank // 2])
    columns = rs.Layout(rs.Mesh(x=4), "x -")
    local = rs.move(source, to=columns, group=pool_group(4), timeout=TIMEOUT)
    assert torch.equal(local, expected.chunk(4)[rank])
    return 1


def test_mixed_sums_and_averages(pool: Pool) -> None:
    assert pool.run(mixed) == on_four(1)


def outside(rank: int) -> None:
    """Ranks outside the mesh may call as well."""
    mesh = mesh_on_four(SQUARE)
    inside = rank < 4
    for op, placement in (("avg", Replicate()), ("bor", Replicate()), ("sum", Partial("max"))):
        made = torch.full((3,), 1 + rank // 2) if inside else torch.empty(0, dtype=torch.int64)
        made = made if op == "bor" else made.float()
        source = DTensor.from_local(
            made, mesh, [Partial(op), Replicate()], run_check=False,
            shape=torch.Size((3,)), stride=(1,),
        )  # fmt: skip
        moved = rs.move(source, to=(mesh, [placement, Shard(0)]), timeout=TIMEOUT)
        assert moved.placements == (placement, Shard(0))
        worth = {"avg": 1.5, "bor": 3, "sum": 3}[op]
        assert moved.to_local().tolist() == [worth] * (2 - rank % 2 if inside else 0)


def test_ranks_outside_the_mesh(pool: Pool) -> None:
    pool.run(outside)


def to_partials(rank: int) -> int:
    """Replicas as addends: what torch does inside, and with a name for it here."""
    mesh = mesh_on_four(SQUARE)
    if rank > 3:
        return 0
    new = [Partial(), Partial("avg"), Partial("max"), Partial("min"), _NormPartial(2)]
    new.append(_MaskPartial("sum", offset_shape=torch.Size((10, 6)), offset_dim=0))
    for placement in new:
        source = DTensor.from_local(FULL.abs() % 9, mesh, [Replicate(), Shard(1)], run_check=False)
        wanted = source.redistribute(mesh, [Replicate()] * 2)
        target = [placement, Replicate()]
        moved = rs.move(source.requires_grad_(), to=(mesh, target), timeout=TIMEOUT)
        spec = moved._spec
        if isinstance(placement, _MaskPartial):
            placement.mask_buffer.release_mask()
        theirs = redistribute_local_tensor(wanted.to_local(), wanted._spec, spec)
        assert torch.equal(moved.to_local(), theirs), placement
        gradient = distribute_tensor(FULL.repeat(1, 2), mesh, [Replicate(), Shard(0)])
        (found,) = torch.autograd.grad(moved, source, gradient)
        assert found.placements == source.placements
        assert torch.equal(found.full_tensor(), FULL.repeat(1, 2))
    return len(new)


def test_replicas_become_addends(pool: Pool) -> None:
    assert pool.run(to_partials) == on_four(6)


def lazy(rank: int) -> None:
    """Conjugates and negatives that are not computed yet, of sources and of gradients."""
    have, want = rs.Layout(rs.Mesh(dp=4), "dp -"), rs.Layout(rs.Mesh(tp=4), "- tp")
    full = torch.complex(FULL[:8], FULL[:8] + 3)
    columns = torch.tensor_split(full, (2, 4, 6), dim=1)[rank]
    x = full.chunk(4)[rank].clone().requires_grad_()
    moved = rs.move(x.conj(), have, want, shape=(8, 6), group=pool_group(4), timeout=TIMEOUT)
    assert torch.equal(moved, columns.conj())
    (found,) = torch.autograd.grad(moved, x, columns.conj())
    assert torch.equal(found, x.detach())
    imaginary = x.detach().conj().imag
    assert imaginary.is_neg()
    moved = rs.move(imaginary, have, want, shape=(8, 6), group=pool_group(4), timeout=TIMEOUT)
    assert torch.equal(moved, columns.conj().imag)


def test_lazy_conjugates_and_negatives(pool: Pool) -> None:
    pool.run(lazy, ranks=range(4))


def dtypes(rank: int) -> int:
    mesh, tried = mesh_on_four(LINE), 0
    if rank > 3:
        return tried
    full = torch.tensor([1 + 2.0**-10, 2.0**-3, 3.0, 5.0, 7.0]).float()
    kinds = (None, torch.bfloat16, torch.float64)
    for forward in kinds:
        for backward in kinds:
            options = {"forward_dtype": forward, "backward_dtype": backward, "async_op": True}
            found = []
            for by_torch in (True, False):
                x = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
                if by_torch:
                    y = x.redistribute(mesh, [Replicate()], **options)
                else:
                    y = rs.move(x, to=(mesh, [Replicate()]), timeout=TIMEOUT, **options)
                y.backward(distribute_tensor(full.to(y.dtype), mesh, [Replicate()]))
                found.append((y.dtype, y.to_local().tolist(), x.grad.to_local().tolist()))
            assert found[0] == found[1], options
            tried += 1
    return tried


def test_dtypes_that_travel(pool: Pool) -> None:
    assert pool.run(dtypes) == on_four(9)


def refused_dtypes(rank: int) -> None:
    have, want = rs.Layout(rs.Mesh(dp=4), "dp -"), rs.Layout(rs.Mesh(tp=4), "- tp")
    given = {"group": pool_group(4), "shape": (8, 6), "timeout": TIMEOUT}
    for options, words in (
        ({"forward_dtype": torch.float32}, "give cast_to="),
        ({"backward_dtype": "float32"}, "give a dtype"),
        ({"async_op": 3}, "True or False"),
    ):
        with pytest.raises(rs.TensorError, match=words):
            rs.move(FULL[:8].chunk(4)[rank], have, want, **given, **options)


def test_dtypes_that_are_refused(pool: Pool) -> None:
    pool.run(refused_dtypes, ranks=range(4))


def writing(rank: int) -> None:
    """In place, into a result that has a gradient; not into one that is the source's memory."""
    have, want = rs.Layout(rs.Mesh(dp=4), "dp -"), rs.Layout(rs.Mesh(tp=4), "- tp")
    given = {"group": pool_group(4), "shape": (8, 6), "timeout": TIMEOUT}
    x = FULL[:8].chunk(4)[rank].clone().requires_grad_()
    y = rs.move(x, have, want, **given)
    before = y.detach().clone()
    y.mul_(3).add_(1)
    y[0] = 0
    assert torch.equal(y[1:], before[1:] * 3 + 1)
    y.sum().backward()
    expected = torch.full((8, 6), 3.0).double()
    expected[0] = 0
    assert torch.equal(x.grad, expected.chunk(4)[rank])
    at_rest = rs.move(x, have, have, **given)
    with pytest.raises(RuntimeError, match="modified inplace"):
        at_rest.mul_(2)


def test_writing_into_results(pool: Pool) -> None:
    pool.run(writing, ranks=range(4))


def compiled(rank: int) -> None:
    have, want = rs.Layout(rs.Mesh(dp=2), "dp -"), rs.Layout(rs.Mesh(tp=2), "- tp")

    def step(x: torch.Tensor) -> torch.Tensor:
        return rs.move(x * 2, have, want, shape=(4, 4), group=pool_group(2)).sin() + 1

    x = torch.arange(8.0).reshape(2, 4).requires_grad_()
    expected = step(x)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a tensor between two graphs
        found = torch.compile(step, backend="eager")(x)
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], slope)
    (reason,) = torch._dynamo.utils.counters["graph_break"].items()
    assert "reshard moves data between processes" in reason[0], reason
    assert reason[1] == 1
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="moves data between processes"):
        torch.compile(step, backend="eager", fullgraph=True)(x)


def test_a_move_ends_a_compiled_graph(pool: Pool) -> None:
    pool.run(compiled, ranks=range(2))


def refused(rank: int, what: str) -> None:
    mesh = mesh_on_four(SQUARE)
    line = mesh_on_four(LINE)
    if rank > 3:
        return
    if what == "mask":
        found = lookup(line)
        moved = DTensor.from_local(found.to_local(), mesh, [found.placements[0], Shard(0)])
        rs.move(moved, to=(mesh, [moved.placements[0], Replicate()]), timeout=TIMEOUT)
        return
    sizes = (5, 2) if what == "shape" and rank == 2 else (4, 2)
    placements = [Partial("sum"), Partial("max" if what == "mixed" else "avg")]
    source = DTensor.from_local(
        torch.ones(sizes).to(torch.int64 if what == "integers" else torch.float32), mesh,
        [Partial("sum")] * 2 if what == "mixed" else placements,
        shape=torch.Size((4, 2)), stride=(2, 1), run_check=False,
    )  # fmt: skip
    if what == "mixed":
        source._spec.placements = tuple(placements)
    into = source if what == "into" else None
    rs.move(source, to=(mesh, [Replicate()] * 2), into=into, timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("mask", "in another way"),
        ("mixed", "pending max and sum"),
        ("shape", "rank 2 holds a local tensor of shape (5, 2)"),
        ("integers", "integers are not divided"),
        ("into", "leave out into="),
    ],
)
def test_refusals_are_the_same_on_all_ranks(pool: Pool, what: str, words: str) -> None:
    outcomes = pool.outcomes(refused, what)[:4]
    kinds = {outcome.kind for outcome in outcomes if isinstance(outcome, Raised)}
    assert len(kinds) == 1, outcomes
    raised(outcomes, kinds.pop(), words)
    assert pool.run(mixed) == on_four(1)
