"""embedding, embedding_bag and linear of plain inputs on a sharded weight.

Inputs that are the same on all ranks are one input: the result is a ShardedTensor, and a loss of it
counts once. Inputs that differ are each rank's own batch, as in torch.distributed._shard: every
rank gets the plain result for its own inputs, and the gradient of the weight is the sum of what
all ranks' losses give it. Ranks compare hashes of their inputs to find out which it is.

    table    rows 0-5 on rank 0, rows 6-11 on rank 1
    rank 0   looks up 3, 9, 9    }  both get rows 3, 4 and 9 of the table, and each does
    rank 1   looks up 4, 9       }  its own lookup in those rows
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn import functional as F

from reshard.errors import OperationError
from reshard.live.inputs.bound import materialize
from reshard.sharded.content import Content, ContentTensor, part_shapes, wrap
from reshard.sharded.groups import digest, members
from reshard.sharded.move import lay_out_gradient, replicated, to_whole
from reshard.sharded.ops.dtensor import Args, Kwargs, fits_dtensor
from reshard.sharded.specs import Shard
from reshard.tensors.agreement import Agreement
from reshard.tensors.autograd import linear
from reshard.tensors.kinds import this_rank
from reshard.text import first_line

Function = Callable[..., Any]


def call_on_inputs(
    func: Function, args: Args, kwargs: Kwargs, call: Callable[[Args, Kwargs], Any]
) -> Any:
    """Call one of these functions; ``call`` calls it with inputs that are equal on all ranks."""
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    weight, inputs = named.get("weight"), named.get("input")
    if not isinstance(weight, ContentTensor) or weight._content.layout.reduce is not None:
        return call(args, kwargs)
    is_sharded = isinstance(inputs, ContentTensor) and func is not F.embedding_bag
    has_values = isinstance(inputs, torch.Tensor) and not inputs.is_meta
    if is_sharded or not has_values or torch.compiler.is_compiling():
        return call(args, kwargs)  # there are no values to compare
    for name, value in named.items():
        if name not in ("weight", "bias") and isinstance(value, ContentTensor):
            named[name] = to_whole(value)
    lookup = _Lookup(func, named, weight)
    differ, rows = lookup.compare_inputs()
    options = map(named.get, ("max_norm", "scale_grad_by_freq", "sparse"))
    sharded = (one for one in (weight, named.get("bias")) if isinstance(one, ContentTensor))
    suits_dtensor = func is not F.embedding_bag and not any(options)
    if not differ and suits_dtensor and all(fits_dtensor(one._content) for one in sharded):
        return call(args, kwargs)
    result = lookup.on_rows(rows, differ)
    return result if differ else replicated(result, weight._content.group)


@cache
def _signature(func: Function) -> inspect.Signature:
    # linear is a builtin, which has no signature.
    return inspect.signature((lambda input, weight, bias=None: None) if func is F.linear else func)


@dataclass(frozen=True, eq=False)
class _Lookup:
    """A call of such a function on a sharded weight."""

    func: Function
    named: Kwargs
    weight: ContentTensor

    def compare_inputs(self) -> tuple[bool, torch.Tensor]:
        """Whether the inputs of ranks differ, and the sorted rows that any rank needs.

        All ranks raise, or none.
        """
        content, problem = self.weight._content, None
        rows = torch.empty(0, dtype=torch.int64, device="cpu")
        try:
            rows = self._checked_rows()
        except Exception as error:
            problem = error
        options = digest(repr([self.named.get(name) for name in ("max_norm", "norm_type")]))
        own = [self._hash(), options, int(problem is not None), len(rows)]
        numbers = _gathered(torch.tensor(own, device=content.device), content)
        hashes, all_options, failures, counts = zip(*(one.tolist() for one in numbers), strict=True)
        if any(failures):
            agreement = Agreement(content.group, self.func.__name__)
            texts = agreement.gather(None if problem is None else str(problem))
            rank, text = next(one for one in texts.items() if one[1] is not None)
            raise self._refusal(f"on rank {rank}: {first_line(text)}") from problem
        if len({*all_options}) > 1:
            raise self._refusal("ranks have different max_norm or norm_type: give all the same")
        if len({*hashes}) == 1:
            return False, rows
        padded = torch.zeros(max(counts), dtype=torch.int64, device=content.device)
        padded[: len(rows)] = rows
        pairs = zip(_gathered(padded, content), counts, strict=True)
        union: torch.Tensor = torch.unique(torch.cat([one[:count] for one, count in pairs]))
        return True, union.to(rows.device)

    def _hash(self) -> int:
        state = blake2b(digest_size=7)
        for name, value in sorted(self.named.items()):
            if name in ("weight", "bias") or not isinstance(value, torch.Tensor):
                continue
            state.update(repr((name, value.dtype, tuple(value.shape))).encode())
            # Bytes, because no dtype of numpy is like bfloat16.
            flat = materialize(value.detach()).contiguous().reshape(-1).view(torch.uint8)
            state.update(flat.cpu().numpy().data)
        return int.from_bytes(state.digest(), "big")

    def _checked_rows(self) -> torch.Tensor:
        """The rows that this rank needs; raises where the call would fail."""
        shape, dtype = tuple(self.weight.shape), self.weight.dtype
        if self.func is F.linear:
            bias = self.named["bias"]
            like = [torch.empty(shape, dtype=dtype, device="meta")]
            if bias is not None:
                like.append(torch.empty(bias.shape, dtype=bias.dtype, device="meta"))
            F.linear(self.named["input"].detach().to("meta"), *like)
            return torch.empty(0, dtype=torch.int64, device="cpu")
        index = self.named["input"]
        rows: torch.Tensor = torch.unique(index)
        if len(rows) and not (int(rows[0]) >= 0 and int(rows[-1]) < shape[0]):
            wrong = int(rows[0]) if int(rows[0]) < 0 else int(rows[-1])
            raise IndexError(f"index {wrong} is out of range: the weight has {shape[0]} rows")
        self._look_up_in(torch.zeros(len(rows), 1, dtype=dtype, device=index.device), rows)
        return rows.to(torch.int64)

    def _refusal(self, why: str) -> OperationError:
        return OperationError(
            f"{self.func.__name__} with a weight of shape {list(self.weight.shape)} and layout "
            f'"{self.weight._content.layout}" cannot be done on any rank: {why}'
        )

    def on_rows(self, rows: torch.Tensor, differ: bool) -> torch.Tensor:
        """The result for this rank's inputs, computed with the needed rows."""
        if self.func is F.linear:
            bias, every = self.named["bias"], torch.arange(self.weight.shape[0], device="cpu")
            if isinstance(bias, ContentTensor):
                bias = rows_of(bias, every, differ)
            return F.linear(self.named["input"], rows_of(self.weight, every, differ), bias)
        max_norm, content = self.named["max_norm"], self.weight._content
        if max_norm is not None:  # scale down the rows that any rank looks up, as the functions do
            with torch.no_grad():
                table = _fetched(content, rows)
                every = torch.arange(len(rows), device=table.device)
                norm_type = float(self.named["norm_type"])
                torch.embedding_renorm_(table, every, float(max_norm), norm_type)
                _put(content, rows, table)
        return self._look_up_in(rows_of(self.weight, rows, differ), rows)

    def _look_up_in(self, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The result of the function with a table of these rows only."""
        index = self.named["input"]
        places = torch.searchsorted(rows, index.to(rows.dtype)).to(index.dtype)
        # The position of the padding row among the rows; None if no rank looks it up.
        padding, size = self.named["padding_idx"], self.weight.shape[0]
        if padding is not None:
            if not -size <= padding < size:
                raise IndexError(
                    f"padding_idx {padding} is out of range: the weight has {size} rows"
                )
            at = (rows == padding % size).nonzero()
            padding = int(at[0]) if len(at) else None
        named = {**self.named, "input": places, "weight": table, "padding_idx": padding}
        return cast(torch.Tensor, self.func(**{**named, "max_norm": None}))


def _gathered(own: torch.Tensor, content: Content) -> list[torch.Tensor]:
    """A tensor of every rank, all of one size, with one small collective."""
    if not dist.is_initialized():
        return [own]
    gathered = [torch.empty_like(own) for _ in members(content.group)]
    dist.all_gather(gathered, own, group=content.group)
    return gathered


def rows_of(tensor: ContentTensor, rows: torch.Tensor, differ: bool) -> torch.Tensor:
    """Some rows of a sharded tensor on all ranks; gradients that differ are summed over ranks."""
    content, source = tensor._content, tensor._content.without_parts()
    back = partial(_gradient_of, source, rows, differ)
    return linear(lambda: _fetched(content, rows), back, tensor)


def _gradient_of(
    content: Content, rows: torch.Tensor, differ: bool, gradient: torch.Tensor
) -> ContentTensor:
    """The gradient of a tensor from the gradient of some of its rows; 0 elsewhere."""

    def scatter() -> ContentTensor:
        total = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        if differ:
            total = total.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=content.group)
        shapes = part_shapes(content.layout, this_rank(), content.shape)
        parts = [torch.zeros(one, dtype=total.dtype, device=content.device) for one in shapes]
        gradients = content.with_parts(parts)
        _put(gradients, rows, total)
        return wrap(gradients)

    def back(gradient: torch.Tensor) -> torch.Tensor:
        return rows_of(lay_out_gradient(content, gradient), rows, differ)

    return linear(scatter, back, gradient)


def _fetched(content: Content, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of a tensor on all ranks; each sends its part of them, in one collective."""
    table = torch.empty(len(rows), *content.shape[1:], dtype=content.dtype, device=content.device)
    regions, ranks = _table_regions(content, rows), members(content.group)
    own = [table.new_empty(0)]
    for shard, region in zip(content.shards, regions[this_rank()], strict=True):
        own.append(shard.tensor.index_select(0, _places_in(shard, rows[region[0]])).reshape(-1))
    flat = torch.cat(own)
    longest = max(sum(table[one].numel() for one in regions[rank]) for rank in ranks)
    padded = flat.new_zeros(longest)
    padded[: len(flat)] = flat
    # As bytes: backends do not know all dtypes.
    gathered = _gathered(padded.view(torch.uint8), content)
    for rank, sent in zip(ranks, gathered, strict=True):
        values = sent.view(flat.dtype)
        for region in regions[rank]:
            part = table[region]
            part.copy_(values[: part.numel()].view(part.shape))
            values = values[part.numel() :]
    return table


Regions = defaultdict[int, list[tuple[slice, ...]]]
"""For each rank, the regions of a table that its shards have."""


def _table_regions(content: Content, rows: torch.Tensor) -> Regions:
    regions: Regions = defaultdict(list)
    boxes = [shard.box for shard in content.shards_metadata]
    ends = [(box.start[0], box.stop[0]) for box in boxes]
    edges = torch.tensor(ends, dtype=torch.int64, device=rows.device).reshape(-1, 2)
    places = torch.searchsorted(rows, edges).tolist()
    for shard, box, (start, stop) in zip(content.shards_metadata, boxes, places, strict=True):
        assert shard.rank is not None
        others = map(slice, box.start[1:], box.stop[1:])
        regions[shard.rank].append((slice(start, stop), *others))
    return regions


def _put(content: Content, rows: torch.Tensor, table: torch.Tensor) -> None:
    """Write rows of a table into this rank's shards."""
    regions = _table_regions(content, rows)[this_rank()]
    for shard, region in zip(content.shards, regions, strict=True):
        places = _places_in(shard, rows[region[0]])
        shard.tensor.index_copy_(0, places, table[region].to(content.device))


def _places_in(shard: Shard, rows: torch.Tensor) -> torch.Tensor:
    return rows.to(shard.tensor.device) - shard.metadata.shard_offsets[0]
