"""PyTorch's tests with torch and with reshard, and every difference.

    python -m tests.torch_suites FOLDER [--only WORD] [--test NAME] [--with CONTENDER] [--json]
                                        [--keep DIR]

FOLDER is ``test/distributed`` of PyTorch's source at the version of the installed torch: its files
are not part of this project. Each file is run twice, on the CPU with gloo: as it is, and with
``torch.distributed._shard`` replaced by ``reshard.compat`` in its imports; in the files of DTensor,
``redistribute`` is ``rs.move``. A test that is skipped is not passed.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.behaviours import table
from tests.torch_suites.running import CONTENDERS, Outcome, Suite, adapted, run, suites_in


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="files whose path has this word")
    parser.add_argument("--test", default="", help="tests that pytest -k finds by this")
    parser.add_argument("--with", dest="contender", choices=CONTENDERS)
    parser.add_argument("--keep", type=Path, help="where to leave the adapted files and logs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    suites = suites_in(args.folder, args.only)
    if not suites:
        parser.error(f"{args.folder} has no _shard/**/test_*.py and no tensor/test_*.py")
    contenders = [args.contender] if args.contender else [*CONTENDERS]
    with tempfile.TemporaryDirectory() as made:
        folder = args.keep or Path(made)
        for contender in contenders:
            adapted(args.folder, folder / contender, contender)
        rows = []
        for suite in suites:
            found = {who: run(suite, folder / who, args.test) for who in contenders}
            rows.append((suite, found))
            if not args.json:
                print(line_of(suite.path, found), flush=True)
    if args.json:
        print(json.dumps([as_json(*row) for row in rows], indent=2))
    else:
        close(rows)
    return int(any(unexplained(found) for _, found in rows))


def line_of(name: str, found: dict[str, Outcome]) -> str:
    counts = ", ".join(
        f"{who} {outcome.count('passed')} of {len(outcome.tests)}"
        + (f" ({skipped} skipped)" if (skipped := outcome.count("skipped")) else "")
        for who, outcome in found.items()
    )
    return f"{name}: passed by {counts}"


def differences(found: dict[str, Outcome]) -> dict[str, str]:
    """Tests that torch passes and reshard does not, with why; or all that fail for one of them."""
    if len(found) == 1:
        [one] = found.values()
        return one.reasons
    torch, ours = (found[who] for who in CONTENDERS)
    passed = [test for test, kind in torch.tests.items() if kind == "passed"]
    lost = [test for test in passed if ours.tests.get(test) != "passed"]
    return {test: ours.reasons.get(test, ours.tests.get(test, "not run")) for test in lost}


def unexplained(found: dict[str, Outcome]) -> dict[str, str]:
    """Differences for which docs/behaviours.md has no reason."""
    known = table()["suites"]
    return {test: why for test, why in differences(found).items() if test not in known}


def close(rows: list[tuple[Suite, dict[str, Outcome]]]) -> None:
    total: dict[str, Outcome] = {}
    for suite, found in rows:
        for who, outcome in found.items():
            all_of = total.setdefault(who, Outcome())
            all_of.tests |= {f"{suite.path} {test}": kind for test, kind in outcome.tests.items()}
    print(line_of("all", total))
    known = table()["suites"]
    for suite, found in rows:
        for test, why in differences(found).items():
            reason = f"explained: {known[test]}" if test in known else why
            print(f"  {suite.path} {test}: {reason}")
    count = sum(len(unexplained(found)) for _, found in rows)
    print(f"{count} differences without an explanation")


def as_json(suite: Suite, found: dict[str, Outcome]) -> dict[str, object]:
    return {
        "file": suite.path,
        "outcomes": {who: outcome.tests for who, outcome in found.items()},
        "differences": differences(found),
        "unexplained": [*unexplained(found)],
    }


if __name__ == "__main__":
    sys.exit(main())
