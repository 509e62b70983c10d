"""What one rank was given for one call: checked, and what is missing is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from reshard.errors import LiveError, TensorError
from reshard.planning.plan import Plan
from reshard.run.live.holding import Held, Local, Tensors, check_apart, check_names, held_of
from reshard.run.live.lots import HAVE, WANT
from reshard.run.live.options import Options
from reshard.run.live.prepared import Prepared
from reshard.run.live.routes import GPU, default_device, with_number

__all__ = ["Bound", "Given", "check_given"]

Bound = tuple[tuple[Held, Held], dict[str, torch.Tensor]]
"""The tensors of both sides, and the result."""


def check_given(tensors: object, into: object, group: object) -> None:
    """What a caller may have mixed up, before anything is done with it."""
    for what, given in (("to move", tensors), ("into=", into)):
        if given is not None and not isinstance(given, Mapping):
            raise TensorError(
                f"the tensors {what} are a {type(given).__name__}: give a dict of this rank's "
                "tensors by name; rs.move takes one tensor"
            )
    usual = group is None or isinstance(group, dist.ProcessGroup)
    # What new_group gives to ranks that are not in it: they may call, if they have no part.
    if not usual and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise LiveError(
            f"group= is {group!r}: give a process group of torch.distributed, as new_group makes"
        )


@dataclass(frozen=True, eq=False, slots=True)
class Given:
    """What one rank was given for one call."""

    plan: Plan
    tensors: Tensors
    into: Tensors | None
    group: dist.ProcessGroup
    options: Options

    def check_member(self, rank: int) -> None:
        """Refuse a group that this rank, which has a part in the move, is not in."""
        if not isinstance(self.group, dist.ProcessGroup):
            raise LiveError(
                f"rank {rank} has a part in this move and is not in the group given by group=: "
                "give a group of all ranks of both layouts"
            )

    def all(self) -> list[torch.Tensor]:
        """The tensors of both sides."""
        both = [*self.tensors.values(), *(self.into or {}).values()]
        return [tensor for tensor in both if tensor is not None]

    def gpus(self) -> set[torch.device]:
        """The GPUs that this call touches."""
        found = {tensor.device for tensor in self.all() if tensor.is_cuda}
        if self.options.device is not None or not found:
            found |= {gpu for gpu in [self._home()] if gpu.type == GPU}
        return found

    def bind(self, prepared: Prepared, rank: int) -> Bound:
        """Check this rank's tensors and make those that are missing."""
        plan = self.plan
        check_names(self.tensors, plan.have, rank, "to move")
        have = held_of(prepared.locals[HAVE], self.tensors, len(plan.have), rank, "to move")
        given: Tensors = {} if self.into is None else self.into
        check_names(given, plan.want, rank, "to move into")
        if self.into is None:
            return self._with_fresh(prepared, have)
        want = held_of(prepared.locals[WANT], given, len(plan.want), rank, "to move into")
        places = (have.where, want.where)
        if prepared.apart != places:
            check_apart(have, want, prepared.program.names, rank)
            prepared.apart = places
        for returning, side in zip(prepared.returning, (have, want), strict=True):
            returning.see(side.where, side.tensors.values())
        if self.options.atomic:
            return self._with_fresh(prepared, have)
        return (have, want), {name: tensor for name, tensor in given.items() if tensor is not None}

    def _with_fresh(self, prepared: Prepared, have: Held) -> Bound:
        want = Held(len(self.plan.want))
        result = {}
        only = self._only_device(have)
        for local in prepared.locals[WANT]:
            device = self._device(local) if only is None else only
            tensor = torch.empty(local.shape, dtype=local.kind, device=device)
            want.add(local.number, tensor)
            result[local.name] = tensor
        return (have, want), result

    def _only_device(self, have: Held) -> torch.device | None:
        """The device of all new tensors, where they need not be asked for one by one."""
        if self.options.device is not None or not have.tensors:
            return self._home()
        return None if have.elsewhere else torch.device("cpu")

    def _home(self) -> torch.device:
        """Where new tensors are made of which no source says where."""
        if self.options.device is None:
            return default_device(self.group)
        return with_number(torch.device(self.options.device))

    def _device(self, local: Local) -> torch.device:
        """With the source of the same name, or with any source."""
        near = self.tensors.get(local.name)
        if near is None:
            near = next((tensor for tensor in self.tensors.values() if tensor is not None), None)
        return torch.device("cpu") if near is None else near.device
