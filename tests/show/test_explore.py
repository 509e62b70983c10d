"""`reshard explore`: the page with fields in a browser, and requests that are not from its page."""

from __future__ import annotations

import html
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from reshard.cli import run
from tests.processes import hear_interrupts
from tests.show.browser import Browser, Tab
from tests.soak import within

ROOT = Path(__file__).parents[2]
QUICK = (
    "import sys; import reshard.cli.explore_server as server; server.CPU_SECONDS = 1; "
    "from reshard.cli import run; sys.exit(run(sys.argv[1:]))"
)
"""The explorer with less patience than it has."""


class Explorer:
    """A running `reshard explore`."""

    def __init__(self, *arguments: str, start: tuple[str, ...] = ("-m", "reshard")) -> None:
        command = [sys.executable, *start, "explore", "--no-browser", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=hear_interrupts,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"exploring at (http://127\.0\.0\.1:(\d+)/) until Ctrl-C\n", line)
        assert found is not None, line
        self.url, self.port = found[1], int(found[2])

    def send(self, request: bytes, seconds: float = 20.0) -> bytes:
        """Send bytes and read all that comes back."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as line:
            line.sendall(request)
            answer = b""
            while data := line.recv(1 << 16):
                answer += data
        return answer

    def post(self, body: bytes, **headers: str) -> tuple[int, bytes]:
        """Post to /plan as the page does, except for some headers; the status and the body."""
        lines = {
            "Host": f"127.0.0.1:{self.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        answer = self.send(b"POST /plan HTTP/1.1\r\n" + head.encode() + b"\r\n" + body)
        return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]

    def end(self) -> int:
        """Press Ctrl-C."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            _, errors = self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert errors == ""
        return self.process.returncode


@pytest.fixture(scope="module")
def explorer() -> Iterator[Explorer]:
    """One explorer for all tests of this file."""
    running = Explorer()
    yield running
    assert running.end() == 130


@pytest.fixture
def tab(browser: Browser, explorer: Explorer) -> Iterator[Tab]:
    """A tab with the explorer; at the end it has asked its own server alone, and logged nothing."""
    tab = browser.tab()
    tab.open(explorer.url)
    yield tab
    tab.close()
    assert not tab.errors
    assert all(url.startswith((explorer.url, "data:,")) for url in tab.requests), tab.requests


def field(name: str) -> str:
    return f"[name='{name}']"


def error_of(tab: Tab, name: str) -> str:
    script = f"document.querySelector(\"[data-field='{name}'] .error\").textContent"
    return str(tab.until(script))


class TestInABrowser:
    """Edit fields as a person does."""

    def test_edits_change_the_plan(self, tab: Tab) -> None:
        assert tab.run("document.querySelectorAll(\".piece[data-side='0']\").length") == 8
        began = time.monotonic()
        tab.type(field("have_mesh"), "dp=2 tp=2")
        tab.until("document.querySelectorAll(\".piece[data-side='0']\").length === 4")
        assert time.monotonic() - began < within(2.0)
        tab.type(field("want_layout"), "tp -")
        tab.until("document.querySelectorAll(\".piece[data-side='1']\").length === 2")
        tab.type(field("shape"), "64,32")
        tab.until("document.querySelector('h1').textContent.includes('4.0 KiB')")
        assert "64,32" in tab.run("document.querySelector('footer code').textContent")
        tab.point(".piece[data-side='0'][data-number='0']")
        assert tab.run("document.querySelectorAll('.piece.lit').length") == 2
        # The address keeps the fields.
        address = tab.run("location.href")
        tab.open("about:blank")
        tab.open(address)
        tab.until("document.querySelectorAll(\".piece[data-side='0']\").length === 4")
        assert tab.run(f'document.querySelector("{field("shape")}").value') == "64,32"

    def test_a_cap_makes_rounds(self, tab: Tab) -> None:
        tab.type(field("memory"), "4MiB")
        tab.until("/in \\d+ rounds/.test(document.querySelector('.cards').textContent)")

    def test_wrong_input_is_said_next_to_its_field(self, tab: Tab) -> None:
        tab.type(field("have_layout"), "dp dp")
        assert error_of(tab, "have_layout") == (
            'layout "dp dp": axis "dp" appears twice: an axis has one place in a layout'
        )
        tab.type(field("shape"), "8,x")
        assert error_of(tab, "shape").startswith('"x" in shape "8,x" is not a size')
        tab.type(field("memory"), "lots")
        assert error_of(tab, "memory") == (
            '"lots" is not an amount of bytes: write 4096, "256MiB" or "1GB"'
        )
        tab.type(field("dtype"), "<img src=x onerror=window.hacked=1>")
        assert "<img" in error_of(tab, "dtype")
        assert tab.run("[window.hacked, document.querySelectorAll('form img').length]") == [None, 0]
        assert tab.run("document.querySelector('#doc').classList.contains('stale')")
        for name, text in (("have_layout", "(dp tp) -"), ("shape", "8,8"), ("memory", "1MiB")):
            tab.type(field(name), text)
        tab.type(field("dtype"), "float32")
        tab.until("!document.querySelector('#doc').classList.contains('stale')")
        assert tab.run("document.querySelectorAll('.wrong').length") == 0

    def test_on_a_phone(self, tab: Tab) -> None:
        tab.resize(375, 700, touch=True)
        assert tab.run("document.documentElement.scrollWidth") == 375


