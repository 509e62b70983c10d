"""Settings of the processes that run tests, and of those that tests start."""

import gc
import signal

__all__ = ["collect_rarely", "hear_interrupts"]


def collect_rarely() -> None:
    """Keep what is imported out of all collections of garbage, and collect more rarely.

    Tests collect where it matters to them; the usual thresholds took 5 % of the usual run.
    """
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


def hear_interrupts() -> None:
    """For ``preexec_fn``: whoever runs the tests in the background may have them ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
