"""Rules against tiny models of transformers: names, shapes, heads, and what parts compute.

A part of a layer, such as its attention, is built once whole and once per rank with the numbers of
a rank. With its weights cut by the rules, the outputs of the ranks must add up to the whole.
"""

from __future__ import annotations

import warnings
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.layout.mesh import Mesh
from reshard.rules import Rules, models
from tests import oracle
from tests.moves import held

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts_per_tok": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LLAMA4 = (
    BASE
    | EXPERTS
    | {
        "intermediate_size_mlp": 80,
        "num_local_experts": 4,
        "head_dim": 16,
        "interleave_moe_layer_step": 2,
    }
)
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": BASE
    | EXPERTS
    | {
        "num_key_value_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": BASE | EXPERTS | {"head_dim": 16, "num_local_experts": 4},
    "phi3": BASE,
    "qwen3_next": BASE
    | EXPERTS
    | {
        "full_attention_interval": 2,
        "head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
    },
    "llama4_text": LLAMA4,
    "gemma3_text": BASE | {"head_dim": 32},
    "llama4": {
        "text_config": LLAMA4,
        "vision_config": VISION
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    },
    "gemma3": {"text_config": BASE | {"head_dim": 32}, "vision_config": VISION},
}
CLASSES = {
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
    "phi3": "Phi3",
    "qwen3_next": "Qwen3Next",
    "llama4_text": "Llama4Text",
    "gemma3_text": "Gemma3Text",
    "llama4": "Llama4",
    "gemma3": "Gemma3",
}
MODELS = {"llama4_text": "Llama4ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"} | {
    kind: f"{CLASSES[kind]}ForConditionalGeneration" for kind in models.MULTIMODAL
}


def build(kind: str, **changes: Any) -> Any:
    """A tiny random model, in float64 so that sums over ranks are exact to many digits."""
    config = getattr(hf, f"{CLASSES[kind]}Config")(**CONFIGS[kind] | changes)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(hf, MODELS.get(kind, f"{CLASSES[kind]}ForCausalLM"))(config)


@cache
def model(kind: str) -> Any:
    whole = build(kind).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in whole.parameters():  # some start as zero or one, which would hide a mistake
        values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data = 0.2 * values
    return whole


def in_memory(kind: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model(kind).state_dict().items()}


