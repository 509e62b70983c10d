"""What docs/rules.md shows, as a type checker sees it; nothing here is run."""

from typing import assert_type

import reshard as rs
from reshard.rules import Rules, models

rules = Rules.load("llama", head_dim=128, kv_heads=8, num_layers=32, fsdp="dp")
assert_type(rules.layout("lm_head.weight", rs.Mesh(tp=4)), rs.Layout)
assert_type(rules.numbers, dict[str, int | None])
assert_type(Rules.families(), tuple[str, ...])
assert_type(Rules.parse('[tensors]\n"*" = "..."'), Rules)
shapes = {name: shape for name, (shape, _) in models.tensors("llama-3-70b").items()}
assert_type(shapes, dict[str, tuple[int, ...]])
assert_type(rules.layouts(shapes, rs.Mesh(dp=2, tp=4)), dict[str, rs.Layout])
assert_type(rules.mesh_for(rs.Mesh(tp=16)), rs.Mesh)
assert_type(models.num_elements(models.tensors("bert-base")), int)

Rules.load("llama", head_dim="128")  # type: ignore[arg-type]
