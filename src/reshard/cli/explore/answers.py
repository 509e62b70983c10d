"""The fields of the explorer: texts in, a plan as a document out, or what is wrong with a field.

>>> answer = answer_of({**DEFAULTS, "shape": "8,x", "have_layout": "dp dp"})
>>> for field, text in answer.errors.items():
...     print(field, "|", text)
shape | "x" in shape "8,x" is not a size: expected numbers such as 8192,4096
have_layout | layout "dp dp": axis "dp" appears twice: an axis has one place in a layout
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.cli.parsing import ModelSide, model_specs, parse_shape, replicated
from reshard.dtypes import canonical_dtype
from reshard.errors import LayoutError, MeshError, ReshardError
from reshard.layout.layout import Layout
from reshard.layout.mesh import Mesh
from reshard.layout.spec import TensorSpec
from reshard.planning.plans import plan
from reshard.rules.models import preset
from reshard.show.page.document import Field, Footer
from reshard.show.page.plan_page import document_of
from reshard.show.picture import num_boxes
from reshard.text import parse_bytes

if TYPE_CHECKING:
    from reshard.planning.plans import Plan
    from reshard.show.page.document import Document

__all__ = ["DEFAULTS", "MODEL_DEFAULTS", "Answer", "answer_of", "fields_of"]

MAX_RANKS = 4096
MAX_BOXES = 100_000
"""What one layout may have; a page with more takes too long to wait for."""
MAX_TEXT = 300
"""Characters of a field."""

T = TypeVar("T")

Specs = dict[str, TensorSpec]

_TENSOR_FIELDS = (
    ("have_mesh", "Mesh, before", "dp=2 tp=4", "dp=2 tp=4"),
    ("have_layout", "Layout, before", "(dp tp) -", "(dp tp) -"),
    ("want_mesh", "Mesh, after", "tp=2 @ 8-9", "tp=2 @ 8-9"),
    ("want_layout", "Layout, after", "- tp", "- tp"),
    ("shape", "Shape", "8192,4096", "8192,4096"),
    ("dtype", "Dtype", "bfloat16", "bfloat16"),
    ("memory", "Memory cap per rank", "256MiB", "256MiB"),
)
_MODEL_FIELDS = (
    ("model", "Model", "llama-3-8b", "llama-3-8b"),
    ("have_mesh", "Mesh, before", "tp=8", "dp=2 tp=4"),
    ("have_fsdp", "FSDP axes, before", "", "dp"),
    ("want_mesh", "Mesh, after", "tp=2 @ 8-9", "tp=2 @ 8-9"),
    ("want_fsdp", "FSDP axes, after", "", "dp"),
    ("replicate", "Axes of replicas", "", "dp"),
    ("dtype", "Dtype", "", "the model's"),
    ("memory", "Memory cap per rank", "256MiB", "256MiB"),
)
"""A model is the name of a known one, never a path: requests do not make the server read files."""
DEFAULTS = {name: value for name, _, value, _ in _TENSOR_FIELDS}
MODEL_DEFAULTS = {name: value for name, _, value, _ in _MODEL_FIELDS}


@dataclass(slots=True)
class Answer:
    """A document, or what is wrong with which field."""

    values: Mapping[str, str]
    document: Document | None = None
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def footer(self) -> Footer:
        """Where the document comes from: commands that show the same."""
        value = {name: text.strip() for name, text in self.values.items()}
        options = {"--dtype": value["dtype"], "--memory": value["memory"]}
        if "model" in value:
            options |= {"--model": value["model"], "--from": value["have_mesh"]}
            options |= {"--from-fsdp": value["have_fsdp"], "--to": value["want_mesh"]}
            options |= {"--to-fsdp": value["want_fsdp"]}
        else:
            options |= {"--from": f"{value['have_mesh']}: {value['have_layout']}"}
            options |= {"--to": f"{value['want_mesh']}: {value['want_layout']}"}
            options |= {"--shape": value["shape"]}
        words = [word for option, text in options.items() if text for word in (option, text)]
        for axis in value.get("replicate", "").split():
            words += ["--replicate", axis]
        return Footer(shlex.join(["reshard", "plan", *words]), value.get("model"))

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


def fields_of(values: Mapping[str, str]) -> list[Field]:
    """The fields with what is in them."""
    fields = _MODEL_FIELDS if "model" in values else _TENSOR_FIELDS
    return [Field(name, label, values[name], hint) for name, label, _, hint in fields]


def answer_of(given: Mapping[str, Any]) -> Answer:
    """Plan what the fields say; a field that is not given has its default."""
    defaults = MODEL_DEFAULTS if "model" in given else DEFAULTS
    answer = Answer({name: str(given.get(name, value)) for name, value in defaults.items()})
    memory = answer.read("memory", parse_bytes)
    sides = _model(answer) if "model" in given else _tensor(answer)
    if answer.errors or len(sides) < 2:
        return answer
    found: list[Plan] = []
    with answer.blaming("general"):
        found.append(plan(*sides, memory=memory))
    if "memory" in answer.errors.get("general", ""):
        answer.errors["memory"] = answer.errors.pop("general").replace("memory=", "the cap")
    if found:
        answer.document = document_of(found[0])
    return answer


def _tensor(answer: Answer) -> list[Specs]:
    """Both sides of one tensor; fewer where something is wrong with a field."""
    shape = answer.read("shape", parse_shape)
    dtype = answer.read("dtype", canonical_dtype)
    layouts = [_layout(answer, side, shape) for side in ("have", "want")]
    if shape is None or dtype is None:
        return []
    return [{"tensor": TensorSpec(shape, dtype, one)} for one in layouts if one is not None]


def _model(answer: Answer) -> list[Specs]:
    """Both sides of a model, by the rules of its family."""
    config = answer.read("model", preset)
    dtype = answer.read("dtype", lambda text: canonical_dtype(text) if text else None)
    meshes = [answer.read(f"{side}_mesh", _mesh) for side in ("have", "want")]
    fsdp = [answer.read(f"{side}_fsdp", lambda text: text or None) for side in ("have", "want")]
    axes = answer.read("replicate", str.split)
    copies: list[str | None] = []
    if config is not None and axes is not None and None not in meshes:
        with answer.blaming("replicate"):
            copies = replicated(axes, [*zip(meshes, fsdp, strict=True)])
    sides: list[Specs] = []
    for side, mesh, cut, copy in zip(("have", "want"), meshes, fsdp, copies, strict=False):
        with answer.blaming(f"{side}_mesh"):
            assert config is not None
            assert mesh is not None
            sides.append(model_specs(config, ModelSide(side, mesh, None, cut, copy, dtype))[0])
    return sides


def _mesh(text: str) -> Mesh:
    mesh = Mesh.parse(text)
    if len(mesh.ranks) > MAX_RANKS:
        raise MeshError(
            f'mesh "{mesh}" has {len(mesh.ranks)} ranks: at most {MAX_RANKS} are explored; '
            "reshard plan takes more"
        )
    return mesh


def _layout(answer: Answer, side: str, shape: tuple[int, ...] | None) -> Layout | None:
    mesh = answer.read(f"{side}_mesh", _mesh)
    if mesh is None:
        return None
    layout = answer.read(f"{side}_layout", lambda text: Layout(mesh, text))
    if layout is None or shape is None:
        return layout
    with answer.blaming(f"{side}_layout"):
        layout.dims(shape)
        boxes = num_boxes(layout, shape)
        if boxes > MAX_BOXES:
            raise LayoutError(
                f'layout "{layout}" has {boxes} boxes: at most {MAX_BOXES} are explored; use '
                "larger blocks"
            )
        return layout
    return None
