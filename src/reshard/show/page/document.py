"""What is on a page, and how it becomes HTML.

The page is one file: styles, script and data are inside it, and its policy lets the browser run
this script alone and load nothing. Names and layouts are text of unknown origin: templates escape
it, and the data of the script cannot end its element.

>>> print(as_json({"name": "</script><b>"}))
{"name":"\\u003c/script\\u003e\\u003cb\\u003e"}
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module, resources
from typing import TYPE_CHECKING, Any

from reshard.layout.mesh import format_ranks
from reshard.show.page.drawings import LOOKS, TEXTURES, Drawing, Table, Tick, palette
from reshard.show.plan_text import Figure
from reshard.text import printable, shorten

if TYPE_CHECKING:
    from jinja2 import Environment


MAX_NAME = 400


@dataclass(frozen=True, slots=True)
class Side:
    """A layout, as a drawing where there can be one, else as a table."""

    mesh: str
    layout: str
    drawing: Drawing | None
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Move:
    """A group of tensors with its layout before, and after if it moves."""

    name: str
    note: str
    have: Side
    want: Side | None = None


@dataclass(frozen=True, slots=True)
class Lane:
    """A name, bars and a note; a bar is where it begins and its width, in percent, and a kind."""

    name: str
    bars: Sequence[tuple[float, float, str]]
    note: str


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured."""

    cards: Sequence[Figure]
    rounds: Sequence[Lane]
    scale: Sequence[Tick]
    note: str


@dataclass(frozen=True, slots=True)
class Document:
    """All that a page shows."""

    headline: str = ""
    cards: Sequence[Figure] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the script works with."""
    digest: str = ""
    damage: Sequence[str] = ()
    reasons: Sequence[str] = ()
    moves: Sequence[Move] = ()
    legend: str = ""
    table: Table | None = None
    lanes: Sequence[Lane] = ()
    scale: Sequence[Tick] = ()
    rounds_note: str = ""
    run: Run | None = None
    extra: Sequence[tuple[str, Sequence[str]]] = ()
    """Titles and lines of what is shown when asked for."""


@dataclass(frozen=True, slots=True)
class Footer:
    """Where a page comes from."""

    command: str | None = None
    model: str | None = None
    explore: str | None = None
    """A command that opens the same in the explorer."""
    version: str = field(default_factory=lambda: str(import_module("reshard").__version__))


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the explorer."""

    name: str
    label: str
    value: str
    hint: str


def render_page(doc: Document, footer: Footer, form: Sequence[Field] = ()) -> str:
    from markupsafe import Markup

    script = _source("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        f"form-action 'none'; script-src 'sha256-{digest}'"
    )
    if form:
        policy += "; connect-src 'self'"
    data, js = Markup(as_json(doc.data)), Markup(script)
    return render_fragment(
        "page.html", doc=doc, footer=footer, form=form, policy=policy, data=data, js=js
    )


def render_fragment(name: str, **words: Any) -> str:
    """A template with the styles of the page; the cells of notebooks have no script."""
    from markupsafe import Markup

    return (
        _environment()
        .get_template(name)
        .render(
            palettes={"light": palette(False), "dark": palette(True), "looks": LOOKS},
            texture_paths=TEXTURES,
            ranks=lambda rect: shorten(format_ranks(rect.ranks), 60),
            css=Markup(_source("page.css")),
            **words,
        )
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    return Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
        loader=FunctionLoader(_source),
    )  # fmt: skip


def _source(name: str) -> str:
    return resources.files("reshard.show.page").joinpath(name).read_text(encoding="utf-8")


def as_json(data: Any) -> str:
    """JSON that is safe inside an element of a page."""
    text = json.dumps(data, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def clean(name: str, most: int = MAX_NAME) -> str:
    """A name as one printable line of bounded length."""
    return printable(shorten(name, most))
