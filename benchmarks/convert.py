"""Conversions of checkpoints against cp and against torch's own tools, interleaved.

    python benchmarks/convert.py [--size 4GB] [--rounds 5] [--cold] [--folder DIR] [--only WORD]
                                 [--memory 256MiB] [--no-peers] [--json]

A synthetic language model in bfloat16 is written as 4 ranks save it, and converted with the command
line, checksums on. Python keeps its byte code, as in an installed package. Every case runs all
contenders in turn, round after round; a figure is the median, and the ratio to `cp -r` is the
median of the ratios of each round. Our time is that of the whole command, interpreter included;
torch's begins when its ranks are up and torch is loaded. All end with a sync. `--cold` drops the
source from the page cache before each run. The output is compared with the source by the
safetensors library before anything counts. Below 1 GB starting an interpreter takes longer than
copying, so that times are shown and not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import making

from reshard.text import format_bytes, parse_bytes

HERE = Path(__file__).parent / "checkpoints"
OURS, CP = "reshard", "cp -r"
BUSY = 2.5
"""A load average above which a round says nothing about time."""

JUDGED = 10**9
"""Bytes of a source from which on times are judged."""

Command = Callable[[Path, Path], list[str]]
"""The command that turns a source into a target."""


@dataclass
class Case:
    """A conversion, the contenders, and what ours may take."""

    name: str
    make: Callable[[Path], None]
    """Writes the source."""
    runs: dict[str, Command]
    at_most: float | None = None
    """Times cp."""
    read_at_most: float | None = None
    """Bytes read, times the source's."""
    check: bool = True
    """Whether the safetensors library can compare source and target."""


