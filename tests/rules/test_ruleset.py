"""Rules: every tensor of every known model gets the layout people expect, or a clear error."""

import re
import time
from collections.abc import Mapping
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import ArgumentTypeError, RulesError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.rules import Rules, models
from tests.soak import within

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"attention_bias": True, "mlp_bias": True},
    "mistral": SMALL,
    "qwen2": SMALL | {"tie_word_embeddings": True},
    "qwen3": SMALL | {"head_dim": 16, "attention_bias": True},
    "gemma": SMALL | {"head_dim": 32, "num_key_value_heads": 1},
    "gemma2": SMALL | {"head_dim": 32},
    "gemma3_text": SMALL | {"head_dim": 32},
    "gpt_neox": SMALL | {"num_key_value_heads": None},
    "mixtral": SMALL | {"num_local_experts": 8},
    "qwen3_moe": SMALL
    | {"head_dim": 16, "num_experts": 8, "moe_intermediate_size": 48, "mlp_only_layers": [1]},
    "bert": SMALL | {"num_key_value_heads": None},
    "gemma3": {"text_config": SMALL | {"head_dim": 32}},
    "phi3": SMALL,
    "gpt_oss": SMALL | {"head_dim": 16, "num_local_experts": 8},
    "llama4": {
        "text_config": SMALL
        | {"intermediate_size_mlp": 80, "num_local_experts": 8, "interleave_moe_layer_step": 2}
    },
    "qwen3_next": SMALL
    | {
        "head_dim": 16,
        "num_experts": 8,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
    },
    "deepseek_v3": SMALL
    | {
        "num_key_value_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
MESHES = [
    *("tp=1", "tp=2", "tp=8", "dp=2 tp=4", "pp=2 tp=2", "pp=3 dp=2", "ep=4", "cp=2 ep=2 tp=2"),
    *("pp=2 ep=4 tp=4", "tp=4 @ 12-15", "kv=2 rep=2"),
]


def config(kind: str) -> dict[str, Any]:
    return CONFIGS[kind] | {"model_type": kind}


@cache
def shapes(name: str) -> dict[str, tuple[int, ...]]:
    source = models.preset(name) if name in models.PRESETS else config(name)
    return {key: shape for key, (shape, _) in models.tensors(source).items()}


def rules_for(name: str, **options: Any) -> Rules:
    source = models.preset(name) if name in models.PRESETS else config(name)
    return Rules.for_config(source, **options)


def rows(layout: Layout, rank: int, shape: tuple[int, ...], dim: int = 0) -> tuple[int, int]:
    """First and last index of the one piece that a rank holds."""
    (piece,) = layout.pieces(rank, shape)
    return piece.box.start[dim], piece.box.stop[dim]


def covered(layout: Layout, shape: tuple[int, ...]) -> bool:
    boxes = {piece.box for rank in layout.mesh.ranks for piece in layout.pieces(rank, shape)}
    return sum(box.size for box in boxes) == prod(shape)


def check_held(rules: Rules, model: Mapping[str, tuple[int, ...]], mesh: Mesh) -> None:
    """Every tensor has a layout, and all ranks together hold it whole."""
    layouts = rules.layouts(model, mesh)
    assert list(layouts) == list(model)
    for layout, shape in {(layouts[key], shape) for key, shape in model.items()}:
        assert layout.mesh.ranks == mesh.ranks
        assert covered(layout, shape), (mesh, layout, shape)


@pytest.mark.parametrize("name", [*CONFIGS, *models.PRESETS])
def test_every_tensor_is_held_whole_by_all_ranks_together(name: str) -> None:
    model = shapes(name)
    if len(model) > 20_000:  # every layer and expert of the largest would take seconds each time
        model = {
            key: model[key] for key in {re.sub(r"\d", "0", key): key for key in model}.values()
        }
    numbers = rules_for(name).numbers
    for mesh in map(Mesh.parse, MESHES):
        if divides_heads(numbers, mesh.axes.get("tp", 1)):
            check_held(rules_for(name, replicate=" ".join(mesh.axes)), model, mesh)


def divides_heads(numbers: Mapping[str, int | None], tp: int) -> bool:
    heads, kv_heads = numbers.get("heads"), numbers.get("kv_heads")
    return heads == kv_heads or not kv_heads or tp % kv_heads == 0 or kv_heads % tp == 0


@pytest.mark.parametrize("name", [*CONFIGS, *models.PRESETS])
def test_q_heads_are_on_the_ranks_of_their_kv_heads(name: str) -> None:
    """Or tp is refused; by the definition: q head i reads kv head i // (heads / kv_heads)."""
    numbers, model = rules_for(name).numbers, shapes(name)
    heads, kv_heads = numbers.get("heads"), numbers.get("kv_heads")
    parts = [next((n for n in model if n.endswith(f".{p}_proj.weight")), None) for p in "qk"]
    if not (heads and kv_heads and all(parts)):
        return  # heads of these are fused: the layout of q, k and v is one text
    for tp in (1, 2, 3, 4, 5, 6, 8, 16):
        rules = rules_for(name, replicate="tp")
        if tp > kv_heads and tp % kv_heads:
            continue
        if not divides_heads(numbers, tp):
            with pytest.raises(RulesError, match=f"tp={tp} does not divide kv_heads={kv_heads}"):
                rules.mesh_for(Mesh(tp=tp))
            continue
        for rank in range(tp):
            q, kv = (
                held_heads(rules, part, model[part], tp, rank, model[part][0] // number)
                for part, number in zip(parts, (heads, kv_heads), strict=True)
            )
            assert {head // (heads // kv_heads) for head in q} <= kv, (tp, rank)


def held_heads(
    rules: Rules, name: str, shape: tuple[int, ...], tp: int, rank: int, size: int
) -> set[int]:
    pieces = rules.layout(name, Mesh(tp=tp), shape).pieces(rank, shape)
    return {row // size for one in pieces for row in range(one.box.start[0], one.box.stop[0])}


def test_ranks_that_get_nothing_of_a_segment_are_told() -> None:
    rules = Rules.load("phi3", head_dim=4, kv_heads=6, heads=6, mlp_size=8)
    shapes = {"layers.0.self_attn.qkv_proj.weight": (3 * 6 * 4, 8)}
    (note,) = rules.notes(rules.layouts(shapes, Mesh(tp=4)), shapes, Mesh(tp=4))
    assert "1 of 4 ranks along tp hold nothing" in note


def test_a_tp_that_may_separate_heads_is_told() -> None:
    """The number of q heads is not known: they may be as many as the kv heads."""
    rules, shapes = Rules.load("llama", head_dim=4, kv_heads=8), {"lm_head.weight": (32, 8)}
    (note,) = rules.notes(rules.layouts(shapes, Mesh(tp=3)), shapes, Mesh(tp=3))
    assert "tp=3 does not divide kv_heads=8" in note
    assert not rules.notes(rules.layouts(shapes, Mesh(tp=4)), shapes, Mesh(tp=4))


def test_a_huge_number_of_readers_is_refused_at_once() -> None:
    rules, before = Rules.load("llama", kv_heads=10**15, heads=7), time.process_time()
    with pytest.raises(RulesError, match=r"of the 7 heads reads; use tp=2 or tp=4\Z"):
        rules.mesh_for("tp=3")
    prime = 10**15 + 37
    with pytest.raises(RulesError, match=r"of the 7 heads reads; use tp=1\Z"):
        Rules.load("llama", kv_heads=prime, heads=7).mesh_for("tp=3")
    assert time.process_time() - before < within(2.0)


def test_the_numbers_of_a_factor_are_declared() -> None:
    text = """
    axes = ["tp", "kv", "rep"]
    model = { kv_heads = 4 }
    factor.tp = { into = ["kv", "rep"], at_most = "kv_heads", read_by = "q_heads" }
    """
    with pytest.raises(RulesError, match='no "q_heads"'):
        Rules.parse(text)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_tensor_is_held_whole_with_fsdp(kind: str) -> None:
    for mesh in map(Mesh.parse, MESHES):
        fsdp = "dp" if "dp" in mesh.axes else None
        axes = [axis for axis in mesh.axes if axis != "dp"]
        check_held(rules_for(kind, fsdp=fsdp, replicate=" ".join(axes)), shapes(kind), mesh)


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("llama", "model.embed_tokens.weight", "tp -"),
        ("llama", "lm_head.weight", "tp -"),
        ("llama", "model.norm.weight", "-"),
        ("llama", "norm.weight", "-"),
        ("llama", "layers.0.input_layernorm.weight", "-"),
        ("llama", "model.layers.0.self_attn.q_proj.weight", "tp*8 -"),
        ("llama", "model.layers.0.self_attn.q_proj.bias", "tp*8"),
        ("llama", "model.layers.0.self_attn.k_proj.weight", "tp*8 -"),
        ("llama", "model.layers.0.self_attn.o_proj.weight", "- tp*8"),
        ("llama", "model.layers.0.self_attn.o_proj.bias", "-"),
        ("llama", "model.layers.0.mlp.up_proj.weight", "tp -"),
        ("llama", "model.layers.0.mlp.down_proj.weight", "- tp"),
        ("llama", "model.layers.0.mlp.down_proj.bias", "-"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", "-"),
        ("qwen2", "model.layers.0.self_attn.v_proj.bias", "tp*8"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight", "-"),
        ("gemma2", "lm_head.weight", "tp -"),
        ("gemma2", "model.layers.0.pre_feedforward_layernorm.weight", "-"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "- -"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.7.w1.weight", "tp -"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.7.w2.weight", "- tp"),
        ("mixtral", "model.layers.0.mlp.experts.gate_up_proj", "- tp{96,96} -"),
        ("qwen3_moe", "model.layers.0.mlp.experts.7.down_proj.weight", "- tp"),
        ("qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj", "- tp{48,48} -"),
        ("qwen3_moe", "model.layers.1.mlp.up_proj.weight", "tp -"),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", "tp*24 -"),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.bias", "tp*24"),
        ("gpt_neox", "gpt_neox.layers.0.attention.dense.weight", "- tp*8"),
        ("gpt_neox", "gpt_neox.layers.0.attention.bias", "..."),
        ("gpt_neox", "embed_out.weight", "tp -"),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", "tp*8{64,16,16} -"),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", "tp{96,96} -"),
        ("gpt_oss", "model.layers.0.self_attn.sinks", "tp"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", "- - tp*2"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_blocks", "- tp*64 - -"),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj_scales", "- - tp"),
        ("llama4", "language_model.model.layers.1.feed_forward.experts.down_proj", "- tp -"),
        ("llama4", "vision_model.model.layers.1.self_attn.o_proj.weight", "- -"),
        ("gemma3", "vision_tower.vision_model.encoder.layers.1.self_attn.k_proj.bias", "-"),
        ("gemma3", "model.language_model.layers.1.self_attn.k_proj.weight", "tp*32 -"),
        ("qwen3_next", "model.layers.0.linear_attn.A_log", "tp*2"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz.weight", "tp*32 -"),
        ("qwen3_next", "mtp.layers.0.self_attn.q_proj.weight", "tp*32 -"),
        ("qwen3_next", "mtp.pre_fc_norm_hidden.weight", "-"),
        ("deepseek_v3", "model.layers.0.self_attn.q_b_proj.weight", "tp*24 -"),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight", "tp*28 -"),
        ("deepseek_v3", "model.layers.2.mlp.experts.3.up_proj.weight_scale_inv", "- -"),
        ("deepseek_v3", "model.layers.5.embed_tokens.weight", "tp -"),
        ("deepseek_v3", "model.layers.5.shared_head.norm.weight", "-"),
        ("bert", "bert.embeddings.word_embeddings.weight", "tp -"),
        ("bert", "embeddings.position_embeddings.weight", "- -"),
        ("bert", "bert.encoder.layer.0.attention.self.query.weight", "tp*8 -"),
        ("bert", "bert.encoder.layer.0.attention.output.dense.weight", "- tp*8"),
        ("bert", "bert.encoder.layer.0.output.dense.bias", "-"),
        ("bert", "bert.encoder.layer.0.output.LayerNorm.gamma", "-"),
        ("bert", "cls.predictions.decoder.weight", "tp -"),
    ],
)
def test_words_over_tp(kind: str, name: str, expected: str) -> None:
    assert str(rules_for(kind).layout(name, Mesh(dp=2, tp=2))) == expected


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_each_rank_has_the_kv_heads_that_its_q_heads_read(kind: str, tp: int) -> None:
    """8 heads in 2 groups: with tp=4 and 8, neighbours hold the same kv head."""
    rules, at = rules_for(kind), "model.layers.0.self_attn"
    head_dim = rules.numbers["head_dim"]
    model = shapes(kind)
    layouts = rules.layouts(model, Mesh(tp=tp))
    for rank in range(tp):
        q = rows(layouts[f"{at}.q_proj.weight"], rank, model[f"{at}.q_proj.weight"])
        k = rows(layouts[f"{at}.k_proj.weight"], rank, model[f"{at}.k_proj.weight"])
        o = rows(layouts[f"{at}.o_proj.weight"], rank, model[f"{at}.o_proj.weight"], dim=1)
        assert q == o == (rank * 8 // tp * head_dim, (rank + 1) * 8 // tp * head_dim)
        assert k[0] // head_dim == q[0] // head_dim // 4
        assert (k[1] - 1) // head_dim == (q[1] - 1) // head_dim // 4


def test_few_kv_heads_keep_ranks_and_order() -> None:
    rules = Rules.load("llama", kv_heads=2)
    assert rules.mesh_for(Mesh(tp=2)) == Mesh(tp=2)
    mesh = rules.mesh_for(Mesh(tp=8, pp=2, ranks=range(16, 32)))
    assert mesh == Mesh(kv=2, rep=4, pp=2, ranks=range(16, 32))
    assert Rules.load("bert").mesh_for(Mesh(tp=8)) == Mesh(tp=8)
    with pytest.raises(RulesError, match=r"^llama: tp=3 is not a multiple of kv_heads=2: use tp=2"):
        rules.layout("lm_head.weight", Mesh(tp=3))
    with pytest.raises(RulesError, match="also one of kv rep"):
        rules.mesh_for(Mesh(tp=4, kv=2))


def test_stages() -> None:
    rules = Rules.load("llama", num_layers=5, tied=1)  # no tp: heads need not be known
    mesh = Mesh(pp=3)
    at = [str(rules.layout(f"model.layers.{i}.mlp.up_proj.weight", mesh)) for i in range(5)]
    assert at == [f"- - | on pp={stage}" for stage in (0, 0, 1, 1, 2)]
    assert str(rules.layout("model.embed_tokens.weight", mesh)) == "- - | on pp=0,2"
    assert str(rules.layout("model.norm.weight", mesh)) == "- | on pp=2"
    untied = Rules.load("llama", num_layers=5, tied=0)
    assert str(untied.layout("model.embed_tokens.weight", mesh)) == "- - | on pp=0"
    assert str(untied.layout("model.embed_tokens.weight", Mesh(pp=1))) == "- - | on pp=0"


def test_experts() -> None:
    rules = Rules.load("qwen3_moe", num_layers=4, num_experts=8, expert_size=48, kv_heads=2)
    name = "model.layers.3.mlp.experts.{}.up_proj.weight".format
    at = [str(rules.layout(name(e), Mesh(ep=4, tp=2))) for e in range(8)]
    assert at == [f"tp - | on ep={e // 2}" for e in range(8)]
    assert str(rules.layout(name(7), Mesh(pp=2, ep=4))) == "- - | on pp=1 ep=3"
    assert str(rules.layout("model.layers.3.mlp.gate.weight", Mesh(ep=4))) == "- -"
    fused = rules.layout("model.layers.3.mlp.experts.gate_up_proj", Mesh(pp=2, ep=4, tp=2))
    assert str(fused) == "ep tp{48,48} - | on pp=1"


def test_layers_that_predict_a_second_token_are_on_the_last_stage() -> None:
    """Published files have them after the last layer, or under a name of their own."""
    mesh = Mesh(pp=2, ep=2)
    deepseek = rules_for("deepseek_v3")
    expert = "model.layers.{}.mlp.experts.{}.up_proj.weight".format
    at = [str(deepseek.layout(expert(i, 7), mesh)) for i in range(6)]
    assert at == [f"- - | on pp={stage} ep=1" for stage in (0, 0, 0, 1, 1, 1)]
    assert str(deepseek.layout("model.layers.5.enorm.weight", mesh)) == "- | on pp=1"
    assert str(deepseek.layout("model.layers.5.embed_tokens.weight", mesh)) == "- - | on pp=1"
    qwen = rules_for("qwen3_next")
    name = "mtp.layers.0.mlp.experts.0.up_proj.weight"
    assert str(qwen.layout(name, mesh)) == "- - | on pp=1 ep=0"
    assert str(qwen.layout("mtp.fc.weight", mesh)) == "- - | on pp=1"
    assert str(qwen.layout("mtp.layers.0.input_layernorm.weight", mesh)) == "- | on pp=1"


def test_fsdp_cuts_dim_0_after_tp() -> None:
    rules = Rules.load("llama", fsdp="dp", head_dim=8, kv_heads=2)
    layouts = {
        name: str(rules.layout(f"model.layers.0.{name}", Mesh(dp=2, tp=2)))
        for name in ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "input_layernorm.weight")
    }
    assert [*layouts.values()] == ["(tp*8 dp) -", "dp tp*8", "dp"]
    assert str(rules.layout("lm_head.weight", Mesh(tp=2))) == "tp -"
    few = rules.layout("model.layers.0.self_attn.k_proj.weight", Mesh(dp=2, tp=4))
    assert str(few) == "(kv*8 dp) -"


def test_fsdp_and_dots() -> None:
    rules = Rules.parse('axes = ["dp", "tp"]\nfsdp = "dp"\n[tensors]\n"*" = "..."\n"x*" = "... tp"')
    mesh = Mesh(dp=2, tp=2)
    assert str(rules.layout("a", mesh)) == "dp ..."
    assert str(rules.layout("a", mesh, ())) == "..."
    assert str(rules.layout("a", mesh, (4,))) == "dp"
    assert str(rules.layout("x", mesh, (4, 4))) == "dp tp"
    assert str(rules.layout("x", mesh, (4,))) == "(tp dp)"


def test_numbers_not_known_are_asked_for_or_counted() -> None:
    rules, name = Rules.load("mixtral"), "model.layers.{}.block_sparse_moe.experts.{}.w1.weight"
    names = [name.format(i, e) for i in range(6) for e in range(4)]
    assert str(rules.layout(names[0], Mesh(tp=1))) == "tp -"
    with pytest.raises(RulesError, match=r"rule .*: needs kv_heads, which is not known: give the"):
        rules.layout(names[0], Mesh(tp=2))
    with pytest.raises(RulesError, match=r"mixtral: tensor .* on pp: needs num_layers, which is"):
        rules.layout(names[0], Mesh(pp=2))
    counted = rules.fit(names)
    assert (counted.numbers["num_layers"], counted.numbers["num_experts"]) == (6, 4)
    assert str(counted.layout(names[-1], Mesh(pp=2, ep=2))) == "- - | on pp=1 ep=1"
    assert Rules.load("mixtral", num_layers=9).fit(names).numbers["num_layers"] == 9
    with pytest.raises(RulesError, match="pp=3 with i=9, num_layers=6, pp_size=2, and mesh pp=2"):
        counted.layout(name.format(9, 0), Mesh(pp=2))


@pytest.mark.parametrize("family", Rules.families())
def test_a_number_that_is_not_known_is_never_guessed(family: str) -> None:
    """Without it a layout is the same as with it, or an error names it."""
    whole = rules_for(family)
    distinct = {re.sub(r"\d+", "0", name): name for name in shapes(family)}.values()
    for name in whole.numbers:
        numbers = {key: number for key, number in whole.numbers.items() if key != name}
        lacking = Rules.load(family, **numbers)
        for key, mesh in product(distinct, (Mesh(tp=2), Mesh(tp=4), Mesh(pp=2))):
            shape = shapes(family)[key]
            try:
                found = lacking.layout(key, mesh, shape)
            except RulesError as error:
                if f"needs {name}, which is not known" not in str(error):
                    raise
            else:
                assert found.same_as(whole.layout(key, mesh, shape), shape)
    nothing_to_cut = Rules.load(family)
    assert {nothing_to_cut.layout(key, Mesh(tp=1)).mesh for key in distinct} == {Mesh(tp=1)}


FILE = """
mesh = "dp=2 tp=4"
axes = ["pp"]
[model]
unit = 16
[tensors]
"*"                  = "..."
"*.weight"           = "tp*{unit} -"
"h.{i}.*"            = { on = "pp = i // 2" }
"h.0.weight"         = "- -"
"h.{i}.norm.weight"  = { layout = "-", on = "" }
"h.1.bias"           = "- | on pp=0,1"
"""


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(FILE)
    rules = Rules.load(path)
    assert rules.layout("a.weight") == Layout(Mesh(dp=2, tp=4), "tp*16 -")
    assert str(Rules.load(str(path), unit=8).layout("a.weight")) == "tp*8 -"
    mesh = Mesh(pp=2, tp=2)
    names = ["h.0.weight", "h.1.weight", "h.3.weight", "h.3.norm.weight", "h.1.bias", "h.2.bias"]
    assert [str(layout) for layout in rules.layouts(names, mesh).values()] == [
        *("- - | on pp=0", "tp*16 - | on pp=0", "tp*16 - | on pp=1", "-"),
        *("- | on pp=0,1", "... | on pp=1"),
    ]


def test_a_file_may_extend_a_family() -> None:
    text = (
        'extends = "llama"\n[model]\nhead_dim = 64\nkv_heads = 2\n[tensors]\n'
        '"value_head.weight" = "- -"'
    )
    rules = Rules.parse(text + '\n"*lm_head.weight" = "- -"')
    assert str(rules.layout("value_head.weight", Mesh(tp=2))) == "- -"
    assert str(rules.layout("lm_head.weight", Mesh(tp=2, pp=2))) == "- -"
    assert str(rules.layout("layers.0.self_attn.k_proj.weight", Mesh(tp=2))) == "tp*64 -"
    with pytest.raises(
        RulesError, match=r'\[model\] "heaf_dim" is used by no rule: write head_dim'
    ):
        Rules.parse(text.replace("head_dim", "heaf_dim"))
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4}
    given = Rules.parse(text, source="own", num_layers=3).given(config=config | {"head_dim": 8})
    assert given.numbers == {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "num_layers": 3,
        "tied": 0,
    }, "arguments before the file before the config"


def test_equal_layouts_are_one_object() -> None:
    rules = rules_for("llama")
    again = Rules.for_config(config("llama"))
    name = "model.layers.{}.mlp.up_proj.weight".format
    assert rules.layout(name(0), Mesh(tp=2)) is again.layout(name(3), Mesh(tp=2))


def test_the_tables_do_not_confuse_names() -> None:
    """Rules that spell an integer out still tell names apart that differ only in it."""
    text = 'axes = ["tp"]\n[tensors]\n"*" = "..."\n"*.1.w" = "- tp"\n"*2.w" = "tp -"'
    names = ["a.1.w", "a.12.w", "a.3.w", "a.4.w", "2.w", "1.w", "a.11.w"]
    layouts = Rules.parse(text).layouts(names, Mesh(tp=2))
    assert [str(layout) for layout in layouts.values()] == [
        *("- tp", "tp -", "...", "...", "tp -", "...", "...")
    ]


def test_twenty_thousand_names_are_fast() -> None:
    model = shapes("qwen3-30b-a3b")
    model |= {f"model.layers.{i}.input_layernorm.weight": (2048,) for i in range(48, 1181)}
    assert len(model) == 20_000
    seconds = []
    for _ in range(7):
        rules = rules_for("qwen3-30b-a3b", num_layers=1181)
        start = time.process_time()
        layouts = rules.layouts(model, Mesh(pp=4, ep=4, tp=2))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.25
    assert len({id(layout) for layout in layouts.values()}) == len(set(layouts.values())) < 100


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.mlp.up_proj.wieght", r'nearest patterns: "\*layers.{i}.mlp.up_proj'),
        ("x", "nearest patterns: none"),
        ("a\nb" * 100, r'tensor "a\\nba'),
    ],
)
def test_a_name_no_rule_knows(name: str, message: str) -> None:
    with pytest.raises(RulesError, match=message) as raised:
        Rules.load("llama").layout(name, Mesh(tp=2))
    assert "\n" not in str(raised.value)
    with pytest.raises(RulesError, match="3 names match no rule"):
        Rules.load("llama", kv_heads=2).layouts([name, "lm_head.weight", "y", "z", "y"], Mesh(tp=2))


