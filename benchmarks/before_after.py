"""Two trees of reshard on the same benchmark, in turns: what a change costs.

    python benchmarks/before_after.py BEFORE AFTER [--script move.py] [--runs 3]
                                      [--arguments "--only 64"]

BEFORE and AFTER are checkouts. Each run starts the benchmark of either tree with ``--json``, which
goes first alternates. Per case, time and CPU time of the fastest run of each tree are compared for
what reshard does itself; other contenders show how quiet the machine was. A case is slower if its
ratio is above 1.15 in two of three pairs of runs, in CPU time where that is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SLOWER = 1.15
Figures = dict[tuple[str, str, str], float]
"""Seconds by case, contender and kind."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--script", default="move.py")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="print every case")
    parser.add_argument("--arguments", default="", help="for the benchmark, in quotes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as compiled:
        return compare(args, Path(compiled))


def compare(args: argparse.Namespace, compiled: Path) -> int:
    """Run both trees in turns. ``compiled`` is where Python keeps what it compiles of them: files
    that it compiles anew in every process of one tree cost a tenth of ``plan_speed.py``."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(compiled)
    for tree in (args.before, args.after):
        command = [sys.executable, "-m", "compileall", "-q", str(tree / "src")]
        subprocess.run(command, check=True)
    pairs = []
    for turn in range(args.runs):
        trees = [args.before, args.after]
        found = {
            tree: figures(tree, args.script, shlex.split(args.arguments))
            for tree in trees[:: 1 - turn % 2 * 2]
        }
        pairs.append(tuple(found[tree] for tree in trees))
        print(f"run {turn + 1} of {args.runs}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return report(pairs, args.all)


def figures(tree: Path, script: str, arguments: list[str]) -> Figures:
    """What a benchmark of one tree measures."""
    command = [sys.executable, str(tree / "benchmarks" / script), "--json", *arguments]
    env = os.environ | {"PYTHONPATH": str(tree / "src")}
    # A benchmark ends with 1 where a target is missed; the figures count all the same.
    text = subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout
    rows: list[dict[str, Any]]
    if text.lstrip().startswith('{\n  "machine"') or '"cases"' in text:
        rows = json.loads(text)["cases"]
    else:
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    found: Figures = {}
    for row in rows:
        name = row.get("name") or row.get("case")
        for kind in ("seconds", "cpu_seconds"):
            values = row.get(kind, {})
            for who, value in (values if isinstance(values, dict) else {"": values}).items():
                found[name, who, kind] = float(value)
        limits = ("target_s",)
        plain = {k: v for k, v in row.items() if k.endswith("_s") and v and k not in limits}
        found |= {(name, key, "cpu_seconds"): float(value) for key, value in plain.items()}
    return found


def report(pairs: list[tuple[Figures, ...]], show_all: bool) -> int:
    keys = [key for key in pairs[0][0] if all(key in one for pair in pairs for one in pair)]
    slower = 0
    for kind in ("seconds", "cpu_seconds"):
        for ours in (True, False):
            chosen = [key for key in keys if key[2] == kind and is_ours(key[1]) == ours]
            ratios = {key: ratio_of(pairs, key) for key in chosen}
            ratios = {key: ratio for key, ratio in ratios.items() if ratio > 0}
            if not ratios:
                continue
            mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
            who = "reshard" if ours else "others, unchanged"
            print(f"{kind}, {who}: geometric mean of {len(ratios)} figures {mean:.3f}")
            for key, ratio in sorted(ratios.items(), key=lambda item: -item[1]):
                each = [pair[1][key] / pair[0][key] for pair in pairs if pair[0][key] > 0]
                is_slower = ours and sum(one > SLOWER for one in each) >= min(2, len(each))
                slower += is_slower
                if is_slower or (show_all and ours):
                    texts = " ".join(f"{one:.2f}" for one in each)
                    mark = "SLOWER" if is_slower else "ok"
                    print(f"  {mark:6} {ratio:.2f} ({texts}) {key[0]}, {key[1]}")
    return int(slower > 0)


def is_ours(contender: str) -> bool:
    return "memcpy" not in contender and (
        contender.startswith(("reshard", "ours", "")) and contender not in OTHERS
    )


OTHERS = {
    "DTensor", "full_tensor + slice", "pack + all_to_all_single", "torch", "cp", "dcp",
    "consolidate", "dcp_to_torch_save", "bare move", "none", "pytorch",
}  # fmt: skip


def ratio_of(pairs: list[tuple[Figures, ...]], key: tuple[str, str, str]) -> float:
    """After over before, the fastest run of each."""
    before, after = (min(pair[side][key] for pair in pairs) for side in (0, 1))
    return after / before if before > 0 else 0.0


if __name__ == "__main__":
    sys.exit(main())
