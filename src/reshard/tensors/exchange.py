"""Tell every rank what all ranks hold and want.

A trainer's ranks know how the weights are cut there, an inference engine's ranks how they should be
cut here; a plan needs both. Each rank describes its own, and gets everyone's.

    specs = rs.describe(model.state_dict())
    have, want = rs.exchange(have=specs)              # on a trainer's rank
    have, want = rs.exchange(want=specs)              # on an inference rank
    plan = rs.plan(have, want)
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch.distributed as dist

from reshard.errors import LiveError, TensorError
from reshard.layout.spec import TensorSpec
from reshard.tensors.agreement import Agreement
from reshard.tensors.merging import merge_specs
from reshard.tensors.texts import specs_from_text, specs_to_text
from reshard.text import quoted

__all__ = ["exchange"]

Specs = Mapping[str, TensorSpec]

GIVE = "give rs.describe(state_dict), or a dict of rs.TensorSpec"


def exchange(
    have: Specs | None = None,
    want: Specs | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float = 60.0,
) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """Both sides of a move, as all ranks of the group described them together.

    Every rank of the group calls it, with what it holds, what it wants, both or neither. One name
    is one tensor: ranks that describe it on different sub-meshes hold replicas of it. Where shapes,
    dtypes or what a rank holds differ, all ranks get the same error.
    """
    if not dist.is_initialized():
        raise LiveError("exchange needs torch.distributed: call init_process_group first")
    texts = Agreement(group, "an exchange of layouts", timeout).gather(_to_text(have, want))
    # Many ranks say the same: each text is read once.
    read = {text: json.loads(text) for text in set(texts.values())}
    for rank, text in texts.items():
        if isinstance(read[text], str):
            raise TensorError(f"on rank {rank}: {read[text]}")
    sides = {text: [*map(specs_from_text, parts)] for text, parts in read.items()}
    have_of, want_of = ({rank: sides[texts[rank]][side] for rank in texts} for side in (0, 1))
    return merge_specs(have_of), merge_specs(want_of)


def _to_text(have: Specs | None, want: Specs | None) -> str:
    """What this rank says: the specs of both sides, or what is wrong with them."""
    for side, specs in (("have", have or {}), ("want", want or {})):
        if not isinstance(specs, Mapping):
            return json.dumps(f"{side}= is a {type(specs).__name__}: {GIVE}")
        for name, spec in specs.items():
            if not isinstance(spec, TensorSpec):
                what = f"{side}[{quoted(name)}] is a {type(spec).__name__}"
                return json.dumps(f"{what}: {GIVE}")
    return json.dumps([specs_to_text(have or {}), specs_to_text(want or {})])
