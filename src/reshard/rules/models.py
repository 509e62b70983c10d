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
from itertools import chain
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
MAX_EXPERTS = 200_000  # of all layers: several times as many as the largest models have


def tensors(config: Config | str) -> Tensors:
    """The {name: (shape, dtype)} of a preset, or of a Hugging Face ``config.json``.

    >>> len(tensors("bert-base")), tensors("bert-base")["bert.pooler.dense.bias"]
    (206, ((768,), 'float32'))
    """
    config = preset(config) if isinstance(config, str) else config
    family = family_of(config)
    prefix = "language_model." if config["model_type"] in MULTIMODAL else ""
    config = text_config(config)
    model = _Model(config)
    layers, experts = model["num_layers"], model.get("num_experts", 1)
    if layers * max(experts, 1) > MAX_EXPERTS:
        raise RulesError(f"{layers} layers of {experts} experts are too many: check the config")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    shapes = _BUILDERS.get(family, _decoder)(model)
    return {f"{prefix}{name}": (shape, dtype) for name, shape in shapes}


def num_elements(model: Tensors) -> int:
    """How many numbers a model has.

    >>> num_elements(tensors("llama-3-8b"))
    8030261248
    """
    return sum(prod(shape) for shape, _ in model.values())


class _Model(dict[str, int]):
    """Numbers of a config: under the names that rules have for them, others under its own keys."""

    def __init__(self, config: Config) -> None:
        super().__init__(complete_numbers(config))
        self.config, self.kind = config, config["model_type"]

    def __missing__(self, key: str) -> int:
        return number(self.config, key)

    def optional(self, key: str, default: int) -> int:
        return number(self.config, key, default)


def _decoder(m: _Model) -> Named:
    """Llama and its relatives."""
    hidden, vocab = m["hidden_size"], m["vocab_size"]
    attention = _ATTENTION.get(m.kind, _attention)
    feed_forward = _FEED_FORWARD.get(m.kind, _dense_layer)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if m.kind in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(m["num_layers"]):
        for name, shape in chain(attention(m, i), feed_forward(m, i)):
            yield f"model.layers.{i}.{name}", shape
        for norm in norms:
            yield f"model.layers.{i}.{norm}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not m["tied"]:
        yield "lm_head.weight", (vocab, hidden)


def _attention(m: _Model, _: int) -> Named:
    """Separate q, k and v projections."""
    hidden, head_dim = m["hidden_size"], m["head_dim"]
    q, kv = m["heads"] * head_dim, m["kv_heads"] * head_dim
    bias = bool(m.config.get("attention_bias", m.kind == "gpt_oss"))
    bias = bias and m.kind not in ("mistral", "mixtral", "qwen2")
    gated = 2 if m.kind == "qwen3_next" else 1  # rows of a head's gate follow those of its query
    for name, size in (("q", gated * q), ("k", kv), ("v", kv)):
        yield from _linear(f"self_attn.{name}_proj", size, hidden, bias=bias or m.kind == "qwen2")
    yield from _linear("self_attn.o_proj", hidden, q, bias=bias)
    if m.kind in ("qwen3", "qwen3_moe", "qwen3_next", "gemma3_text"):
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)
    if m.kind == "gpt_oss":
        yield "self_attn.sinks", (m["heads"],)


def _fused_attention(m: _Model, _: int) -> Named:
    """Phi3: the rows of all q heads, then of all k heads, then of all v heads."""
    hidden, head_dim = m["hidden_size"], m["head_dim"]
    yield "self_attn.qkv_proj.weight", ((m["heads"] + 2 * m["kv_heads"]) * head_dim, hidden)
    yield "self_attn.o_proj.weight", (hidden, m["heads"] * head_dim)


def _latent_attention(m: _Model, _: int) -> Named:
    """Deepseek: q, k and v of all heads from short vectors that all heads share."""
    hidden, heads = m["hidden_size"], m["heads"]
    nope, rope = m["qk_nope_head_dim"], m["qk_rope_head_dim"]
    value, latent = m["v_head_dim"], m["kv_lora_rank"]
    bias = bool(m.config.get("attention_bias"))
    if m.config.get("q_lora_rank") is None:
        yield "self_attn.q_proj.weight", (heads * (nope + rope), hidden)
    else:
        rank = m["q_lora_rank"]
        yield from _linear("self_attn.q_a_proj", rank, hidden, bias=bias)
        yield "self_attn.q_a_layernorm.weight", (rank,)
        yield "self_attn.q_b_proj.weight", (heads * (nope + rope), rank)
    yield from _linear("self_attn.kv_a_proj_with_mqa", latent + rope, hidden, bias=bias)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield "self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
    yield from _linear("self_attn.o_proj", hidden, heads * value, bias=bias)


