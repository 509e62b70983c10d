"""How much code one request runs through: files entered, changes of file, depth of the stack.

    python benchmarks/walk.py [move] [plan] [convert] [activations] [--files]

Deterministic figures, not times: they say how many files a reader has to open to follow a request.
`move` runs on two ranks of one host and counts the files of `reshard/live` that the first (cold)
`rs.move` of a process group and a later (warm) one enter, and the frames between `rs.move` and the
copies: the calls of memmove, process_vm_readv and process_vm_writev. (When ranks connect, each also
reads one number of the other's memory, to see whether it may; that is no copy.) The other sections
count all files of reshard, for `rs.plan` and one rank's part, `reshard convert`, and a step with
`input_reshard`. Only functions count, not module and class bodies, of the calling thread and of
threads that it starts with `threading`.
"""

from __future__ import annotations

import argparse
import inspect
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from side_by_side import run_ranks

import reshard as rs

ROOT = Path(rs.__file__).parent
LIVE, NN = ROOT / "live", ROOT / "nn"
COPIES = {"HostCopies.run", "read_memory", "write_memory"}
"""The functions of `live/copy/host.py` that copy, by memmove or by a system call."""
PROBE = "_can_read"
"""The function that reads one number of a peer's memory when ranks connect."""
MAX_LIVE_FILES, MAX_FRAMES = 20, 10
MAX_NN_FILES, MAX_NN_OBJECTS = 9, 5
MAX_PLAN_FILES, MAX_CONVERT_FILES = 16, 38


