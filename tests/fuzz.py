"""Run the central property on many random pairs: `python -m tests.fuzz --pairs 100000 --seed 0`.

Case number i of a run with seed s is `case_of(s + i)`, so that a failure is found again by its
number alone. Failures are printed as code to paste; the exit code is 1 if there was any.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from random import Random

from tests.cases import Case, row_bytes
from tests.checks import check_case
from tests.generate import random_case

BATCH = 100
MOST_SHOWN = 20


@dataclass
class Batch:
    """What a worker found in its cases."""

    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    unbalanced: list[str] = field(default_factory=list)
    wire: int = 0
    least: int = 0


def case_of(number: int) -> Case:
    return random_case(Random(number))


def kind_of(case: Case) -> str:
    if case.error is not None:
        return "errors"
    if case.have.num_addends > 1:
        return "sums"
    return "boxes" if case.have.boxes or case.want.boxes else "layouts"


def run_batch(first: int, num_cases: int, balance_every: int = 4) -> Batch:
    """Check cases; solve for the best balance of every so many, of none if that is 0."""
    batch = Batch()
    for number in range(first, first + num_cases):
        case = case_of(number)
        batch.kinds[kind_of(case)] += 1
        try:
            balance = balance_every > 0 and number % balance_every == 0
            figures = check_case(case, balance)
        except Exception:
            trace = traceback.format_exc(limit=-3)
            batch.failures.append(f"# case {number}\n{case.snippet()}{trace}")
            continue
        if figures is not None:
            batch.wire += figures.wire
            batch.least += figures.least
            if figures.excess > row_bytes(case):
                batch.unbalanced.append(f"# case {number}: {figures}\n{case.snippet()}")
    return batch


def batches(seed: int, num_pairs: int) -> Iterator[tuple[int, int]]:
    for first in range(seed, seed + num_pairs, BATCH):
        yield first, min(BATCH, seed + num_pairs - first)


def show(title: str, found: list[str]) -> None:
    if found:
        print(f"\n{len(found)} {title}, the shortest first:\n")
        print("\n".join(sorted(found, key=len)[:MOST_SHOWN]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--balance-every", type=int, default=4, help="0: needs no scipy")
    options = parser.parse_args()
    total = Batch()
    start = time.monotonic()
    with ProcessPoolExecutor(options.workers) as pool:
        every = options.balance_every
        work = [pool.submit(run_batch, *b, every) for b in batches(options.seed, options.pairs)]
        for done, future in enumerate(as_completed(work), 1):
            batch = future.result()
            total.kinds += batch.kinds
            total.failures += batch.failures
            total.unbalanced += batch.unbalanced
            total.wire += batch.wire
            total.least += batch.least
            if done % 10 == 0 or done == len(work):
                rate = total.kinds.total() / (time.monotonic() - start)
                print(
                    f"{total.kinds.total()} cases, {rate:.0f}/s, {len(total.failures)} failures, "
                    f"{len(total.unbalanced)} unbalanced",
                    flush=True,
                )
    print(f"{dict(total.kinds)}; {total.wire} bytes on the wire, at least {total.least} needed")
    show("unbalanced", total.unbalanced)
    show("failures", total.failures)
    return 1 if total.failures or total.unbalanced else 0


if __name__ == "__main__":
    sys.exit(main())