def test_names_that_match_no_rule_are_counted_at_once() -> None:
    names = [f"decoder.b{i % 1000}.{i}.attention.kernel_weight" for i in range(20_000)]
    rules, before = Rules.load("llama", kv_heads=2), time.process_time()
    with pytest.raises(RulesError, match="20000 names match no rule"):
        rules.layouts(names, "tp=2")
    assert time.process_time() - before < within(3.0)


def test_no_mesh_wrong_numbers_wrong_shape() -> None:
    rules = Rules.load("llama")
    with pytest.raises(RulesError, match="no mesh: pass one"):
        rules.layout("lm_head.weight")
    with pytest.raises(RulesError, match='no number "head_size": the numbers are heads, kv_heads'):
        Rules.load("llama", head_size=128)
    with pytest.raises(RulesError, match="heads=-1 is not"):
        Rules.load("llama", heads=-1)
    with pytest.raises(RulesError, match='fsdp="zero" names no axis'):
        Rules.load("llama", fsdp="zero")
    with pytest.raises(RulesError, match='layout "tp -" has 2 words and the tensor 1 dim:'):
        Rules.parse('axes=["tp"]\n[tensors]\n"*"="tp -"').layout("a", Mesh(tp=2), (4,))


def test_unknown_sources(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match=r'"lama" is no family .* try "llama"'):
        Rules.load("lama")
    with pytest.raises(RulesError, match="the families are bert, "):
        Rules.load(tmp_path)
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RulesError, match="not UTF-8"):
        Rules.load(tmp_path / "a.toml")
    with pytest.raises(RulesError, match="model_type 'opt' is not known"):
        Rules.for_config({"model_type": "opt"})
    with pytest.raises(RulesError, match='"num_attention_heads" in the config is many'):
        Rules.for_config({"model_type": "llama", "num_attention_heads": "many"})


