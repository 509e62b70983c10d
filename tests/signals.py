"""Signals of processes that tests start."""

import signal

__all__ = ["hear_interrupts"]


def hear_interrupts() -> None:
    """For ``preexec_fn``: whoever runs the tests in the background may have them ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
