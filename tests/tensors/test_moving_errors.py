"""What is wrong with a request is said in one line that says what to write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import reshard as rs
from tests.ranks.pool import Pool
from tests.tensors.worlds import playing

ONE = rs.Mesh(x=1)
ROWS, COLUMNS = rs.Layout(ONE, "x -"), rs.Layout(ONE, "- x")
WRONG = {
    "have in words": ({"have": "x -"}, "'x -' is no mesh with a layout: expected"),
    "have a dict": ({"have": {}}, "have=a dict is no layout"),
    "want in words": ({"want": "- x"}, "'- x' is no mesh with a layout: expected"),
    "to no mesh": ({"want": None, "to": (1, 2)}, "a tuple is no destination"),
    "no shape": ({"shape": None}, "without shape=: have= is its layout, shape= that of the whole"),
    "no layout": ({"have": None}, "a plain tensor comes without have=: have= is its layout"),
    "a list": ({"tensor": [1.0], "shape": None}, "a list cannot be moved: give a tensor"),
    "lazy": ({"tensor": torch.nn.UninitializedParameter()}, "which has no shape yet"),
    "sparse": ({"tensor": torch.ones(4, 4).to_sparse()}, "only dense tensors can be moved"),
    "into an array": ({"into": np.zeros((4, 4))}, "into= is a ndarray: give a tensor"),
    "shape in words": ({"shape": "4x4"}, 'shape="4x4": give the sizes'),
    "shape a number": ({"shape": 16}, "shape=16: give the sizes"),
    "shape of halves": ({"shape": (4, 4.5)}, "give the sizes of the whole tensor"),
    "memory a list": ({"memory": [1]}, "is not an amount of bytes: write 4096"),
    "memory in parsecs": ({"memory": "12 parsecs"}, "is not an amount of bytes"),
    "dtype a list": ({"tensor": None, "dtype": ["float32"]}, "is not a dtype: use one of"),
    "cast to nothing": ({"cast_to": "float33"}, "is not a dtype: use one of"),
    "grad": ({"grad": "mean"}, 'grad="mean": it is "sum" or "replicated"'),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request(what: str) -> None:
    given, said = WRONG[what]
    request: dict[str, Any] = {"tensor": torch.ones(4, 4), "have": ROWS, "want": COLUMNS}
    with pytest.raises(rs.ReshardError) as error:
        rs.move(**{**request, "shape": (4, 4), **given})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("want", [ROWS, COLUMNS], ids=["nothing moves", "to columns"])
def test_a_move_without_a_process_group(want: rs.Layout) -> None:
    with pytest.raises(rs.LiveError, match="call init_process_group first"):
        rs.move(torch.ones(4, 4), ROWS, want, shape=(4, 4))


def test_a_tensor_that_says_otherwise() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    with playing(0, 2):
        rows = zeros(4, 4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        columns = rs.Layout(rs.Mesh(dp=2, tp=2), "- dp")
        with pytest.raises(rs.TensorError) as error:
            rs.move(rows, columns, to=columns)
        assert str(error.value) == (
            'have="- dp" on mesh dp=2 tp=2 and the tensor itself says "d0 -" on mesh d0=2: '
            "leave out have=, or name with it replicas on other ranks"
        )
        with pytest.raises(rs.TensorError, match=r"shape=\(2, 4\) and the tensor .* \(4, 4\)"):
            rs.move(rows, shape=(2, 4), to=columns)


@pytest.mark.parametrize("of_dtensor", [True, False])
def test_a_placement_instead_of_a_list(of_dtensor: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    with playing(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        source: Any = zeros(4, 4, device_mesh=mesh, placements=[Shard(0)])
        request = {} if of_dtensor else {"have": ROWS, "shape": (4, 4)}
        source = source if of_dtensor else torch.ones(4, 4)
        with pytest.raises(rs.LayoutError, match=r"placements are a Shard: give one per axis"):
            rs.move(source, to=(mesh, Shard(0)), **request)  # type: ignore[call-overload]


def test_ranks_that_torch_simulates_in_one_process_are_refused() -> None:
    from torch.distributed._local_tensor import LocalTensorMode

    with LocalTensorMode(frozenset(range(2))), pytest.raises(rs.TensorError) as error:
        rs.move(torch.ones(4, 4), ROWS, COLUMNS, shape=(4, 4))
    assert str(error.value).startswith("LocalTensorMode runs all ranks in this process")


def move_by_texts(rank: int) -> None:
    full = torch.arange(16.0).reshape(4, 4)
    moved = rs.move(full.chunk(2)[rank], "x=2: x -", "y=2: - y", shape=(4, 4))
    assert moved is not None
    assert torch.equal(moved, full.chunk(2, dim=1)[rank])


def test_layouts_may_be_texts(pool: Pool) -> None:
    pool.run(move_by_texts, ranks=range(2))
