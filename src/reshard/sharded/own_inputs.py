"""embedding, embedding_bag and linear of plain inputs on a sharded weight.

Inputs that are the same on all ranks are one input: the result is a ShardedTensor, and a loss of it
counts once. Inputs that differ are each rank's own batch, as in torch.distributed._shard: every
rank gets the plain result for its own inputs, and the gradient of the weight is the sum of what
all ranks' losses give it. Ranks tell each other a hash of their inputs to know which it is.

    table    rows 0-5 on rank 0, rows 6-11 on rank 1
    rank 0   looks up 3, 9, 9    }  both get rows 3, 4 and 9 of the table, and each does
    rank 1   looks up 4, 9       }  the lookup of its own with those
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn import functional as F

from reshard.errors import OperationError
from reshard.sharded.content import Content, materialized, members
from reshard.sharded.fingerprints import digest
from reshard.sharded.gradients import as_laid_out, replicated
from reshard.sharded.telling import all_told, numbers_of_all
from reshard.sharded.tensor import ShardedTensor, wrap
from reshard.tensors.kinds import this_rank

__all__ = ["on_inputs"]


def on_inputs(func: Any, args: Any, kwargs: Any, otherwise: Callable[[Any, Any], Any]) -> Any:
    """Call one of these functions; ``otherwise`` does it for inputs that all ranks have alike."""
    given = _named(func, args, kwargs)
    weight, source = given.get("weight"), given.get("input")
    if not isinstance(weight, ShardedTensor) or weight._content.layout.reduce is not None:
        return otherwise(args, kwargs)
    if isinstance(source, ShardedTensor) and func is not F.embedding_bag:
        return otherwise(args, kwargs)
    if not isinstance(source, torch.Tensor) or source.is_meta or torch.compiler.is_compiling():
        return otherwise(args, kwargs)  # there are no values to compare
    given = {name: _plain(name, value) for name, value in given.items()}
    call = _Call(func, given, weight)
    asked = call.compared()
    if asked.own:
        return call.on_rows(asked)
    if func is F.linear or (func is F.embedding and call.suits_dtensor):
        return otherwise(args, kwargs)
    return replicated(call.on_rows(asked), weight._content.group)


@dataclass(frozen=True)
class _Asked:
    """What ranks ask of a weight."""

    own: bool
    """Whether ranks have inputs of their own."""
    rows: torch.Tensor
    """The rows that some rank needs, each once, in rising order."""


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of such a function on a sharded weight."""

    func: Any
    given: dict[str, Any]
    weight: ShardedTensor

    @property
    def is_lookup(self) -> bool:
        return self.func is not F.linear

    @property
    def suits_dtensor(self) -> bool:
        """Whether DTensor looks up rows in a weight that lies like this."""
        from reshard.sharded.computing import fits_dtensor

        plain = not any(self.given[name] for name in ("max_norm", "scale_grad_by_freq", "sparse"))
        return plain and fits_dtensor(self.weight._content)

    def compared(self) -> _Asked:
        """Whether ranks have inputs of their own, and what they ask for; all raise, or none."""
        content, problem, rows = self.weight._content, None, torch.empty(0, dtype=torch.int64)
        try:
            rows = self._checked_rows()
        except Exception as error:
            problem = error
        common = repr([self.given.get(name) for name in ("max_norm", "norm_type")])
        own = [self._hash(), digest(common), int(problem is not None), len(rows)]
        told = numbers_of_all(own, content.group, content.device)
        if any(row[2] for row in told):
            self._raise_together(problem)
        if len({row[1] for row in told}) > 1:
            self._refuse("ranks have different max_norm or norm_type: give all the same")
        if len({row[0] for row in told}) == 1:
            return _Asked(False, rows)
        return _Asked(True, _all_rows(rows, [row[3] for row in told], content))

    def _hash(self) -> int:
        """A number for the plain inputs, of which different ones have different numbers."""
        found = blake2b(digest_size=7)
        for name, value in sorted(self.given.items()):
            if name in ("weight", "bias") or not isinstance(value, torch.Tensor):
                continue
            found.update(repr((name, value.dtype, tuple(value.shape))).encode())
            # Bytes, because no dtype of numpy is like bfloat16.
            flat = materialized(value.detach()).contiguous().reshape(-1).view(torch.uint8)
            found.update(flat.cpu().numpy().data)
        return int.from_bytes(found.digest(), "big")

    def _checked_rows(self) -> torch.Tensor:
        """The rows that this rank needs; raises where the call would fail."""
        shape, dtype = tuple(self.weight.shape), self.weight.dtype
        if not self.is_lookup:
            bias = self.given["bias"]
            like = [torch.empty(shape, dtype=dtype, device="meta")]
            if bias is not None:
                like.append(torch.empty(bias.shape, dtype=bias.dtype, device="meta"))
            F.linear(self.given["input"].detach().to("meta"), *like)
            return torch.empty(0, dtype=torch.int64)
        index = self.given["input"]
        rows: torch.Tensor = torch.unique(index)
        if len(rows) and not (int(rows[0]) >= 0 and int(rows[-1]) < shape[0]):
            wrong = int(rows[0]) if int(rows[0]) < 0 else int(rows[-1])
            raise IndexError(f"index {wrong} is out of range: the weight has {shape[0]} rows")
        self._done_with(torch.zeros(len(rows), 1, dtype=dtype, device=index.device), rows)
        return rows.to(torch.int64)

    def _raise_together(self, problem: Exception | None) -> None:
        content = self.weight._content
        told = all_told(None if problem is None else str(problem), content.group, content.device)
        ranks = members(content.group)
        rank, text = next(one for one in zip(ranks, told, strict=True) if one[1] is not None)
        raise self._refusal(f"on rank {rank}: {text.splitlines()[0][:300]}") from problem

    def _refuse(self, why: str) -> None:
        raise self._refusal(why)

    def _refusal(self, why: str) -> OperationError:
        return OperationError(
            f"{self.func.__name__} with a weight of shape {list(self.weight.shape)} and layout "
            f'"{self.weight.cut}" cannot be done on any rank: {why}'
        )

    def on_rows(self, asked: _Asked) -> torch.Tensor:
        """The result for this rank's inputs, with the rows that are asked for."""
        if not self.is_lookup:
            bias = self.given["bias"]
            if isinstance(bias, ShardedTensor):
                bias = rows_of(bias, None, asked.own)
            table = rows_of(self.weight, None, asked.own)
            return F.linear(self.given["input"], table, bias)
        if self.given["max_norm"] is not None:
            self._renormalize(asked.rows)
        return self._done_with(rows_of(self.weight, asked.rows, asked.own), asked.rows)

    def _renormalize(self, rows: torch.Tensor) -> None:
        """Shorten the rows that some rank looks up, as the functions do that have a max_norm."""
        content = self.weight._content
        with torch.no_grad():
            table = _fetched(content, rows)
            every = torch.arange(len(rows), device=table.device)
            torch.embedding_renorm_(
                table, every, float(self.given["max_norm"]), float(self.given["norm_type"])
            )
            _put(content, rows, table)

    def _done_with(self, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The function, with a table of these rows alone."""
        index = self.given["input"]
        found = torch.searchsorted(rows, index.to(rows.dtype)).to(index.dtype)
        padding = self._padding(rows)
        given = {**self.given, "input": found, "weight": table, "padding_idx": padding}
        return cast(torch.Tensor, self.func(**{**given, "max_norm": None}))

    def _padding(self, rows: torch.Tensor) -> int | None:
        """Where the padding is among the rows; None where nobody looks it up."""
        padding, count = self.given["padding_idx"], self.weight.shape[0]
        if padding is None:
            return None
        if not -count <= padding < count:
            raise IndexError(f"padding_idx {padding} is out of range: the weight has {count} rows")
        at = (rows == padding % count).nonzero()
        return int(at[0]) if len(at) else None


@cache
def _signature(func: Any) -> inspect.Signature:
    if func is F.linear:  # builtin, so that it has none
        return inspect.signature(lambda input, weight, bias=None: None)
    return inspect.signature(func)


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _plain(name: str, value: Any) -> Any:
    """An input that every rank has in full, where it is sharded; weights stay what they are."""
    if name in ("weight", "bias") or not isinstance(value, ShardedTensor):
        return value
    return value.full_tensor()


def _all_rows(rows: torch.Tensor, counts: list[int], content: Content) -> torch.Tensor:
    """The rows that any rank needs."""
    padded = torch.zeros(max(counts), dtype=torch.int64, device=content.device)
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(found, padded, group=content.group)
    asked = [one[:count] for one, count in zip(found, counts, strict=True)]
    union: torch.Tensor = torch.unique(torch.cat(asked))
    return union.to(rows.device)


def rows_of(weight: ShardedTensor, rows: torch.Tensor | None, own: bool) -> torch.Tensor:
    """Some rows of a sharded tensor on all ranks, or all of them; gradients flow back.

    The gradients of all ranks are added up where they are each rank's ``own``; they are otherwise
    taken to be the same.
    """
    found: torch.Tensor = _rows_of(weight, rows, own)
    return found


class _RowsOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: ShardedTensor, rows: Any, own: bool) -> torch.Tensor:
        ctx.content, ctx.rows, ctx.own = replace(weight._content, parts=()), rows, own
        return _fetched(weight._content, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None]:
        return _gradient_of(gradients[0], ctx.content, ctx.rows, ctx.own), None, None


class _GradientOf(torch.autograd.Function):
    """The gradient of a tensor, of which only some rows have one."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, content: Content, rows: Any, own: bool) -> Any:
        from reshard.sharded.making import shapes_here

        ctx.content, ctx.rows, ctx.own = content, rows, own
        total = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        if own:
            total = total.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=content.group)
        shapes = shapes_here(content)
        made = [torch.zeros(one, dtype=total.dtype, device=content.device) for one in shapes]
        gradients = content.with_parts(made)
        _put(gradients, rows, total)
        return wrap(gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None, None]:
        laid_out = as_laid_out(ctx.content, gradients[0])
        return rows_of(laid_out, ctx.rows, ctx.own), None, None, None


