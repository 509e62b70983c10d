"""Random faults in live moves, by the hundred: what was seen, and every trial that went wrong.

    python -m tests.campaign --kills 500 --stops 200 --late 200 --interrupts 1000 --options 20000
                             [--jobs 4] [--seed 0] [--json]

Every trial runs on ranks of its own. A *kill*: SIGKILL of one rank at a random moment, the first
call of a session included; the others must name it in time and go on without it. A *stop*: SIGSTOP,
and SIGCONT after the others have given up; they must name it, and the next call must work on all
ranks. *Late*: a rank calls after the others have given up, in the first call or a later one; all
must name it, and the next call must work. *Interrupts*: Ctrl-C and raising signal handlers, one to
three in a row, on 3 and 4 ranks; no result may have data of another call, and every rank that is in
the call must raise within 2 s. *Options*: the property test of all options with each other.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from tests.live.failure.faults import TRANSPORTS, Tried, moves_well, plan_of, source_of, tried
from tests.live.failure.test_killed import TIMEOUT, move_for_ever
from tests.live.random_options import make_two_hosts, run_batches
from tests.live.session import interrupts
from tests.live.session.test_matching import check_against_model, check_iteration
from tests.live.test_random_options import check_found
from tests.ranks.outcome import Returned
from tests.ranks.pool import Pool, fresh_ranks
from tests.ranks.rank import tell

STOP_TIMEOUT = 0.7
SOON = 1.0
SLACK = 1.0
"""Seconds that a busy machine may add to what is promised."""
CALLS = 40
AT_ONCE = 100
MOST_PROBLEMS = 8


@dataclass
class Tally:
    """What came of the trials of one kind."""

    trials: int = 0
    seconds: list[float] = field(default_factory=list)
    """From the fault to the error, for every rank that raised."""
    problems: list[str] = field(default_factory=list)


def kill(seed: int) -> Tally:
    """SIGKILL of a rank at a random moment."""
    rng = Random(seed)
    transport, victim = rng.choice(TRANSPORTS), rng.randrange(4)
    tally = Tally(1)
    with fresh_ranks(4) as ranks:
        job = ranks.begin(move_for_ever, transport, victim)
        for rank in range(4):
            job.hear(rank)
        time.sleep(rng.choice([0.0, 0.01, 0.03, 0.1, 0.3, 0.8, 1.6]) * rng.random())
        ranks.kill(victim)
        killed = time.monotonic()
        for rank, outcome in enumerate(job.outcomes(TIMEOUT + 40)):
            if rank == victim:
                continue
            if not isinstance(outcome, Returned):
                tally.problems.append(f"rank {rank}: {outcome}")
                continue
            one = outcome.value
            tally.seconds.append(one.ended - killed)
            store = victim == 0 and "the store of the process group does not answer" in one.message
            named = f"rank {victim} " in one.message or store
            if not named or one.kind not in ("PeerLostError", "MoveTimeoutError"):
                tally.problems.append(f"rank {victim} was killed, and rank {rank} got {one}")
            elif one.ended - killed > TIMEOUT + SOON + SLACK:
                tally.problems.append(f"{one.ended - killed:.1f} s until {one}")
    return tally


def wait_for_stopped(rank: int, transport: str, warm: bool) -> tuple[Tried, Tried]:
    plan, small = plan_of((2048, 2048), memory="64KiB"), plan_of((512, 512))
    given = source_of(plan, rank)
    if warm:
        plan.run(given, transport=transport)
    into = {"tensor": torch.full((2048, 512), -1.0)}
    dist.barrier()
    tell("ready")
    options: Any = {"transport": transport, "timeout": STOP_TIMEOUT}

    def moves() -> None:
        for _ in range(100):
            plan.run(given, into=into, **options)

    first = tried(moves)
    into["tensor"].fill_(-1)
    dist.barrier()
    assert (into["tensor"] == -1).all(), "written after the call had failed"
    # A rank may have been one call ahead of the others: the call that it was in has failed too.
    for _ in range(2):
        again = tried(lambda: small.run(source_of(small, rank), transport=transport, timeout=10))
        if again.kind == "moved":
            break
    return first, again


def stop(seed: int) -> Tally:
    """SIGSTOP of a rank at a random moment, and SIGCONT when the others have given up."""
    rng = Random(seed)
    transport, victim, warm = rng.choice(TRANSPORTS), rng.randrange(4), rng.random() < 0.7
    tally = Tally(1)
    with fresh_ranks(4) as ranks:
        job = ranks.begin(wait_for_stopped, transport, warm)
        for rank in range(4):
            job.hear(rank)
        time.sleep(rng.choice([0.0, 0.05, 0.2]) * rng.random())
        ranks.kill(victim, signal.SIGSTOP)
        stopped = time.monotonic()
        time.sleep(STOP_TIMEOUT + 2.0)
        ranks.kill(victim, signal.SIGCONT)
        outcomes = job.outcomes(40)
    for rank, outcome in enumerate(outcomes):
        if not isinstance(outcome, Returned):
            tally.problems.append(f"rank {rank}: {outcome}")
            continue
        first, again = outcome.value
        if again.kind != "moved":
            tally.problems.append(f"rank {rank}, the next call: {again}")
        if rank != victim:
            tally.seconds.append(first.ended - stopped)
        # While ranks connect, one that does not answer counts as lost.
        known = first.kind in ("MoveTimeoutError", "PeerLostError")
        if not known or f"rank {victim} " not in first.cause:
            tally.problems.append(f"rank {victim} was stopped, and rank {rank} got {first}")
    return tally


def come_late(
    rank: int, late: int, seconds: float, transport: str, first: bool
) -> tuple[Tried, Tried]:
    plan = plan_of((64, 40))
    given = source_of(plan, rank)
    if not first:
        for _ in range(3):
            plan.run(given, transport=transport)
    dist.barrier()
    if rank == late:
        time.sleep(seconds)
    one = tried(lambda: plan.run(given, transport=transport, timeout=STOP_TIMEOUT))
    dist.barrier()
    return one, tried(lambda: moves_well(rank, dist.group.WORLD, transport))


def late(seed: int) -> Tally:
    """A rank calls when the others have given up."""
    rng = Random(seed)
    transport, who, first = rng.choice(TRANSPORTS), rng.randrange(4), rng.random() < 0.4
    seconds = STOP_TIMEOUT + 0.3 + rng.random()
    tally = Tally(1)
    with fresh_ranks(4) as ranks:
        outcomes = ranks.outcomes(come_late, who, seconds, transport, first)
    for rank, outcome in enumerate(outcomes):
        if not isinstance(outcome, Returned):
            tally.problems.append(f"rank {rank}: {outcome}")
            continue
        one, again = outcome.value
        if again.kind != "moved":
            tally.problems.append(f"rank {rank}, the next call: {again}")
        tally.seconds.append(one.seconds)
        if one.kind != "MoveTimeoutError" or f"rank {who} " not in one.cause:
            tally.problems.append(f"rank {who} was late, and rank {rank} got {one}")
        elif rank != who and one.seconds > STOP_TIMEOUT + SOON + SLACK:
            tally.problems.append(f"{one.seconds:.1f} s until {one}")
    return tally


def interrupt(seed: int) -> Tally:
    """Forty calls with random interrupts; a trial is one interrupt."""
    num_ranks, anywhere = 3 + seed % 2, seed % 4 == 3
    tally = Tally()
    with fresh_ranks(num_ranks) as ranks:
        told = ranks.run(interrupts.run_on_rank, num_ranks, seed, CALLS, anywhere, timeout=200)
    for iteration, seen in enumerate(zip(*told, strict=True)):
        raised = [moment for one in seen for moment in one.raised]
        tally.trials += len(raised)
        if raised and not anywhere:
            tally.seconds += [
                one.ended - max(min(raised), one.began) for one in seen if one.outcome != "moved"
            ]
        try:
            check_iteration(iteration, list(seen), anywhere)
        except AssertionError as error:
            tally.problems.append(f"iteration {iteration}: {error}")
    if not anywhere:
        check_against_model(told)
    return tally


_pools: list[Pool] = []


def options(seed: int) -> Tally:
    """A hundred cases of all options with each other, on a pool that is kept."""
    if not _pools:
        _pools.append(Pool(size=8))
    num_ranks = 8 if seed % 5 == 4 else 4
    _pools[0].run(make_two_hosts, num_ranks)
    seeds = range(seed * AT_ONCE, (seed + 1) * AT_ONCE)
    found = _pools[0].run(run_batches, num_ranks, seeds, ranks=range(num_ranks), timeout=300)
    check_found(found, len(seeds))
    return Tally(AT_ONCE)


KINDS: dict[str, Callable[[int], Tally]] = {
    "kills": kill,
    "stops": stop,
    "late": late,
    "interrupts": interrupt,
    "options": options,
}


def work(kind: str, first: int, step: int, count: int) -> Tally:
    """Every ``step``-th trial from ``first`` on, until there are so many."""
    total = Tally()
    seed = first
    while total.trials < count:
        try:
            one = KINDS[kind](seed)
        except Exception as error:
            one = Tally(1, problems=[f"{type(error).__name__}: {error}"])
        total.trials += one.trials
        total.seconds += one.seconds
        total.problems += [f"{kind}, seed {seed}: {text}" for text in one.problems]
        seed += step
    return total


def share_out(args: argparse.Namespace) -> Iterator[tuple[str, Tally]]:
    """Run the trials of each kind in several processes."""
    for kind in KINDS:
        count = getattr(args, kind)
        if not count:
            continue
        own = [sys.executable, "-m", "tests.campaign", "--seed"]
        each = ["--jobs", str(args.jobs), "--own", kind, "--count", str(-(-count // args.jobs))]
        started = [
            subprocess.Popen([*own, str(args.seed + n), *each], stdout=subprocess.PIPE)
            for n in range(args.jobs)
        ]
        total = Tally()
        for process in started:
            text = process.communicate()[0]
            try:
                part = Tally(**json.loads(text.splitlines()[-1]))
            except (IndexError, ValueError):
                part = Tally(0, problems=[f"{kind}: a process ended with {process.returncode}"])
            total.trials += part.trials
            total.seconds += part.seconds
            total.problems += part.problems
        yield kind, total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--own", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own:
        tally = work(args.own, args.seed, args.jobs, args.count)
        with suppress(Exception):
            for pool in _pools:
                pool.close()
        print(json.dumps(asdict(tally)))
        return 0
    failed = 0
    for kind, tally in share_out(args):
        failed += len(tally.problems)
        if args.json:
            print(json.dumps({"kind": kind, **asdict(tally)}), flush=True)
            continue
        seconds = tally.seconds or [0.0]
        print(
            f"{kind}: {tally.trials} trials, {len(tally.problems)} problems; from fault to error "
            f"{statistics.median(seconds):.2f} s in the median, {max(seconds):.2f} s at most",
            flush=True,
        )
        for text in tally.problems[:MOST_PROBLEMS]:
            print(f"  {text[:1500]}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
