"""Wrong inputs of the command line, each with a part of the one line that answers it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard.cli import run
from reshard.rules import models

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip

WRONG_FILES = {
    "text.toml": 'ranks_per_host = "x"',
    "cut.toml": "hosts = [",
    "key.toml": "hots = 3",
    "cut.json": '{"a"',
    "list.json": "[1]",
    "other.json": '{"model_type": "t5"}',
    "digits.json": f'{{"hidden_size": {"9" * 5000}}}',
}
SHAPE, MOVE = "--shape 8,8", "--from 'dp=2: dp -' --to 'tp=2: - tp' --shape 8,8"
SIDES = "--from tp=4 --to 'tp=2 @ 8-9'"
MODEL = f"{SIDES} --model llama-3-8b"
WRONG_INPUTS = [
    # (what is typed, what the answer says to type)
    (f"show 'dp tp' --mesh 'dp2 tp4' {SHAPE}", "name=size, such as tp=4"),
    (f"show 'tp -' --mesh tp:4 {SHAPE}", "name=size, such as tp=4"),
    (f"show 'tp, -' --mesh tp=4 {SHAPE}", 'write "tp -"'),
    (f"show '[tp, None]' --mesh tp=4 {SHAPE}", 'write "tp -"'),
    (f"show \"P('tp', None)\" --mesh tp=4 {SHAPE}", 'write "tp -"'),
    (f"show 'tp None' --mesh tp=4 {SHAPE}", 'write "tp -"'),
    (f"show 'Shard(0)' --mesh tp=4 {SHAPE}", 'it is "tp ..."'),
    (f"show 'dp=2 tp=2: Shard(0), Shard(0)' {SHAPE}", 'it is "(dp tp) ..."'),
    (f"show 'dp=2 tp=2: [Replicate(), Shard(1)]' {SHAPE}", 'it is "- tp ..."'),
    (f"show 'dp=2: Partial()' {SHAPE}", 'it is "... | sum dp"'),
    (
        f"show tp --mesh tp=4 {SHAPE}",
        'and shape (8, 8) has 2 dims: write one word per dim, or "..."',
    ),
    (f"show 'tp=4 tp -' {SHAPE}", '"tp=2: - tp"'),
    (f"show 'tp=4: TP -' {SHAPE}", "mesh tp=4 has tp: use one of these"),
    ("show 'tp=4: tp -'", "'--shape' is missing: reshard show \"tp=4: tp -\" --shape 8192,4096"),
    ("show 'tp=4: tp -' --shape '8 8'", "numbers such as 8192,4096"),
    ("show 'tp=4: tp -' --shape 8K,4K", "numbers such as 8192,4096"),
    (f"show 'tp=4: tp -' {SHAPE} --rank 7", "its ranks are 0-3"),
    ("show --model llama-3-8b", '--mesh "tp=4"'),
    ("show --model llama-3-8b --mesh tp=4 lm_head", "try lm_head.weight"),
    (f"plan --from dp=2 --to tp=2 {SHAPE}", '"MESH: LAYOUT", such as "tp=2: - tp"'),
    (f"plan --from 'dp=2: dp -' {SHAPE}", "For example: reshard plan --shape 8192,4096 --from"),
    (f"plan --from 'Shard(0)' --to 'tp=2: - tp' {SHAPE}", 'as in "tp=2: - tp"'),
    ("plan --from 'dp=2: dp -' --to 'tp=2: - tp'", "(a whole model): neither of them were given"),
    ("plan --model llama3-8b --from tp=8 --to tp=4", 'no model "llama3-8b": try llama-3-8b'),
    ("plan --model meta-llama/Meta-Llama-3-8B --from tp=8 --to tp=4", "try llama-3-8b"),
    ("plan --model llama-3-8b --from fsdp=16 --to tp=8", "--from-fsdp or --to-fsdp"),
    ("plan --model llama-3-8b --from 'tp=8: tp -' --to tp=4", 'the layout "tp -": with --model'),
    (
        f"plan {MOVE} --memory '256 megabytes'",
        'is not an amount of bytes: write 4096, "256MiB" or "1GB"',
    ),
    (f"plan {MOVE} --memory 1", "the smallest that works is 4 bytes; raise --memory"),
    (f"plan {MOVE} --dtype float12", '"float12" is not a dtype: use one of bool uint8 int8'),
    (f"plan {MOVE} --rank 99", "rank 99 has no part in this plan: its ranks are 0-1"),
    (f"plan {MOVE} --save x.pdf", "must be .html, .json or .trace"),
    ("inspect", "For example: reshard inspect ckpt"),
    ("inspect nowhere", "check the path"),
    ("inspect empty", "no .safetensors, .metadata with .distcp, .pt"),
    ("convert hf", "For example: reshard convert ckpt out --mesh"),
    ("convert hf tp4 --mesh tp=2", "choose another target, or give --overwrite;"),
    ("convert plain out --mesh tp=4", "give --rules with a family such as llama"),
    ("convert hf out --mesh tp=4 --rules llamas", 'try "llama"'),
    ("convert hf out --mesh tp=4 --layout 'tp -'", 'NAME=LAYOUT, such as "*=tp ..."'),
    ("convert hf out --mesh tp=4 --layout 'nope=tp -'", 'such as "lm_head.weight"'),
    ("convert hf out --layout '*=tp ...'", "give --mesh"),
    ("convert hf out --mesh dp=2", "cut dim 0 by it (--fsdp dp"),
    ("convert hf out --format safetensors", "'full', 'sharded', 'distcp', 'ranks'"),
    ("convert hf out --dtype int8", "use float32, bfloat16, float16"),
    ("convert hf hf --overwrite", "choose a destination outside of the source"),
    ("convert hf out --drop '*zz*'", "matches no tensor: leave it out of --drop\n"),
    (
        "convert hf out --mesh tp=2 --layout 'lm_head.weight=tp -'",
        ": add it to layouts (--layout NAME=LAYOUT), or give --rules\n",
    ),
    (f"plan {MOVE} --topology hf", "hf cannot be read: Is a directory: expected a TOML file"),
    ("diff hf", "For example: reshard diff ckpt-1000 ckpt-2000"),
    ("index hf", "For example: reshard index src -o index"),
    ("plann", "Did you mean 'plan'? Try reshard --help"),
    ("plan --shape", "Try reshard plan --help"),
    ("show tp=2: tp - --shape 8,8", "a text with spaces needs quotes. Try reshard show --help"),
    ("show --model llama-3-8b --mesh 'tp=4: tp -'", 'give the mesh alone, "tp=4"'),
    ("plan --model ./hff --from tp=8 --to tp=4", "or name a config.json, or its folder"),
    ("plan --model empty --from tp=8 --to tp=4", '"empty" has no config.json'),
    (f"plan {MOVE} --html .", "Is a directory: name a file"),
    (f"plan {MOVE} --html nowhere/x.html", "x.html: No such file or directory: check the path"),
    (
        "explore --shape 8 --from 'dp=2: dp'",
        '--to is not given and its default does not fit: layout "- tp"',
    ),
    ("--jsn", "No such option '--jsn'. Try reshard --help"),
    # what each part of a command refuses
    (f"show 'tp -' --mesh tp {SHAPE}", '"tp" in mesh "tp" is not an axis'),
    (f"show 'tp -' --mesh tp=0 {SHAPE}", 'axis "tp" has size 0'),
    (f"show 'tp -' --mesh tp=-2 {SHAPE}", '"tp=-2" in mesh'),
    (f"show 'tp -' --mesh tp=two {SHAPE}", '"tp=two" in mesh'),
    (f"show 'tp -' --mesh 'tp=2 tp=4' {SHAPE}", 'axis "tp" appears twice in mesh'),
    (f"show 'tp -' --mesh 'tp=2 @ 1,1' {SHAPE}", "rank 1 appears twice"),
    (f"show 'tp -' --mesh 'tp=2 @ 1' {SHAPE}", "needs 2 ranks and got 1"),
    (f"show 'tp -' --mesh 'tp=2 @ a-b' {SHAPE}", '"a-b" in "tp=2 @ a-b" is not a rank'),
    (f"show 'tp -' --mesh 'tp=2 @ 9-1' {SHAPE}", '"9-1"'),
    (f"show 'tp -' --mesh '' {SHAPE}", 'mesh "" names no axis'),
    (f"show 'on -' --mesh on=2 {SHAPE}", '"on" cannot name an axis'),
    (f"show 'tp -' --mesh tp=99999999 {SHAPE}", "99999999 ranks: at most"),
    (f"show 'dp -' --mesh tp=2 {SHAPE}", 'names axis "dp" and mesh tp=2 has tp'),
    (f"show 'tp tp' --mesh tp=2 {SHAPE}", 'axis "tp" appears twice'),
    (f"show 'tp[3,4] -' --mesh tp=2 {SHAPE}", '"tp[3,4]" add up to 7 and the dim it cuts has 8'),
    (f"show 'tp[3,4,1] -' --mesh tp=2 {SHAPE}", "gives 3 sizes and mesh tp=2"),
    (f"show 'tp{{3,4}} -' --mesh tp=2 {SHAPE}", '"tp{3,4}" add up to 7'),
    (f"show 'tp*0 -' --mesh tp=2 {SHAPE}", 'found "0" at character 4'),
    (f"show '(tp -' --mesh tp=2 {SHAPE}", 'layout "(tp -": found "-"'),
    (f"show 'tp$ -' --mesh tp=2 {SHAPE}", 'found "$" at character 3'),
    (f"show 'tp - | foo' --mesh tp=2 {SHAPE}", 'found "foo" at character 8'),
    (f"show 'tp - | on pp=1' --mesh tp=2 {SHAPE}", 'names axis "pp"'),
    (f"show 'tp - | without 7' --mesh tp=2 {SHAPE}", "without rank 7"),
    (f"show '' --mesh tp=2 {SHAPE}", 'layout ""'),
    ("show 'tp -' --mesh tp=2 --shape 8,-8", 'size -8 in shape "8,-8" is negative'),
    ("show 'tp -' --mesh tp=2 --shape 8,eight", '"eight" in shape'),
    ("show 'tp -' --mesh tp=2 --shape 8.5,3", '"8.5" in shape'),
    ("show 'tp -' --mesh tp=2 --shape 8,,8", '"" in shape "8,,8"'),
    ("show 'tp -' --mesh tp=2 --shape 999999999999999999999999999999,4", "is too large"),
    ("show 'tp -' --mesh tp=2 --shape 99999999999,99999999999", "elements: check the sizes"),
    (f"show 'tp -' --mesh tp=2 {SHAPE} --rank 9", "rank 9 is not in mesh tp=2"),
    (f"show 'tp -' --mesh tp=2 {SHAPE} --rank x", "'x' is not a valid integer"),
    (f"show 'tp -' --mesh tp=2 {SHAPE} --colour", "'--colour'"),
    ("show 'x:1 y:1' --mesh 'x=2 y=2' --shape 8192,4096 --json", "33554432 boxes"),
    ("show", "'LAYOUT'"),
    ("demo x", "(x)"),
    ("demo --no-live --trace x.trace", "leave out --no-live, or --trace"),
    (
        "plan --from 'dp=2 dp -' --to 'tp=2 @ 8-9: - tp' --shape 64,64",
        '--from "dp=2 dp -" has no layout: expected "MESH: LAYOUT"',
    ),
    ("plan --from 'dp=2: dp -' --to tp=2 --shape 64,64", '--to "tp=2" has no layout'),
    (
        "plan --from 'dp=2: dp -' --to 'tp=2: - tp -' --shape 64,64",
        "has 3 words and shape (64, 64) has 2 dims",
    ),
    ("plan --from 'dp=2 x=1: - - | on dp=2' --to 'tp=2 @ 8-9: - tp' --shape 64,64", "on dp=2"),
    ("plan --from 'dp=2: dp -' --to 'tp=2: - - | sum tp' --shape 64,64", "has a pending sum"),
    ("plan --from 'dp=2: dp -' --to 'tp=2: - tp' --shape 64,64 --without 1", "ranks [1] are lost"),
    ("plan --from 'dp=2: dp -' --to 'tp=2: - tp' --shape 64,64 --without 7", "without rank 7"),
    (
        "plan --from 'dp=2: dp -' --to 'tp=2: - tp' --shape 64,64 --without x",
        '"x" in "--without x"',
    ),
    (f"plan {MOVE} --memory 0", "cap of 0 B"),
    (f"plan {MOVE} --memory -5", '"-5" is not an amount of bytes'),
    (f"plan {MOVE} --rules llama", "is for --model"),
    (f"plan {MOVE} --model llama-3-8b", "both of them were given"),
    (f"plan {MOVE} --topology text.toml", "ranks_per_host is a number"),
    (f"plan {MOVE} --topology cut.toml", "cut.toml cannot be read"),
    (f"plan {MOVE} --topology none.toml", "none.toml does not exist: check the path"),
    (f"plan {MOVE} --topology /dev/zero", "/dev/zero has more than"),
    (f"plan {MOVE} --topology key.toml", '"hots" is not known'),
    (f"plan {MOVE} --save none/a.html", "a.html: No such file or directory"),
    ("plan --from tp=4 --to tp --model llama-3-8b", '"tp" in mesh "tp" is not an axis'),
    ("plan --from tp=4 --to tp=12 --model llama-3-8b", "tp=12 is not a multiple of kv_heads=8"),
    (f"plan {MODEL} --rules lama", '"lama" is no family of rules'),
    (f"plan {MODEL} --rules bert", 'no rule matches tensor "'),
    (f"plan {MODEL} --from-fsdp zz", '"zz"'),
    (
        "plan --from tpp=16 --to 'tp=2 @ 8-9' --model llama-3-8b",
        'axis "tpp" of mesh tpp=16 cuts no tensor',
    ),
    (
        "plan --from tpp=16 --to 'tp=2 @ 8-9' --model llama-3-8b",
        "axes pp, dp, fsdp, cp, ep, tp, kv, rep: wri",
    ),
    ("plan --from tp=4 --to 'fsdp=2 @ 8-9' --model llama-3-8b", "(--replicate fsdp, replicate="),
    (
        "plan --from tp=4 --to 'ep=2 @ 8-9' --model llama-3-8b",
        'axis "ep" of mesh ep=2 @ 8-9 cuts no te',
    ),
    (f"plan {MODEL} --from-fsdp dp", 'fsdp names axis "dp" and mesh tp=4'),
    (f"plan {MODEL} --replicate dp", '"dp": the meshes have tp to replicate'),
    (f"plan {MOVE} --replicate dp", "--replicate is for --model"),
    (f"plan {SIDES} --model none.json", "none.json: No such file or directory"),
    (f"plan {SIDES} --model cut.json", 'cut.json" is not JSON'),
    (f"plan {SIDES} --model list.json", 'list.json" holds a list'),
    (f"plan {SIDES} --model digits.json", 'digits.json" is not JSON (Exceeds the limit'),
    (f"plan {SIDES} --model zeros.json", 'zeros.json" is larger than'),
    (f"plan {SIDES} --model other.json", "'t5' is not known"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer")
    shapes = {name: shape for name, (shape, _) in models.tensors(CONFIG).items()}
    for name in ("hf", "plain", "empty"):
        (folder / name).mkdir()
    (folder / "hf/config.json").write_text(json.dumps(CONFIG))
    for name in ("hf", "plain"):
        save_file(
            {key: np.ones(shape, "float16") for key, shape in shapes.items()},
            folder / name / "model.safetensors",
        )
    (folder / "tp4").mkdir()
    shutil.copy(folder / "hf/model.safetensors", folder / "tp4")
    for name, text in WRONG_FILES.items():
        (folder / name).write_text(text)
    (folder / "zeros.json").symlink_to("/dev/zero")
    return folder


@pytest.mark.parametrize(("typed", "answer"), WRONG_INPUTS, ids=range(len(WRONG_INPUTS)))
def test_a_wrong_input_is_answered_with_what_to_type(
    typed: str,
    answer: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(files)
    monkeypatch.setenv("COLUMNS", "80")
    assert run(shlex.split(typed)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"reshard: .+\n", said.err)
    assert answer in said.err
    assert not re.search(r"internal error|Traceback|[\w]+=\)", said.err)


def test_there_are_forty() -> None:
    assert len({typed for typed, _ in WRONG_INPUTS}) >= 40
