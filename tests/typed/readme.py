"""What README.md shows, as a type checker sees it; nothing here is run."""

from typing import assert_type

import numpy as np

import reshard as rs

have = rs.Layout(rs.Mesh(dp=2, tp=4), "(dp tp) -")
want = rs.Layout(rs.Mesh(tp=2, ranks=[8, 9]), "- tp")
plan = rs.plan(have, want, shape=(8192, 4096), dtype="bfloat16", memory="1GiB")
assert_type(plan, rs.Plan)
assert_type(plan.summary(), rs.Summary)
assert_type(plan.summary().wire_bytes, int)
assert_type(plan.summary().seconds, float | None)
assert_type(rs.__version__, str)
plan.check()
plan.save("move.html")

arrays = {rank: {"tensor": np.zeros((3, 8))} for rank in (0, 1)}
for rank, tensors in rs.simulate(plan, arrays).items():
    assert_type(rank, int)
    print(tensors["tensor"].shape)

inspection = rs.checkpoint.inspect("ckpt")
assert_type(inspection, rs.checkpoint.Inspection)
assert_type(rs.checkpoint.verify("ckpt", "out"), rs.checkpoint.VerifyReport)
rules = rs.rules.Rules.load("llama", head_dim=128, kv_heads=8)
assert_type(rules, rs.Rules)

try:
    plan.check()
except rs.ReshardError as error:
    print(error)

rs.plann(have, want)  # type: ignore[attr-defined]
rs.checkpoint.inspekt("ckpt")  # type: ignore[attr-defined]
