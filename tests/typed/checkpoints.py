"""What docs/checkpoints.md shows, as a type checker sees it; nothing here is run."""

from typing import assert_type

import torch

import reshard as rs
from reshard import checkpoint

report = checkpoint.verify("ckpt", "ckpt-full")
assert_type(report.ok, bool)
for problem in report.problems:
    print(problem.kind, problem.file, problem.bytes)
assert_type(report.digests["embed.weight"], str)
changed = checkpoint.diff("ckpt", "ckpt-full")
assert_type(changed, checkpoint.DiffReport)
assert_type(changed.equal, bool)
converted = checkpoint.convert("ckpt", "out", mesh="tp=2", rules="llama", memory="256MiB")
assert_type(converted, rs.checkpoint.ConvertReport)

state = {"weight": torch.zeros(12, 8), "step": 3}
assert_type(checkpoint.save(state, "ckpt"), checkpoint.SaveReport)
assert_type(checkpoint.load("ckpt", into=state), checkpoint.LoadReport)
assert_type(checkpoint.load("ckpt", state), checkpoint.LoadReport)

checkpoint.verify(3)  # type: ignore[arg-type]
checkpoint.lode("ckpt")  # type: ignore[attr-defined]
