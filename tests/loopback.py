"""Tests ask no name server: a name for the address at which torch reaches the stores of this host.

torch connects to a store through a socket of IPv6, at ::ffff:127.0.0.1, and looks up the name of
that address in every connection. Few files /etc/hosts have it, so a name server is asked, and each
question that is lost takes 5 seconds: longer than many tests wait for a rank.
"""

import ctypes
import os
import tempfile
from contextlib import suppress
from pathlib import Path

HOSTS = Path("/etc/hosts")
ADDRESS = "::ffff:127.0.0.1"

CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 4096, 16384, 1 << 18


def name_loopback() -> None:
    """Give this process and those that it starts an /etc/hosts with the address, where allowed.

    Elsewhere a lost question takes one second.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    with suppress(OSError):
        text = HOSTS.read_text()
        if ADDRESS not in text:
            _mount_over(HOSTS, f"{text}\n{ADDRESS} localhost\n")


def _mount_over(path: Path, text: str) -> None:
    """Show another text in place of a file, in a mount namespace of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(text)
        file.flush()
        Path(file.name).chmod(0o644)
        if not libc.unshare(CLONE_NEWNS):
            libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
            libc.mount(file.name.encode(), bytes(path), None, MS_BIND, None)