_rows_of: Callable[..., Any] = _RowsOf.apply
_gradient_of: Callable[..., Any] = _GradientOf.apply


def _fetched(content: Content, rows: torch.Tensor | None) -> torch.Tensor:
    """Some rows of a tensor on all ranks; each sends what it has of them, in one collective."""
    count = content.shape[0] if rows is None else len(rows)
    made = torch.empty(count, *content.shape[1:], dtype=content.dtype, device=content.device)
    spots = _spots(content, rows)
    pairs = zip(content.shards, spots.get(this_rank(), []), strict=True)
    mine = [_taken(one.tensor, one.metadata.shard_offsets[0], at, rows) for one, at in pairs]
    flat = torch.cat([one.reshape(-1) for one in mine]) if mine else made.new_empty(0)
    for rank, all_of_rank in _exchanged(content, flat, spots, made).items():
        begin = 0
        for at in spots.get(rank, []):
            part = made[at]
            part.copy_(all_of_rank[begin : begin + part.numel()].view(part.shape))
            begin += part.numel()
    return made


def _exchanged(
    content: Content, flat: torch.Tensor, spots: dict[int, list[Any]], made: torch.Tensor
) -> dict[int, torch.Tensor]:
    """What every rank has, by rank; as bytes, because not all dtypes are known to all backends."""
    ranks = members(content.group)
    if not dist.is_initialized() or len(ranks) == 1:
        return {ranks[0]: flat}
    sizes = [sum(made[at].numel() for at in spots.get(rank, [])) for rank in ranks]
    padded = flat.new_zeros(max(sizes))
    padded[: len(flat)] = flat
    own = padded.view(torch.uint8)
    found = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(found, own, group=content.group)
    return {rank: one.view(flat.dtype) for rank, one in zip(ranks, found, strict=True)}


