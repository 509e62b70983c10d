"""A Llama of a few layers, sharded with the shipped rules: the same logits, the same training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import reshard as rs
from reshard.nn import ShardingPlan, shard_module
from reshard.rules import Rules
from reshard.sharded import ShardedTensor
from tests.ranks.pool import Pool
from tests.ranks.rank import pool_group
from tests.soak import cases

FOUR = range(4)
VOCABULARY, HIDDEN, STEPS, LAYERS = 96, 64, cases(2, 20), cases(1, 2)


def llama(attention: str, tied: bool) -> tuple[Any, Any]:
    """A model with random weights, the same on all ranks, and its config; all in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=120,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        attn_implementation=attention,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                # The model's own computes in float32, whatever it is given.
                setattr(module, name, nn.RMSNorm(HIDDEN, eps=1e-6, dtype=torch.float64))
    return model, config


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def train(rank: int, attention: str, tied: bool) -> list[float]:
    """Train a sharded model and a whole one side by side; gives how far their losses are apart."""
    whole, config = llama(attention, tied)
    model = copy.deepcopy(whole)
    rules = Rules.for_config(config.to_dict())
    plan = ShardingPlan.from_rules(rules, model, rs.Mesh(tp=4))
    handle = shard_module(model, plan, process_group=pool_group(4))
    parameters = dict(model.named_parameters())
    cut = [name for name, one in parameters.items() if isinstance(one, ShardedTensor)]
    assert len(cut) == LAYERS * 7 + (1 if tied else 2)
    assert all(
        parameters[name].local_tensor().numel() * 4 == parameters[name].numel() for name in cut
    )

    tokens = torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=tokens).logits
    assert isinstance(logits, ShardedTensor)
    torch.testing.assert_close(
        logits.full_tensor(), whole(input_ids=tokens).logits, rtol=0, atol=1e-10
    )
    apart = []
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (whole, model)]
    for step in range(STEPS):
        tokens = torch.randint(
            0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(step)
        )
        losses = []
        for one, optimizer in zip((whole, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(one, tokens)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
            losses.append((loss.item(), norm.item()))
        apart.append(max(abs(a - b) for a, b in zip(*losses, strict=True)))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ShardedTensor):
            assert isinstance(parameter.grad, ShardedTensor)
            assert parameter.grad.local_tensor().shape == parameter.local_tensor().shape, name
    handle.remove()
    for name, parameter in model.named_parameters():
        assert not isinstance(parameter, ShardedTensor)
        torch.testing.assert_close(parameter, whole.get_parameter(name), rtol=0, atol=1e-8)
    return apart


@pytest.mark.parametrize(
    ("attention", "tied"), [("eager", False), ("sdpa", True)], ids=["eager", "sdpa-tied"]
)
def test_a_sharded_llama_trains_like_a_whole_one(pool: Pool, attention: str, tied: bool) -> None:
    for apart in pool.run(train, attention, tied, ranks=FOUR, timeout=110):
        assert len(apart) == STEPS
        assert max(apart) < 1e-10