def test_arguments_of_another_type_are_refused() -> None:
    for call in (
        lambda: Rules.load("llama", config=[1]),
        lambda: Rules.load(config=[]),
        lambda: Rules.load("llama").given(config=[1]),
        lambda: models.tensors(5),
    ):
        with pytest.raises(ArgumentTypeError, match=r"config= got .*: give the dict of a config"):
            call()
    with pytest.raises(ArgumentTypeError, match=r"parse\(\) got .*: .* load\(\) reads files"):
        Rules.parse(Path("my.toml"))


TENSORS = 'axes = ["tp", "pp"]\n[model]\nn = 4\nm = "?"\n[tensors]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "rules: this is not TOML"),
        ("a = 1", 'key "a" is not known: the keys are'),
        ("a = " + "9" * 5000, "not TOML"),
        ("extends = 0x" + "f" * 5000, 'key "extends" is a number that is too large'),
        ("[model]\nx = 0x" + "f" * 5000, r'\[model\] "x" is a number that is too large'),
        ("a = " + "[" * 5000, "nested too deep|not TOML"),
        ("#" * (1 << 21), "too many"),
        ('extends = "../x"', 'key "extends" names "../x"'),
        ("extends = 3", 'key "extends" is "3", expected a text'),
        ("mesh = 4", 'key "mesh"'),
        ('mesh = "tp=x"', 'key "mesh": .*expected name=size'),
        ('axes = "tp"', 'key "axes" is "tp", expected a list'),
        ('axes = ["t p"]', '"t p" cannot name an axis'),
        ('axes = ["sum"]', '"sum" cannot name an axis'),
        ('fsdp = "dp"', 'key "fsdp": axis "dp" is not one of the axes'),
        ("tensors = 1", 'key "tensors" is "1", expected a table'),
        ("[model]\nx = 1.5", r'\[model\] "x" is a float'),
        ("[model]\nx = -1", r'\[model\] "x" is "-1"'),
        ("[model]\nx = true", r'\[model\] "x"'),
        ('[model]\nx = "count "', r'\[model\] "x"'),
        ('[model]\nx = "count i j"', r'\[model\] "x"'),
        ('[model]\n"x y" = 1', r'\[model\] "x y"'),
        ('[factor]\ntp = "kv"', r"\[factor\] \"tp\" is \"kv\", expected { into"),
        (TENSORS + '"*" = 3', r'\[tensors\] "\*" is "3", expected a layout'),
        (TENSORS + '"*" = { layout = "tp", no = 1 }', r"is a dict, expected a layout"),
        (TENSORS + '"*" = "pt -"', r'\[tensors\] "\*": axis "pt" is not one of the axes pp, tp'),
        (TENSORS + '"*" = { on = "xp = 1" }', 'axis "xp" is not one of the axes'),
        (TENSORS + '"*" = { on = "pp = i" }', '"i" is not a number: it knows m, n'),
        (TENSORS + '"{n}.*" = "-"', "{n} is also a number"),
        (TENSORS + '"*" = "tp*{heads} -"', '"heads" is not a number'),
        (TENSORS + '"*" = "tp*"', "expected a number"),
        (TENSORS + '"*" = "tp tp"', 'axis "tp" appears twice'),
        (TENSORS + '"a{i}" = "-"', "whole part"),
        (TENSORS + '"*" = { on = "pp = 1 +" }', "found the end"),
        (TENSORS + '"a\\nb" = "-\\n$"', r'"a\\nb".*found "\$"'),
    ],
    ids=lambda value: value[-40:],
)
def test_wrong_files(text: str, message: str) -> None:
    with pytest.raises(RulesError, match=message) as raised:
        Rules.parse(text)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600


