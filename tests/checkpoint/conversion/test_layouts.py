"""All commands and functions that take rules give a model the same layouts and ignore no option."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from reshard import checkpoint
from reshard.checkpoint.conversion.names import Outline
from reshard.checkpoint.conversion.request import Request, wanted_of
from reshard.checkpoint.formats.reader import as_rules, open_storage
from reshard.cli import run
from reshard.errors import LayoutError, MeshError, ReshardError, RulesError, TargetError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.rules import Rules, models
from tests.soak import soaking

KV_HEADS, HEADS, HEAD_DIM = 2, 4, 4
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": 10,
    "max_position_embeddings": 4,
    "num_local_experts": 2,
    "num_experts": 2,
    "moe_intermediate_size": 8,
    # deepseek_v3
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 2,
    "first_k_dense_replace": 0,
    # llama4
    "intermediate_size_mlp": 12,
    "interleave_moe_layer_step": 1,
    # qwen3_next
    "shared_expert_intermediate_size": 8,
    "linear_num_key_heads": KV_HEADS,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
MULTIMODAL = ("gemma3", "llama4")
"""Families whose config has the numbers in its ``text_config``."""
TP = (1, KV_HEADS, 2 * KV_HEADS, 4 * KV_HEADS)
"""Below, equal to and above the number of kv heads; the last one also above that of q heads."""


def write_model(folder: Path, family: str, with_config: bool = True) -> dict[str, Any]:
    """A checkpoint of a small model, as Hugging Face writes it; returns its config."""
    config = {"text_config": SMALL} if family in MULTIMODAL else SMALL
    config = config | {"model_type": family}
    folder.mkdir(parents=True)
    shapes = {name: shape for name, (shape, _) in models.tensors(config).items()}
    start = 0
    tensors = {}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        tensors[name] = np.arange(start, start + count, dtype=np.float32).reshape(shape)
        start += count
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if with_config:
        (folder / "config.json").write_text(json.dumps(config))
    return config


def planned(config: Path, mesh: str, *rules: str) -> dict[str, Layout]:
    """The layouts of ``reshard plan``'s source."""
    saved = config.with_suffix(".plan.json")
    words = ["--model", str(config), "--from", mesh, "--to", mesh, "--save", str(saved), *rules]
    assert run(["plan", *words]) == 0
    data = json.loads(saved.read_text())
    layouts = [Layout.from_dict(one) for one in data["layouts"]]
    return {name: layouts[number] for name, (_, _, number) in data["have"].items()}


@pytest.mark.parametrize("family", Rules.families())
def test_the_same_request_has_the_same_layouts_everywhere(family: str, tmp_path: Path) -> None:
    config = write_model(tmp_path / "src", family)
    shapes = {name: shape for name, (shape, _) in models.tensors(config).items()}
    outlines = {name: Outline(shape, "float32") for name, shape in shapes.items()}
    file = tmp_path / "src" / "config.json"
    for tp in TP:
        mesh = Mesh(tp=tp)
        expected = Rules.load(config=config).layouts(shapes, mesh)
        assert Rules.load(family, config=config).layouts(shapes, mesh) == expected
        assert planned(file, f"tp={tp}") == expected
        assert planned(file, f"tp={tp}", "--rules", family) == expected
        with open_storage(tmp_path / "src") as storage:
            for given in (None, family, Rules.load(family)):
                wanted = wanted_of(
                    outlines,
                    Request("src", "dst", mesh=mesh, rules=given).with_config(storage),
                    False,
                )
                assert {name: tensor.layout for name, tensor in wanted.items()} == expected
                read = as_rules(given, storage, by_config=True)
                assert read is not None
                assert read.fit(shapes).layouts(shapes, mesh) == expected


FILES = [(family, tp) for family in Rules.families() for tp in TP]


@pytest.mark.parametrize(("family", "tp"), FILES if soaking() else [("llama", 4), ("mixtral", 8)])
def test_files_are_cut_and_read_by_the_same_layouts(family: str, tp: int, tmp_path: Path) -> None:
    config, mesh = write_model(tmp_path / "src", family), f"tp={tp}"
    shapes = {name: shape for name, (shape, _) in models.tensors(config).items()}
    expected = Rules.load(config=config).layouts(shapes, Mesh(tp=tp))
    checkpoint.convert(tmp_path / "src", tmp_path / "0", mesh=mesh, format="ranks")
    words = ["--mesh", mesh, "--rules", family, "--format", "ranks", "--quiet"]
    assert run(["convert", str(tmp_path / "src"), str(tmp_path / "1"), *words]) == 0
    whole = load_file(tmp_path / "src" / "model.safetensors")
    for folder in ("0", "1"):
        for rank, path in enumerate(sorted((tmp_path / folder).glob("*.safetensors"))):
            local = load_file(path)
            for name, layout in expected.items():
                parts = [
                    whole[name][tuple(map(slice, piece.box.start, piece.box.stop))].ravel()
                    for piece in layout.pieces(rank, shapes[name])
                ]
                assert np.array_equal(local[name].ravel(), np.concatenate([*parts, []]))
    _read_back(tmp_path, family, mesh)


