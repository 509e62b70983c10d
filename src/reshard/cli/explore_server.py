"""The fields and the server of ``reshard explore``: HTTP on the loopback address.

Fields are texts in, a plan as a document out, or what is wrong with a field:

>>> answer = answer_of({**DEFAULTS, "shape": "8,x", "have_layout": "dp dp"})
>>> for field, text in answer.errors.items():
...     print(field, "|", text)
shape | "x" in shape "8,x" is not a size: expected numbers such as 8192,4096
have_layout | layout "dp dp": axis "dp" appears twice: an axis has one place in a layout

Other pages that a browser has open, and other programs of the machine, can reach the server, so a
request is not trusted. Its ``Host`` and ``Origin`` must be this server's, which keeps out pages
whose name was made to resolve to this machine (DNS rebinding); what it sends is short JSON; and its
work is done in a process of its own, with limits on CPU seconds, memory and time, of which there
are few.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import ForkingMixIn, TCPServer
from typing import Any, NoReturn, TypeVar

from reshard.cli.options import command_of, model_specs, parse_shape, replicated
from reshard.dtypes import canonical_dtype
from reshard.errors import LayoutError, MeshError, ReshardError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.layout.spec import TensorSpec
from reshard.planning.plans import plan
from reshard.rules.models import preset
from reshard.show.holdings import num_boxes
from reshard.show.page.document import (
    Document,
    Field,
    Footer,
    as_json,
    render_fragment,
    render_page,
)
from reshard.show.page.plan_page import document_of
from reshard.text import parse_bytes

MAX_RANKS = 4096
MAX_BOXES = 100_000
"""What one layout may have; a page with more takes too long to wait for."""
MAX_TEXT = 300

T = TypeVar("T")

Specs = dict[str, TensorSpec]

_TENSOR_FIELDS = (
    Field("have_mesh", "Mesh, before", "dp=2 tp=4", "dp=2 tp=4"),
    Field("have_layout", "Layout, before", "(dp tp) -", "(dp tp) -"),
    Field("want_mesh", "Mesh, after", "tp=2 @ 8-9", "tp=2 @ 8-9"),
    Field("want_layout", "Layout, after", "- tp", "- tp"),
    Field("shape", "Shape", "8192,4096", "8192,4096"),
    Field("dtype", "Dtype", "bfloat16", "bfloat16"),
    Field("memory", "Memory cap per rank", "256MiB", "256MiB"),
)
_MODEL_FIELDS = (
    Field("model", "Model", "llama-3-8b", "llama-3-8b"),
    Field("have_mesh", "Mesh, before", "tp=8", "dp=2 tp=4"),
    Field("from_fsdp", "FSDP axes, before", "", "dp"),
    Field("want_mesh", "Mesh, after", "tp=2 @ 8-9", "tp=2 @ 8-9"),
    Field("to_fsdp", "FSDP axes, after", "", "dp"),
    Field("replicate", "Axes of replicas", "", "dp"),
    Field("dtype", "Dtype", "", "the model's"),
    Field("memory", "Memory cap per rank", "256MiB", "256MiB"),
)
"""A model is the name of a known one, never a path: requests do not make the server read files."""
DEFAULTS = {field.name: field.value for field in _TENSOR_FIELDS}
MODEL_DEFAULTS = {field.name: field.value for field in _MODEL_FIELDS}


@dataclass(slots=True)
class Answer:
    """A document, or what is wrong with which field."""

    values: Mapping[str, str]
    document: Document | None = None
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def footer(self) -> Footer:
        """Where the document comes from: a command that shows the same."""
        options = {name: text.strip() for name, text in self.values.items()}
        for side, option in (("have", "from"), ("want", "to")):
            mesh, layout = options.pop(f"{side}_mesh"), options.pop(f"{side}_layout", "")
            options[option] = f"{mesh}: {layout}" if layout else mesh
        axes = options.pop("replicate", "").split()
        return Footer(command_of("plan", {**options, "replicate": axes}), options.get("model"))

    @contextmanager
    def blaming(self, name: str) -> Iterator[None]:
        """Note an error of the library as one of a field, on one line."""
        try:
            yield
        except ReshardError as error:
            text = " ".join(str(error).removeprefix('tensor "tensor": ').split())
            self.errors.setdefault(name, text)

    def read(self, name: str, parse: Callable[[str], T]) -> T | None:
        """What a field says; None where something is wrong with it."""
        text = self.values[name]
        if len(text) > MAX_TEXT:
            self.errors[name] = f"{len(text)} characters: at most {MAX_TEXT} work here"
            return None
        with self.blaming(name):
            return parse(text.strip())
        return None


def answer_of(values: Mapping[str, Any]) -> Answer:
    """Plan what the fields say; a field without a value has its default."""
    is_model = "model" in values
    defaults = MODEL_DEFAULTS if is_model else DEFAULTS
    answer = Answer({name: str(values.get(name, value)) for name, value in defaults.items()})
    memory = answer.read("memory", parse_bytes)
    sides = _model(answer) if is_model else _tensor(answer)
    if answer.errors or len(sides) < 2:
        return answer
    with answer.blaming("general"):
        answer.document = document_of(plan(*sides, memory=memory))
    if "memory" in answer.errors.get("general", ""):
        answer.errors["memory"] = answer.errors.pop("general").replace("memory=", "the cap")
    return answer


def _tensor(answer: Answer) -> list[Specs]:
    shape = answer.read("shape", parse_shape)
    dtype = answer.read("dtype", canonical_dtype)
    sides: list[Specs] = []
    for side in ("have", "want"):
        mesh = answer.read(f"{side}_mesh", _mesh)
        if mesh is not None:
            layout = answer.read(f"{side}_layout", partial(_layout, mesh, shape))
            if layout is not None and shape is not None and dtype is not None:
                sides.append({"tensor": TensorSpec(shape, dtype, layout)})
    return sides


def _model(answer: Answer) -> list[Specs]:
    config = answer.read("model", preset)
    dtype = answer.read("dtype", lambda text: canonical_dtype(text) if text else None)
    read = [answer.read(f"{side}_mesh", _mesh) for side in ("have", "want")]
    fsdp = [answer.read(f"{side}_fsdp", lambda text: text or None) for side in ("from", "to")]
    axes, meshes = answer.read("replicate", str.split), [mesh for mesh in read if mesh is not None]
    sides: list[Specs] = []
    if config is None or axes is None or len(meshes) < 2:
        return sides
    with answer.blaming("replicate"):
        copies = replicated(axes, [*zip(meshes, fsdp, strict=True)])
        for side, mesh, sharding, copy in zip(("have", "want"), meshes, fsdp, copies, strict=True):
            with answer.blaming(f"{side}_mesh"):
                sides.append(model_specs(config, mesh, None, sharding, copy, dtype)[0])
    return sides


def _mesh(text: str) -> Mesh:
    mesh = Mesh.parse(text)
    if len(mesh.ranks) > MAX_RANKS:
        raise MeshError(
            f'mesh "{mesh}" has {len(mesh.ranks)} ranks: at most {MAX_RANKS} are explored; '
            "reshard plan takes more"
        )
    return mesh


def _layout(mesh: Mesh, shape: tuple[int, ...] | None, text: str) -> Layout:
    layout = Layout(mesh, text)
    if shape is not None:
        layout.dims(shape)
        boxes = num_boxes(layout, shape)
        if boxes > MAX_BOXES:
            raise LayoutError(
                f'layout "{layout}" has {boxes} boxes: at most {MAX_BOXES} are explored; use '
                "larger blocks"
            )
    return layout


ADDRESS = "127.0.0.1"
MAX_BODY = 8192
MAX_PROCESSES = 16
"""Browsers open connections in advance; each of them has a process until it times out."""
CPU_SECONDS = 10
"""What a plan may take before the answer is that it takes too long."""
SECONDS = 30
"""What an answer may take before its process is ended."""
REQUEST_SECONDS = 5
"""What a client may take to send its request: else a few slow ones would keep all processes."""
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


class RefusedError(Exception):
    """A request that gets no answer: the status, and why."""


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
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left, or was too slow, is no news."""

    def server_close(self) -> None:
        """Stop listening, and end requests that are still being worked on."""
        for process in self.active_children or ():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "reshard"
    sys_version = ""
    timeout = REQUEST_SECONDS

    def setup(self) -> None:
        """Limit what this process may use; it handles this request alone."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGXCPU, _raise_timeout)
        signal.alarm(REQUEST_SECONDS)
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + CPU_SECONDS))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        super().setup()

    def do_GET(self) -> None:
        self._respond(self._page)

    def do_POST(self) -> None:
        self._respond(self._plan)

    def _respond(self, make: Callable[[], tuple[str, str]]) -> None:
        """Send a content type and a text, or why the request is refused."""
        status = HTTPStatus.OK
        try:
            self._check_origin()
            kind, text = make()
        except RefusedError as refused:
            status, reason = refused.args
            kind, text = "text/plain; charset=utf-8", f"{reason}\n"
        body = text.encode()
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _check_origin(self) -> None:
        """Refuse requests but those from a page of this server, or from no page at all."""
        names = [f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")]
        hosts, origin = self.headers.get_all("Host", []), self.headers.get("Origin")
        if len(hosts) != 1 or hosts[0].lower() not in names:
            raise RefusedError(HTTPStatus.FORBIDDEN, f"this server is called {names[0]}")
        if origin is not None and origin not in [f"http://{name}" for name in names]:
            raise RefusedError(HTTPStatus.FORBIDDEN, "other pages may not use this server")

    def _page(self) -> tuple[str, str]:
        if self.path.partition("?")[0] != "/":
            raise RefusedError(HTTPStatus.NOT_FOUND, "there is one page here: /")
        answer = _bounded(self.server.values)
        if answer.document is None:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "; ".join(answer.errors.values()))
        fields = _MODEL_FIELDS if "model" in answer.values else _TENSOR_FIELDS
        form = [replace(field, value=answer.values[field.name]) for field in fields]
        return "text/html; charset=utf-8", render_page(answer.document, answer.footer, form)

    def _plan(self) -> tuple[str, str]:
        """The plan of the fields in the body, or what is wrong with them."""
        if self.path != "/plan":
            raise RefusedError(HTTPStatus.NOT_FOUND, "plans are made at /plan")
        if self.headers.get_content_type() != "application/json":
            text = "the body must be application/json"
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text)
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 10):
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "the body needs a Content-Length")
        if int(length) > MAX_BODY:
            text = f"the body has {length} bytes: at most {MAX_BODY} work"
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        try:
            values = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not all(isinstance(v, str) for v in values.values()):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the body must be an object of texts")
        answer = _bounded(values)
        if (doc := answer.document) is None:
            return "application/json", as_json({"errors": answer.errors})
        html = render_fragment("doc.html", doc=doc, footer=answer.footer)
        return "application/json", as_json({"html": html, "title": doc.headline, "data": doc.data})

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal of the explorer stays quiet."""


def _bounded(values: Mapping[str, str]) -> Answer:
    """The answer, or that it takes too much time or memory."""
    signal.alarm(SECONDS)  # the request is there
    try:
        return answer_of(values)
    except TimeoutError:
        text = f"this plan takes more than {CPU_SECONDS} s: use fewer ranks or larger blocks"
    except MemoryError:
        text = f"this plan takes more than {MEMORY >> 30} GiB: use fewer ranks or larger blocks"
    except Exception as error:  # ours, and no reason to leave a browser without an answer
        text = f"internal error: {type(error).__name__}: {str(error)[:200]}; please report it"
    return Answer(dict(values), errors={"general": text})


def _raise_timeout(*_: object) -> NoReturn:
    raise TimeoutError
