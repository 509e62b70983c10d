"""Configs of models: the numbers that rules need, for published models and from config.json.

    >>> numbers_of(preset("llama-3-70b"))["num_layers"]
    80

The config of a multimodal model holds the one of its text part, which is what is read here.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from reshard.errors import RulesError, require_type

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _ModelType:
    """What must be known of a ``model_type`` in addition to its config."""

    family: str  # its family of rules
    defaults: Config = field(default_factory=dict)
    """What transformers assumes where a config leaves it out, as far as it is needed here."""
    tied: bool = False  # whether the output layer is the embedding unless the config says otherwise
    expert_size: str | None = None  # where a config has the rows of an expert's first matrices


_OWN, _MOE = "intermediate_size", "moe_intermediate_size"
_DIM256 = {"head_dim": 256}
_TYPES: Mapping[str, _ModelType] = {
    "llama": _ModelType("llama"),
    "mistral": _ModelType("mistral"),
    "qwen2": _ModelType("qwen2"),
    "qwen3": _ModelType("qwen3", {"head_dim": 128}),
    "gemma": _ModelType("gemma", _DIM256, tied=True),
    "gemma2": _ModelType("gemma", _DIM256, tied=True),
    "gemma3_text": _ModelType(
        "gemma",
        # Published configs leave out everything that is as in transformers.
        {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208} | _DIM256,
        tied=True,
    ),
    "gemma3": _ModelType("gemma3"),
    "gpt_neox": _ModelType("gpt_neox"),
    "mixtral": _ModelType("mixtral", expert_size=_OWN),
    "qwen3_moe": _ModelType("qwen3_moe", expert_size=_MOE),
    "qwen3_next": _ModelType("qwen3_next", _DIM256, expert_size=_MOE),
    "phi3": _ModelType("phi3"),
    "gpt_oss": _ModelType("gpt_oss", {"head_dim": 64}, expert_size=_OWN),
    "llama4_text": _ModelType("llama4", expert_size=_OWN),
    "llama4": _ModelType("llama4"),
    "deepseek_v3": _ModelType("deepseek_v3", expert_size=_MOE),
    "bert": _ModelType("bert", tied=True),
}

MULTIMODAL = MappingProxyType({"gemma3": "gemma3_text", "llama4": "llama4_text"})
"""The model type of the text part of each model type that has other parts."""

_OUTER = ("dtype", "torch_dtype", "tie_word_embeddings")
"""What the config of a multimodal model may say of its text part as well."""

_KEYS: Mapping[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads",),
    "num_layers": ("num_hidden_layers",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "mlp_size": ("intermediate_size",),
    "linear_k_heads": ("linear_num_key_heads",),
    "linear_k_dim": ("linear_key_head_dim",),
    "linear_v_dim": ("linear_value_head_dim",),
}
"""The keys, the first that is there, of numbers that a config states under another name."""

NUMBERS = (
    "heads", "kv_heads", "head_dim", "num_layers", "tied", "num_experts", "expert_size", "mlp_size",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "linear_k_heads", "linear_group", "linear_k_dim", "linear_v_dim",
)  # fmt: skip
"""The names that rules have for numbers of a config."""


def _config(
    kind: str, hidden: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        **more,
    }


_PRESETS = {
    "llama-3-8b": _config("llama", 4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _config("llama", 8192, 28672, 80, 64, 8, 128256),
    "llama-3.2-1b": _config("llama", 2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),
    "llama-4-scout": {
        "model_type": "llama4",
        "text_config": _config(
            "llama4_text", 5120, 8192, 48, 40, 8, 202048, head_dim=128, intermediate_size_mlp=16384,
            num_local_experts=16, interleave_moe_layer_step=1,
        ),
    },
    "mistral-7b": _config("mistral", 4096, 14336, 32, 32, 8, 32000),
    "mixtral-8x7b": _config("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8),
    "deepseek-v3": _config(
        "deepseek_v3", 7168, 18432, 61, 128, 128, 129280, n_routed_experts=256, n_shared_experts=1,
        moe_intermediate_size=2048, first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    ),
    "gpt-oss-20b": _config(
        "gpt_oss", 2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32,
    ),
    "gpt-oss-120b": _config(
        "gpt_oss", 2880, 2880, 36, 64, 8, 201088, head_dim=64, num_local_experts=128,
    ),
    "phi-3-mini": _config("phi3", 3072, 8192, 32, 32, 32, 32064),
    "phi-4": _config("phi3", 5120, 17920, 40, 40, 10, 100352),
    "qwen2-7b": _config("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "qwen3-8b": _config("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "qwen3-30b-a3b": _config(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128,
        moe_intermediate_size=768,
    ),
    "qwen3-next-80b-a3b": _config(
        "qwen3_next", 2048, 5120, 48, 16, 2, 151936, head_dim=256, num_experts=512,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, full_attention_interval=4,
        linear_conv_kernel_dim=4, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128,
    ),
    "gemma-2b": _config("gemma", 2048, 16384, 18, 8, 1, 256000, head_dim=256),
    "gemma-7b": _config("gemma", 3072, 24576, 28, 16, 16, 256000, head_dim=256),
    "gemma-3-1b": _config("gemma3_text", 1152, 6912, 26, 4, 1, 262144, head_dim=256),
    "gemma-3-4b": {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
        },
    },
    "gpt-neox-20b": _config("gpt_neox", 6144, 24576, 44, 64, 64, 50432, torch_dtype="float16"),
    "bert-base": _config(
        "bert", 768, 3072, 12, 12, 12, 30522, max_position_embeddings=512, type_vocab_size=2,
        torch_dtype="float32",
    ),
}  # fmt: skip
PRESETS: Mapping[str, Config] = MappingProxyType(_PRESETS)  # the configs of some published models


def preset(name: str) -> Config:
    """The config of a published model."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3) or list(PRESETS)
        raise RulesError(f'there is no model "{name}": try {", ".join(near)}')
    return PRESETS[name]