def _read_back(folder: Path, family: str, mesh: str) -> None:
    """Rules read rank files as they wrote them, in every function that reads."""
    ranks, whole = folder / "0", load_file(folder / "src" / "model.safetensors")
    found = checkpoint.inspect(ranks, family, mesh)
    assert found.ok
    assert {t.name: t.shape for t in found.tensors} == {n: a.shape for n, a in whole.items()}
    assert checkpoint.verify(folder / "src", ranks, b_rules=family, b_mesh=mesh).ok
    assert checkpoint.diff(folder / "src", ranks, b_rules=family, b_mesh=mesh).equal
    checkpoint.convert(ranks, folder / "back", source_rules=family, source_mesh=mesh)
    into = {name: torch.zeros(array.shape) for name, array in whole.items()}
    checkpoint.load(ranks, into=into, rules=family, mesh=mesh)
    back = load_file(folder / "back" / "model.safetensors")
    for name, array in whole.items():
        assert np.array_equal(into[name].numpy(), array)
        assert np.array_equal(back[name], array)


def test_rules_keep_heads_whole_as_the_config_says(tmp_path: Path) -> None:
    """Two kv heads over four ranks: neighbours hold the same head, and never half of one."""
    write_model(tmp_path / "src", "llama")
    report = checkpoint.convert(
        tmp_path / "src", tmp_path / "out", mesh="tp=4", rules="llama", format="ranks"
    )
    name = "model.layers.0.self_attn.k_proj.weight"
    whole = load_file(tmp_path / "src" / "model.safetensors")[name]
    for rank, path in enumerate(sorted((tmp_path / "out").glob("*.safetensors"))):
        head = rank // 2 * HEAD_DIM
        assert np.array_equal(load_file(path)[name], whole[head : head + HEAD_DIM])
    assert "tp=4 is read as kv=2 rep=2, because kv_heads is 2" in str(report)


def test_without_a_config_the_numbers_are_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path / "src", "llama", with_config=False)
    with pytest.raises(RulesError, match="needs kv_heads, which is not known"):
        checkpoint.convert(tmp_path / "src", tmp_path / "out", mesh="tp=4", rules="llama")
    with pytest.raises(RulesError, match=r"has no config.json .*: give --rules"):
        checkpoint.convert(tmp_path / "src", tmp_path / "out", mesh="tp=4")
    own = tmp_path / "own.toml"
    own.write_text('extends = "llama"\n[model]\nhead_dim = 4\nkv_heads = 2\n')
    checkpoint.convert(tmp_path / "src", tmp_path / "out", mesh="tp=4", rules=own)
    assert checkpoint.verify(tmp_path / "src", tmp_path / "out").ok