def _hybrid_attention(m: _Model, index: int) -> Named:
    """Qwen3-next: most layers have linear attention, with heads of their own."""
    kinds = m.config.get("layer_types")
    every = m.optional("full_attention_interval", 4) or 1
    is_linear = (index + 1) % every != 0
    if isinstance(kinds, list) and index < len(kinds):
        is_linear = kinds[index] == "linear_attention"
    if not is_linear:
        yield from _attention(m, index)
        return
    hidden = m["hidden_size"]
    keys, values = m["linear_num_key_heads"], m["linear_num_value_heads"]
    head = m["linear_value_head_dim"]
    k, v = keys * m["linear_key_head_dim"], values * head
    yield "linear_attn.A_log", (values,)
    yield "linear_attn.dt_bias", (values,)
    yield "linear_attn.conv1d.weight", (2 * k + v, 1, m.optional("linear_conv_kernel_dim", 4))
    yield "linear_attn.in_proj_qkvz.weight", (2 * k + 2 * v, hidden)
    yield "linear_attn.in_proj_ba.weight", (2 * values, hidden)
    yield "linear_attn.norm.weight", (head,)
    yield "linear_attn.out_proj.weight", (hidden, v)


def _dense_layer(m: _Model, _: int) -> Named:
    bias = bool(m.config.get("mlp_bias")) and m.kind == "llama"
    return _dense(m, "mlp", m["intermediate_size"], bias)


def _fused_dense(m: _Model, _: int) -> Named:
    """Phi3: the rows of gate, then those of up."""
    hidden, ffn = m["hidden_size"], m["intermediate_size"]
    yield "mlp.gate_up_proj.weight", (2 * ffn, hidden)
    yield "mlp.down_proj.weight", (hidden, ffn)


def _qwen_experts(m: _Model, index: int) -> Named:
    dense = m.config.get("mlp_only_layers") or []
    step = m.optional("decoder_sparse_step", 1) or 1
    is_dense = (isinstance(dense, list) and index in dense) or (index + 1) % step
    if is_dense or not m["num_experts"]:
        yield from _dense(m, "mlp", m["intermediate_size"])
        return
    yield from _experts(m, "mlp")
    if m.kind == "qwen3_next":
        yield from _dense(m, "mlp.shared_expert", m["shared_expert_intermediate_size"])
        yield "mlp.shared_expert_gate.weight", (1, m["hidden_size"])


def _deepseek(m: _Model, index: int) -> Named:
    if index < m.optional("first_k_dense_replace", 3):
        yield from _dense(m, "mlp", m["intermediate_size"])
        return
    yield from _experts(m, "mlp")
    yield "mlp.gate.e_score_correction_bias", (m["num_experts"],)
    yield from _dense(m, "mlp.shared_experts", m.optional("n_shared_experts", 1) * m["expert_size"])


def _gpt_oss(m: _Model, _: int) -> Named:
    """All experts in one tensor; columns of gate and up take turns."""
    experts, ffn, hidden = m["num_experts"], m["expert_size"], m["hidden_size"]
    yield from _linear("mlp.router", experts, hidden)
    yield "mlp.experts.gate_up_proj", (experts, hidden, 2 * ffn)
    yield "mlp.experts.gate_up_proj_bias", (experts, 2 * ffn)
    yield "mlp.experts.down_proj", (experts, ffn, hidden)
    yield "mlp.experts.down_proj_bias", (experts, hidden)


def _llama4(m: _Model, index: int) -> Named:
    """All experts in one tensor; the columns of gate, then those of up."""
    experts, ffn, hidden = m["num_experts"], m["expert_size"], m["hidden_size"]
    sparse, step = m.config.get("moe_layers"), m.optional("interleave_moe_layer_step", 1) or 1
    if index not in sparse if isinstance(sparse, list) else (index + 1) % step:
        yield from _dense(m, "feed_forward", m["intermediate_size_mlp"])
        return
    yield "feed_forward.router.weight", (experts, hidden)
    yield "feed_forward.experts.gate_up_proj", (experts, hidden, 2 * ffn)
    yield "feed_forward.experts.down_proj", (experts, ffn, hidden)
    yield from _dense(m, "feed_forward.shared_expert", ffn)


