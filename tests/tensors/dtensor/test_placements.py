"""A DTensor's layout says what torch really put on every rank, and placements come back from it."""

from itertools import permutations, product
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

import reshard as rs
from reshard.tensors.dtensor.placements import axis_names, layout_from, mesh_of, placements_of
from reshard.tensors.dtensor.wrapping import dtensor_of
from reshard.tensors.local import layout_of, local_of
from tests.tensors.worlds import MESHES, cut, numbered, playing, ranks_of

SHAPES = [(8, 8), (5, 7), (13, 3), (1, 4), (0, 3), (6,), (3, 4, 5)]


def distribute(full: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return torch_distribute_tensor(full, mesh, placements, src_data_rank=None)


def all_placements(num_axes: int, num_dims: int) -> list[list[Placement]]:
    # distribute_tensor keeps the values of a pending max, so that they can be compared.
    kinds = [Replicate(), Partial("max"), *map(Shard, range(num_dims))]
    return [list(chosen) for chosen in product(kinds, repeat=num_axes)]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_layouts_are_what_distribute_tensor_does(sizes: tuple[int, ...]) -> None:
    for rank in ranks_of(prod(sizes)):
        mesh = init_device_mesh("cpu", sizes)
        for shape in SHAPES if len(sizes) < 3 else SHAPES[:4]:
            full = numbered(*shape)
            for placements in all_placements(len(sizes), len(shape)):
                tensor = distribute(full, mesh, placements)
                layout = layout_of(tensor)
                assert torch.equal(local_of(tensor), cut(full, layout, rank)), layout
                assert layout.local_shape(rank, shape) == tensor.to_local().shape


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_placements_come_back(sizes: tuple[int, ...]) -> None:
    with playing(0, prod(sizes)):
        mesh = init_device_mesh("cpu", sizes)
        for shape in [(8, 8), (13, 3), (3, 4, 5)][: 2 if len(sizes) > 2 else 3]:
            for placements in all_placements(len(sizes), len(shape)):
                layout = layout_of(distribute(numbered(*shape), mesh, placements))
                assert placements_of(layout, mesh, shape) == tuple(placements)


def nested(full: torch.Tensor, dim: int, sizes: list[int], at: list[int]) -> torch.Tensor:
    """Chunk, and chunk what is left, one coordinate after the other."""
    for size, place in zip(sizes, at, strict=True):
        chunks = [*full.chunk(size, dim), *[full.narrow(dim, 0, 0)] * size]
        full = chunks[place]
    return full


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_strided_shards_are_an_order_of_nesting(order: tuple[int, ...]) -> None:
    """Every order of three mesh dims, uneven too, both as strides and as torch's shard order."""
    sizes = (2, 3, 2)
    for rank in ranks_of(12):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b", "c"))
        words = " ".join("abc"[at] for at in order)
        for rows in (24, 29, 13, 3):
            full = numbered(rows, 2)
            layout = rs.Layout(rs.Mesh(a=2, b=3, c=2), f"({words}) -")
            place = mesh.get_coordinate()
            part = nested(full, 0, [sizes[i] for i in order], [place[i] for i in order])
            assert torch.equal(part, cut(full, layout, rank))
            placements = placements_of(layout, mesh, full.shape)
            tensor = dtensor_of(part, mesh, placements, full.shape)
            assert layout_of(tensor) == layout
            entry = (ShardOrderEntry(tensor_dim=0, mesh_dims=order),)
            ordered = DTensorSpec(
                mesh, (Shard(0),) * 3, tensor._spec.tensor_meta, shard_order=entry
            )
            assert layout_of(DTensor(part, ordered, requires_grad=False)) == layout


def test_strided_shards_that_say_no_order_are_cut_as_torch_cuts_them() -> None:
    said, refused = set(), set()
    for rank in ranks_of(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for rows, factors in product((24, 13, 7, 2), product((1, 3, 5), repeat=2)):
            placements = [_StridedShard(0, split_factor=factor) for factor in factors]
            tensor = distribute(numbered(rows, 2), mesh, placements)
            try:
                layout = layout_of(tensor)
            except rs.LayoutError as error:
                refused.add(str(error).partition("cuts ")[2][:26])
                continue
            said.add(str(layout))
            assert torch.equal(local_of(tensor), cut(numbered(rows, 2), layout, rank))
            back = placements_of(layout, mesh, (rows, 2))
            assert back is not None
            assert layout_from(mesh, back, (rows, 2)).same_as(layout, (rows, 2))
    assert {"(a:4 b) -", "(a{5,5,3} b) -", "(a:4 b:2) -"} <= said, said
    assert refused == {"parts of different lengths"}


def test_a_view_of_a_sharded_dim() -> None:
    for rank in ranks_of(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        view = distribute(numbered(3, 8), mesh, [Shard(1)]).view(24)
        assert str(layout_of(view)) == "tp:2"
        assert torch.equal(local_of(view), cut(numbered(24), layout_of(view), rank))


class Block(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, rows)
        self.down = nn.Linear(rows, 8)
        self.norm = nn.LayerNorm(8)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(numbered(*parameter.shape))


def shard_as_fsdp_over_tp(block: Block, mesh: DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, mesh["tp"], plan, src_data_rank=None)
    fully_shard(block, mesh=mesh[tuple(n for n in mesh.mesh_dim_names if n != "tp")])


@pytest.mark.parametrize("rows", [12, 13, 2, 1])
def test_fsdp_over_tensor_parallel(rows: int) -> None:
    for rank in ranks_of(6):
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        block, whole = Block(rows), Block(rows).state_dict()
        shard_as_fsdp_over_tp(block, mesh)
        layouts = {name: layout_of(tensor) for name, tensor in block.state_dict().items()}
        assert {name: str(layout) for name, layout in layouts.items()} == {
            "up.weight": "(tp dp) -",
            "up.bias": "(tp dp)",
            "down.weight": "dp tp",
            "down.bias": "dp",
            "norm.weight": "dp",
            "norm.bias": "dp",
        }
        for name, tensor in block.state_dict().items():
            assert torch.equal(local_of(tensor), cut(whole[name], layouts[name], rank)), name


def test_hybrid_fsdp_over_tensor_parallel() -> None:
    for rank in ranks_of(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("rep", "dp", "tp"))
        block, whole = Block(7), Block(7).state_dict()
        shard_as_fsdp_over_tp(block, mesh)
        weight = block.up.weight
        assert str(layout_of(weight)) == "(tp dp) -"
        assert layout_of(weight).mesh == rs.Mesh(rep=2, dp=2, tp=2)
        assert torch.equal(local_of(weight), cut(whole["up.weight"], layout_of(weight), rank))


def test_uneven_strides_of_distribute_tensor_are_refused_with_the_layout_they_have() -> None:
    """torch cuts [_StridedShard, Shard] in two ways; only FSDP's can be gathered again."""
    refused = {}
    for rank in ranks_of(6):
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        tensor = distribute(numbered(13), mesh, [_StridedShard(0, split_factor=2), Shard(0)])
        try:
            layout_of(tensor)
        except rs.LayoutError as error:
            refused[rank] = str(error)
            local = local_of(tensor)
            told = rs.Layout(mesh_of(mesh), "(dp{7,6} tp)")
            assert torch.equal(local, cut(numbered(13), told, rank))
    assert sorted(refused) == [4, 5]
    assert refused[4] == (
        "rank 4 holds a local tensor of shape (2,) and placements [_StridedShard(dim=0, sf=2), "
        'Shard(dim=0)] on mesh dp=3 tp=2 give it (1,) of the tensor (13,), as layout "(tp dp)": '
        'it has the shape that "(dp{7,6} tp)" gives, which is how distribute_tensor shards a '
        "_StridedShard: move the local tensor with that layout"
    )


def test_own_sizes_are_refused() -> None:
    with playing(1, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        tensor = DTensor.from_local(
            torch.zeros(3, 2), mesh, [Shard(0)], shape=torch.Size((14, 2)), stride=(2, 1)
        )
        with pytest.raises(rs.LayoutError, match=r"rank 1 .*\(3, 2\).*\(4, 2\).*tp\[2,3,4,5\]"):
            layout_of(tensor)


@pytest.mark.parametrize(
    ("torch_op", "word"),
    [("sum", "sum"), ("avg", "avg"), ("max", "max"), ("min", "min"), ("product", "prod")],
)
def test_pending_reductions(torch_op: str, word: str) -> None:
    with playing(0, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        placements = [Partial(torch_op), Shard(1), Partial(torch_op)]
        tensor = DTensor.from_local(torch.zeros(3, 2), mesh, placements)
        assert str(layout_of(tensor)) == f"- b | {word} a c"
        assert placements_of(layout_of(tensor), mesh, tensor.shape) == tuple(placements)


def test_reductions_that_have_no_word() -> None:
    with playing(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for placements, named in [
            ([Partial("bor"), Replicate()], "pending bor"),
            ([Partial("sum"), Partial("avg")], "pending avg and sum"),
            ([_MaskPartial("sum", offset_shape=torch.Size((4,))), Replicate()], "_MaskPartial"),
        ]:
            tensor = DTensor.from_local(torch.zeros(2, dtype=torch.int64), mesh, placements)
            with pytest.raises(rs.LayoutError, match=named):
                layout_of(tensor)


def test_scalars_and_meshes_of_one() -> None:
    with playing(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        scalar = DTensor.from_local(torch.tensor(1.0), mesh, [Replicate(), Partial()])
        assert str(layout_of(scalar)) == "... | sum b"
        assert placements_of(layout_of(scalar), mesh, ()) == (Replicate(), Partial())
        one = DeviceMesh("cpu", [[0]], mesh_dim_names=("a", "b"))
        alone = distribute(numbered(4, 2), one, [Shard(0), Partial("max")])
        assert str(layout_of(alone)) == "a - | max b"


def test_sub_meshes_and_permuted_meshes_have_global_ranks() -> None:
    for rank in ranks_of(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        sub = mesh["dp", "tp"]
        first = rank // 4 * 4
        assert mesh_of(sub) == rs.Mesh(dp=2, tp=2, ranks=range(first, first + 4))
        tensor = distribute(numbered(5, 2), sub, [Shard(0), Shard(0)])
        assert torch.equal(local_of(tensor), cut(numbered(5, 2), layout_of(tensor), rank))
        order = [[7, 2, 4], [1, 0, 5]]
        mixed = DeviceMesh("cpu", order, mesh_dim_names=("dp", "tp"))
        assert mesh_of(mixed) == rs.Mesh(dp=2, tp=3, ranks=[7, 2, 4, 1, 0, 5])
        flat = mesh["pp", "dp"]._flatten("both")
        assert list(mesh_of(flat).ranks) == [rank % 2 + 2 * i for i in range(4)]


def test_a_rank_outside_the_mesh_has_nothing_to_compare() -> None:
    for rank in ranks_of(4):
        mesh = DeviceMesh("cpu", [1, 3], mesh_dim_names=("tp",))
        tensor = distribute(numbered(5, 2), mesh, [Shard(0)])
        assert layout_of(tensor) == rs.Layout(rs.Mesh(tp=2, ranks=[1, 3]), "tp -")
        inside = rank in (1, 3)
        assert (local_of(tensor) is not None) == inside
        rebuilt = dtensor_of(local_of(tensor), mesh, [Shard(0)], (5, 2), dtype=torch.int64)
        assert rebuilt.dtype == torch.int64
        assert (local_of(rebuilt) is not None) == inside


def test_a_rank_that_holds_nothing_need_not_make_something() -> None:
    with playing(3, 4):
        mesh = init_device_mesh("cpu", (4,))
        tensor = dtensor_of(None, mesh, [Shard(0)], (3, 5), dtype=torch.bfloat16)
        assert local_of(tensor).shape == (0, 5)
        assert tensor.dtype == torch.bfloat16
        assert str(layout_of(tensor)) == "d0 -"
        with pytest.raises(rs.TensorError, match=r"gives it \(0, 5\): .* dtype= where it has none"):
            dtensor_of(None, mesh, [Shard(0)], (3, 5))


def test_axis_names_become_words() -> None:
    names = ("dp-shard", "dp_shard", "sum", "2d", "", "self", "tp", "sum_")
    assert axis_names(names, 8) == (
        *("dp_shard", "dp_shard_", "sum_", "_2d", "_", "self_", "tp", "sum__"),
    )
    assert axis_names(None, 2) == ("d0", "d1")
    with playing(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("without", "a b"))
        layout = layout_of(distribute(numbered(4, 4), mesh, [Shard(1), Shard(0)]))
        assert str(layout) == "a_b without_"
        assert placements_of(layout, mesh, (4, 4)) == (Shard(1), Shard(0))


def test_wrapping_keeps_memory_metadata_and_gradients() -> None:
    for rank in ranks_of(6):
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        for placements in ([Shard(0), Shard(0)], [Shard(1), Replicate()], [Shard(-1), Shard(0)]):
            layout = layout_from(mesh, placements, (13, 5))
            local = cut(numbered(13, 5).double(), layout, rank).requires_grad_()
            tensor = dtensor_of(local, mesh, placements, (13, 5))
            assert tensor.shape == (13, 5)
            assert tensor.stride() == (5, 1)
            assert tensor.dtype == torch.float64
            assert layout_of(tensor) == layout
            assert local_of(tensor).data_ptr() == local.data_ptr()
            tensor.to_local().sum().backward()
            assert torch.equal(local.grad, torch.ones_like(local))
        scalar = dtensor_of(torch.tensor(2), mesh, [Replicate(), Replicate()], ())
        assert scalar.shape == ()
        turned = dtensor_of(torch.zeros(4, 3).t(), mesh, [Replicate()] * 2, (3, 4), stride=(1, 3))
        assert turned.stride() == (1, 3)


def test_wrapping_refuses_what_does_not_fit() -> None:
    with playing(0, 4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        with pytest.raises(rs.TensorError, match=r"rank 0 .*\(2, 3\).*gives it \(4, 3\)"):
            dtensor_of(torch.zeros(2, 3), mesh, [Shard(0)], (13, 3))
        with pytest.raises(rs.TensorError, match="on meta for a mesh of cpu"):
            dtensor_of(torch.zeros(4, 3, device="meta"), mesh, [Shard(0)], (13, 3))
        with pytest.raises(rs.TensorError, match=r"rank 0 gives no local tensor .*\(4, 3\)"):
            dtensor_of(None, mesh, [Shard(0)], (13, 3))
        with pytest.raises(rs.LayoutError, match=r"2 placements .* has 1 axes"):
            layout_from(mesh, [Shard(0), Shard(1)], (13, 3))
        with pytest.raises(rs.LayoutError, match=r"cuts dim 2 and shape \(13, 3\) has 2 dims"):
            layout_from(mesh, [Shard(2)], (13, 3))
        with pytest.raises(rs.LayoutError, match=r"cuts dim -1 and shape \(13, 3\)"):
            layout_from(mesh, [Shard(-3)], (13, 3))


@pytest.mark.parametrize(
    ("mesh", "text", "expected"),
    [
        ("x=3 y=2", "(y x) -", (_StridedShard(0, split_factor=2), Shard(0))),
        ("x=6", "x -", (Shard(0), Shard(0))),
        ("x=6", "x*1 -", (Shard(0), Shard(0))),
        ("x=6", "x[2,2,2,2,2,2] -", (Shard(0), Shard(0))),
        ("x=6", "x[2,2,2,2,1,3] -", None),
        ("x=2 y=3 @ 0,2,4,1,3,5", "- x", (Replicate(), Shard(1))),
        ("x=3 y=2", "x -", (Shard(0), Replicate())),
        ("x=3 y=2", "- - | on x=0", None),
        ("x=3 y=2", "x - | without 5", None),
        ("x=3 y=2", "- y~", None),
        ("x=2 y=3 @ 0,2,4,1,3,5", "y - | avg x", (Shard(0), Partial("avg"))),
        ("x=5", "- -", None),
    ],
)
def test_placements_of_layouts_in_other_words(
    mesh: str, text: str, expected: tuple[Placement, ...] | None
) -> None:
    with playing(0, 6):
        device_mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        layout = rs.Layout(rs.Mesh.parse(mesh), text)
        assert placements_of(layout, device_mesh, (12, 4)) == expected


def test_placements_of_boxes() -> None:
    with playing(0, 6):
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        layout = rs.Layout(mesh_of(mesh), "(tp dp) -")
        boxes = {r: [p.box for p in layout.pieces(r, (13, 2))] for r in range(6)}
        found = placements_of(rs.Layout.from_boxes((13, 2), boxes), mesh, (13, 2))
        assert found == (_StridedShard(0, split_factor=2), Shard(0))
        boxes[5] = []
        assert placements_of(rs.Layout.from_boxes((13, 2), boxes), mesh, (13, 2)) is None


def test_meshes_are_not_kept_alive() -> None:
    with playing(0, 4):
        from reshard.tensors.dtensor import placements

        before = len(placements._known)
        for _ in range(3):
            mesh = init_device_mesh("cpu", (2, 2))
            layout_of(distribute(numbered(4, 4), mesh, [Shard(0), Shard(1)]))
        del mesh
        assert len(placements._known) <= before + 1
        assert dist.is_initialized()