@dataclass
class Measured:
    """What the rounds of a case took."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    read: int = 0
    loads: list[float] = field(default_factory=list)


def main() -> None:
    args = arguments().parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="reshard-bench-", dir=args.folder) as folder:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
        for case in cases(args, Path(folder)):
            if args.only in case.name:
                rows.append(row_of(case, args, Path(folder)))
                if not args.json:
                    print(text_of(rows[-1]), flush=True)
        for row in looks(args, Path(folder)):
            if args.only in row["name"]:
                rows.append(row)
                if not args.json:
                    print(text_of(row), flush=True)
    close(rows, args.json)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_bytes, default="4GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--folder", help="where to write; some three times the size")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--cold", action="store_true", help="read the source from the disk")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="without torch")
    parser.add_argument("--quick", action="store_true", help="256MB and one round")
    parser.add_argument("--json", action="store_true")
    return parser


@dataclass(frozen=True)
class Commands:
    """How sources are made and converted in one run of the benchmark."""

    args: argparse.Namespace
    folder: Path
    shapes: making.Shapes

    def convert(
        self, mesh: str, dim_of: making.DimOf, *options: str, of: making.Shapes | None = None
    ) -> Command:
        """Our command, with a rules file that cuts the model, or other tensors, so."""
        shapes = of or self.shapes
        rules = self.folder / f"{dim_of.__name__}-{len(shapes)}.toml"
        rules.write_text(making.rules_text(dim_of, shapes))
        return ours(self.args, "--mesh", mesh, "--rules", str(rules), *options)

    def source(self, dim_of: making.DimOf) -> Callable[[Path], None]:
        """Writes the model as 4 ranks save it."""
        return lambda path: making.write(path, self.shapes, dim_of)

    def distcp(self, path: Path) -> None:
        """Writes the model as a .distcp of 4 ranks."""
        plain = path.with_name("plain")
        making.write(plain, self.shapes, making.by_rows)
        run(self.convert("tp=4", making.by_rows, "--format", "distcp")(plain, path))
        shutil.rmtree(plain)


def cases(args: argparse.Namespace, folder: Path) -> Iterator[Case]:
    if args.quick:
        args.size, args.rounds = parse_bytes("256MB"), 1
    commands = Commands(args, folder, making.model(args.size))
    yield from to_other_ranks(commands)
    yield from to_full(commands)
    large = making.one_tensor(4 << 30 if args.size >= JUDGED else args.size)
    yield Case(
        f"one tensor of {format_bytes(making.size_of(large))}, Shard(0) 4 to Shard(1) 2",
        lambda path: making.write(path, large, making.by_rows),
        {OURS: commands.convert("tp=2", making.by_columns, of=large), CP: copied},
        read_at_most=1.05,
    )


def to_other_ranks(commands: Commands) -> Iterator[Case]:
    rows, heads, columns = making.by_rows, making.by_heads, making.by_columns
    convert, source = commands.convert, commands.source
    dcp2, dcp4 = "DCP load and save, 2 ranks", "DCP load and save, 4 ranks"
    yield Case(
        "Shard(0), 4 to 2",
        source(rows),
        {OURS: convert("tp=2", rows), CP: copied, dcp2: peer("dcp", "--cut", "rows")},
        at_most=1.25,
    )
    yield Case(
        "TP mix, 4 to 2",
        source(heads),
        {OURS: convert("tp=2", heads), CP: copied, dcp2: peer("dcp", "--cut", "heads")},
        at_most=1.6,
    )
    yield Case(
        "Shard(0) 4 to Shard(1) 4",
        source(rows),
        {
            OURS: convert("tp=4", columns),
            CP: copied,
            dcp4: peer("dcp", "--ranks", "4", "--cut", "columns"),
        },
        at_most=2.5,
        read_at_most=1.05,
    )


def to_full(commands: Commands) -> Iterator[Case]:
    full = ours(commands.args, "--format", "full")
    yield Case(
        "sharded to full safetensors",
        commands.source(making.by_rows),
        {OURS: full, CP: copied, "consolidate_safetensors_files": peer("consolidate")},
        at_most=1.6,
    )
    yield Case(
        ".distcp to full safetensors",
        commands.distcp,
        {OURS: full, CP: copied, "dcp_to_torch_save": peer("to_torch")},
        at_most=1.6,
        check=False,
    )


def ours(args: argparse.Namespace, *options: str) -> Command:
    command = [sys.executable, str(HERE / "ours.py"), "convert", "--quiet", "--memory", args.memory]
    return lambda src, dst: [*command, str(src), str(dst), *options]


def copied(src: Path, dst: Path) -> list[str]:
    return ["cp", "-r", str(src), str(dst)]


def peer(what: str, *options: str) -> Command:
    command = [sys.executable, str(HERE / "peers.py"), what]
    return lambda src, dst: [*command, str(src), str(dst), *options]


def row_of(case: Case, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure a case: contenders in turn, the first turn of ours checked and not counted."""
    src, dst = folder / "source", folder / "target"
    case.make(src)
    size = sum(file.stat().st_size for file in src.iterdir())
    runs = {n: command for n, command in case.runs.items() if args.peers or n in (OURS, CP)}
    measured = Measured()
    for turn in range(args.rounds + 1):
        measured.loads.append(os.getloadavg()[0])
        for name, command in runs.items() if turn else [(OURS, runs[OURS])]:
            forget(src) if args.cold else warm(src)
            took, cpu, said = timed(command(src, dst))
            if turn:
                note(measured, name, took, cpu, said)
            else:
                verify(src, dst, case.check and args.peers)
            shutil.rmtree(dst)
            os.sync()
    shutil.rmtree(src)
    return described(case, args, measured, size)


def timed(command: list[str]) -> tuple[float, float, dict[str, Any]]:
    """Wall seconds until all is on the disk, CPU seconds, and what the command said at its end."""
    before, began = os.times(), time.perf_counter()
    said = run(command)
    os.sync()
    took, after = time.perf_counter() - began, os.times()
    cpu = after.children_user + after.children_system
    return took, cpu - before.children_user - before.children_system, said


def run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


def note(measured: Measured, name: str, took: float, cpu: float, said: dict[str, Any]) -> None:
    measured.seconds.setdefault(name, []).append(said.get("seconds", took))
    measured.cpu.setdefault(name, []).append(cpu)
    measured.peak[name] = max(measured.peak.get(name, 0), said.get("peak_kib", 0) * 1024)
    if name == OURS:
        measured.read = max(measured.read, said["read_bytes"])


def verify(src: Path, dst: Path, by_library: bool) -> None:
    """The target holds the bits of the source: says the safetensors library, or else reshard."""
    if by_library:
        run(peer("check")(src, dst))
    else:
        run([sys.executable, "-m", "reshard", "verify", str(src), str(dst)])


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(folder: Path) -> None:
    for path in files_of(folder):
        subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)


