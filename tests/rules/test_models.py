"""Names and shapes of known models, against the published numbers."""

from typing import Any

import pytest

from reshard.errors import RulesError
from reshard.rules import models


@pytest.mark.parametrize(
    ("name", "num_tensors", "num_elements"),
    [
        ("llama-3-8b", 291, 8_030_261_248),
        ("llama-3-70b", 723, 70_553_706_496),
        ("llama-3.2-1b", 146, 1_235_814_400),
        ("mistral-7b", 291, 7_241_732_096),
        ("mixtral-8x7b", 995, 46_702_792_704),
        ("qwen2-7b", 339, 7_615_616_512),
        ("qwen3-8b", 399, 8_190_735_360),
        ("qwen3-30b-a3b", 48 * (128 * 3 + 9) + 3, 30_532_122_624),
        ("gemma-2b", 164, 2_506_172_416),
        ("gemma-7b", 254, 8_537_680_896),
        ("gpt-neox-20b", 532, 20_554_567_680),
        ("bert-base", 206, 110_106_428),
        ("gemma-3-1b", 340, 999_885_952),
        ("gemma-3-4b", 444, 3_880_263_168),  # the text part
        ("phi-3-mini", 195, 3_821_079_552),
        ("phi-4", 243, 14_659_507_200),
        ("gpt-oss-20b", 411, 20_914_757_184),
        ("gpt-oss-120b", 615, 116_829_156_672),
        ("qwen3-next-80b-a3b", 74_391, 79_674_391_296),
        ("llama-4-scout", 579, 107_769_861_120),  # the text part
        ("deepseek-v3", 45_395, 671_026_419_200),
    ],
)
def test_presets_have_the_published_sizes(name: str, num_tensors: int, num_elements: int) -> None:
    tensors = models.tensors(name)
    assert len(tensors) == num_tensors
    assert models.num_elements(tensors) == num_elements


def test_every_preset_is_tested() -> None:
    (mark,) = test_presets_have_the_published_sizes.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for row in mark.args[1]} == set(models.PRESETS)


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "dtype"),
    [
        ("llama-3-8b", "model.layers.31.mlp.down_proj.weight", (4096, 14336), "bfloat16"),
        ("llama-3-70b", "model.layers.79.self_attn.v_proj.weight", (1024, 8192), "bfloat16"),
        ("qwen2-7b", "model.layers.0.self_attn.k_proj.bias", (512,), "bfloat16"),
        ("qwen3-30b-a3b", "model.layers.47.mlp.gate.weight", (128, 2048), "bfloat16"),
        ("qwen3-30b-a3b", "model.layers.0.self_attn.q_norm.weight", (128,), "bfloat16"),
        (
            "qwen3-30b-a3b",
            "model.layers.9.mlp.experts.127.down_proj.weight",
            (2048, 768),
            "bfloat16",
        ),
        (
            "mixtral-8x7b",
            "model.layers.0.block_sparse_moe.experts.7.w2.weight",
            (4096, 14336),
            None,
        ),
        ("gemma-2b", "model.layers.0.self_attn.k_proj.weight", (256, 2048), "bfloat16"),
        ("gpt-neox-20b", "gpt_neox.layers.0.attention.query_key_value.bias", (18432,), "float16"),
        ("bert-base", "bert.embeddings.token_type_embeddings.weight", (2, 768), "float32"),
        (
            "gemma-3-4b",
            "language_model.model.layers.33.self_attn.k_proj.weight",
            (1024, 2560),
            None,
        ),
        ("deepseek-v3", "model.layers.60.self_attn.kv_b_proj.weight", (32768, 512), None),
        ("gpt-oss-20b", "model.layers.23.mlp.experts.gate_up_proj", (32, 2880, 5760), None),
    ],
)
def test_shapes(name: str, tensor: str, shape: tuple[int, ...], dtype: str | None) -> None:
    assert models.tensors(name)[tensor] == (shape, dtype or "bfloat16")


def test_a_tied_output_layer_is_not_in_the_file() -> None:
    assert "lm_head.weight" not in models.tensors("gemma-7b")
    config = dict(models.preset("llama-3-8b"))
    assert "lm_head.weight" in models.tensors(config)
    assert "lm_head.weight" not in models.tensors(config | {"tie_word_embeddings": True})


def test_dtype_is_read_in_either_spelling() -> None:
    config = dict(models.preset("bert-base"))
    del config["torch_dtype"]
    assert models.tensors(config)["cls.predictions.bias"] == ((30522,), "float32")
    half = models.tensors(config | {"dtype": "torch.float16"})
    assert half["cls.predictions.bias"][1] == "float16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "model_type 'None' is not known"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not known: the types are llama"),
        ({"hidden_size": None}, '"hidden_size" in the config is None'),
        ({"vocab_size": "x"}, '"vocab_size" in the config is x'),
        ({"num_hidden_layers": -1}, '"num_hidden_layers" in the config is -1'),
        ({"num_hidden_layers": 10**6}, "1000000 layers of 1 experts are too many"),
        ({"model_type": "mixtral"}, '"num_experts" in the config is None'),
        ({"model_type": "gemma3"}, "model_type 'gemma3' has no \"text_config\""),
        ({"model_type": "llama4", "text_config": 3}, 'has no "text_config"'),
    ],
)
def test_wrong_configs_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RulesError, match=message):
        models.tensors({**models.preset("llama-3-8b"), **change})


def test_other_keys_of_a_config_are_not_taken_for_numbers_of_rules() -> None:
    other = {"num_layers": 12, "heads": "x", "mlp_size": True, "linear_k_heads": [], "tied": 1}
    assert models.numbers_of(other) == {}
    config = models.preset("llama-3-8b")
    assert models.numbers_of(config | other) == models.numbers_of(config)
    assert models.numbers_of({"num_attention_heads": 8, "qk_rope_head_dim": 64}) == {
        "heads": 8,
        "qk_rope_head_dim": 64,
    }


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(RulesError, match='no model "llama3-8b": try llama-3-8b'):
        models.tensors("llama3-8b")


def test_a_moe_without_experts_is_dense() -> None:
    config = models.preset("qwen3-30b-a3b") | {"num_experts": 0, "num_hidden_layers": 1}
    names = {name for name in models.tensors(config) if ".mlp." in name}
    assert names == {f"model.layers.0.mlp.{one}_proj.weight" for one in ("gate", "up", "down")}
