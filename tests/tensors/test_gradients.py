"""Gradients of moves: of ranks without input or output, twice, and where there are none."""

import time
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import reshard as rs
from tests.ranks.outcome import Outcome, Raised, Returned
from tests.ranks.pool import Pool, fresh_ranks
from tests.tensors.dtensor.redistribution import Pair, check_same, gradient_for, leaf, source
from tests.tensors.worlds import cut, numbered

TRAINERS, SERVERS = rs.Mesh(dp=2), rs.Mesh(tp=2, ranks=[2, 3])
ROWS, COLUMNS = rs.Layout(TRAINERS, "dp -"), rs.Layout(SERVERS, "- tp")
WHOLE = rs.Layout(SERVERS, "- -")
SHAPE = (6, 4)
TIMEOUT = 20.0


def part(layout: rs.Layout, rank: int, first: int = 0, grad: bool = True) -> torch.Tensor | None:
    """A rank's part of a counting tensor; None where it has none."""
    if layout.holds(rank) is None:
        return None
    return cut(numbered(*SHAPE).double() + first, layout, rank).requires_grad_(grad)


def across(rank: int, want: rs.Layout, copies: int) -> None:
    """From ranks 0 and 1 to ranks 2 and 3; each has a loss or lends a hand."""
    x = part(ROWS, rank)
    y = rs.move(x, ROWS, want, shape=SHAPE, dtype="float64", timeout=TIMEOUT)
    assert y.requires_grad
    if x is None:
        assert torch.equal(y, part(want, rank))
        (y * y).sum().backward()
    else:
        assert tuple(y.shape) == (0,)
        rs.backward(y)
        assert torch.equal(x.grad, copies * 2 * x.detach())


@pytest.mark.parametrize(("want", "copies"), [(COLUMNS, 1), (WHOLE, 2)])
def test_between_disjoint_ranks(pool: Pool, want: rs.Layout, copies: int) -> None:
    pool.run(across, want, copies, ranks=range(4))


def stay(rank: int, grad: str) -> torch.Tensor:
    """A replicated tensor that is already where it should be."""
    layout = rs.Layout(rs.Mesh(dp=4), "- -")
    x = part(layout, rank)
    y = rs.move(x, layout, layout, shape=SHAPE, grad=grad, timeout=TIMEOUT)
    assert y.data_ptr() == x.data_ptr()
    y.backward(torch.full(SHAPE, 10.0**rank, dtype=torch.float64))
    return x.grad[0, 0].item()


def test_replicas_at_rest(pool: Pool) -> None:
    """Replicas are one value: its gradient is the sum of theirs, also where nothing moves."""
    assert pool.run(stay, "sum", ranks=range(4)) == [1111.0] * 4
    assert pool.run(stay, "replicated", ranks=range(4)) == [1.0, 10.0, 100.0, 1000.0]


def average_halves(rank: int) -> None:
    """Gradients are added up and divided in float32, and rounded once, for meshes and for boxes."""
    shape = (64,)
    have, whole = rs.Layout(rs.Mesh(dp=3), "- | avg dp"), rs.Layout(rs.Mesh(x=3), "-")
    boxes = {holder: [rs.Box((0,), (40,)), rs.Box((40,), shape)] for holder in range(3)}
    gradients = [torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    gradients = [gradient.bfloat16() for gradient in gradients]
    total = gradients[0].float() + gradients[1].float() + gradients[2].float()
    for want in (whole, rs.Layout.from_boxes(shape, boxes)):
        x = torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)
        y = rs.move(x, have, want, shape=shape, timeout=TIMEOUT)
        y.backward(gradients[rank])
        assert torch.equal(x.grad, (total / torch.tensor(3.0)).bfloat16()), want


def test_gradients_of_an_average_are_rounded_once(pool: Pool) -> None:
    pool.run(average_halves, ranks=range(3))


def gradients_of_all_forms(rank: int) -> None:
    """Gradients that are expanded, transposed, sliced or of another dtype."""
    have, want = rs.Layout(rs.Mesh(dp=4), "dp -"), rs.Layout(rs.Mesh(tp=4), "- tp")
    weights = numbered(*SHAPE).double()
    for cast in (None, "float32", "float64"):
        x = part(have, rank)
        y = rs.move(x, have, want, shape=SHAPE, cast_to=cast, timeout=TIMEOUT)
        y.sum().backward(retain_graph=True)
        assert torch.equal(x.grad, torch.ones_like(x))
        x.grad, kind = None, y.dtype
        mine = cut(weights, want, rank).to(kind)
        y.backward(mine.T.contiguous().T, retain_graph=True)
        y.backward(torch.stack([mine, mine], dim=-1)[..., 0])
        assert x.grad.dtype == torch.float64
        assert torch.equal(x.grad, 2 * cut(weights, have, rank))


