"""Take a model that trains with FSDP2 and tensor parallelism to a smaller tensor-parallel group.

    torchrun --nproc-per-node 4 examples/fsdp_tp_to_tp.py

Four ranks train on a mesh dp=2 tp=2: attention and MLP are sharded by tp, and everything by dp; so
norms, embedding and head are on the dp mesh of their rank alone, once for each tp rank. Two of the
ranks then serve the model by tensor parallelism, with whole norms, embedding and head. Nothing is
written to disk. At the end both models must answer alike.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard as rs

WORDS, HIDDEN, HEADS, SIZE = 96, 64, 8, 8
TEXT = torch.arange(24).reshape(2, 12)


class Model(nn.Module):
    """A language model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.attention_norm, self.mlp_norm, self.norm = (nn.RMSNorm(HIDDEN) for _ in range(3))
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HEADS * SIZE) for _ in range(3))
        self.o = nn.Linear(HEADS * SIZE, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        y = self.attention_norm(x)
        # As many heads as this rank has: its parts of q, k and v are those of the same heads.
        q, k, v = (linear(y).unflatten(-1, (-1, SIZE)) for linear in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + self.o(seen.transpose(1, 2).flatten(-2))
        x = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return F.log_softmax(self.head(self.norm(x)), dim=-1)


def model_on(tp: DeviceMesh) -> nn.Module:
    """The model, its attention and MLP sharded over the ranks of a mesh."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    how = {"q": columns, "k": columns, "v": columns, "o": rows, "up": columns, "down": rows}
    return parallelize_module(Model(), tp, how)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    trained = model_on(mesh["tp"])
    fully_shard(trained, mesh=mesh["dp"])
    train(trained)

    torch.manual_seed(1)  # other weights: what is right in the end was moved
    serving = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))  # all ranks take part
    served = model_on(serving) if rank in (0, 1) else None

    # State dicts say how they are sharded; a rank that serves nothing wants nothing. What ranks say
    # of a norm on their dp meshes, 0,2 and 1,3, exchange takes for replicas of one tensor.
    mine = trained.state_dict()
    into = {} if served is None else served.state_dict()
    have, want = rs.exchange(have=rs.describe(mine), want=rs.describe(into))
    plan = rs.plan(have, want)
    plan.run(mine, into=into)

    with torch.no_grad():
        expected = trained(TEXT)
    if served is not None:
        with torch.no_grad():
            torch.testing.assert_close(served(TEXT), expected)
        if rank == 0:
            print(f"{plan}\n\nBoth models give the same logits {tuple(expected.shape)}.")
    dist.destroy_process_group()


def train(model: nn.Module) -> None:
    """One step, so that the weights are not those of the beginning."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (-model(TEXT).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