def check_config(config: object) -> None:
    advice = "give the dict of a config.json; a config of transformers has to_dict()"
    require_type(config, Mapping, "config=", advice)


def family_of(config: Config) -> str:
    """The family of rules for a config."""
    check_config(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _TYPES:
        raise RulesError(
            f"a config of model_type {str(model_type)[:60]!r} is not known: the types are "
            f"{', '.join(_TYPES)}; write a rules file for others"
        )
    return _TYPES[model_type].family


def text_config(config: Config) -> Config:
    """The config of the text part, with what transformers assumes where it says nothing.

    >>> text_config(preset("gemma-3-4b"))["num_key_value_heads"]
    4
    """
    kind = str(config.get("model_type"))
    if kind in MULTIMODAL:
        inner = config.get("text_config")
        if not isinstance(inner, Mapping):
            raise RulesError(f'a config of model_type {kind!r} has no "text_config": add it')
        own = {key: value for key, value in inner.items() if value is not None}
        kind = MULTIMODAL[kind]
        outer = {key: config[key] for key in _OUTER if config.get(key) is not None}
        config = {**outer, **own, "model_type": kind}
    defaults = _TYPES[kind].defaults if kind in _TYPES else {}
    return {**defaults, **{key: value for key, value in config.items() if value is not None}}


def numbers_of(config: Config, names: Collection[str] = NUMBERS) -> dict[str, int]:
    """The numbers of a config that rules use, under their names there.

    A number that the config does not give is left out. Defaults of transformers are used only for
    a ``model_type`` that is known here.

    >>> numbers_of(preset("qwen3-30b-a3b"))["kv_heads"]
    4
    >>> numbers_of({"model_type": "phi9", "num_attention_heads": 8})
    {'heads': 8}
    """
    config = text_config(config)
    numbers = {name: _number_of(config, name) for name in NUMBERS if name in names}
    return {name: number for name, number in numbers.items() if number is not None}


def _number_of(config: Config, name: str) -> int | None:
    """One number of a config; None where the config does not give it."""
    kind = _TYPES.get(str(config.get("model_type")))
    match name:
        case "kv_heads":
            default = _number_of(config, "heads") if kind else None
            return _optional(config, "num_key_value_heads", default)
        case "head_dim":
            heads = _optional(config, "num_attention_heads")
            hidden = _optional(config, "hidden_size")
            even = hidden // heads if hidden and heads and hidden % heads == 0 else None
            return _optional(config, "head_dim", even)
        case "expert_size":
            return _optional(config, kind.expert_size) if kind and kind.expert_size else None
        case "linear_group":
            keys = _optional(config, "linear_num_key_heads")
            values = _optional(config, "linear_num_value_heads")
            return values // keys if keys and values else None
        case "tied":
            tied = config.get("tie_word_embeddings", kind.tied if kind else None)
            return None if tied is None else int(bool(tied))
    stated = _KEYS.get(name, (name,))
    return next((number(config, key) for key in stated if config.get(key) is not None), None)


def complete_numbers(config: Config) -> dict[str, int]:
    """The numbers that the state dict of a known model follows from; a missing one is an error."""
    for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"):
        number(config, key)
    numbers, kind = numbers_of(config), config["model_type"]
    size_key = _TYPES[kind].expert_size
    if size_key:
        number(numbers, "num_experts")
        number(config, size_key)
    if "head_dim" not in numbers and kind != "deepseek_v3":
        raise RulesError(
            f'"hidden_size" in the config is {config["hidden_size"]} and "num_attention_heads" is '
            f'{config["num_attention_heads"]}, which does not divide it: give "head_dim"'
        )
    return numbers


def _optional(config: Config, key: str, default: int | None = None) -> int | None:
    return default if config.get(key) is None else number(config, key)


def number(config: Config, key: str, default: int | None = None) -> int:
    """A whole number of a config; what is missing or something else is an error that names it."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 40:
        raise RulesError(f'"{key}" in the config is {str(value)[:40]}: expected a whole number')
    return value