def test_large_files_are_read_quickly() -> None:
    names = [f"x{number:09}" for number in range(20_000)]
    axes = f"axes = {names}\n[tensors]\n"
    many_axes = axes + "\n".join(f'"{name}" = "{name}"' for name in names[:3000])
    model = "\n".join(f"{name} = 1" for name in names[:1000])
    rules = "\n".join(f'"{name}" = "tp*{{{name}}}"' for name in names[:1000])
    began = time.process_time()
    assert len(Rules.parse(many_axes).document.axes) == 20_000
    assert len(Rules.parse(f'axes = ["tp"]\n[model]\n{model}\n[tensors]\n{rules}').numbers) == 1000
    assert time.process_time() - began < within(2.0)
    with pytest.raises(RulesError, match=r"\[model\] has 1001 entries: at most 1000 work"):
        Rules.parse(f"[model]\nz = 1\n{model}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"*" = { layout = "-", on = "pp = 7" }', "pp=7 with no numbers, and mesh .* pp=0 to 1"),
        ('"*" = { layout = "-", on = "pp = 0 - 1" }', "pp=-1 with"),
        ('"*" = { layout = "-", on = "pp = n // (n - 4)" }', "divides by zero"),
        ('"*" = { layout = "pp", on = "pp = 1" }', 'axis "pp" appears twice'),
        ('"*" = "tp*{m}"', 'rule "[*]": needs m, which is not known'),
        ('"*" = "tp*{n - 4}"', 'found "0".*at least 1'),
        ('"*" = "tp[1,2,3]"', "gives 3 sizes"),
        ('"a.*" = "-"\n"*.w" = "tp"', 'match "a.w" and are equally specific'),
    ],
)
def test_wrong_when_used(line: str, message: str) -> None:
    with pytest.raises(RulesError, match=message) as raised:
        Rules.parse(TENSORS + line).layout("a.w", Mesh(pp=2, tp=2))
    assert "\n" not in str(raised.value)


SHIPPED = Path(models.__file__).with_name("families")


@settings(max_examples=200)
@given(st.data())
def test_damaged_files_are_errors_or_rules(data: st.DataObject) -> None:
    text = (SHIPPED / "mixtral.toml").read_text()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 40)))
    middle = data.draw(st.text(alphabet='"[]{}=*.\n#1a(),-$ ', max_size=20))
    try:
        rules = Rules.parse(text[:start] + middle + text[stop:])
        rules.layout("model.layers.1.block_sparse_moe.experts.3.w1.weight", Mesh(tp=2))
    except RulesError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message
