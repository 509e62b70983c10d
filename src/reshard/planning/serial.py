"""Plans as JSON: the two sides, the options and the digest; the rows follow from these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reshard.errors import FormatError, ReshardError
from reshard.layout.layout import Layout
from reshard.layout.spec import TensorSpec
from reshard.planning.cost.topology import Topology
from reshard.planning.names.tables import names_of, table_of
from reshard.planning.plans import Plan

__all__ = ["SCHEMA", "from_json", "to_dict", "to_json"]

SCHEMA = "reshard.plan/1"
MAX_TEXT = 1 << 30
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What reading data of a wrong kind may raise."""


def to_json(plan: Plan, indent: int | None) -> str:
    """Write a plan as JSON text."""
    return json.dumps(to_dict(plan), indent=indent)


def to_dict(plan: Plan) -> dict[str, Any]:
    """A plan as plain data; layouts are listed once and referred to by number."""
    layouts: dict[Layout, int] = {}
    return {
        "schema": SCHEMA,
        "digest": plan.digest,
        "have": _side(plan.have, layouts),
        "want": _side(plan.want, layouts),
        "layouts": [layout.to_dict() for layout in layouts],
        "names": table_of(plan.names),
        "memory": plan.memory,
        "strict": plan.strict,
        "topology": plan.topology and plan.topology.to_dict(),
    }


def _side(specs: Mapping[str, TensorSpec], layouts: dict[Layout, int]) -> dict[str, list[Any]]:
    return {
        name: [list(spec.shape), spec.dtype, layouts.setdefault(spec.layout, len(layouts))]
        for name, spec in specs.items()
    }


def from_json(text: str) -> Plan:
    """Read a plan, or say what is wrong with the text."""
    if len(text) > MAX_TEXT:
        raise FormatError(f"a plan of {len(text)} characters: at most {MAX_TEXT} work")
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise FormatError(f'this is "{found}" and this library reads "{SCHEMA}"')
        layouts = [Layout.from_dict(layout) for layout in data["layouts"]]
        plan = Plan(
            _read_side(data["have"], layouts),
            _read_side(data["want"], layouts),
            names=names_of(data["names"]),
            memory=int(data["memory"]),
            topology=None if data["topology"] is None else Topology.from_dict(data["topology"]),
            strict=data["strict"] is True,
        )
    except ReshardError:
        raise
    except _UNREADABLE as error:
        raise FormatError(f"a plan's JSON cannot be read: {type(error).__name__} {error}") from None
    if plan.digest != data.get("digest"):
        raise FormatError(
            f"the text says digest {data.get('digest')} and the plan in it has {plan.digest}: "
            "it was changed, or written by another version"
        )
    return plan


def _read_side(data: Mapping[str, Any], layouts: list[Layout]) -> dict[str, TensorSpec]:
    return {
        str(name): TensorSpec(tuple(shape), dtype, layouts[number])
        for name, (shape, dtype, number) in data.items()
    }
