"""What docs/quickstart.md shows, as a type checker sees it; nothing here is run."""

from typing import assert_type

import numpy as np
import torch

import reshard as rs

have, want = rs.Layout.parse("dp=2: dp -"), rs.Layout.parse("tp=2: - tp")
assert_type(have, rs.Layout)
plan = rs.plan(have, want, shape=(6, 8), dtype="int64", memory="1MiB")
plan.check()
assert_type(plan.summary().lower_bound_bytes, int)
full = np.arange(48).reshape(6, 8)
out = rs.simulate(plan, {rank: {"tensor": full[3 * rank :]} for rank in (0, 1)})
print(out[1]["tensor"].shape)
assert_type(have.draw((6, 8)), str)

moved = rs.move(torch.zeros(2, 8), "dp=4: dp -", "tp=4: - tp", shape=(8, 8))
if isinstance(moved, torch.Tensor):
    print(moved.shape)

rs.Layout.parse(3)  # type: ignore[arg-type]
plan.chek()  # type: ignore[attr-defined]
