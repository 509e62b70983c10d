"""A model of transformers converted through all formats, with torch's own tools in between."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reshard import checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def logits(folder: Path) -> torch.Tensor:
    from transformers import LlamaForCausalLM

    with torch.no_grad():
        return LlamaForCausalLM.from_pretrained(folder).eval()(torch.arange(20)[None]).logits


@pytest.mark.filterwarnings("ignore")
def test_a_model_computes_the_same_after_all_formats(model: Path, tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("sharded", "distcp", "ranks", "full")]
    checkpoint.convert(model, names[0], mesh="tp=4", rules="llama")
    checkpoint.convert(names[0], names[1], mesh="dp=2 tp=2", fsdp="dp", format="distcp")
    checkpoint.convert(names[1], names[2], mesh="tp=2", format="ranks")
    checkpoint.convert(names[2], names[3], max_shard_size="50KB")
    assert len(list(names[3].glob("*.safetensors"))) > 1
    assert torch.equal(logits(model), logits(names[3]))


def test_torch_consolidates_what_we_shard(model: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    checkpoint.convert(model, tmp_path / "sharded", mesh="tp=4", rules="llama")
    expected = load_file(model / "model.safetensors")
    (tmp_path / "whole").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        consolidate_safetensors_files(
            str(tmp_path / "sharded"),
            str(tmp_path / "whole"),
            fqn_to_index_mapping=dict.fromkeys(expected, 1),
        )
    found = load_file(next((tmp_path / "whole").glob("*.safetensors")))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
