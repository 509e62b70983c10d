"""Tensor names and shapes of known models: what is in the state dict that a config describes?

Names are those of the files that Hugging Face transformers writes, of multimodal models those of
the text part. Nothing is loaded or allocated, so a 70B model costs as little as a small one.

    >>> tensors("llama-3-8b")["model.layers.0.self_attn.k_proj.weight"]
    ((1024, 4096), 'bfloat16')
    >>> [len(tensors(name)) for name in ("llama-3-8b", "llama-3-70b", "qwen3-30b-a3b")]
    [291, 723, 18867]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TypeAlias

from reshard.errors import RulesError
from reshard.rules.configs import (
    MULTIMODAL,
    PRESETS,
    Config,
    complete_numbers,
    family_of,
    number,
    numbers_of,
    preset,
    text_config,
)

__all__ = [
    "MULTIMODAL",
    "PRESETS",
    "Tensors",
    "family_of",
    "num_elements",
    "numbers_of",
    "preset",
    "tensors",
]

Shape: TypeAlias = tuple[int, ...]
Named: TypeAlias = Iterator[tuple[str, Shape]]
Tensors: TypeAlias = dict[str, tuple[Shape, str]]  # {name: (shape, dtype)}
MAX_TENSORS = 10_000_000


def tensors(config: Config | str) -> Tensors:
    """The {name: (shape, dtype)} of a preset, or of a Hugging Face ``config.json``.

    >>> len(tensors("bert-base")), tensors("bert-base")["bert.pooler.dense.bias"]
    (206, ((768,), 'float32'))
    """
    config = preset(config) if isinstance(config, str) else config
    family = family_of(config)
    prefix = "language_model." if config["model_type"] in MULTIMODAL else ""
    config = text_config(config)
    numbers = complete_numbers(config)
    layers, experts = numbers["num_layers"], numbers.get("num_experts", 1)
    if layers * max(experts, 1) > MAX_TENSORS:
        raise RulesError(f"{layers} layers of {experts} experts are too many: check the config")
    shapes = _BUILDERS.get(family, _decoder)(config)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return {f"{prefix}{name}": (shape, dtype.removeprefix("torch.")) for name, shape in shapes}


def num_elements(model: Tensors) -> int:
    """How many numbers a model has.

    >>> num_elements(tensors("llama-3-8b"))
    8030261248
    """
    return sum(prod(shape) for shape, _ in model.values())


def _decoder(config: Config) -> Named:
    """Llama and its relatives."""
    numbers, kind = complete_numbers(config), config["model_type"]
    hidden, vocab = number(config, "hidden_size"), number(config, "vocab_size")
    attention = _ATTENTION.get(kind, _attention)
    feed_forward = _FEED_FORWARD.get(kind, _dense_layer)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(numbers["num_layers"]):
        layer = f"model.layers.{i}"
        yield from attention(config, numbers, layer, i)
        yield from feed_forward(config, numbers, layer, i)
        for norm in norms:
            yield f"{layer}.{norm}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not numbers["tied"]:
        yield "lm_head.weight", (vocab, hidden)


def _attention(config: Config, numbers: Mapping[str, int], layer: str, index: int) -> Named:
    """Separate q, k and v projections."""
    at, kind, hidden = f"{layer}.self_attn", config["model_type"], number(config, "hidden_size")
    head_dim = numbers["head_dim"]
    q, kv = numbers["heads"] * head_dim, numbers["kv_heads"] * head_dim
    bias = bool(config.get("attention_bias", kind == "gpt_oss"))
    bias = bias and kind not in ("mistral", "mixtral", "qwen2")
    gated = 2 if kind == "qwen3_next" else 1  # the rows of a head's gate follow those of its query
    for name, size in (("q", gated * q), ("k", kv), ("v", kv)):
        yield from _linear(f"{at}.{name}_proj", size, hidden, bias or kind == "qwen2")
    yield from _linear(f"{at}.o_proj", hidden, q, bias)
    if kind in ("qwen3", "qwen3_moe", "qwen3_next", "gemma3_text"):
        yield f"{at}.q_norm.weight", (head_dim,)
        yield f"{at}.k_norm.weight", (head_dim,)
    if kind == "gpt_oss":
        yield f"{at}.sinks", (numbers["heads"],)


def _fused_attention(config: Config, numbers: Mapping[str, int], layer: str, index: int) -> Named:
    """Phi3: the rows of all q heads, then of all k heads, then of all v heads."""
    at, hidden, head_dim = f"{layer}.self_attn", number(config, "hidden_size"), numbers["head_dim"]
    rows = (numbers["heads"] + 2 * numbers["kv_heads"]) * head_dim
    yield f"{at}.qkv_proj.weight", (rows, hidden)
    yield f"{at}.o_proj.weight", (hidden, numbers["heads"] * head_dim)


def _latent_attention(config: Config, numbers: Mapping[str, int], layer: str, index: int) -> Named:
    """Deepseek: q, k and v of all heads from short vectors that all heads share."""
    at, hidden, heads = f"{layer}.self_attn", number(config, "hidden_size"), numbers["heads"]
    nope, rope = number(config, "qk_nope_head_dim"), number(config, "qk_rope_head_dim")
    value, latent = number(config, "v_head_dim"), number(config, "kv_lora_rank")
    bias = bool(config.get("attention_bias"))
    if config.get("q_lora_rank") is None:
        yield f"{at}.q_proj.weight", (heads * (nope + rope), hidden)
    else:
        rank = number(config, "q_lora_rank")
        yield from _linear(f"{at}.q_a_proj", rank, hidden, bias)
        yield f"{at}.q_a_layernorm.weight", (rank,)
        yield f"{at}.q_b_proj.weight", (heads * (nope + rope), rank)
    yield from _linear(f"{at}.kv_a_proj_with_mqa", latent + rope, hidden, bias)
    yield f"{at}.kv_a_layernorm.weight", (latent,)
    yield f"{at}.kv_b_proj.weight", (heads * (nope + value), latent)
    yield from _linear(f"{at}.o_proj", hidden, heads * value, bias)


def _hybrid_attention(config: Config, numbers: Mapping[str, int], layer: str, index: int) -> Named:
    """Qwen3-next: most layers have linear attention, with heads of their own."""
    kinds = config.get("layer_types")
    every = number(config, "full_attention_interval", 4) or 1
    linear = (index + 1) % every != 0
    if isinstance(kinds, list) and index < len(kinds):
        linear = kinds[index] == "linear_attention"
    if not linear:
        yield from _attention(config, numbers, layer, index)
        return
    at, hidden = f"{layer}.linear_attn", number(config, "hidden_size")
    keys, values = number(config, "linear_num_key_heads"), number(config, "linear_num_value_heads")
    head = number(config, "linear_value_head_dim")
    k, v = keys * number(config, "linear_key_head_dim"), values * head
    yield f"{at}.A_log", (values,)
    yield f"{at}.dt_bias", (values,)
    yield f"{at}.conv1d.weight", (2 * k + v, 1, number(config, "linear_conv_kernel_dim", 4))
    yield f"{at}.in_proj_qkvz.weight", (2 * k + 2 * v, hidden)
    yield f"{at}.in_proj_ba.weight", (2 * values, hidden)
    yield f"{at}.norm.weight", (head,)
    yield f"{at}.out_proj.weight", (hidden, v)


def _dense_layer(config: Config, numbers: Mapping[str, int], layer: str, index: int) -> Named:
    bias = bool(config.get("mlp_bias")) and config["model_type"] == "llama"
    yield from _dense(config, f"{layer}.mlp", number(config, "intermediate_size"), bias)


def _fused_dense(config: Config, numbers: Mapping[str, int], layer: str, index: int) -> Named:
    """Phi3: the rows of gate, then those of up."""
    hidden, ffn = number(config, "hidden_size"), number(config, "intermediate_size")
    yield f"{layer}.mlp.gate_up_proj.weight", (2 * ffn, hidden)
    yield f"{layer}.mlp.down_proj.weight", (hidden, ffn)


def _qwen_experts(config: Config, numbers: Mapping[str, int], layer: str, index: int) -> Named:
    dense = config.get("mlp_only_layers") or []
    step = number(config, "decoder_sparse_step", 1) or 1
    is_dense = (isinstance(dense, list) and index in dense) or (index + 1) % step
    if is_dense or not numbers["num_experts"]:
        yield from _dense(config, f"{layer}.mlp", number(config, "intermediate_size"))
        return
    yield from _experts(config, numbers, f"{layer}.mlp")
    if config["model_type"] == "qwen3_next":
        shared = number(config, "shared_expert_intermediate_size")
        yield from _dense(config, f"{layer}.mlp.shared_expert", shared)
        yield f"{layer}.mlp.shared_expert_gate.weight", (1, number(config, "hidden_size"))


def _deepseek(config: Config, numbers: Mapping[str, int], layer: str, index: int) -> Named:
    at = f"{layer}.mlp"
    if index < number(config, "first_k_dense_replace", 3):
        yield from _dense(config, at, number(config, "intermediate_size"))
        return
    yield from _experts(config, numbers, at)
    yield f"{at}.gate.e_score_correction_bias", (numbers["num_experts"],)
    shared = number(config, "n_shared_experts", 1) * numbers["expert_size"]
    yield from _dense(config, f"{at}.shared_experts", shared)


def _gpt_oss(config: Config, numbers: Mapping[str, int], layer: str, index: int) -> Named:
    """All experts in one tensor; columns of gate and up take turns."""
    at, experts, ffn = f"{layer}.mlp", numbers["num_experts"], numbers["expert_size"]
    hidden = number(config, "hidden_size")
    yield from _linear(f"{at}.router", experts, hidden)
    yield f"{at}.experts.gate_up_proj", (experts, hidden, 2 * ffn)
    yield f"{at}.experts.gate_up_proj_bias", (experts, 2 * ffn)
    yield f"{at}.experts.down_proj", (experts, ffn, hidden)
    yield f"{at}.experts.down_proj_bias", (experts, hidden)


def _llama4(config: Config, numbers: Mapping[str, int], layer: str, index: int) -> Named:
    """All experts in one tensor; the columns of gate, then those of up."""
    at, experts, ffn = f"{layer}.feed_forward", numbers["num_experts"], numbers["expert_size"]
    hidden, sparse = number(config, "hidden_size"), config.get("moe_layers")
    step = number(config, "interleave_moe_layer_step", 1) or 1
    if index not in sparse if isinstance(sparse, list) else (index + 1) % step:
        yield from _dense(config, at, number(config, "intermediate_size_mlp"))
        return
    yield f"{at}.router.weight", (experts, hidden)
    yield f"{at}.experts.gate_up_proj", (experts, hidden, 2 * ffn)
    yield f"{at}.experts.down_proj", (experts, ffn, hidden)
    yield from _dense(config, f"{at}.shared_expert", ffn)


def _experts(
    config: Config,
    numbers: Mapping[str, int],
    at: str,
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> Named:
    """A router, and three matrices for each expert."""
    hidden, ffn = number(config, "hidden_size"), numbers["expert_size"]
    yield f"{at}.gate.weight", (numbers["num_experts"], hidden)
    for e in range(numbers["num_experts"]):
        for name, shape in zip(names, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True):
            yield f"{at}.experts.{e}.{name}.weight", shape


def _dense(config: Config, at: str, ffn: int, bias: bool = False) -> Named:
    hidden = number(config, "hidden_size")
    for name, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
        yield from _linear(f"{at}.{name}_proj", rows, columns, bias)


def _linear(at: str, out: int, inside: int, bias: bool = True) -> Named:
    yield f"{at}.weight", (out, inside)
    if bias:
        yield f"{at}.bias", (out,)


def _norm(at: str, size: int) -> Named:
    yield f"{at}.weight", (size,)
    yield f"{at}.bias", (size,)


def _gpt_neox(config: Config) -> Named:
    hidden, vocab = number(config, "hidden_size"), number(config, "vocab_size")
    ffn, bias = number(config, "intermediate_size"), bool(config.get("attention_bias", True))
    numbers = complete_numbers(config)
    yield "gpt_neox.embed_in.weight", (vocab, hidden)
    for i in range(numbers["num_layers"]):
        layer = f"gpt_neox.layers.{i}"
        yield from _norm(f"{layer}.input_layernorm", hidden)
        yield from _norm(f"{layer}.post_attention_layernorm", hidden)
        yield from _linear(f"{layer}.attention.query_key_value", 3 * hidden, hidden, bias)
        yield from _linear(f"{layer}.attention.dense", hidden, hidden, bias)
        yield from _linear(f"{layer}.mlp.dense_h_to_4h", ffn, hidden)
        yield from _linear(f"{layer}.mlp.dense_4h_to_h", hidden, ffn)
    yield from _norm("gpt_neox.final_layer_norm", hidden)
    if not numbers["tied"]:
        yield "embed_out.weight", (vocab, hidden)


def _bert(config: Config) -> Named:
    """BertForPreTraining; the decoder is the word embedding and is not in the file."""
    hidden, ffn = number(config, "hidden_size"), number(config, "intermediate_size")
    vocab = number(config, "vocab_size")
    at = "bert.embeddings"
    yield f"{at}.word_embeddings.weight", (vocab, hidden)
    positions = number(config, "max_position_embeddings", 512)
    yield f"{at}.position_embeddings.weight", (positions, hidden)
    yield f"{at}.token_type_embeddings.weight", (number(config, "type_vocab_size", 2), hidden)
    yield from _norm(f"{at}.LayerNorm", hidden)
    for i in range(number(config, "num_hidden_layers")):
        layer = f"bert.encoder.layer.{i}"
        for name in ("query", "key", "value"):
            yield from _linear(f"{layer}.attention.self.{name}", hidden, hidden)
        yield from _linear(f"{layer}.attention.output.dense", hidden, hidden)
        yield from _norm(f"{layer}.attention.output.LayerNorm", hidden)
        yield from _linear(f"{layer}.intermediate.dense", ffn, hidden)
        yield from _linear(f"{layer}.output.dense", hidden, ffn)
        yield from _norm(f"{layer}.output.LayerNorm", hidden)
    yield from _linear("bert.pooler.dense", hidden, hidden)
    yield "cls.predictions.bias", (vocab,)
    yield from _linear("cls.predictions.transform.dense", hidden, hidden)
    yield from _norm("cls.predictions.transform.LayerNorm", hidden)
    yield from _linear("cls.seq_relationship", 2, hidden)


_Part: TypeAlias = Callable[[Config, Mapping[str, int], str, int], Named]

_ATTENTION: Mapping[str, _Part] = {
    "phi3": _fused_attention,
    "qwen3_next": _hybrid_attention,
    "deepseek_v3": _latent_attention,
}
_FEED_FORWARD: Mapping[str, _Part] = {
    "phi3": _fused_dense,
    "mixtral": lambda config, numbers, layer, _: _experts(
        config, numbers, f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
    ),
    "qwen3_moe": _qwen_experts,
    "qwen3_next": _qwen_experts,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
}
_BUILDERS: Mapping[str, Callable[[Config], Named]] = {"gpt_neox": _gpt_neox, "bert": _bert}
