"""Tensor names and shapes of known models: what is in the state dict that a config describes?

Names are those of the files that Hugging Face transformers writes. Nothing is loaded or allocated,
so a 70B model costs as little as a small one.

    >>> tensors("llama-3-8b")["model.layers.0.self_attn.k_proj.weight"]
    ((1024, 4096), 'bfloat16')
    >>> [len(tensors(name)) for name in ("llama-3-8b", "llama-3-70b", "qwen3-30b-a3b")]
    [291, 723, 18867]
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from reshard.errors import RulesError

__all__ = ["PRESETS", "Tensors", "family_of", "num_elements", "numbers_of", "preset", "tensors"]

Shape: TypeAlias = tuple[int, ...]
Tensors: TypeAlias = dict[str, tuple[Shape, str]]
"""{name: (shape, dtype)}"""

_FAMILIES = MappingProxyType(
    {
        "llama": "llama",
        "mistral": "mistral",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "gemma": "gemma",
        "gemma2": "gemma",
        "gemma3_text": "gemma",
        "gpt_neox": "gpt_neox",
        "mixtral": "mixtral",
        "qwen3_moe": "qwen3_moe",
        "bert": "bert",
    }
)
"""The family of rules for each ``model_type``."""

_TIED = frozenset({"gemma", "gemma2", "gemma3_text", "bert"})
"""Model types whose output layer is the embedding unless the config says otherwise."""

_HEAD_DIM = MappingProxyType({"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256})
"""The size of a head where a config leaves it out and it is not hidden_size over heads."""

_EXPERT_SIZE = MappingProxyType(
    {"mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}
)
"""Where a config with experts has the rows of their first matrices."""

NUMBERS = (
    "heads", "kv_heads", "head_dim", "num_layers", "tied", "num_experts", "expert_size",
)  # fmt: skip
"""The names that rules have for numbers of a config."""

MAX_TENSORS = 10_000_000


def _llama(hidden: int, ffn: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
    }


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-3-8b": _llama(4096, 14336, 32, 32, 128256),
        "llama-3-70b": _llama(8192, 28672, 80, 64, 128256),
        "llama-3.2-1b": _llama(2048, 8192, 16, 32, 128256) | {"tie_word_embeddings": True},
        "mistral-7b": _llama(4096, 14336, 32, 32, 32000) | {"model_type": "mistral"},
        "mixtral-8x7b": _llama(4096, 14336, 32, 32, 32000)
        | {"model_type": "mixtral", "num_local_experts": 8},
        "qwen2-7b": _llama(3584, 18944, 28, 28, 152064)
        | {"model_type": "qwen2", "num_key_value_heads": 4},
        "qwen3-8b": _llama(4096, 12288, 36, 32, 151936) | {"model_type": "qwen3", "head_dim": 128},
        "qwen3-30b-a3b": _llama(2048, 6144, 48, 32, 151936)
        | {
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "moe_intermediate_size": 768,
        },
        "gemma-2b": _llama(2048, 16384, 18, 8, 256000)
        | {"model_type": "gemma", "head_dim": 256, "num_key_value_heads": 1},
        "gemma-7b": _llama(3072, 24576, 28, 16, 256000)
        | {"model_type": "gemma", "head_dim": 256, "num_key_value_heads": 16},
        "gpt-neox-20b": _llama(6144, 24576, 44, 64, 50432)
        | {"model_type": "gpt_neox", "num_key_value_heads": 64, "torch_dtype": "float16"},
        "bert-base": _llama(768, 3072, 12, 12, 30522)
        | {
            "model_type": "bert",
            "num_key_value_heads": 12,
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            "torch_dtype": "float32",
        },
    }
)
"""The configs of some published models."""


def preset(name: str) -> Mapping[str, Any]:
    """The config of a published model.

    >>> preset("llama-3-70b")["num_hidden_layers"]
    80
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3) or list(PRESETS)
        raise RulesError(f'there is no model "{name}": try {", ".join(near)}')
    return PRESETS[name]


