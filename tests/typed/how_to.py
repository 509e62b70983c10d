"""What the pages of docs/how-to show, as a type checker sees them; nothing here is run."""

from typing import assert_type

import torch
from torch import nn

import reshard as rs
from reshard import checkpoint
from reshard.nn import input_reshard, resharding_of

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
assert_type(checkpoint.save(model.state_dict(), "ckpt", format="distcp"), checkpoint.SaveReport)
assert_type(checkpoint.load("ckpt", model.state_dict()), checkpoint.LoadReport)

have = rs.Layout.parse("replica=2 dp=2: dp -")
assert_type(have.without([3]), rs.Layout)
rs.plan(have.without([3]), rs.Layout.parse("dp=3 @ 0-2: dp -"), shape=(6, 4)).check()

weights: dict[str, torch.Tensor] = {"q": torch.zeros(4, 4)}
spec = rs.TensorSpec((192, 32), "bfloat16", rs.Layout.parse("tp=2 @ 2-3: tp{64,64,64} -"))
held, wanted = rs.exchange(have=rs.describe(weights), want={"qkv": spec})
plan = rs.plan(held, wanted, names={"qkv": rs.join("q", "k", "v", dim=0)}, memory="256MiB")
plan.run(weights, into={}, tag=3)

input_reshard(model, None, 0, modules=["0"])
print(resharding_of(model).stats().bytes_kept)

rs.plan(have, have, shape=(6, 4), memmory="1GiB")  # type: ignore[call-arg]
