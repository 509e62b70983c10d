"""The server of the explorer: HTTP on the loopback address.

Other pages that a browser has open, and other programs of the machine, can reach it, so a request
is not trusted. Its ``Host`` and ``Origin`` must be this server's, which keeps out pages whose name
was made to resolve to this machine (DNS rebinding); what it sends is short JSON; and its work is
done in a process of its own, with limits on CPU seconds, memory and time, of which there are few.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ForkingMixIn, TCPServer
from typing import TYPE_CHECKING, Any, NoReturn

from reshard.cli.explore.answers import Answer, answer_of, fields_of
from reshard.show.page.document import as_json, render_page, render_part

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Server"]

ADDRESS = "127.0.0.1"
MAX_BODY = 8192
MAX_PROCESSES = 16
"""Browsers open connections in advance; each of them has a process until it times out."""
CPU_SECONDS = 10
"""What a plan may take before the answer is that it takes too long."""
SECONDS = 30
"""What a request may take altogether before its process is ended."""
MEMORY = 2 << 30
"""Bytes that a request may allocate beyond what the server has."""

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class TooLongError(Exception):
    """The plan takes more CPU time than a request has."""


class Server(ForkingMixIn, HTTPServer):
    """A server whose requests are each handled by a process with limits."""

    max_children = MAX_PROCESSES
    allow_reuse_address = True

    def __init__(self, port: int, values: Mapping[str, str]) -> None:
        self.values = dict(values)
        super().__init__((ADDRESS, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for the name of this machine."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_port}/"

    @property
    def names(self) -> tuple[str, ...]:
        """What a browser may call this server."""
        return tuple(f"{name}:{self.server_port}" for name in (ADDRESS, "localhost"))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left, or was too slow, is no news."""

    def server_close(self) -> None:
        """Stop listening, and end requests that are still being worked on."""
        for process in self.active_children or ():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    server_version = "reshard"
    sys_version = ""
    timeout = 5

    def setup(self) -> None:
        """Limit what this process may use; it handles this request alone."""
        _limit()
        super().setup()

    def do_GET(self) -> None:
        """The page."""
        if not self._is_ours():
            return
        if self.path.partition("?")[0] != "/":
            self._refuse(HTTPStatus.NOT_FOUND, "there is one page here: /")
            return
        answer = _bounded(self.server.values)
        if answer.document is None:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "; ".join(answer.errors.values()))
            return
        page = render_page(answer.document, answer.footer, fields_of(answer.values))
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", page)

    def do_POST(self) -> None:
        """The plan of the fields in the body, or what is wrong with them."""
        if not self._is_ours():
            return
        if self.path != "/plan":
            self._refuse(HTTPStatus.NOT_FOUND, "plans are made at /plan")
            return
        values = self._values()
        if values is not None:
            answer = _bounded(values)
            self._send(HTTPStatus.OK, "application/json", as_json(_plain(answer)))

    def _is_ours(self) -> bool:
        """Whether the request is from a page of this server, or from no page at all."""
        hosts = self.headers.get_all("Host", [])
        origin = self.headers.get("Origin")
        if len(hosts) != 1 or hosts[0].lower() not in self.server.names:
            self._refuse(HTTPStatus.FORBIDDEN, f"this server is called {self.server.names[0]}")
            return False
        if origin is not None and origin not in [f"http://{name}" for name in self.server.names]:
            self._refuse(HTTPStatus.FORBIDDEN, "other pages may not use this server")
            return False
        return True

    def _values(self) -> dict[str, str] | None:
        """The fields in the body; None where it is not what the page sends."""
        if self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
            return None
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 10):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the body needs a Content-Length")
            return None
        if int(length) > MAX_BODY:
            text = f"the body has {length} bytes: at most {MAX_BODY} work"
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
            return None
        try:
            values = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not all(isinstance(v, str) for v in values.values()):
            self._refuse(HTTPStatus.BAD_REQUEST, "the body must be an object of texts")
            return None
        return values

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{text}\n")

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal of the explorer stays quiet."""


def _plain(answer: Answer) -> dict[str, Any]:
    if answer.document is None:
        return {"errors": answer.errors}
    return {
        "html": render_part(answer.document, answer.footer),
        "title": answer.document.headline,
        "data": answer.document.data,
    }


def _bounded(values: Mapping[str, str]) -> Answer:
    """The answer, or that it takes too much time or memory."""
    try:
        return answer_of(values)
    except TooLongError:
        text = f"this plan takes more than {CPU_SECONDS} s: use fewer ranks or larger blocks"
    except MemoryError:
        text = f"this plan takes more than {MEMORY >> 30} GiB: use fewer ranks or larger blocks"
    except Exception as error:  # ours, and no reason to leave a browser without an answer
        text = f"internal error: {type(error).__name__}: {str(error)[:200]}; please report it"
    answer = Answer(dict(values))
    answer.errors["general"] = text
    return answer


def _limit() -> None:
    """Bound the CPU seconds, the memory and the time of this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGXCPU, _too_long)
    signal.alarm(SECONDS)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + CPU_SECONDS))
    with open("/proc/self/statm") as file:  # noqa: PTH123
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


def _too_long(*_: object) -> NoReturn:
    raise TooLongError
