"""Plant one mistake after the other and print which test notices it: `make mutations`.

python -m tests.mutations live checkpoint.3
"""

import argparse
import sys
from collections.abc import Sequence

from tests.mutations import mutations, noticed_by


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant mistakes, and print which test notices each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="rooms or single mistakes: live, checkpoint.3")
    only = parser.parse_args(arguments).only
    chosen = {
        key: one
        for key, one in mutations().items()
        if not only or key in only or key.partition(".")[0] in only
    }
    missed = 0
    for key, mutation in chosen.items():
        test = noticed_by(mutation)
        missed += not test
        changed = f"{mutation.file}: {mutation.before.strip()!r} -> {mutation.after.strip()!r}"
        print(f"{key:14} {'noticed by ' + test if test else 'MISSED'}\n    {changed}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
