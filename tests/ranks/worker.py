"""One rank, seen from the process that started it."""

import atexit
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from tests.ranks.outcome import Died, Outcome, Told
from tests.ranks.rank import READY, Wires, serve

CONTEXT = multiprocessing.get_context("forkserver")
# Imported once by the fork server, not by each of eight ranks; a name that does not exist is passed
# over.
PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "pytest",
    "reshard.planning.plans",
    "reshard.simulation",
    "reshard.live.api",
    "reshard.tensors",
    "reshard.sharded",
    "reshard.compat",
    "reshard.nn",
    "reshard.checkpoint.live.loading",
    "reshard.checkpoint.live.saving",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "functorch.compile",
    "hypothesis",
    "tests.ranks.rank",
]
MODELS = [
    "torch.testing._internal.common_methods_invocations",  # a second, with scipy.signal
    "transformers.models.llama.modeling_llama",  # two seconds
    "transformers.models.mixtral.modeling_mixtral",
]
WITH_MODELS = ("live", "tensors", "sharded", "nn", "checkpoint")
"""Folders whose tests, or those that run after them in the same process, train models on ranks."""
WITHOUT_MODELS = ("live/failure", "live/session")
# One thread each: ranks share few cores, and a process that has threads is not safe to fork.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
STACKS_WITHIN = 0.5
STACKS_PAUSE = 0.05
EXIT_WITHIN = 5.0
START_WITHIN = 60.0


def start_fork_server() -> None:
    """Starts the process that all ranks are forked from; the second call does nothing.

    It imports torch, which takes seconds; a rank then costs milliseconds. Its environment is that
    of the moment: a variable that a test sets later is not seen by ranks.
    """
    CONTEXT.set_forkserver_preload([*PRELOAD, *(MODELS if _needs_models() else [])])
    with mock.patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()


def _needs_models() -> bool:
    """Whether the test that runs, or one after it, is likely to need models on many ranks."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removeprefix("tests/")
    return test.startswith(WITH_MODELS) and not test.startswith(WITHOUT_MODELS)


class Worker:
    """The process of one rank and the pipes to it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.busy = False
        """Whether a function was sent whose outcome has not been received."""
        self._tasks, far_tasks = CONTEXT.Pipe()
        self._stacks, far_stacks = CONTEXT.Pipe(duplex=False)
        far_lifeline, self.lifeline = CONTEXT.Pipe(duplex=False)
        """Its closing kills the rank; the kernel closes it if this process is killed."""
        far_ends = Wires(far_tasks, far_stacks, far_lifeline)
        self._process = CONTEXT.Process(
            target=serve, args=(rank, far_ends), name=f"rank {rank}", daemon=True
        )
        self._process.start()
        for end in (far_tasks, far_stacks, far_lifeline):
            end.close()
        # Before multiprocessing waits for its children at exit, for a stopped one for ever.
        atexit.register(self.lifeline.close)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    @property
    def signs_of_life(self) -> tuple[Connection, int]:
        """What becomes ready when the rank answers, and when it dies."""
        return self._tasks, self._process.sentinel

    def wait_until_ready(self) -> None:
        """Signals before this moment would meet a process that is not set up for them."""
        if not self._tasks.poll(START_WITHIN):
            raise TimeoutError(f"rank {self.rank} did not start within {START_WITHIN:g} s")
        assert self._tasks.recv_bytes() == READY

    def send(self, function: Callable[..., Any], args: tuple[Any, ...], number: int) -> None:
        """Has the rank call `function(rank, *args)`, as the job of this number."""
        task = pickle.dumps((function, args, number))
        self.busy = True
        with suppress(OSError):  # a dead rank is told by `receive`
            self._tasks.send_bytes(task)

    def receive(self) -> Outcome | Told | None:
        """What the rank has sent, if anything: its function's outcome, or a word before that."""
        # Asked first: what a rank sent before it died is in the pipe by then.
        dead = not self.alive
        try:
            if self._tasks.poll():
                message: Outcome | Told = pickle.loads(self._tasks.recv_bytes())
            elif dead:
                message = self._death()
            else:
                return None
        except (EOFError, ConnectionResetError):
            message = self._death()
        self.busy = isinstance(message, Told)
        return message

    def _death(self) -> Died:
        noticed = time.monotonic()
        self.gone_within(EXIT_WITHIN)
        return Died(self.exit_code, self.read_stacks(), noticed)

    def ask_for_stacks(self) -> None:
        if self.alive:
            os.kill(self.pid, signal.SIGUSR1)

    def read_stacks(self) -> str:
        """What faulthandler has written, as soon as nothing more comes."""
        text, patience = b"", STACKS_WITHIN
        while self._stacks.poll(patience) and (part := os.read(self._stacks.fileno(), 65536)):
            text, patience = text + part, STACKS_PAUSE
        return text.decode(errors="replace").rstrip()

    def hang_up(self) -> None:
        """Tells an idle rank to leave."""
        self._tasks.close()

    def gone_within(self, seconds: float) -> bool:
        self._process.join(max(0.0, seconds))
        return not self.alive

    def release(self) -> None:
        """Kills the rank if it still lives, waits for it, and closes everything."""
        atexit.unregister(self.lifeline.close)
        if self.alive:
            self._process.kill()
        self._process.join()
        self._process.close()
        for wire in (self._tasks, self._stacks, self.lifeline):
            wire.close()
