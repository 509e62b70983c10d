"""Who writes which box: each once, by a rank that holds it, all ranks about equally many bytes.

>>> from reshard.layout.layout import Layout
>>> from reshard.layout.mesh import Mesh
>>> specs = {name: TensorSpec((size,), "float32", Layout(Mesh(dp=2), "-"))
...          for name, size in [("a", 6), ("b", 1), ("c", 5)]}
>>> {name: owned.ranks.tolist() for name, owned in owners_of(specs).items()}
{'a': [0], 'b': [1], 'c': [1]}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from reshard.checkpoint.formats.output import Owned, Wanted, owned_boxes
from reshard.dtypes import itemsize
from reshard.layout.boxlist import listed_of
from reshard.layout.columns import Ints
from reshard.layout.layout import BoxLayout, Layout
from reshard.layout.spec import TensorSpec

__all__ = ["main_mesh", "on_mesh", "owners_of"]


def owners_of(specs: Mapping[str, TensorSpec]) -> dict[str, Owned]:
    """The writer of every distinct box of every tensor."""
    owned = {
        name: owned_boxes(name, Wanted(spec.shape, spec.dtype, spec.layout), number)
        for number, (name, spec) in enumerate(specs.items())
    }
    loads: Counter[int] = Counter()
    choices = []
    for name, spec in specs.items():
        sizes = _sizes(owned[name], spec)
        if not sizes.any():
            continue
        listed = listed_of(spec.layout, spec.shape)
        shared = np.diff(listed.first) > 1
        for box in np.flatnonzero(~shared).tolist():
            loads[int(owned[name].ranks[box])] += int(sizes[box])
        choices += [
            (-int(sizes[box]), name, box, listed.of(box)) for box in np.flatnonzero(shared).tolist()
        ]
        owned[name] = replace(owned[name], ranks=owned[name].ranks.copy())
    for size, name, box, holders in sorted(choices, key=lambda one: one[:3]):
        rank = min(holders.tolist(), key=lambda rank: (loads[rank], rank))
        loads[rank] -= size
        owned[name].ranks[box] = rank
    return owned


def _sizes(owned: Owned, spec: TensorSpec) -> Ints:
    sizes: Ints = (owned.stops - owned.starts).prod(axis=1) * itemsize(spec.dtype)
    return sizes


def main_mesh(specs: Mapping[str, TensorSpec]) -> str | None:
    """The mesh that most bytes are cut over, which is the one that files speak of."""
    found: Counter[str] = Counter()
    for spec in specs.values():
        if not isinstance(spec.layout, BoxLayout):
            found[str(spec.layout.mesh)] += spec.num_bytes
    return found.most_common(1)[0][0] if found else None


def on_mesh(layout: Layout, main: Layout | None) -> Layout:
    """What is whole on all ranks of the main mesh, in its words."""
    if main is None or layout.mesh == main.mesh or isinstance(layout, BoxLayout):
        return layout
    same = sorted(layout.ranks) == sorted(main.ranks)
    return Layout(main.mesh, "...") if same and str(layout) == "..." else layout
