"""A Llama of a few layers under tensor parallelism, with its activations kept as shares."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard.nn import input_reshard, resharding_of
from tests.nn.activations.compare import FOUR, same
from tests.ranks.meshes import mesh_of
from tests.ranks.pool import Pool
from tests.soak import cases, soaking

STEPS, VOCABULARY = cases(2, 10), 64


def llama(recompute: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    styles = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel),
        **dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel),
    }
    for layer in model.model.layers:
        plan = {
            path: styles[path.rpartition(".")[2]]()
            for path, _ in layer.named_modules()
            if path.rpartition(".")[2] in styles
        }
        parallelize_module(layer, mesh_of(4), plan)
        if recompute:
            layer.mlp = checkpoint_wrapper(layer.mlp)
    return model


def trained(wrap: bool, recompute: bool) -> list[torch.Tensor]:
    model: nn.Module = llama(recompute)
    if wrap:
        patterns = ["model.layers.*.mlp", "model.layers.*.self_attn"]
        input_reshard(model, mesh_of(4), 0, modules=patterns)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        seed = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (3, 9), generator=seed)
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if wrap:
        stats = resharding_of(model).stats()
        assert stats.bytes_saved > 0
        assert stats.collectives <= stats.restores
    return [param.detach() for param in model.parameters()]


def both(rank: int) -> None:
    plain = trained(False, False)
    for recompute in (False, True):
        expected = trained(False, recompute) if recompute and soaking() else plain
        same(trained(True, recompute), expected, recompute)


def test_B98_a_llama_trains_the_same(pool: Pool) -> None:
    pool.run(both, ranks=FOUR)
