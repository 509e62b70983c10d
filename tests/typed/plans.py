"""What docs/plans.md shows, as a type checker sees it; nothing here is run."""

from typing import assert_type

import reshard as rs

layout = rs.Layout(rs.Mesh(tp=2), "tp ...")


def spec(*shape: int) -> rs.TensorSpec:
    """The spec of one tensor of the examples."""
    return rs.TensorSpec(shape=shape, dtype="float32", layout=layout)


have = {"layers.0.q": spec(8, 4), "layers.0.k": spec(2, 4), "wte": spec(10, 4)}
want = {"layers.0.qk": spec(10, 4), "embed": spec(16, 4)}
names = {
    "layers.{i}.qk": rs.join(dim=0, source="layers.{i}.{part}", q=4, k=1),
    "embed": rs.take("wte", pad={0: 16}),
}
plan = rs.plan(have, want, names=names, memory="64MiB", strict=True)
assert_type(plan, rs.Plan)
assert_type(plan.digest, str)
assert_type(plan.to_json(), str)
assert_type(rs.Plan.from_json(plan.to_json()), rs.Plan)
rows = plan.for_rank(1)
print(rows.sends, rows.receives, rows.copies)

assert_type(rs.plan("dp=2: dp -", "tp=2: - tp", shape=(8, 4)), rs.Plan)
rs.plan(layout, layout, shape=(8, 4), dtipe="int8")  # type: ignore[call-arg]
