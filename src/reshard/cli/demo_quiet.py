"""Loaded by the process that ranks of the demo are forked from, before anything else.

An interrupt at the terminal reaches every process of the job. It is for the demo, which then ends
its ranks; what this module sets they have from their first moment on. Whoever else loads it, such
as a tool that reads all modules, goes on hearing of interrupts.
"""

import os
import signal

if os.environ.get("RESHARD_DEMO_RANKS"):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
