"""Two hosts on one machine: network namespaces, joined by a pair of virtual interfaces.

Nothing gets out of them: each has its own loopback, one end of the pair, and no other route. Their
names are new every time, so whatever runs in them was started here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SECONDS = 10.0
INSTALL_SECONDS = 60.0


class NotPermittedError(Exception):
    """This machine has no network namespaces for us; the message says why."""


@dataclass(frozen=True)
class Host:
    """One of the two."""

    namespace: str
    interface: str
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs another one on this host, in the same process."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def set_link(self, state: str) -> None:
        """Take this end of the link ``down``, or ``up`` again."""
        _ip("-n", self.namespace, "link", "set", self.interface, state)

    def signal(self, number: signal.Signals) -> list[int]:
        """Send a signal to every process of this host; gives their ids."""
        pids = [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def end_processes(self) -> None:
        """End all of them; a process may start another before it ends."""
        for _ in range(100):
            left = self.signal(signal.SIGKILL)
            if not left:
                return
            time.sleep(0.02)
        raise RuntimeError(f"processes {left} of namespace {self.namespace} do not end")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nobody else; at the end nothing is left of them."""
    missing = _why_not()
    if missing:
        raise NotPermittedError(missing)
    token = secrets.token_hex(3)
    first, second = (
        Host(f"reshard-{token}-{side}", f"rs{token}{side}", f"10.77.0.{number}")
        for number, side in enumerate("ab", 1)
    )
    with contextlib.ExitStack() as undo:
        for host in (first, second):
            _try("ip", "netns", "add", host.namespace)
            undo.callback(_delete, host)
        _join(first, second)
        yield first, second


def _join(first: Host, second: Host) -> None:
    for host in (first, second):
        _try(*host.command(["true"]))
    here, there = first.interface, second.interface
    end = ["type", "veth", "peer", "name", there, "netns", second.namespace]
    _try("ip", "-n", first.namespace, "link", "add", here, *end)
    for host in (first, second):
        inside = ("-n", host.namespace)
        _ip(*inside, "address", "add", f"{host.address}/24", "dev", host.interface)
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "link", "set", host.interface, "up")


def _try(*command: str) -> None:
    """Run what a machine may forbid."""
    try:
        _run(command, SECONDS)
    except subprocess.CalledProcessError as error:
        raise NotPermittedError(f"{' '.join(command)}: {error.stderr.strip()}") from None


def _delete(host: Host) -> None:
    """End what runs on a host, and the host; with it goes its end of the link, and the other."""
    try:
        host.end_processes()
    finally:
        _ip("netns", "delete", host.namespace)


@functools.cache
def _why_not() -> str:
    """What is missing here; the command `ip` is installed where we may, at the first try."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if shutil.which("ip") is None and shutil.which("apt-get"):
        with contextlib.suppress(subprocess.SubprocessError):
            _run(["apt-get", "install", "-y", "iproute2"], INSTALL_SECONDS)
    if shutil.which("ip") is None:
        return "there is no command ip, and it could not be installed (apt-get install iproute2)"
    return ""


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments], SECONDS)


def _run(command: Sequence[str], seconds: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    return done.stdout