@dataclass
class Walk:
    """The functions of reshard that ran, in order."""

    files: dict[str, int] = field(default_factory=dict)
    """How many functions were entered in each file."""
    changes: int = 0
    """How often a function called one of another file."""
    stack: list[str] = field(default_factory=list)
    """The deepest stack from the first function to a copy."""
    objects: list[str] = field(default_factory=list)
    """The most objects of reshard.nn whose methods called each other, by class, innermost first."""

    def under(self, folder: Path) -> list[str]:
        """The files entered below a folder."""
        return sorted(name for name in self.files if Path(name).is_relative_to(folder))

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Record a call; for `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or not _is_ours(frame) or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        if code.co_name.startswith("<") and _is_body(frame.f_back):
            return  # a comprehension of a module body
        name = code.co_filename
        self.files[name] = self.files.get(name, 0) + 1
        caller = frame.f_back
        while caller is not None and not _is_ours(caller):
            caller = caller.f_back
        self.changes += caller is not None and caller.f_code.co_filename != name
        if name.startswith(str(NN)):
            objects = {id(one): type(one).__name__ for one in _objects(frame)}
            self.objects = max(self.objects, [*objects.values()], key=len)
        if code.co_qualname in COPIES:
            stack = list(_stack(frame))
            if PROBE not in stack and len(stack) > len(self.stack):
                self.stack = stack


def _is_body(frame: FrameType | None) -> bool:
    return frame is not None and not frame.f_code.co_flags & inspect.CO_OPTIMIZED


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(str(ROOT))


def _stack(frame: FrameType | None) -> Iterator[str]:
    """The functions of reshard from a frame outwards, up to the one that the user called."""
    while frame is not None:
        if _is_ours(frame):
            yield frame.f_code.co_qualname
        frame = frame.f_back


def _objects(frame: FrameType | None) -> Iterator[object]:
    """The objects whose methods are on the stack, of those in reshard.nn."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(str(NN)) and "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back


@contextmanager
def walked() -> Iterator[Walk]:
    """Record what runs in this block."""
    walk = Walk()
    threading.setprofile(walk.profile)
    sys.setprofile(walk.profile)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def walk_move(rank: int, args: argparse.Namespace) -> None:
    """A cold and two warm moves, of a small tensor (staged) and of a large one (peer memory)."""
    mesh = rs.Mesh(r=2)
    rows, columns = rs.Layout(mesh, "r -"), rs.Layout(mesh, "- r")
    rs.check()  # imports the live engine
    for size, label in ((64, "small"), (4096, "large")):
        local, group = torch.ones(size // 2, size), dist.new_group([0, 1])
        for turn in ("cold", "warm", "warm again"):
            dist.barrier()
            with walked() as walk:
                rs.move(local, rows, columns, shape=(size, size), group=group)
            if rank == 0 and turn != "warm":
                show_move(walk, f"rs.move, {label}, {turn.split()[0]}", args.files)


def show_move(walk: Walk, title: str, files: bool) -> None:
    """Print the figures of a move, and a mark for each limit."""
    entered, frames = walk.under(LIVE), len(walk.stack) - 1
    marks = ["ok" if good else "MISS" for good in _limits(entered, frames)]
    print(f"{title}: {len(walk.files)} files, {walk.changes} changes of file")
    print(f"    {marks[0]}  {len(entered)} files of live/ (at most {MAX_LIVE_FILES})")
    print(f"    {marks[1]}  {frames} frames between rs.move and the copy (at most {MAX_FRAMES})")
    print(f"    {' < '.join(walk.stack)}", flush=True)
    if files:
        _list_files(entered, LIVE)


def _limits(entered: list[str], frames: int) -> tuple[bool, bool]:
    return len(entered) <= MAX_LIVE_FILES, 0 < frames <= MAX_FRAMES


def _list_files(entered: list[str], folder: Path) -> None:
    for name in entered:
        print(f"        {Path(name).relative_to(folder)}")


def show(title: str, files: bool, action: Callable[[], Any], most: int) -> None:
    """Run something and print how much code it ran through, and a mark for the limit."""
    with walked() as walk:
        action()
    mark = "ok" if 0 < len(walk.files) <= most else "MISS"
    print(f"{title}: {len(walk.files)} files, {walk.changes} changes of file")
    print(f"    {mark}  {len(walk.files)} files (at most {most})", flush=True)
    if files:
        _list_files(walk.under(ROOT), ROOT)


def walk_plan(files: bool) -> None:
    """Plan one tensor, and list what one rank sends."""
    have = rs.Layout(rs.Mesh(dp=4, tp=2), "dp tp")
    want = rs.Layout(rs.Mesh(r=8), "- r")

    def plan() -> None:
        specs = [{"w": rs.TensorSpec((64, 64), "float32", layout)} for layout in (have, want)]
        rs.plan(*specs).for_rank(0)

    show("rs.plan and one rank's rows", files, plan, MAX_PLAN_FILES)


def walk_convert(files: bool) -> None:
    """Convert a small safetensors file for two ranks."""
    from safetensors.numpy import save_file

    from reshard.cli import run as cli

    with tempfile.TemporaryDirectory() as folder:
        source, to = Path(folder) / "model.safetensors", Path(folder) / "out"
        save_file({"w": np.zeros((64, 64), np.float32)}, source)
        words = ["convert", str(source), str(to), "--mesh", "tp=2", "--layout", "w=tp -"]

        def convert() -> None:
            with redirect_stdout(io.StringIO()):
                code = cli([*words, "--quiet"])
            if code:
                raise SystemExit(code)

        show("reshard convert", files, convert, MAX_CONVERT_FILES)


def walk_activations(rank: int, args: argparse.Namespace) -> None:
    """A forward and backward pass whose saved input is kept as shares."""
    from reshard.nn import input_reshard

    module = input_reshard(torch.nn.Linear(64, 64), dist.group.WORLD, 0)

    def step() -> None:
        module(torch.ones(16, 64, requires_grad=True)).sum().backward()

    step()
    dist.barrier()
    with walked() as walk:
        step()
    if rank == 0:
        entered, objects = walk.under(NN), walk.objects
        mark = "ok" if 0 < len(entered) <= MAX_NN_FILES else "MISS"
        deep = "ok" if 0 < len(objects) <= MAX_NN_OBJECTS else "MISS"
        print(f"input_reshard: {len(walk.files)} files, {walk.changes} changes of file")
        print(f"    {mark}  {len(entered)} files of nn/ (at most {MAX_NN_FILES})")
        print(f"    {deep}  {len(objects)} objects deep (at most {MAX_NN_OBJECTS})")
        print(f"    {' < '.join(objects)}", flush=True)
        if args.files:
            _list_files(walk.under(ROOT), ROOT)


def walk_on_ranks(rank: int, args: argparse.Namespace) -> None:
    if "move" in args.sections:
        walk_move(rank, args)
    if "activations" in args.sections:
        walk_activations(rank, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = ("move", "plan", "convert", "activations")
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(known))
    parser.add_argument("--files", action="store_true", help="name the files that were entered")
    args = parser.parse_args()
    args.sections = args.sections or known
    if "plan" in args.sections:
        walk_plan(args.files)
    if "convert" in args.sections:
        walk_convert(args.files)
    if {"move", "activations"} & set(args.sections):
        run_ranks(2, walk_on_ranks, args)


if __name__ == "__main__":
    main()