def test_forms_of_gradients(pool: Pool) -> None:
    pool.run(gradients_of_all_forms, ranks=range(4))


def gradients_of_float8(rank: int) -> None:
    """Casts to and from float8, with gradients that it can express."""
    have, want = rs.Layout(rs.Mesh(dp=2), "dp -"), rs.Layout(rs.Mesh(tp=2), "- -")
    for dtype, cast in (
        ("bfloat16", "float8_e4m3fn"), ("float8_e5m2", "float32"), ("float8_e5m2", "float8_e4m3fn"),
    ):  # fmt: skip
        x = cut(numbered(4, 2), have, rank).to(getattr(torch, dtype)).requires_grad_()
        y = rs.move(x, have, want, shape=(4, 2), cast_to=cast, timeout=TIMEOUT)
        assert torch.equal(y.detach().float(), numbered(4, 2).float())
        y.float().backward(torch.full((4, 2), rank + 1.0))
        assert x.grad.dtype == x.dtype
        assert torch.equal(x.grad.float(), torch.full((2, 2), 3.0))


def test_gradients_of_casts_to_and_from_float8(pool: Pool) -> None:
    pool.run(gradients_of_float8, ranks=range(2))


def twice(rank: int, have: rs.Layout, want: rs.Layout, sources: int, copies: int) -> None:
    """The gradient of a gradient of cubes."""
    x = part(have, rank, first=1)
    y = rs.move(x, have, want, shape=SHAPE, timeout=TIMEOUT)
    (g,) = torch.autograd.grad(y, x, 3 * y * y, create_graph=True)
    torch.testing.assert_close(g, copies * 3 * x.detach() ** 2)
    (h,) = torch.autograd.grad(g, x, torch.full_like(g, 5.0))
    torch.testing.assert_close(h, sources * 5 * copies * 6 * x.detach())


def test_twice(pool: Pool) -> None:
    mesh = rs.Mesh(dp=2, tp=2)
    forms = [rs.Layout(mesh, text) for text in ("dp tp", "- (tp dp)", "tp -", "- -")]
    for have in forms:
        for want in forms:
            counts = [4 // len({str(p) for r in range(4) for p in one.pieces(r, SHAPE)})
                      for one in (have, want)]  # fmt: skip
            pool.run(twice, have, want, *counts, ranks=range(4))


