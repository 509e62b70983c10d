"""How long does planning take, and how does it grow? CPU seconds, no processes started.

    python benchmarks/plan_speed.py [--quick] [--json]

Measured per case: ``rs.plan`` of the whole state dict, ``for_rank`` of the rank with the most rows,
and the digest; then ``summary()``, which looks at every rank. Each case runs in a fresh process so
that nothing is cached, and memory is that process's peak above the imports.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import reshard as rs
from reshard.rules.models import preset, tensors


@dataclass(frozen=True)
class Case:
    """A state dict that moves from one mesh to another, and the seconds it may take."""

    name: str
    model: str
    have: str
    want: str
    target: float | None = None
    fsdp: bool = False
    """The source cuts every tensor by dp, after tp where there is one."""


def replicas(ranks: int, target: float | None) -> Case:
    """Trainers with tp=8 to as many servers with tp=4 on other ranks."""
    want = f"replica={ranks // 4} tp=4 @ {ranks}-{2 * ranks - 1}"
    name = f"L70 {ranks}+{ranks}: tp8 -> tp4"
    return Case(name, "llama-3-70b", f"dp={ranks // 8} tp=8", want, target)


def fsdp(ranks: int, num: int, target: float | None, same: bool = False) -> Case:
    """FSDP over many ranks to replicas of tp=8, on other ranks or on the same."""
    want = f"replica={num} tp=8" + ("" if same else f" @ {ranks}-{ranks + 8 * num - 1}")
    name = f"L70 FSDP {ranks} -> {num} x tp8{', same ranks' if same else ''}"
    return Case(name, "llama-3-70b", f"dp={ranks}", want, target, fsdp=True)


CASES = [
    Case("L8 dp2 tp4 -> 2 x tp2", "llama-3-8b", "dp=2 tp=4", "replica=2 tp=2 @ 8-11"),
    *(
        replicas(ranks, target)
        for ranks, target in ((8, None), (64, None), (256, 0.05), (1024, 1.0))
    ),
    *(fsdp(ranks, num, None) for ranks, num in ((8, 1), (64, 8), (256, 32), (1024, 128))),
    fsdp(16384, 256, 1.0),
    fsdp(1024, 128, None, same=True),
    fsdp(16384, 256, None, same=True),
    Case("M30 EP8 -> TP4", "qwen3-30b-a3b", "ep=8", "tp=4 @ 8-11", 0.5),
    Case("M30 EP8 -> 2 x TP4, same ranks", "qwen3-30b-a3b", "ep=8", "replica=2 tp=4"),
]


def specs(case: Case, mesh_text: str, fsdp: bool) -> dict[str, rs.TensorSpec]:
    mesh = rs.Mesh.parse(mesh_text)
    names = tensors(case.model)
    replicas = [axis for axis in mesh.axes if axis == "replica" or (axis == "dp" and not fsdp)]
    rules = rs.Rules.load(
        config=preset(case.model),
        fsdp="dp" if fsdp else None,
        replicate=" ".join(replicas),
    )
    layouts = rules.layouts({name: shape for name, (shape, _) in names.items()}, mesh=mesh)
    return {
        name: rs.TensorSpec(shape, dtype, layouts[name]) for name, (shape, dtype) in names.items()
    }


def measure(case: Case) -> dict[str, Any]:
    """Plan one case in this process and say what it took."""
    have, want = specs(case, case.have, case.fsdp), specs(case, case.want, False)
    make_plan = rs.plan  # loads the planner, which is not what is measured
    # A collection that visits all that is imported takes 4 ms, and comes at any time.
    gc.collect()
    gc.freeze()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    plan = make_plan(have, want)
    planned = time.process_time()
    rank = worst_rank(make_plan(have, want))  # another plan, so that nothing of this one is kept
    before = time.process_time()
    mine = plan.for_rank(rank)
    rows = mine.sends.num_rows + mine.receives.num_rows + mine.copies.num_rows
    derived = time.process_time()
    digest = plan.digest
    done = time.process_time()
    summary = plan.summary()
    summed = time.process_time()
    return {
        "case": case.name,
        "tensors": len(want),
        "stacks": len(plan.stacks),
        "plan_s": planned - start,
        "for_rank_s": derived - before,
        "digest_s": done - derived,
        "total_s": planned - start + done - before,
        "summary_s": summed - done,
        "target_s": case.target,
        "rank": rank,
        "rows": rows,
        "rounds": plan.num_rounds,
        "messages": summary.num_messages,
        "wire_over_bound": summary.wire_bytes / max(summary.lower_bound_bytes, 1),
        "busiest_over_mean": summary.busiest_sender_bytes / max(summary.mean_sender_bytes, 1),
        "rss_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024,
        "digest": digest,
    }


def worst_rank(plan: rs.Plan) -> int:
    """The rank with the most rows among the first, last and middle of either side."""
    ranks = plan.ranks
    tried = {ranks[i * (len(ranks) - 1) // 7] for i in range(8)}

    def count(rank: int) -> int:
        mine = plan.for_rank(rank)
        return mine.sends.num_rows + mine.receives.num_rows

    return max(sorted(tried), key=count)


def line(run: dict[str, Any], late: bool) -> str:
    """One case as a line of the table."""
    target = f" target {run['target_s']:.2f}{' MISSED' if late else ''}" if run["target_s"] else ""
    return (
        f"{run['case']:40s} {run['total_s']:6.3f} s (plan {run['plan_s']:.3f}, "
        f"rank {run['for_rank_s']:.3f}, digest {run['digest_s']:.3f}){target}; "
        f"summary {run['summary_s']:.3f} s; {run['rows']} rows of rank {run['rank']}, "
        f"{run['rounds']} rounds, {run['messages']} messages, +{run['rss_mib']:.0f} MiB; "
        f"wire/bound {run['wire_over_bound']:.4f}, busiest/mean {run['busiest_over_mean']:.3f}"
    )


def main() -> int:
    """Run every case in its own process, best of three, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="each case once")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(CASES[options.one])))
        return 0
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; CPU seconds, best of runs")
    missed = 0
    for number, case in enumerate(CASES):
        command = [sys.executable, __file__, "--one", str(number)]
        runs = [
            json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
            for _ in range(1 if options.quick else 3)
        ]
        best = min(runs, key=lambda run: run["total_s"])
        late = case.target is not None and best["total_s"] > case.target
        missed += late
        if options.json:
            print(json.dumps(best))
            continue
        print(line(best, late))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