def _spots(content: Content, rows: torch.Tensor | None) -> dict[int, list[tuple[slice, ...]]]:
    """Where the shards of every rank are, in a table of some rows."""
    found: dict[int, list[tuple[slice, ...]]] = {}
    shards = content.shards_metadata
    ends = [(one.shard_offsets[0], one.shard_offsets[0] + one.shard_sizes[0]) for one in shards]
    if rows is not None:
        edges = torch.tensor(ends, dtype=torch.int64, device=rows.device).reshape(-1, 2)
        ends = [(a, b) for a, b in torch.searchsorted(rows, edges).tolist()]
    for shard, (start, stop) in zip(shards, ends, strict=True):
        assert shard.rank is not None
        others = zip(shard.shard_offsets[1:], shard.shard_sizes[1:], strict=True)
        spot = (slice(start, stop), *(slice(one, one + size) for one, size in others))
        found.setdefault(shard.rank, []).append(spot)
    return found


def _taken(
    shard: torch.Tensor, offset: int, at: tuple[slice, ...], rows: torch.Tensor | None
) -> torch.Tensor:
    """What a shard has of some rows."""
    if rows is None:
        return shard
    return shard.index_select(0, rows[at[0]].to(shard.device) - offset)


def _put(content: Content, rows: torch.Tensor | None, table: torch.Tensor) -> None:
    """Write rows of a table into this rank's shards."""
    spots = _spots(content, rows).get(this_rank(), [])
    for shard, at in zip(content.shards, spots, strict=True):
        values = table[at].to(shard.tensor.device)
        if rows is None:
            shard.tensor.copy_(values)
        else:
            places = rows[at[0]].to(shard.tensor.device) - shard.metadata.shard_offsets[0]
            shard.tensor.index_copy_(0, places, values)