class TestAModelInABrowser:
    """`reshard explore --model`: the fields of a whole model."""

    @pytest.fixture(scope="class")
    @classmethod
    def explorer(cls) -> Iterator[Explorer]:
        words = ["--model", "llama-3-8b", "--from", "dp=2 tp=4", "--from-fsdp", "dp"]
        running = Explorer(*words, "--to", "tp=4 @ 8-11")
        yield running
        assert running.end() == 130

    def test_edits_change_the_plan(self, tab: Tab) -> None:
        headline = "document.querySelector('h1').textContent"
        assert tab.run(headline).startswith("Plan of 291 tensors, 15.0 GiB of bfloat16")
        name = tab.run("document.querySelector('#move-0 h3 code').textContent")
        assert name == "model.layers.{0-31}.mlp.{gate,up}_proj.weight"
        tab.type(field("model"), "llama-3.2-1b")
        tab.until(f"!{headline}.startsWith('Plan of 291 tensors')")
        tab.type(field("want_mesh"), "dp=2 tp=2 @ 8-11")
        assert 'axis "dp"' in error_of(tab, "want_mesh")
        tab.type(field("replicate"), "dp")
        tab.until("document.querySelectorAll('.wrong').length === 0")
        tab.until(f"{headline}.includes('to mesh dp=2 tp=2 @ 8-11')")
        command = tab.run("document.querySelector('footer code').textContent")
        assert command == (
            "reshard plan --model llama-3.2-1b --from-fsdp dp --memory 256MiB "
            "--from 'dp=2 tp=4' --to 'dp=2 tp=2 @ 8-11' --replicate dp"
        )
        tab.type(field("from_fsdp"), "pp")
        assert '"pp"' in error_of(tab, "have_mesh")
        tab.type(field("from_fsdp"), "")  # now replicas along dp on both sides
        tab.until("!document.querySelector('footer code').textContent.includes('--from-fsdp')")

    def test_a_model_that_is_unknown_or_a_path(self, tab: Tab) -> None:
        for typed in ("llama-9", "/etc/passwd", "../config.json"):
            tab.type(field("model"), typed)
            tab.until(
                f"document.querySelector(\"[data-field='model'] .error\").textContent"
                f".includes('{typed}')"
            )
        assert tab.run("document.querySelector('#doc').classList.contains('stale')")


def test_the_explorer_of_a_page_shows_the_same_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The footer of a model's page names a command, whose first page is that plan."""
    page = tmp_path / "plan.html"
    sides = ["--from", "dp=2 tp=4", "--from-fsdp", "dp", "--to", "dp=2 tp=2", "--replicate", "dp"]
    assert run(["plan", "--model", "llama-3-8b", *sides, "--html", str(page)]) == 0
    headline = capsys.readouterr().out.partition("\n")[0]
    found = re.search(r"reshard explore [^<]+", page.read_text())
    assert found is not None
    explorer = Explorer(*shlex.split(html.unescape(found[0]))[2:])
    try:
        answer = explorer.send(
            f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{explorer.port}\r\n\r\n".encode()
        )
        assert headline in answer.decode()
    finally:
        assert explorer.end() == 130


def test_the_address_is_json_if_asked() -> None:
    command = [sys.executable, "-m", "reshard", "explore", "--no-browser", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=hear_interrupts
    ) as process:
        assert process.stdout is not None
        text = "".join(iter(process.stdout.readline, "}\n")) + "}"
        data = json.loads(text)
        process.send_signal(signal.SIGINT)
    assert data == {"schema": "reshard.explore/1", "url": data["url"], "port": data["port"]}
    assert data["url"] == f"http://127.0.0.1:{data['port']}/"
    assert "`reshard.explore/1`" in (ROOT / "docs/json.md").read_text()
    assert process.returncode == 130


