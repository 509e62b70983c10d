"""``reshard show``: which rank holds which part of a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reshard.errors import LayoutError

if TYPE_CHECKING:
    from reshard.layout.layout import Layout

__all__ = ["show"]

MAX_PIECES = 1_000_000


@click.command()
@click.argument("layout")
@click.option("--mesh", required=True, help='The ranks, such as "dp=2 tp=4" or "tp=2 @ 8-9".')
@click.option("--shape", required=True, help="The shape of the tensor, such as 8192,4096.")
@click.option("--rank", type=int, help="Only what this rank holds, box by box.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(layout: str, mesh: str, shape: str, rank: int | None, as_json: bool) -> None:
    """Draw which rank holds which part of a tensor.

    \b
    reshard show "(dp tp) -" --mesh "dp=2 tp=4" --shape 8192,4096
    """
    from reshard.cli.parsing import parse_shape
    from reshard.layout.layout import Layout
    from reshard.layout.mesh import Mesh

    sizes = parse_shape(shape)
    cut = Layout(Mesh.parse(mesh), layout.strip())
    cut.dims(sizes)
    if rank is not None:
        cut.mesh.coords(rank)
    if as_json:
        _print_json(cut, sizes, rank)
    else:
        _print(cut, sizes, rank)


def _print(layout: Layout, shape: tuple[int, ...], rank: int | None) -> None:
    from reshard.cli.output import print_lines, terminal_width, wants_boxes
    from reshard.show.ink import Span
    from reshard.show.terminal import draw, pieces_table

    if rank is None:
        print_lines(draw(layout, shape, width=terminal_width(), unicode=wants_boxes()))
    else:
        print_lines([[Span(line)] for line in pieces_table(layout, rank, shape)])


def _print_json(layout: Layout, shape: tuple[int, ...], rank: int | None) -> None:
    from reshard.cli.output import print_json
    from reshard.show.picture import num_boxes

    ranks = layout.ranks if rank is None else [rank]
    pieces = num_boxes(layout, shape)
    if rank is None and pieces > MAX_PIECES:
        raise LayoutError(
            f'layout "{layout}" has {pieces} boxes for shape {shape}, and at most {MAX_PIECES} '
            "are listed: ask for one rank with --rank"
        )
    print_json(
        {
            "schema": "reshard.show/1",
            **layout.to_dict(),
            "shape": list(shape),
            "ranks": [_held(layout, one, shape) for one in ranks],
        }
    )


def _held(layout: Layout, rank: int, shape: tuple[int, ...]) -> dict[str, Any]:
    return {
        "rank": rank,
        "coords": layout.mesh.coords(rank),
        "local_shape": list(layout.local_shape(rank, shape)),
        "pieces": [
            {
                "start": list(piece.box.start),
                "stop": list(piece.box.stop),
                "offset": piece.offset,
                "strides": list(piece.strides),
            }
            for piece in layout.pieces(rank, shape)
        ],
    }
