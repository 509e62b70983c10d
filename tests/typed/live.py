"""The types of `rs.move`, `plan.run` and `plan.start`, as mypy sees them; nothing here is run."""

from typing import assert_type

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

import reshard as rs
from reshard.sharded import ShardedTensor


def moves(
    local: torch.Tensor,
    dtensor: DTensor,
    sharded: ShardedTensor,
    layout: rs.Layout,
    mesh: DeviceMesh,
    placements: list[Placement],
) -> None:
    """Every form of a move, and the type of its result."""
    assert_type(rs.move(local, layout, layout, shape=(8, 4)), torch.Tensor | None)
    assert_type(rs.move(None, layout, layout, shape=(8, 4), dtype="int8"), torch.Tensor | None)
    assert_type(rs.move(dtensor, to=layout, timeout=5), torch.Tensor | None)
    assert_type(rs.move(dtensor, want=layout), torch.Tensor | None)
    assert_type(rs.move(sharded, to=layout), torch.Tensor | None)
    assert_type(rs.move(local, "dp=2: dp -", "tp=2: - tp", shape=(8, 4)), torch.Tensor | None)
    assert_type(rs.move(dtensor, to=layout, into=local), torch.Tensor)
    assert_type(rs.move(local, layout, to=layout, shape=(8,), into=dtensor), DTensor)
    assert_type(rs.move(dtensor, to=(mesh, placements)), DTensor)
    assert_type(rs.move(sharded, to=(mesh, placements), cast_to=torch.float16), DTensor)
    assert_type(rs.move(None, layout, to=(mesh, placements), shape=[8], dtype="int8"), DTensor)
    assert_type(rs.move(dtensor, to=(mesh, placements), into=dtensor), DTensor)
    assert_type(rs.move(dtensor, to=(mesh, placements), async_op=True, tag="step 3"), DTensor)


def wrong_moves(dtensor: DTensor, layout: rs.Layout) -> None:
    """What a type checker finds before it runs; an ignore that is not needed is an error."""
    rs.move(dtensor, to=layout, time_out=5)  # type: ignore[call-overload]
    rs.move(dtensor, to=layout, transport="pear")  # type: ignore[call-overload]
    rs.move(dtensor, to=8)  # type: ignore[call-overload]
    rs.move(dtensor, to=layout, grad="average")  # type: ignore[call-overload]
    rs.backward("moved")  # type: ignore[arg-type]