def _experts(
    m: _Model, at: str, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> Named:
    """A router, and three matrices for each expert."""
    hidden, ffn = m["hidden_size"], m["expert_size"]
    yield f"{at}.gate.weight", (m["num_experts"], hidden)
    matrices = [*zip(names, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True)]
    for e in range(m["num_experts"]):
        for name, shape in matrices:
            yield f"{at}.experts.{e}.{name}.weight", shape


def _dense(m: _Model, at: str, ffn: int, bias: bool = False) -> Named:
    hidden = m["hidden_size"]
    for name, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
        yield from _linear(f"{at}.{name}_proj", rows, columns, bias=bias)


def _linear(at: str, *shape: int, bias: bool = True) -> Named:
    """The weight of a linear layer or of a norm, and its bias."""
    yield f"{at}.weight", shape
    if bias:
        yield f"{at}.bias", shape[:1]


def _gpt_neox(m: _Model) -> Named:
    hidden, vocab, ffn = m["hidden_size"], m["vocab_size"], m["intermediate_size"]
    bias = bool(m.config.get("attention_bias", True))
    yield "gpt_neox.embed_in.weight", (vocab, hidden)
    for i in range(m["num_layers"]):
        layer = f"gpt_neox.layers.{i}"
        yield from _linear(f"{layer}.input_layernorm", hidden)
        yield from _linear(f"{layer}.post_attention_layernorm", hidden)
        yield from _linear(f"{layer}.attention.query_key_value", 3 * hidden, hidden, bias=bias)
        yield from _linear(f"{layer}.attention.dense", hidden, hidden, bias=bias)
        yield from _linear(f"{layer}.mlp.dense_h_to_4h", ffn, hidden)
        yield from _linear(f"{layer}.mlp.dense_4h_to_h", hidden, ffn)
    yield from _linear("gpt_neox.final_layer_norm", hidden)
    if not m["tied"]:
        yield "embed_out.weight", (vocab, hidden)


def _bert(m: _Model) -> Named:
    """BertForPreTraining; the decoder is the word embedding and is not in the file."""
    hidden, ffn, vocab = m["hidden_size"], m["intermediate_size"], m["vocab_size"]
    positions, types = m.optional("max_position_embeddings", 512), m.optional("type_vocab_size", 2)
    yield "bert.embeddings.word_embeddings.weight", (vocab, hidden)
    yield "bert.embeddings.position_embeddings.weight", (positions, hidden)
    yield "bert.embeddings.token_type_embeddings.weight", (types, hidden)
    yield from _linear("bert.embeddings.LayerNorm", hidden)
    for i in range(m["num_layers"]):
        layer = f"bert.encoder.layer.{i}"
        for name in ("query", "key", "value"):
            yield from _linear(f"{layer}.attention.self.{name}", hidden, hidden)
        yield from _linear(f"{layer}.attention.output.dense", hidden, hidden)
        yield from _linear(f"{layer}.attention.output.LayerNorm", hidden)
        yield from _linear(f"{layer}.intermediate.dense", ffn, hidden)
        yield from _linear(f"{layer}.output.dense", hidden, ffn)
        yield from _linear(f"{layer}.output.LayerNorm", hidden)
    yield from _linear("bert.pooler.dense", hidden, hidden)
    yield "cls.predictions.bias", (vocab,)
    yield from _linear("cls.predictions.transform.dense", hidden, hidden)
    yield from _linear("cls.predictions.transform.LayerNorm", hidden)
    yield from _linear("cls.seq_relationship", 2, hidden)


_Part: TypeAlias = Callable[[_Model, int], Named]
"""The tensors of one layer that belong to its attention or its feed-forward part."""

_ATTENTION: Mapping[str, _Part] = {
    "phi3": _fused_attention,
    "qwen3_next": _hybrid_attention,
    "deepseek_v3": _latent_attention,
}
_FEED_FORWARD: Mapping[str, _Part] = {
    "phi3": _fused_dense,
    "mixtral": lambda m, _: _experts(m, "block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": _qwen_experts,
    "qwen3_next": _qwen_experts,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
}
_BUILDERS: Mapping[str, Callable[[_Model], Named]] = {"gpt_neox": _gpt_neox, "bert": _bert}