@pytest.fixture(scope="module")
def in_files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The shapes in the files that save_pretrained writes."""
    from safetensors import safe_open

    @cache
    def shapes(kind: str) -> dict[str, tuple[int, ...]]:
        folder = tmp_path_factory.mktemp(kind)
        model(kind).save_pretrained(folder)
        found = {}
        for path in Path(folder).glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                names = file.keys()
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
        return found

    return shapes


def config_of(kind: str) -> dict[str, Any]:
    return dict(model(kind).config.to_dict())


@pytest.mark.parametrize("kind", CONFIGS)
def test_names_and_shapes_are_those_of_the_files(kind: str, in_files: Any) -> None:
    known = {name: shape for name, (shape, _) in models.tensors(config_of(kind)).items()}
    found = in_files(kind)
    if kind in models.MULTIMODAL:
        found = {name: shape for name, shape in found.items() if "language_model" in name}
    assert known == found


def test_variants_of_configs() -> None:
    """What a config may say differently, against the names of the model in memory."""
    for kind, changes in (
        ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True, "num_hidden_layers": 1}),
        ("gpt_oss", {"attention_bias": False, "num_hidden_layers": 1}),
        ("qwen3_next", {"layer_types": ["full_attention"] * 2, "attention_bias": True}),
        ("qwen3_next", {"mlp_only_layers": [0, 1], "attention_bias": True}),
        ("llama4_text", {"moe_layers": [0], "attention_bias": True}),
    ):
        with torch.device("meta"):
            small = build(kind, **changes)
        known = {key: shape for key, (shape, _) in models.tensors(small.config.to_dict()).items()}
        found = {key: tuple(value.shape) for key, value in small.state_dict().items()}
        single = {key: shape for key, shape in known.items() if ".experts." not in key}
        assert single == {key: shape for key, shape in found.items() if ".experts." not in key}
        rules = Rules.load(config=small.config.to_dict())
        assert len(rules.layouts(found, Mesh(tp=2))) == len(found)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "ep=2 tp=8", "pp=2 ep=4"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_parameter_has_a_rule_and_a_layout_that_fits(
    kind: str, mesh: str, in_files: Any
) -> None:
    rules = Rules.load(config=config_of(kind), replicate=" ".join(Mesh.parse(mesh).axes))
    for shapes in (in_memory(kind), in_files(kind)):
        layouts = rules.layouts(shapes, Mesh.parse(mesh))
        assert list(layouts) == list(shapes)
        for layout, shape in {(layouts[name], shape) for name, shape in shapes.items()}:
            boxes = {p.box for rank in layout.mesh.ranks for p in layout.pieces(rank, shape)}
            assert sum(box.size for box in boxes) == prod(shape)


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind in models.MULTIMODAL])
def test_pictures_are_read_whole_on_the_first_stage(kind: str) -> None:
    shapes = in_memory(kind)
    rules = Rules.load(config=config_of(kind), replicate="tp pp")
    layouts = rules.layouts(shapes, Mesh(pp=2, tp=2))
    other = [name for name in shapes if "vision" in name or "projector" in name]
    assert len(other) > 20
    for name in other:
        words = str(layouts[name])
        assert "tp" not in words, (name, words)
        assert words.endswith("on pp=0"), (name, words)
    text = [str(layouts[name]) for name in shapes if name not in other]
    assert any(words.startswith("tp*") for words in text)
    assert any(words.endswith("on pp=1") for words in text)


NUMBERS_OF_A_RANK = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
    "intermediate_size_mlp", "num_attention_heads", "num_key_value_heads",
    "linear_num_key_heads", "linear_num_value_heads",
)  # fmt: skip
"""The numbers of a config that tp divides; one kv head is left where there are fewer."""


def config_of_a_rank(kind: str, tp: int) -> dict[str, Any]:
    numbers = {key: CONFIGS[kind][key] for key in NUMBERS_OF_A_RANK if key in CONFIGS[kind]}
    changes = {key: max(1, value // tp) for key, value in numbers.items()}
    if kind == "phi3":  # it has no head_dim of its own: keep it
        changes["head_dim"] = CONFIGS[kind]["hidden_size"] // CONFIGS[kind]["num_attention_heads"]
    return changes


PARTS = ("self_attn", "linear_attn", "mlp", "feed_forward")


def calls(whole: Any) -> dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """The arguments and the output of each part of each layer in one forward pass."""
    seen: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}

    def record(name: str) -> Any:
        def hook(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            seen[name] = args, kwargs, output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [
        module.register_forward_hook(record(name), with_kwargs=True)
        for name, module in whole.named_modules()
        if name.rsplit(".", 1)[-1] in PARTS
    ]
    with torch.no_grad():
        whole(input_ids=torch.arange(2, 26).reshape(2, 12), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


SINGLE = [kind for kind in CONFIGS if kind not in models.MULTIMODAL]


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("kind", SINGLE)
def test_parts_cut_by_rules_add_up_to_the_whole(kind: str, tp: int) -> None:
    """With 4 kv heads, tp is below, equal to and above their number; deepseek_v3 has 8."""
    whole = model(kind)
    for name, parameter in whole.named_parameters():
        if name.endswith(("o_proj.bias", "down_proj_bias")):
            parameter.data.zero_()  # whole on every rank, and added once where ranks are summed
    state = whole.state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    layouts = Rules.load(config=config_of(kind)).layouts(shapes, Mesh(tp=tp))
    sharded = {
        name: oracle.cut(np.asarray(value), held(layouts[name], shapes[name]))
        for name, value in state.items()
    }
    rank_model = build(kind, **config_of_a_rank(kind, tp)).double().eval()
    parts = calls(whole)
    assert len(parts) == 2 * CONFIGS[kind]["num_hidden_layers"]
    for name, (args, kwargs, expected) in parts.items():
        part, total = rank_model.get_submodule(name), 0
        for rank in range(tp):
            own = {
                key.removeprefix(f"{name}."): torch.from_numpy(values[rank])
                for key, values in sharded.items()
                if key.startswith(f"{name}.")
            }
            part.load_state_dict(own, strict=True)
            with torch.no_grad():
                output = part(*args, **kwargs)
            total = total + (output[0] if isinstance(output, tuple) else output)
        torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)
