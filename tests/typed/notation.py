"""What docs/notation.md shows, as a type checker sees it; nothing here is run."""

from typing import assert_type

import reshard as rs

mesh = rs.Mesh.parse("dp=2 tp=4 @ 8-15")
assert_type(mesh, rs.Mesh)
assert_type(mesh.ranks[0], int)
assert_type(mesh.num_ranks, int)
layout = rs.Layout(mesh, "(dp tp) -")
assert_type(layout.without([9]), rs.Layout)
assert_type(rs.Layout.parse("dp=2 tp=4: (dp tp) -"), rs.Layout)
assert_type(layout.draw((8, 4)), str)
for piece in layout.pieces(rank=8, shape=(8, 4)):
    assert_type(piece.box, rs.Box)
    assert_type(piece.box.start, tuple[int, ...])
    assert_type(piece.offset, int)
assert_type(layout.local_shape(8, (8, 4)), tuple[int, ...])
boxes = rs.Layout.from_boxes((4, 4), {0: [rs.Box((0, 0), (2, 4))], 1: [rs.Box((2, 0), (4, 4))]})
assert boxes.mesh.num_ranks == 2
spec = rs.TensorSpec(shape=(8, 4), dtype="bfloat16", layout=layout)
assert_type(spec.num_bytes, int)

rs.Mesh(dp="2")  # type: ignore[arg-type]
rs.Box((0, 0), 4)  # type: ignore[arg-type]
