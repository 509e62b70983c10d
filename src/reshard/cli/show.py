"""``reshard show``: which rank holds which part of a tensor."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import click

from reshard.cli.options import (
    json_option,
    model_config,
    model_option,
    parse_model_mesh,
    parse_shape,
)
from reshard.cli.output import fitted, print_json, print_lines, terminal_width, wants_boxes
from reshard.errors import ArgumentError, LayoutError
from reshard.text import align, and_more, format_shape, quoted

if TYPE_CHECKING:
    from reshard.layout.layout import Layout
    from reshard.layout.mesh import Mesh


MAX_PIECES = 1_000_000


@click.command()
@click.argument("layout", required=False, metavar="[LAYOUT|TENSOR]")
@click.option("--mesh", help='The ranks, such as "dp=2 tp=4", where LAYOUT does not name them.')
@click.option("--shape", help="The shape of the tensor, such as 8192,4096.")
@model_option("A model: llama-3-8b, ..., a config.json or its folder.")
@click.option("--rank", type=int, help="Only what this rank holds, box by box.")
@json_option
def show(
    layout: str | None,
    mesh: str | None,
    shape: str | None,
    model: str | None,
    rank: int | None,
    as_json: bool,
) -> None:
    """Draw which rank holds which part of a tensor.

    \b
    reshard show "dp=2 tp=4: (dp tp) -" --shape 8192,4096
    reshard show --model llama-3-8b --mesh tp=4   all layouts, by the rules
    reshard show --model llama-3-8b --mesh tp=4 lm_head.weight
    """
    from reshard.show.terminal import Span, draw, pieces_table

    if model is not None:
        if mesh is None:
            raise ArgumentError('--model needs the ranks: give --mesh, such as --mesh "tp=4"')
        if rank is not None and layout is None:
            raise ArgumentError("--rank is about one tensor: name it, such as lm_head.weight")
        shown = _of_model(model, layout, parse_model_mesh(mesh, "--mesh"), as_json)
        if shown is None:
            return
        one, sizes = shown
    elif layout is None or shape is None:
        missing = "'LAYOUT'" if layout is None else "'--shape'"
        raise ArgumentError(f'{missing} is missing: reshard show "tp=4: tp -" --shape 8192,4096')
    else:
        sizes, one = parse_shape(shape), _layout(layout.strip(), mesh)
    one.dims(sizes)
    if rank is not None:
        one.mesh.coords(rank)
    if as_json:
        _print_json(one, sizes, rank)
    elif rank is None:
        print_lines(draw(one, sizes, width=terminal_width(), unicode=wants_boxes()))
    else:
        text = fitted("\n".join(pieces_table(one, rank, sizes)))
        print_lines([[Span(line)] for line in text.splitlines()])


def _layout(text: str, mesh: str | None) -> Layout:
    from reshard.layout.layout import Layout
    from reshard.layout.mesh import Mesh

    if mesh is None:
        return Layout.parse(text)
    if ":" in text.partition("|")[0] and "=" in text.partition(":")[0]:
        raise ArgumentError(f'"{text}" names a mesh, and so does --mesh: leave one out')
    return Layout(Mesh.parse(mesh), text)


def _of_model(
    model: str, tensor: str | None, mesh: Mesh, as_json: bool
) -> tuple[Layout, tuple[int, ...]] | None:
    """The layout and the shape of one tensor of a model; prints all layouts where none is named."""
    from reshard.rules import Rules, models

    config = model_config(model)
    shapes = {name: shape for name, (shape, _) in models.tensors(config).items()}
    layouts = Rules.load(config=config, replicate=" ".join(mesh.axes)).layouts(shapes, mesh)
    if tensor is not None:
        if tensor.strip() not in shapes:
            import difflib

            near = difflib.get_close_matches(tensor, shapes, n=3) or [*shapes][:3]
            raise ArgumentError(f"{model} has no tensor {quoted(tensor)}: try {and_more(near)}")
        return layouts[tensor.strip()], shapes[tensor.strip()]
    if as_json:
        listed = {name: {"shape": shapes[name], **layouts[name].to_dict()} for name in shapes}
        print_json("show.model", {"model": model, "tensors": listed})
        return None
    counts = Counter[tuple[str, str, str]]()
    for name, layout in layouts.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "{i}", name)
        text = str(layout).partition(" | on ")[0]
        counts[pattern, format_shape(shapes[name]), text] += 1
    table = [("tensor", "shape", "layout", "count")]
    table += [(*row, str(number)) for row, number in counts.items()]
    print(fitted("\n".join(align(table, right={3}))))
    return None


def _print_json(layout: Layout, shape: tuple[int, ...], rank: int | None) -> None:
    from reshard.show.holdings import num_boxes

    boxes = num_boxes(layout, shape)
    if rank is None and boxes > MAX_PIECES:
        raise LayoutError(
            f'layout "{layout}" has {boxes} boxes for shape {shape}, and at most {MAX_PIECES} '
            "are listed: ask for one rank with --rank"
        )
    ranks = []
    for one in layout.ranks if rank is None else [rank]:
        pieces = [
            {
                "start": piece.box.start,
                "stop": piece.box.stop,
                "offset": piece.offset,
                "strides": piece.strides,
            }
            for piece in layout.pieces(one, shape)
        ]
        about = {"rank": one, "coords": layout.mesh.coords(one)}
        ranks.append({**about, "local_shape": layout.local_shape(one, shape), "pieces": pieces})
    print_json("show", {**layout.to_dict(), "shape": shape, "ranks": ranks})