def tensors(config: Mapping[str, Any] | str) -> Tensors:
    """The {name: (shape, dtype)} of a preset, or of a Hugging Face ``config.json``.

    >>> len(tensors("bert-base")), tensors("bert-base")["bert.pooler.dense.bias"]
    (206, ((768,), 'float32'))
    """
    config = preset(config) if isinstance(config, str) else config
    family, numbers = family_of(config), _complete_numbers(config)
    layers, experts = numbers["num_layers"], numbers.get("num_experts", 1)
    if layers * max(experts, 1) > MAX_TENSORS:
        raise RulesError(f"{layers} layers of {experts} experts are too many: check the config")
    shapes = _BUILDERS.get(family, _decoder)(config)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return {name: (shape, dtype.removeprefix("torch.")) for name, shape in shapes}


def num_elements(model: Tensors) -> int:
    """How many numbers a model has.

    >>> num_elements(tensors("llama-3-8b"))
    8030261248
    """
    total = 0
    for shape, _ in model.values():
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def family_of(config: Mapping[str, Any]) -> str:
    """The family of rules for a config.

    >>> family_of({"model_type": "qwen3_moe"})
    'qwen3_moe'
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise RulesError(
            f"a config of model_type {str(model_type)[:60]!r} is not known: the types are "
            f"{', '.join(_FAMILIES)}; write a rules file for others"
        )
    return _FAMILIES[model_type]


def numbers_of(config: Mapping[str, Any], names: Collection[str] = NUMBERS) -> dict[str, int]:
    """The numbers of a config that rules use, under their names there.

    A number that the config does not give is left out. Defaults of transformers are used only for
    a ``model_type`` that is known here.

    >>> numbers_of(preset("qwen3-30b-a3b"))["kv_heads"]
    4
    >>> numbers_of({"model_type": "phi9", "num_attention_heads": 8})
    {'heads': 8}
    """
    numbers = {name: _number_of(config, name) for name in NUMBERS if name in names}
    return {name: number for name, number in numbers.items() if number is not None}


def _number_of(config: Mapping[str, Any], name: str) -> int | None:
    """One number of a config; None where the config does not give it."""
    kind = str(config.get("model_type"))
    match name:
        case "heads":
            return _optional(config, "num_attention_heads")
        case "kv_heads":
            default = _number_of(config, "heads") if kind in _FAMILIES else None
            return _optional(config, "num_key_value_heads", default)
        case "head_dim":
            return _optional(config, "head_dim", _HEAD_DIM.get(kind) or _even_head_dim(config))
        case "num_layers":
            return _optional(config, "num_hidden_layers")
        case "num_experts":
            return _optional(config, "num_local_experts", _optional(config, "num_experts"))
        case "expert_size":
            return _optional(config, _EXPERT_SIZE[kind]) if kind in _EXPERT_SIZE else None
    tied = config.get("tie_word_embeddings")
    if tied is None:
        return int(kind in _TIED) if kind in _FAMILIES else None
    return int(bool(tied))


def _even_head_dim(config: Mapping[str, Any]) -> int | None:
    heads = _optional(config, "num_attention_heads")
    hidden = _optional(config, "hidden_size")
    return hidden // heads if hidden and heads and hidden % heads == 0 else None


def _complete_numbers(config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers that the state dict of a known model follows from; a missing one is an error."""
    for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"):
        _number(config, key)
    numbers, kind = numbers_of(config), config["model_type"]
    if kind in _EXPERT_SIZE:
        _number(numbers, "num_experts")
        _number(config, _EXPERT_SIZE[kind])
    if "head_dim" not in numbers:
        raise RulesError(
            f'"hidden_size" in the config is {config["hidden_size"]} and "num_attention_heads" is '
            f'{config["num_attention_heads"]}, which does not divide it: give "head_dim"'
        )
    return numbers


