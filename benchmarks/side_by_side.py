"""What benchmarks on several ranks share: starting them, and telling what they measured."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Run = Callable[[], object]
Row = dict[str, Any]
"""The name of a case, its seconds by contender, and its checks."""


@dataclass
class Case:
    """One workload on one rank, and what the ratio of two of its times should be."""

    name: str
    runs: dict[str, Run]
    ours: str
    at_most: dict[str, float]
    """At most so many times as slow as these."""
    at_least: dict[str, float]
    """At least so many times as fast as these."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is known of the contenders."""


def arguments(text: str) -> argparse.ArgumentParser:
    """The options that all have."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="smaller tensors, fewer repetitions")
    parser.add_argument("--json", action="store_true")
    return parser


def run_ranks(
    num: int, body: Callable[[int, argparse.Namespace], None], args: argparse.Namespace
) -> None:
    """Run a function on so many ranks of this host, in a gloo group, and exit as they do."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        path = Path(folder) / "store"
        ranks = [
            context.Process(target=_rank_main, args=(rank, num, path, body, args))
            for rank in range(num)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    sys.exit(max(process.exitcode or 0 for process in ranks))


def _rank_main(
    rank: int,
    num: int,
    path: Path,
    body: Callable[[int, argparse.Namespace], None],
    args: argparse.Namespace,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=num)
    body(rank, args)
    dist.destroy_process_group()


def measured(case: Case, repeat: int) -> dict[str, Any]:
    """Medians of the slowest rank, contenders in turn; the first two turns warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in case.runs}
    for turn in range(repeat + 2):
        for name, run in case.runs.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            took = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn > 1:
                seconds[name].append(float(took))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    found = {"name": case.name, "seconds": medians, "checks": list(checks(case, medians))}
    return found | ({"facts": case.facts} if case.facts else {})


def checks(case: Case, medians: dict[str, float]) -> Iterator[dict[str, Any]]:
    for name, most in case.at_most.items():
        ratio = medians[case.ours] / medians[name]
        yield {"what": f"at most {most:g}x {name}", "is": ratio, "holds": ratio <= most}
    for name, least in case.at_least.items():
        ratio = medians[name] / medians[case.ours]
        yield {"what": f"{least:g}x as fast as {name}", "is": ratio, "holds": ratio >= least}


def text_of(row: Row) -> str:
    """A case in words, with a mark for each check."""
    times = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in row["seconds"].items())
    lines = [f"{row['name']}: {times}"]
    lines += [f"    {name}: {fact}" for name, fact in row.get("facts", {}).items()]
    for check in row["checks"]:
        mark = "ok  " if check["holds"] else "MISS"
        lines.append(f"    {mark} {check['what']}: {check['is']:.2f}")
    return "\n".join(lines)


def tell(rows: Iterable[Row], rank: int, as_json: bool) -> None:
    """Measure case after case, and let the first rank say what came out of each."""
    found = []
    for row in rows:
        found.append(row)
        if rank == 0 and not as_json:
            print(text_of(row), flush=True)
    if rank == 0:
        _close(found, as_json)


def _close(rows: list[Row], as_json: bool) -> None:
    """What is said at the end: on which machine, and with --json everything."""
    facts = {"load": os.getloadavg(), "cores": os.cpu_count(), "torch": torch.__version__}
    if as_json:
        print(json.dumps({"machine": facts, "cases": rows}, indent=2))
    else:
        load = os.getloadavg()[0]
        print(f"load {load:.1f} on {os.cpu_count()} cores, torch {torch.__version__}")