def described(case: Case, args: argparse.Namespace, found: Measured, size: int) -> dict[str, Any]:
    medians = {name: statistics.median(each) for name, each in found.seconds.items()}
    pairs = zip(found.seconds[OURS], found.seconds[CP], strict=True)
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    cap = parse_bytes(args.memory)
    checks = [limit(f"peak memory at most {format_bytes(cap)}", found.peak[OURS] / cap, 1.0)]
    if case.at_most is not None and size >= JUDGED:
        checks.append(limit(f"at most {case.at_most:g}x {CP}", ratio, case.at_most))
    if case.read_at_most is not None:
        what = f"reads at most {case.read_at_most:g}x the source"
        checks.append(limit(what, found.read / size, case.read_at_most))
    return {
        "name": case.name,
        "bytes": size,
        "seconds": medians,
        "spread": {name: [min(each), max(each)] for name, each in found.seconds.items()},
        "cpu": {name: statistics.median(each) for name, each in found.cpu.items()},
        "peak": {name: peak for name, peak in found.peak.items() if peak},
        "of cp": {name: seconds / medians[CP] for name, seconds in medians.items()},
        "busy": max(found.loads) > BUSY,
        "checks": checks,
    }


def limit(what: str, found: float, most: float) -> dict[str, Any]:
    return {"what": what, "is": found, "holds": found <= most}


def looks(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """`inspect` and `verify`, which write nothing."""
    if not any(args.only in name for name in ("inspect", "verify 4 ranks against 2")):
        return
    shapes = making.model(args.size)
    one, two = folder / "one", folder / "two"
    making.write(one, shapes, making.by_rows)
    rules = folder / "rules.toml"
    rules.write_text(making.rules_text(making.by_rows, shapes))
    run(ours(args, "--mesh", "tp=2", "--rules", str(rules))(one, two))
    command = [sys.executable, "-m", "reshard"]
    inspected = [timed_plainly([*command, "inspect", str(two)]) for _ in range(args.rounds + 2)]
    best = statistics.median(inspected)
    checks = [limit("at most 0.3 s", best, 0.3)]
    yield {"name": "inspect", "seconds": {OURS: best}, "checks": checks}
    seconds: dict[str, list[float]] = {OURS: [], "cat": []}
    for _ in range(args.rounds):
        for name, line in (
            (OURS, [*command, "verify", str(one), str(two)]),
            ("cat", cat(one, two)),
        ):
            for side in (one, two):
                forget(side) if args.cold else warm(side)
            seconds[name].append(timed_plainly(line))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    share = medians[OURS] / medians["cat"]
    # From a disk it should be the disk that takes the time; from memory it is our arithmetic.
    checks = [limit("at most 1.25x cat", share, 1.25)] if args.cold else []
    yield {"name": "verify 4 ranks against 2", "seconds": medians, "checks": checks}


def cat(*folders: Path) -> list[str]:
    return ["cat", *(str(path) for folder in folders for path in files_of(folder))]


def timed_plainly(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def text_of(row: dict[str, Any]) -> str:
    """A case in words, with a mark for each check."""
    busy = " (the machine was busy)" if row.get("busy") else ""
    size = f", {format_bytes(row['bytes'])}" if "bytes" in row else ""
    lines = [f"{row['name']}{size}{busy}"]
    for name, seconds in row["seconds"].items():
        words = [f"{seconds:.2f} s"]
        if "cpu" in row:
            words += [f"{row['of cp'][name]:.2f}x {CP}", f"{row['cpu'][name]:.2f} CPU s"]
        if name in row.get("peak", {}):
            words.append(f"peak {format_bytes(row['peak'][name])}")
        lines.append(f"    {name:32} {', '.join(words)}")
    for check in row["checks"]:
        mark = "ok  " if check["holds"] else "MISS"
        lines.append(f"    {mark} {check['what']}: {check['is']:.3f}")
    return "\n".join(lines)


def close(rows: list[dict[str, Any]], as_json: bool) -> None:
    facts = {"load": os.getloadavg(), "cores": os.cpu_count(), "python": sys.version.split()[0]}
    if as_json:
        print(json.dumps({"machine": facts, "cases": rows}, indent=2))
    else:
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, Python {facts['python']}")


if __name__ == "__main__":
    main()
