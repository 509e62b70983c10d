"""Loaded by the process that ranks of the demo are forked from, before anything else.

An interrupt at the terminal reaches every process of the job. It is for the demo, which then ends
its ranks; what this module sets they have from their first moment on.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
