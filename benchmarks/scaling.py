"""How does the cost of a plan grow with the number of ranks? CPU seconds and memory, one process.

    python benchmarks/scaling.py [--most 65536] [--write docs]

Every case runs in a fresh process: `rs.plan`, the part of the rank with the most rows, the digest,
then `summary()` and `check()`. Memory is the peak of the process after each of the three. With
``--write`` the table goes into ``scale.md`` of that folder and the plot into ``scale.svg``.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from plan_speed import Case, specs

import reshard as rs

Dicts = tuple[dict[str, rs.TensorSpec], dict[str, rs.TensorSpec]]
SIZES = (8, 64, 256, 1024, 4096, 16384, 65536)
BEGIN, END = "<!-- table of benchmarks/scaling.py -->\n", "<!-- end of the table -->\n"


def _dicts(model: str, have: str, want: str, fsdp: bool = False) -> Dicts:
    case = Case("", model, have, want)
    return specs(case, have, fsdp), specs(case, want, False)


def fsdp_to_tp(n: int) -> Dicts:
    """Llama-3-70B, FSDP over n ranks to replicas of tp=8 on the same ranks."""
    return _dicts("llama-3-70b", f"dp={n}", f"replica={n // 8} tp=8", fsdp=True)


def fsdp_shrinks(n: int) -> Dicts:
    """Llama-3-70B, FSDP over n ranks to FSDP over n - 1 of them."""
    case = Case("", "llama-3-70b", "", "")
    return specs(case, f"dp={n}", True), specs(case, f"dp={n - 1}", True)


def hsdp_lost(n: int) -> Dicts:
    """Llama-3-70B, HSDP with groups of 64: one group is lost and comes back empty."""
    mesh, lost = rs.Mesh(replica=n // 64, dp=64), range(64, 128)
    groups = specs(Case("", "llama-3-70b", "", ""), "dp=64", True)
    texts = {str(spec.layout) for spec in groups.values()}
    whole = {text: rs.Layout(mesh, text) for text in texts}
    left = {text: layout.without(lost) for text, layout in whole.items()}
    return tuple(
        {
            name: rs.TensorSpec(spec.shape, spec.dtype, layouts[str(spec.layout)])
            for name, spec in groups.items()
        }
        for layouts in (left, whole)
    )


def experts_to_tp(n: int) -> Dicts:
    """A mixture of experts of 18,867 tensors, EP64 to replicas of tp=8 on the same ranks."""
    return _dicts("qwen3-30b-a3b", f"dp={n // 64} ep=64", f"replica={n // 8} tp=8")


MOVES: dict[str, tuple[Callable[[int], Dicts], tuple[int, ...]]] = {
    "FSDP n to n/8 x tp8": (fsdp_to_tp, SIZES),
    "FSDP n to n - 1": (fsdp_shrinks, (4096, 16384)),
    "HSDP, a lost group of 64": (hsdp_lost, (4096, 16384)),
    "EP64 to TP8, 18,867 tensors": (experts_to_tp, (4096,)),
}


def worst_rank(plan: rs.Plan) -> int:
    """The rank that sends the most rows."""
    rows = np.zeros(int(plan.world[-1]) + 1, dtype=np.int64)
    for flow in plan.flows:
        for stream in flow.streams():
            np.add.at(rows, stream.rows.source, stream.served)
    return int(rows.argmax())


def measure(move: str, num_ranks: int) -> dict[str, Any]:
    """Plan one case in this process and say what it took."""
    have, want = MOVES[move][0](num_ranks)
    make_plan = rs.plan  # loads the planner, which is not what is measured
    rank = worst_rank(make_plan(have, want))
    base, times = _memory(), [time.process_time()]
    plan = make_plan(have, want)
    mine = plan.for_rank(rank)
    times.append((plan.digest, time.process_time())[1])
    memory = [_memory()]
    summary = plan.summary()
    times.append(time.process_time())
    memory.append(_memory())
    found = {
        "move": move,
        "ranks": num_ranks,
        "plan_s": times[1] - times[0],
        "rows": mine.sends.num_rows + mine.receives.num_rows,
        "rounds": plan.num_rounds,
        "summary_s": times[2] - times[1],
        "messages": summary.num_messages,
        "wire_over_bound": summary.wire_bytes / max(summary.lower_bound_bytes, 1),
        "base_mib": base,
        "memory_mib": memory,
    }
    plan.check()
    found["check_s"] = time.process_time() - times[2]
    memory.append(_memory())
    return found


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def table(runs: list[dict[str, Any]]) -> str:
    """The runs as a table in Markdown."""
    lines = [
        "| move | ranks | plan, rank, digest | rows of the rank | rounds | summary | check | MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        memory = " / ".join(f"{one:.0f}" for one in run["memory_mib"])
        lines.append(
            f"| {run['move']} | {run['ranks']:,} | {run['plan_s']:.3f} s | {run['rows']:,} | "
            f"{run['rounds']} | {run['summary_s']:.3f} s | {run['check_s']:.2f} s | {memory} |"
        )
    return "\n".join(lines) + "\n"


def plot(runs: list[dict[str, Any]]) -> str:
    """CPU seconds over ranks as an SVG, both axes logarithmic; one curve for each step."""
    width, height, left, bottom = 640, 360, 60, 40
    runs = [run for run in runs if run["move"] == next(iter(MOVES))]
    low, high = -3, 2

    def at(ranks: float, seconds: float) -> tuple[float, float]:
        across = math.log2(ranks / SIZES[0]) / math.log2(SIZES[-1] / SIZES[0])
        up = (math.log10(max(seconds, 10**low)) - low) / (high - low)
        return left + across * (width - left - 120), (height - bottom) * (1 - up) + 10

    box, font = f"0 0 {width} {height + 20}", 'font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" {font}>']
    for power in range(low, high + 1):
        y = at(SIZES[0], 10**power)[1]
        parts.append(f'<path d="M{left} {y:.1f}H{width - 120}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{10**power:g} s</text>'
        )
    for ranks in SIZES:
        x = at(ranks, 1)[0]
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{ranks:,}</text>')
    steps = [("plan_s", "plan, rank, digest", "#1b6ca8"), ("summary_s", "summary", "#2a9d4a"),
             ("check_s", "check", "#c0532b")]  # fmt: skip
    for key, label, colour in steps:
        points = [at(run["ranks"], run[key]) for run in runs]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        if points:
            x, y = points[-1]
            parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{colour}">{label}</text>')
    parts.append(
        f'<text x="{left}" y="{height + 12}">ranks; {next(iter(MOVES))}, same ranks</text>'
    )
    return "\n".join([*parts, "</svg>\n"])


def write(runs: list[dict[str, Any]], folder: Path) -> None:
    """Put the table into the page and the plot beside it."""
    page = folder / "scale.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + "\n" + table(runs) + "\n" + END + rest.split(END)[1])
    (folder / "scale.svg").write_text(plot(runs))


def main() -> int:
    """Run every case in its own process and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="ranks of the largest case")
    parser.add_argument("--write", type=Path, help="the folder of scale.md")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return 0
    runs = []
    for move, (_, sizes) in MOVES.items():
        for size in (size for size in sizes if size <= options.most):
            command = [sys.executable, __file__, "--one", move, str(size)]
            done = subprocess.run(command, capture_output=True, check=True, text=True)
            runs.append(json.loads(done.stdout))
            print(table(runs[-1:]).splitlines()[-1], flush=True)
    if options.write:
        write(runs, options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
