"""Buckets: tensors flattened one after the other, padded, and cut over an axis as one.

FSDP1, ZeRO and Megatron's distributed optimizer keep parameters this way: a rank holds one range of
the bucket, and so a piece of some tensors, all of others and nothing of the rest.

    bucket   | a a a a a a | b b | c c c c c c c . |      (. is padding)
    ranks    |   rank 0    |   rank 1   |  rank 2  |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from reshard.errors import LayoutError
from reshard.layout.layout import Layout, check_shape
from reshard.layout.mesh import Mesh

__all__ = ["flat_bucket"]


def flat_bucket(
    shapes: Mapping[str, Sequence[int]],
    mesh: Mesh,
    axis: str,
    *,
    align: int = 1,
    pad_to: int = 1,
) -> dict[str, Layout]:
    """The layout of each tensor of a bucket that is cut into equal ranges along an axis.

    Each tensor starts at a multiple of ``align`` elements; the length of the bucket is rounded up
    to a multiple of ``pad_to`` and of the size of the axis.

    >>> layouts = flat_bucket({"a": (2, 3), "b": (2,), "c": (7,)}, Mesh(dp=3), "dp")
    >>> [str(layout) for layout in layouts.values()]
    ['... | flat dp[5,1,0]', '... | flat dp[0,2,0]', '... | flat dp[0,2,5]']
    """
    if axis not in mesh.axes:
        raise LayoutError(
            f'"{axis}" is not an axis of mesh {mesh}: use one of {", ".join(mesh.axes)}'
        )
    if align < 1 or pad_to < 1:
        raise LayoutError(f"align={align} and pad_to={pad_to}: both are at least 1")
    num = mesh.axes[axis]
    starts, length = _places(shapes, align)
    total = _up(_up(length, pad_to), num)
    share = total // num
    return {
        name: Layout(
            mesh, f"... | flat {axis}[{','.join(map(str, _cut(start, size, share, num)))}]"
        )
        for name, start, size in starts
    }


def _places(
    shapes: Mapping[str, Sequence[int]], align: int
) -> tuple[list[tuple[str, int, int]], int]:
    """The name, first element and size of each tensor, and the length of all."""
    places, end = [], 0
    for name, shape in shapes.items():
        check_shape(shape)
        start = _up(end, align)
        places.append((name, start, prod(shape)))
        end = start + prod(shape)
    return places, end


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _cut(start: int, size: int, share: int, num: int) -> Iterator[int]:
    """How much of a tensor each range of the bucket holds."""
    for number in range(num):
        low, high = number * share, (number + 1) * share
        yield max(min(start + size, high) - max(start, low), 0)
