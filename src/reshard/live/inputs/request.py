"""What one rank was given for one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from reshard.errors import LiveError, TensorError
from reshard.live.inputs.bound import BoundTensors, LocalTensor, Tensors, bind_side, check_names
from reshard.live.inputs.devices import GPU, default_device, with_index
from reshard.live.inputs.overlap import check_overlaps
from reshard.live.options import Options
from reshard.live.program.rounds import HAVE, WANT

__all__ = ["Request", "check_request"]


def check_request(tensors: object, into: object, group: object) -> None:
    """Refuse what a caller may have mixed up, before anything is done with it."""
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
class Request:
    """What one rank was given for one call."""

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

    def all_tensors(self) -> list[torch.Tensor]:
        """The tensors of both sides."""
        both = [*self.tensors.values(), *(self.into or {}).values()]
        return [tensor for tensor in both if tensor is not None]

    def gpus(self) -> set[torch.device]:
        """The GPUs that this call touches."""
        found = {tensor.device for tensor in self.all_tensors() if tensor.is_cuda}
        if self.options.device is not None or not found:
            found |= {gpu for gpu in [self._home()] if gpu.type == GPU}
        return found

    def bind(self, locals_: Locals, rank: int) -> BoundTensors:
        """Check this rank's tensors and make those that are missing."""
        bound = BoundTensors(locals_.num_have, locals_.staging)
        check_names(self.tensors, locals_.names[HAVE], rank, "to move")
        bind_side(bound, locals_.sides[HAVE], self.tensors, rank, "to move")
        if self.into is None:
            self._make_destinations(bound, locals_.sides[WANT])
            return bound
        check_names(self.into, locals_.names[WANT], rank, "to move into")
        bind_side(bound, locals_.sides[WANT], self.into, rank, "to move into")
        places = bound.identity
        if locals_.disjoint != places:
            check_overlaps(bound, locals_.names, rank)
            locals_.disjoint = places
        if self.options.atomic:
            bound.drop_destinations()
            self._make_destinations(bound, locals_.sides[WANT])
        else:
            bound.result = {n: tensor for n, tensor in self.into.items() if tensor is not None}
        return bound

    def _make_destinations(self, bound: BoundTensors, wanted: list[LocalTensor]) -> None:
        only = self._only_device(bound)
        for local in wanted:
            device = self._device(local) if only is None else only
            tensor = torch.empty(local.shape, dtype=local.dtype, device=device)
            bound.add(local.number, tensor)
            bound.result[local.name] = tensor

    def _only_device(self, bound: BoundTensors) -> torch.device | None:
        """The device of all new tensors, where they need not be asked for one by one."""
        if self.options.device is not None or not bound.tensors:
            return self._home()
        return None if bound.on_devices else torch.device("cpu")

    def _home(self) -> torch.device:
        """Where new tensors are made of which no source says where."""
        if self.options.device is None:
            return default_device(self.group)
        return with_index(torch.device(self.options.device))

    def _device(self, local: LocalTensor) -> torch.device:
        """With the source of the same name, or with any source."""
        near = self.tensors.get(local.name)
        if near is None:
            near = next((tensor for tensor in self.tensors.values() if tensor is not None), None)
        return torch.device("cpu") if near is None else near.device


class Locals:
    """What a plan says of one rank's local tensors."""

    def __init__(
        self,
        sides: tuple[list[LocalTensor], list[LocalTensor]],
        names: tuple[Mapping[str, object], Mapping[str, object]],
    ) -> None:
        self.sides, self.names = sides, names
        self.num_have = len(names[HAVE])
        self.staging = self.num_have + len(names[WANT])
        self.disjoint: object = None
        """The tensors that were last found not to overlap."""