def test_ranks_without_a_head_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "src", "llama")
    report = checkpoint.convert(tmp_path / "src", tmp_path / "out", mesh="tp=8", dry_run=True)
    assert "warning: 4 of 8 ranks along kv, rep hold nothing of" in str(report)
    config = str(tmp_path / "src" / "config.json")
    assert run(["plan", "--model", config, "--from", "tp=8", "--to", "tp=2"]) == 0
    text = capsys.readouterr().out
    assert "--from: tp=8 is read as kv=2 rep=4" in text
    assert "--from: warning: 4 of 8 ranks along kv, rep hold nothing of" in text
    assert "--to" not in text
    assert run(["plan", "--model", config, "--from", "tp=8", "--to", "tp=2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["notes"]) == 2


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ("tpp=4", {}, 'axis "tpp" of mesh tpp=4 cuts no tensor.* axes pp, dp, .*: write tp, or'),
        ("tpp=4", {"rules": "llama"}, 'axis "tpp" of mesh tpp=4 cuts no tensor'),
        ("fsdp=2", {}, r"cut dim 0 by it \(--fsdp fsdp"),
        ("dp=2 tp=2", {}, r"or replicate on purpose \(--replicate dp"),
        ("tp=2", {"fsdp": "dp"}, 'fsdp names axis "dp" and mesh tp=2 has tp'),
        ("tp=2", {"replicate": "dp"}, 'replicate names axis "dp" and mesh tp=2 has tp'),
        ("dp=2 tp=2", {"fsdp": "dp", "replicate": "dp"}, '"dp" is named by fsdp and by repl'),
        (
            "tp=2",
            {"layouts": {"*q_proj.wieght": "tp -"}, "rules": "llama"},
            "matches no tensor: write",
        ),
        (None, {"fsdp": "dp"}, "fsdp would do nothing: format full writes whole .* give --mesh"),
        (None, {"rules": "llama"}, "rules would do nothing: .*, or give --mesh"),
        ("tp=2", {"format": "full"}, "mesh would do nothing: .*give --format sharded"),
        ("tp=2", {"layouts": {"*": "-"}, "replicate": "tp"}, "fsdp and replicate are for rules"),
        (4, {}, 'mesh is 4: give a Mesh, or a text such as "dp=2 tp=4"'),
        (
            "tp=2",
            {"dtype": {"*.q_porj.*": "float16"}},
            "matches no tensor: write a name or pattern",
        ),
    ],
)
def test_nothing_that_was_asked_for_is_ignored(
    mesh: str | None, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "src", "llama")
    with pytest.raises((LayoutError, MeshError, RulesError), match=message):
        checkpoint.convert(tmp_path / "src", tmp_path / "out", mesh=mesh, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_axes_are_checked_where_rank_files_are_read(tmp_path: Path) -> None:
    write_model(tmp_path / "src", "llama")
    out = str(tmp_path / "out")
    words = ["--mesh", "dp=2 tp=2", "--replicate", "dp", "--format", "ranks", "--quiet"]
    assert run(["convert", str(tmp_path / "src"), out, *words]) == 0
    reads: list[Callable[..., object]] = [
        lambda **more: checkpoint.inspect(out, **more),
        lambda **more: checkpoint.verify(out, **more),
        lambda **more: checkpoint.load(out, into={}, strict=False, **more),
    ]
    for read in reads:
        with pytest.raises(RulesError, match='axis "dpp" of mesh dpp=2 tp=2 cuts no tensor'):
            read(rules="llama", mesh="dpp=2 tp=2")
        read(rules=Rules.load("llama", replicate="dp"), mesh="dp=2 tp=2")
    given = ["--rules", "llama", "--mesh", "dp=2 tp=2"]
    assert run(["inspect", out, *given]) == 2
    assert run(["inspect", out, *given, "--replicate", "dp"]) == 0
    assert run(["verify", out, *given, "--replicate", "dp", "--quiet"]) == 0
    assert run(["verify", out, *given, "--replicate", "tp2", "--quiet"]) == 2


@pytest.mark.parametrize("wanted", [[], ["--mesh", "dp=2 tp=2"], ["--mesh", "tp=2"]])
def test_replicas_in_rank_files_are_converted(tmp_path: Path, wanted: list[str]) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    halves = np.arange(16, dtype=np.float32).reshape(2, 2, 4)
    for rank in range(4):
        save_file({"w": halves[rank % 2]}, ranks / f"model-rank-{rank}-part-0.safetensors")
    rules = str(tmp_path / "rules.toml")
    Path(rules).write_text('axes = ["tp", "dp"]\n[tensors]\n"w" = "tp -"\n')
    given = ["--from-rules", rules, "--from-mesh", "dp=2 tp=2", "--quiet"]
    words = ["convert", str(ranks), str(tmp_path / "out"), *given]
    words += [*wanted, "--rules", rules] if wanted else []
    assert run(words) == 2
    assert run([*words, "--replicate", "tp2"]) == 2
    assert run([*words, "--replicate", "dp"]) == 0
    known = Rules.load(rules, replicate="dp")
    assert checkpoint.verify(ranks, tmp_path / "out", rules=known, mesh="dp=2 tp=2")


def test_fsdp_and_replicas_on_the_command_line(tmp_path: Path) -> None:
    config = write_model(tmp_path / "src", "llama")
    mesh = ["--mesh", "dp=2 cp=2 tp=2", "--fsdp", "dp", "--replicate", "cp"]
    words = [str(tmp_path / "src"), str(tmp_path / "out"), *mesh, "--format", "ranks", "--quiet"]
    assert run(["convert", *words]) == 0
    rules = Rules.load(config=config, fsdp="dp", replicate="cp")
    found = {tensor.name: tensor.layout for tensor in checkpoint.inspect(tmp_path / "out").tensors}
    shapes = {name: shape for name, (shape, _) in models.tensors(config).items()}
    layouts = rules.layouts(shapes, Mesh.parse("dp=2 cp=2 tp=2"))
    assert found == {name: f"dp=2 cp=2 tp=2: {layout}" for name, layout in layouts.items()}


def test_layouts_for_all_tensors_need_no_mesh_beside_rules(tmp_path: Path) -> None:
    config = write_model(tmp_path / "src", "llama")
    layout = Layout(Mesh(tp=2), "...")
    rules = Rules.load(config=config)
    checkpoint.convert(tmp_path / "src", tmp_path / "out", rules=rules, layouts={"*": layout})
    assert {tensor.layout for tensor in checkpoint.inspect(tmp_path / "out").tensors} == {
        "tp=2: ..."
    }


def test_a_pattern_leaves_single_numbers_whole(tmp_path: Path) -> None:
    """The example of ``convert --help``, on a checkpoint with a 0-d tensor."""
    (tmp_path / "src").mkdir()
    tensors = {"w": np.ones((4, 2), np.float32), "step": np.array(3.0, np.float32)}
    save_file(tensors, tmp_path / "src" / "model.safetensors")
    words = [str(tmp_path / "src"), str(tmp_path / "out"), "--mesh", "tp=2", "--quiet"]
    assert run(["convert", *words, "--layout", "*=tp ..."]) == 0
    found = {tensor.name: tensor.layout for tensor in checkpoint.inspect(tmp_path / "out").tensors}
    assert found == {"w": "tp=2: tp ...", "step": "tp=2: ..."}
    layouts = {"step": "tp ...", "*": "tp ..."}
    with pytest.raises(LayoutError, match=r'"step": layout "tp ..." has 1 word and shape'):
        checkpoint.convert(tmp_path / "src", tmp_path / "b", mesh="tp=2", layouts=layouts)
    layouts = {"*": "tp ...", "w*": "- tp"}
    with pytest.raises(LayoutError, match=r'"w[*]" decides nothing: "w" .* by "[*]" before it'):
        checkpoint.convert(tmp_path / "src", tmp_path / "b", mesh="tp=2", layouts=layouts)


@pytest.mark.parametrize("format", ["full", "sharded", "distcp", "ranks"])
def test_files_are_counted_as_inspect_counts_them(format: str, tmp_path: Path) -> None:
    write_model(tmp_path / "src", "llama")
    mesh = None if format == "full" else "tp=2"
    report = checkpoint.convert(
        tmp_path / "src", tmp_path / "out", mesh=mesh, format=format, max_shard_size=1000
    )
    found = checkpoint.inspect(tmp_path / "out")
    assert (report.num_files, report.num_others) == (len(found.files), len(found.others))


def test_a_dry_run_asks_and_does_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "src", "llama")
    asked: list[tuple[str, int]] = []

    def denied(path: Any, mode: int) -> bool:
        asked.append((str(path), mode))
        return False

    target = tmp_path / "deep" / "out"
    monkeypatch.setattr("os.fsync", lambda _: pytest.fail("a dry run wrote something"))
    report = checkpoint.convert(tmp_path / "src", target, dry_run=True)
    assert report.seconds is None
    monkeypatch.setattr("os.access", denied)
    with pytest.raises(TargetError, match=f"{tmp_path} cannot be written to"):
        checkpoint.convert(tmp_path / "src", target, dry_run=True)
    assert asked[-1][0] == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_rules_and_a_mesh_are_not_passed_over(tmp_path: Path) -> None:
    """Files that say themselves how they are cut, or that are not cut, need neither."""
    write_model(tmp_path / "src", "llama")
    for format in ("distcp", "ranks"):
        checkpoint.convert(tmp_path / "src", tmp_path / format, mesh="tp=2", format=format)
    for options in ({"rules": "llama", "mesh": "tp=2"}, {"mesh": "tp=2"}):
        with pytest.raises(ReshardError, match="records the layout of its tensors: leave out"):
            checkpoint.inspect(tmp_path / "distcp", **options)
    with pytest.raises(ReshardError, match="holds whole tensors: leave out mesh tp=2"):
        checkpoint.inspect(tmp_path / "src", mesh="tp=2")
    with pytest.raises(ReshardError, match="was written for mesh tp=2, and mesh tp=4 was given"):
        checkpoint.inspect(tmp_path / "ranks", mesh="tp=4")
    assert checkpoint.inspect(tmp_path / "ranks", mesh="tp=2").ok
    with pytest.raises(ReshardError, match="b_rules and b_mesh are for a second checkpoint"):
        checkpoint.verify(tmp_path / "ranks", b_mesh="tp=2")