def _optional(config: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
    return default if config.get(key) is None else _number(config, key)


def _number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 40:
        raise RulesError(f'"{key}" in the config is {str(value)[:40]}: expected a whole number')
    return value


def _decoder(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Llama and its relatives."""
    numbers = _complete_numbers(config)
    hidden, vocab = _number(config, "hidden_size"), _number(config, "vocab_size")
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(numbers["num_layers"]):
        layer = f"model.layers.{i}"
        yield from _attention(config, numbers, hidden, f"{layer}.self_attn")
        yield from _feed_forward(config, numbers, hidden, layer, i)
        for norm in _norms(config):
            yield f"{layer}.{norm}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not numbers["tied"]:
        yield "lm_head.weight", (vocab, hidden)


def _norms(config: Mapping[str, Any]) -> tuple[str, ...]:
    around = ("input_layernorm", "post_attention_layernorm")
    more = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    return around + more if config["model_type"] in ("gemma2", "gemma3_text") else around


def _attention(
    config: Mapping[str, Any], numbers: Mapping[str, int], hidden: int, at: str
) -> Iterator[tuple[str, Shape]]:
    kind, head_dim = config["model_type"], numbers["head_dim"]
    q, kv = numbers["heads"] * head_dim, numbers["kv_heads"] * head_dim
    bias = bool(config.get("attention_bias")) and kind not in ("mistral", "mixtral", "qwen2")
    for name, size in (("q", q), ("k", kv), ("v", kv)):
        yield f"{at}.{name}_proj.weight", (size, hidden)
        if bias or kind == "qwen2":
            yield f"{at}.{name}_proj.bias", (size,)
    yield f"{at}.o_proj.weight", (hidden, q)
    if bias:
        yield f"{at}.o_proj.bias", (hidden,)
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        yield f"{at}.q_norm.weight", (head_dim,)
        yield f"{at}.k_norm.weight", (head_dim,)


def _feed_forward(
    config: Mapping[str, Any], numbers: Mapping[str, int], hidden: int, layer: str, index: int
) -> Iterator[tuple[str, Shape]]:
    kind = config["model_type"]
    if kind == "mixtral":
        at, names = f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
    elif kind == "qwen3_moe" and _is_sparse(config, index):
        at, names = f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
    else:
        yield from _dense(config, hidden, f"{layer}.mlp")
        return
    ffn = numbers["expert_size"]
    yield f"{at}.gate.weight", (numbers["num_experts"], hidden)
    for e in range(numbers["num_experts"]):
        for name, shape in zip(names, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True):
            yield f"{at}.experts.{e}.{name}.weight", shape


def _is_sparse(config: Mapping[str, Any], index: int) -> bool:
    dense = config.get("mlp_only_layers") or []
    step = _number(config, "decoder_sparse_step", 1) or 1
    return not (isinstance(dense, list) and index in dense) and (index + 1) % step == 0


def _dense(config: Mapping[str, Any], hidden: int, at: str) -> Iterator[tuple[str, Shape]]:
    ffn = _number(config, "intermediate_size")
    bias = bool(config.get("mlp_bias")) and config["model_type"] == "llama"
    for name, shape in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))):
        yield f"{at}.{name}_proj.weight", shape
        if bias:
            yield f"{at}.{name}_proj.bias", shape[:1]


def _linear(at: str, out: int, inside: int, bias: bool = True) -> Iterator[tuple[str, Shape]]:
    yield f"{at}.weight", (out, inside)
    if bias:
        yield f"{at}.bias", (out,)


def _norm(at: str, size: int) -> Iterator[tuple[str, Shape]]:
    yield f"{at}.weight", (size,)
    yield f"{at}.bias", (size,)


def _gpt_neox(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, vocab = _number(config, "hidden_size"), _number(config, "vocab_size")
    ffn, bias = _number(config, "intermediate_size"), bool(config.get("attention_bias", True))
    numbers = _complete_numbers(config)
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


def _bert(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """BertForPreTraining; the decoder is the word embedding and is not in the file."""
    hidden, ffn = _number(config, "hidden_size"), _number(config, "intermediate_size")
    vocab = _number(config, "vocab_size")
    at = "bert.embeddings"
    yield f"{at}.word_embeddings.weight", (vocab, hidden)
    positions = _number(config, "max_position_embeddings", 512)
    yield f"{at}.position_embeddings.weight", (positions, hidden)
    yield f"{at}.token_type_embeddings.weight", (_number(config, "type_vocab_size", 2), hidden)
    yield from _norm(f"{at}.LayerNorm", hidden)
    for i in range(_number(config, "num_hidden_layers")):
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


_BUILDERS = MappingProxyType({"gpt_neox": _gpt_neox, "bert": _bert})