def test_a_plan_is_json(explorer: Explorer) -> None:
    status, body = explorer.post(b'{"shape": "64,64"}')
    answer = json.loads(body)
    assert status == 200
    assert set(answer) == {"html", "title", "data"}
    assert "16.0 KiB" not in answer["title"]
    assert "8.0 KiB" in answer["title"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example:80"}, 403),
        ({"Host": "127.0.0.1"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Length": ""}, 411),
        ({"Content_Length": "-1"}, 411),
        ({"Content_Length": "9" * 30}, 411),
        ({"Content_Length": "999999999"}, 413),
    ],
)
def test_requests_that_are_not_from_the_page_are_refused(
    explorer: Explorer, headers: dict[str, str], status: int
) -> None:
    assert explorer.post(b"{}", **headers)[0] == status


@pytest.mark.parametrize(
    "body", [b"[]", b"{", b'{"shape": 3}', b"\xff\xfe", b"[" * 8000, b'{"shape": {"a": []}}']
)
def test_bodies_that_are_not_fields(explorer: Explorer, body: bytes) -> None:
    status, answer = explorer.post(body)
    assert (status, answer) == (400, b"the body must be an object of texts\n")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /etc/passwd HTTP/1.1", 404),
        ("GET /../../etc/passwd HTTP/1.1", 404),
        ("POST / HTTP/1.1", 404),
        ("DELETE / HTTP/1.1", 501),
        ("GET http://evil.example/ HTTP/1.1", 404),
        ("GET /" + "a" * 70_000 + " HTTP/1.1", 414),
    ],
)
def test_other_paths_and_methods(explorer: Explorer, request_line: str, status: int) -> None:
    head = f"{request_line}\r\nHost: 127.0.0.1:{explorer.port}\r\n\r\n"
    answer = explorer.send(head.encode())
    assert int(answer.split()[1]) == status


@pytest.mark.parametrize(
    ("fields", "where", "said"),
    [
        ({"have_mesh": "dp=8192"}, "have_mesh", "at most 4096 are explored"),
        ({"have_mesh": "dp=99999999999"}, "have_mesh", "at most 1048576 work"),
        ({"have_layout": "dp:1 tp:1"}, "have_layout", "boxes: at most 100000 are explored"),
        ({"shape": "1,1,1"}, "have_layout", "2 words"),
        ({"shape": "9" * 400}, "shape", "at most 300 work"),
        ({"shape": "999999999999,999999999999"}, "shape", "elements"),
        ({"want_layout": "| " * 100}, "want_layout", ""),
        ({"memory": "1"}, "memory", ""),
        ({"want_layout": "tp - | sum tp"}, "want_layout", ""),
    ],
)
def test_fields_that_ask_for_too_much_or_for_nonsense(
    explorer: Explorer, fields: dict[str, str], where: str, said: str
) -> None:
    status, body = explorer.post(json.dumps(fields).encode())
    errors = json.loads(body)["errors"]
    assert status == 200
    assert where in errors, errors
    assert said in errors[where]
    assert "\n" not in errors[where]


def test_work_is_bounded_and_the_server_goes_on() -> None:
    explorer = Explorer(start=("-c", QUICK))
    heavy = {
        "have_mesh": "a=4096", "have_layout": "a -", "shape": "4096,4096",
        "want_mesh": "b=4096 @ 4096-8191", "want_layout": "- b",
    }  # fmt: skip
    try:
        status, body = explorer.post(json.dumps(heavy).encode())
        assert status == 200
        assert "this plan takes more than" in json.loads(body)["errors"]["general"]
        assert explorer.post(b"{}")[0] == 200
    finally:
        assert explorer.end() == 130


def test_slow_clients_do_not_stop_others(explorer: Explorer) -> None:
    lines = [socket.create_connection(("127.0.0.1", explorer.port)) for _ in range(3)]
    for line in lines:
        line.sendall(b"POST /plan HTTP/1.1\r\nHost: ")
    assert explorer.post(b"{}")[0] == 200
    for line in lines:
        line.close()


def test_clients_that_never_end_their_request_are_cut_off(explorer: Explorer) -> None:
    """More of them than there are processes, each sending a byte before any timeout of a socket."""
    clients = [socket.create_connection(("127.0.0.1", explorer.port)) for _ in range(20)]
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(1.0):
            for client in clients:
                with suppress(OSError):
                    client.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        began = time.monotonic()
        assert explorer.post(b"{}")[0] == 200
        assert time.monotonic() - began < within(20.0)  # a plan may take 30 s, a request may not
    finally:
        ended.set()
        thread.join()
        for client in clients:
            client.close()


def test_the_server_is_on_the_loopback_address_alone(explorer: Explorer) -> None:
    table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
    mine = [one for one in listening if int(one.partition(":")[2], 16) == explorer.port]
    assert mine == [f"0100007F:{explorer.port:04X}"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "8,x"], 'reshard: "x" in shape "8,x" is not a size'),
        (["--from", "dp=2"], 'reshard: --from "dp=2" has no layout'),
        (["--memory", "lots"], 'reshard: "lots" is not an amount of bytes'),
        (["--port", "99999"], "99999 is not in the range"),
        (["--model", "llama-9"], 'there is no model "llama-9": try llama-3-8b'),
        (["--model", "llama-3-8b", "--shape", "8,8"], "give --shape (one tensor) or --model"),
        (["--model", "llama-3-8b", "--from", "dp=2"], 'axis "dp"'),
        (["--model", "llama-3-8b", "--from", "tp=2: tp -"], 'give the mesh alone, "tp=2"'),
        (["--to-fsdp", "dp"], "--to-fsdp is for --model"),
    ],
)
def test_wrong_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explore", "--no-browser", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_port_that_is_taken(explorer: Explorer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explore", "--no-browser", "--port", str(explorer.port)]) == 2
    assert f"cannot listen on port {explorer.port}: " in capsys.readouterr().err