def twice_as_torch(rank: int) -> int:
    """Second derivatives of a quadratic form, of DTensors on one mesh, by reshard and by torch."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    if rank > 3:
        return 0
    kinds = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Partial(), Partial())]
    tried = 0
    for have in kinds:
        for want in kinds[:2]:
            pair = Pair((7, 5), have, want)
            results = []
            for move in (by_reshard, by_torch):
                x = leaf(source(mesh, pair, rank), grad=True)
                y = move(x, want)
                weights = gradient_for(mesh, pair, rank, number=0)
                (g,) = torch.autograd.grad((y * y * weights).sum(), x, create_graph=True)
                (h,) = torch.autograd.grad((g * g).sum(), x)
                results.append((g.detach(), h))
            for found, wanted in zip(*results, strict=True):
                check_same(found, wanted, f"{pair}")
            tried += 1
    return tried


def by_reshard(x: torch.Tensor, want: Sequence) -> torch.Tensor:
    return rs.move(x, to=(x.device_mesh, want), timeout=TIMEOUT)


def by_torch(x: torch.Tensor, want: Sequence) -> torch.Tensor:
    return x.redistribute(x.device_mesh, want)


def test_twice_as_dtensor(pool: Pool) -> None:
    assert pool.run(twice_as_torch) == [6] * 4 + [0] * 4


def with_and_without(rank: int) -> None:
    """The same move with gradients, without, and with them again."""
    for _ in range(2):
        across(rank, COLUMNS, 1)
        with torch.no_grad():
            y = rs.move(part(ROWS, rank), ROWS, COLUMNS, shape=SHAPE, dtype="float64")
        assert (y is None) == (rank < 2)
        assert y is None or not y.requires_grad
        y = rs.move(part(ROWS, rank, grad=False), ROWS, COLUMNS, shape=SHAPE, dtype="float64")
        assert (y is None) == (rank < 2)
        assert y is None or not y.requires_grad
        rs.backward(None)


def test_no_grad(pool: Pool) -> None:
    pool.run(with_and_without, ranks=range(4))


def donate_with_gradients(rank: int) -> None:
    """The gradient that is moved is also the gradient of another tensor."""
    rows, columns = (rs.Layout(rs.Mesh(x=2), text) for text in ("x -", "- x"))
    mesh, other = DeviceMesh("cpu", [0, 1]), torch.ones(6, 2, requires_grad=True)
    if rank > 1:
        return
    tripled = other * 3  # made first, so that its backward comes last
    y = rs.move(torch.ones(3, 4, requires_grad=True) * 1, rows, columns, shape=SHAPE, donate=True)
    ((y + tripled) * 2).sum().backward()
    assert torch.equal(other.grad, torch.full((6, 2), 6.0))
    x = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)]).requires_grad_()
    other = DTensor.from_local(torch.ones(6, 2), mesh, [Shard(1)]).requires_grad_()
    tripled = other * 3
    y = rs.move(x * 1, to=(mesh, [Shard(1)]), donate=True)
    ((y + tripled) * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full(SHAPE, 2.0))
    assert torch.equal(other.grad.full_tensor(), torch.full(SHAPE, 6.0))


def test_gradients_of_a_donated_source_are_not_freed(pool: Pool) -> None:
    pool.run(donate_with_gradients)


def write_what_is_saved(rank: int) -> None:
    """A move into tensors that an operation has kept for its backward, as any in-place write."""
    rows, columns = (rs.Layout(rs.Mesh(x=2), text) for text in ("x -", "- x"))
    mesh = DeviceMesh("cpu", [0, 1])
    if rank > 1:
        return
    spec = rs.sharded.ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"])
    for atomic in (False, True):
        kinds = {
            "plain": torch.ones(6, 2),
            "parameter": torch.nn.Parameter(torch.ones(6, 2)),
            "view": torch.ones(12, 2)[::2],
            "dtensor": DTensor.from_local(torch.ones(6, 2), mesh, [Shard(1)]),
            "sharded": rs.sharded.ones(spec, *SHAPE, process_group=mesh.get_group()),
        }
        for kind, into in kinds.items():
            x = torch.ones_like(into.detach()).requires_grad_()
            loss = (x * into).sum()
            rs.move(torch.ones(3, 4), rows, columns, shape=SHAPE, into=into, atomic=atomic)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            assert into._version, kind
    with torch.inference_mode():
        into = torch.zeros(6, 2)
        rs.move(torch.ones(3, 4), rows, columns, shape=SHAPE, into=into)
    assert torch.equal(into, torch.ones(6, 2))


def test_autograd_notices_writes_into_tensors_that_it_has_kept(pool: Pool) -> None:
    pool.run(write_what_is_saved)


def raised(outcomes: Sequence[Outcome], kind: str, *words: str) -> None:
    """Every rank raised the same kind of error, soon, and it has these words."""
    for outcome in outcomes:
        assert isinstance(outcome, Raised), outcome
        assert outcome.kind == kind, outcome
        assert all(word in outcome.message for word in words), outcome.message
        assert outcome.seconds < 5


def refused(rank: int, have: rs.Layout, options: dict) -> None:
    x = part(have, rank)
    wants_into = options.pop("into", False) and COLUMNS.holds(rank) is not None
    into = torch.zeros(COLUMNS.local_shape(rank, SHAPE)).double() if wants_into else None
    rs.move(x, have, COLUMNS, shape=SHAPE, dtype="float64", into=into, timeout=TIMEOUT, **options)


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_pending_without_gradients(pool: Pool, op: str) -> None:
    have = rs.Layout(TRAINERS, f"- - | {op} dp")
    raised(pool.outcomes(refused, have, {}, ranks=range(4)), "TensorError", f"pending {op}")


def test_integers_have_no_gradients(pool: Pool) -> None:
    outcomes = pool.outcomes(refused, ROWS, {"cast_to": "int64"}, ranks=range(4))
    raised(outcomes, "TensorError", "int64", "detach the source")


def refused_into(rank: int) -> None:
    layout = rs.Layout(rs.Mesh(dp=4), "dp -")
    want = rs.Layout(rs.Mesh(tp=4), "- tp")
    into = torch.zeros(want.local_shape(rank, SHAPE)).double()
    rs.move(part(layout, rank), layout, want, shape=SHAPE, into=into, timeout=TIMEOUT)


def test_gradients_do_not_pass_into(pool: Pool) -> None:
    raised(pool.outcomes(refused_into, ranks=range(4)), "TensorError", "into=", "no_grad")
    outcomes = pool.outcomes(refused, ROWS, {"into": True}, ranks=range(4))
    raised(outcomes[2:], "TensorError", "into=")


def stay_in_place(rank: int) -> None:
    layout, shape = rs.Layout(rs.Mesh(x=4), "x -"), (1, 6)
    local = None if rank else torch.arange(6.0).double()[None]
    into = torch.zeros(layout.local_shape(rank, shape)).double() if rank < 3 else None
    for _ in range(2):
        kind = {"shape": shape, "dtype": "float64"}
        rs.move(local, layout, layout, **kind, into=into, timeout=TIMEOUT)  # type: ignore[call-overload]
    assert rank or torch.equal(into, local)


def test_a_rank_without_into_where_nothing_moves(pool: Pool) -> None:
    """Ranks with `into=` copy, and expect no message of the rank that only returns its source."""
    pool.run(stay_in_place, ranks=range(4))


def stay_with_gradients_on_one(rank: int, have: str) -> None:
    layouts = [rs.Layout(rs.Mesh(x=2), text) for text in (have, "- -")]
    local = torch.ones(layouts[0].local_shape(rank, SHAPE)).requires_grad_(rank == 0)
    rs.move(local, *layouts, shape=SHAPE, timeout=TIMEOUT)


@pytest.mark.parametrize("have", ["x -", "- -"])
def test_gradients_on_some_ranks_only(pool: Pool, have: str) -> None:
    """Also where nothing moves: backward would wait for ranks that take no part in it."""
    outcomes = pool.outcomes(stay_with_gradients_on_one, have, ranks=range(2))
    raised(outcomes, "DisagreementError", "requires gradients on ranks 0 and not on 1")


def different(rank: int) -> None:
    """Only one of two sources requires gradients, in a move that was never made before."""
    x = None if rank > 1 else torch.ones(2, 3, requires_grad=rank != 1)
    rs.move(x, ROWS, COLUMNS, shape=(4, 3), dtype="float32", timeout=TIMEOUT)


def test_gradients_on_some_ranks(pool: Pool) -> None:
    words = ("requires gradients on ranks 0 and not on 1", "set requires_grad alike")
    cold = pool.outcomes(different, ranks=range(4))
    raised(cold, "DisagreementError", *words)
    pool.run(across, COLUMNS, 1, ranks=range(4))


def test_gradients_on_some_ranks_later(pool: Pool) -> None:
    """On a warm call the sources hear nothing of each other: those who got both parts raise."""
    words = ("requires gradients on ranks 0 and not on 1", "set requires_grad alike")
    raised(pool.outcomes(different_later, ranks=range(4))[2:], "DisagreementError", *words)
    pool.run(across, COLUMNS, 1, ranks=range(4))


def different_later(rank: int) -> None:
    across(rank, COLUMNS, 1)
    x = part(ROWS, rank, grad=rank != 1)
    rs.move(x, ROWS, COLUMNS, shape=SHAPE, dtype="float64", timeout=TIMEOUT)


def skip(rank: int, lazy: int, seconds: float) -> float:
    """All but one rank take part in the backward; those that wait for it are told whom."""
    x = part(ROWS, rank)
    y = rs.move(x, ROWS, COLUMNS, shape=SHAPE, dtype="float64", timeout=seconds)
    start = time.monotonic()
    if rank != lazy:
        rs.backward(y)
    return time.monotonic() - start


def test_a_rank_that_skips_the_backward() -> None:
    with fresh_ranks(4) as ranks:
        ranks.run(across, COLUMNS, 1)
        outcomes = ranks.outcomes(skip, 3, 2.0)
        raised(outcomes[:2], "MoveTimeoutError", "rank 3 has not called")
        assert all(2 <= outcome.seconds < 3.5 for outcome in outcomes[:2]), outcomes


def shaped_like_nobody(rank: int) -> None:
    with pytest.raises(rs.TensorError, match="carries no gradients"):
        rs.backward(torch.zeros(3))


def test_backward_of_nothing(pool: Pool) -> None:
    assert isinstance(pool.outcomes(shaped_like_nobody, ranks=[0])[0], Returned)
