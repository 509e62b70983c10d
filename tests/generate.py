"""Random pairs of layouts over random meshes, for the fuzzer and, steered, for hypothesis.

Every word of the notation is drawn so that it is valid: sizes add up, and a cut that needs an exact
length stands only where all ranks agree on it. A destination wants only what the source holds,
except in the cases that expect a CoverageError. All choices go through one `random.Random`, so that
the fuzzer seeds it and hypothesis steers it (see `tests.strategies`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from tests import oracle
from tests.cases import DTYPES, Case, Side, covered
from tests.oracle import Boxes

AXES = ("dp", "tp", "pp", "cp", "ep", "x")
MAX_RANKS = 12
NUM_RANKS = (1, 2, 2, 3, 4, 4, 6, 8, 8, 9, 12)
RANK_IDS = range(21)
MAX_ELEMENTS = (40, 120, 120, 400, 400, 2000)
"""Elements of a tensor: mostly few, because few elements have all the corner cases."""
SUM_DTYPES = ("float32", "float64", "int32", "int64")
MEMORY = (None, None, None, None, None, 512, 2048, 8192, 65536)
SIZES_OF_AXES = {
    num: [sizes for k in (1, 2, 3) for sizes in itertools.product((1, 2, 3, 4), repeat=k)
          if math.prod(sizes) == num]
    for num in range(1, MAX_RANKS + 1)
}  # fmt: skip


@dataclass(frozen=True)
class Mesh:
    """The axes of a mesh and its ranks, before it is written down."""

    axes: dict[str, int]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        text = " ".join(f"{axis}={size}" for axis, size in self.axes.items())
        if self.ranks == tuple(range(len(self.ranks))):
            return text
        return f"{text} @ {rank_text(self.ranks)}"


def rank_text(ranks: Iterable[int]) -> str:
    """Ranks as text, runs as ranges: '8-10,3'."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def chance(rng: Random, percent: int) -> bool:
    return rng.randrange(100) < percent


def some(rng: Random, items: Sequence, at_least: int = 0) -> list:
    """Some of the items, in random order."""
    return rng.sample(list(items), rng.randint(min(at_least, len(items)), len(items)))


def axes_of(rng: Random, num_ranks: int) -> dict[str, int]:
    sizes = rng.choice(SIZES_OF_AXES[num_ranks])
    if 1 in sizes and chance(rng, 70):
        sizes = rng.choice([s for s in SIZES_OF_AXES[num_ranks] if 1 not in s] or [sizes])
    return dict(zip(rng.sample(AXES, len(sizes)), sizes, strict=True))


def mesh(rng: Random, within: range = RANK_IDS) -> Mesh:
    """A mesh of some of these ranks, which begin with 0."""
    num_ranks = rng.choice([num for num in NUM_RANKS if num <= len(within)])
    ranks = list(range(num_ranks))
    style = rng.choice(("contiguous", "offset", "permuted", "scattered"))
    if style == "offset":
        first = rng.randint(0, len(within) - num_ranks)
        ranks = [first + rank for rank in ranks]
    elif style == "permuted":
        rng.shuffle(ranks)
    elif style == "scattered":
        ranks = rng.sample(within, num_ranks)
    return Mesh(axes_of(rng, num_ranks), tuple(ranks))


def other_mesh(rng: Random, first: Mesh, within: range = RANK_IDS) -> Mesh:
    """A mesh for the other side: the same, permuted, overlapping or disjoint."""
    num_ranks = len(first.ranks)
    style = rng.choice(("same", "same ranks", "permuted", "any", "disjoint"))
    if style == "same":
        return first
    if style == "same ranks":
        return Mesh(axes_of(rng, num_ranks), first.ranks)
    if style == "permuted":
        axes = axes_of(rng, num_ranks) if chance(rng, 50) else first.axes
        return Mesh(axes, tuple(rng.sample(first.ranks, num_ranks)))
    second = mesh(rng, within)
    left = [rank for rank in within if rank not in first.ranks]
    if style == "disjoint" and len(left) >= len(second.ranks):
        return replace(second, ranks=tuple(rng.sample(left, len(second.ranks))))
    return second


def shape(rng: Random) -> tuple[int, ...]:
    num_dims = rng.choice((0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4))
    limit = rng.choice(MAX_ELEMENTS)
    sizes: list[int] = []
    for left in range(num_dims, 0, -1):
        most = int((limit / max(1, math.prod(sizes))) ** (1 / left))
        kind = rng.randrange(30)
        sizes.append(0 if kind == 0 else 1 if kind < 4 else rng.randint(1, max(1, most)))
    rng.shuffle(sizes)
    return tuple(sizes)


def parts(rng: Random, total: int, num_parts: int) -> list[int]:
    """Sizes that add up to the total; some may be 0."""
    cuts = sorted(rng.randint(0, total) for _ in range(num_parts - 1))
    return [after - before for before, after in itertools.pairwise([0, *cuts, total])]


def lengths_after(word: str, lengths: set[int], axes: dict[str, int]) -> set[int]:
    """The lengths that ranks may have left after a word that acts on any of these lengths."""
    cuts = oracle.parse_cuts(word)
    places = [
        dict(zip(axes, at, strict=True)) for at in itertools.product(*map(range, axes.values()))
    ]
    return {len(oracle.kept_by_all(cuts, n, at, axes)) for n in lengths for at in places}


def plain_cut(rng: Random, axis: str, lengths: set[int], axes: dict[str, int]) -> str:
    kinds = ["", "", "*", ":", "~"] + ["["] * (len(lengths) == 1) * 2
    kind = rng.choice(kinds)
    if kind in ("", "~"):
        return axis + kind
    if kind == "[":
        return f"{axis}[{','.join(map(str, parts(rng, min(lengths), axes[axis])))}]"
    return f"{axis}{kind}{rng.choice((1, 2, 3, 4, 8))}"


def joined(rng: Random, cuts: list[str]) -> str:
    return cuts[0] if len(cuts) == 1 and chance(rng, 90) else f"({' '.join(cuts)})"


def plain_word(rng: Random, here: list[str], lengths: set[int], axes: dict[str, int]) -> str:
    """A word of cuts by these axes, without packed segments."""
    cuts: list[str] = []
    for axis in here:
        cuts.append(plain_cut(rng, axis, lengths, axes))
        lengths = lengths_after(cuts[-1], lengths, axes)
    return joined(rng, cuts)


def packed_cut(rng: Random, here: list[str], length: int, axes: dict[str, int], depth: int) -> str:
    """Packed segments: all cut alike by a prefix, or each with its own word over these axes."""
    num_segments = rng.randint(1, 4)
    sizes = parts(rng, length, num_segments)
    if length and length % num_segments == 0 and chance(rng, 40):
        sizes = [length // num_segments] * num_segments
    if here and chance(rng, 50):
        prefix = plain_word(rng, here, set(sizes), axes)
        return f"{prefix}{{{','.join(map(str, sizes))}}}"
    segments = []
    for size in sizes:
        own = word(rng, some(rng, here), {size}, axes, depth + 1)
        segments.append(str(size) if own == "-" and chance(rng, 50) else f"{size} {own}")
    return f"{{{', '.join(segments)}}}"


def word(
    rng: Random, here: list[str], lengths: set[int], axes: dict[str, int], depth: int = 0
) -> str:
    """A word for a dim (or a segment, or `flat`) that is cut by all these axes."""
    cuts: list[str] = []
    here = list(here)
    while here or (not cuts and depth == 0 and len(lengths) == 1 and chance(rng, 3)):
        if len(lengths) == 1 and depth < 2 and chance(rng, 25):
            num_axes = rng.randint(0, len(here))
            cuts.append(packed_cut(rng, here[:num_axes], min(lengths), axes, depth))
            del here[:num_axes]
        else:
            cuts.append(
                plain_cut(rng, here.pop(0), lengths, axes) if here else f"{{{min(lengths)}}}"
            )
        lengths = lengths_after(cuts[-1], lengths, axes)
    return joined(rng, cuts) if cuts else "-"


def with_dots(rng: Random, words: list[str]) -> str:
    """The words as text; a run of '-' sometimes as '...', which may also stand for no dim."""
    where = rng.randint(0, len(words))
    if words and not chance(rng, 40):
        return " ".join(words)
    end = where
    while end < len(words) and words[end] == "-":
        end += 1
    return " ".join([*words[:where], "...", *words[end:]])


@dataclass(frozen=True)
class Pending:
    """What a layout may say about sums: the operation and, for a destination, how many addends."""

    op: str
    num: int | None = None


def sum_axes(rng: Random, axes: dict[str, int], pending: Pending | None) -> list[str]:
    """Axes to sum over, or none where these axes cannot give the number of addends."""
    if pending is None:
        return []
    choices = [
        list(chosen) for k in (1, 2) for chosen in itertools.permutations(axes, k)
        if pending.num in (None, math.prod(axes[axis] for axis in chosen))
    ]  # fmt: skip
    return rng.choice(choices) if choices else []


def layout(rng: Random, on: Mesh, shape: tuple[int, ...], pending: Pending | None = None) -> str:
    """A valid layout of a tensor of this shape, without lost ranks."""
    summed = sum_axes(rng, on.axes, pending)
    roles: dict[str, list[str]] = {}
    dims = [f"dim {dim}" for dim in range(len(shape))]
    for axis in rng.sample(list(on.axes), len(on.axes)):
        if axis not in summed:
            role = rng.choice([*dims, *dims, *dims, "whole", "on", "flat"])
            roles.setdefault(role, []).append(axis)
    words = [
        word(rng, roles.get(dim, []), {size}, on.axes)
        for dim, size in zip(dims, shape, strict=True)
    ]
    text = with_dots(rng, words)
    suffixes = []
    if "on" in roles:
        kept = {axis: sorted(some(rng, range(on.axes[axis]), 1)) for axis in roles["on"]}
        suffixes.append("on " + " ".join(f"{a}={','.join(map(str, at))}" for a, at in kept.items()))
    if summed and pending:
        suffixes.append(f"{pending.op} {' '.join(summed)}")
    if "flat" in roles:
        lengths = {held.size for held in oracle.local_indices(str(on), text, shape).values()}
        suffixes.append(f"flat {word(rng, roles['flat'], lengths, on.axes)}")
    return " | ".join([text, *suffixes])


def grid(rng: Random, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The cells of a random grid over the shape."""
    spans = []
    for size in shape:
        cuts = sorted(
            {rng.randint(0, size) for _ in range(rng.choice((0, 0, 1, 2, 3)))} - {0, size}
        )
        spans.append(list(itertools.pairwise([0, *cuts, size])))
    cells = itertools.product(*spans)
    return [(tuple(lo for lo, _ in cell), tuple(hi for _, hi in cell)) for cell in cells]


def boxes(rng: Random, ranks: Sequence[int], shape: tuple[int, ...], complete: bool) -> Boxes:
    """Boxes on ranks: cells of one grid with replicas, and other grids that overlap them partly."""
    ranks = rng.sample(list(ranks), len(ranks))
    num_first = rng.randint(1, len(ranks))
    held: dict[int, list] = {rank: [] for rank in ranks}
    for cell in grid(rng, shape):
        for rank in rng.sample(ranks[:num_first], rng.randint(1, min(3, num_first))):
            if complete or chance(rng, 60):
                held[rank].append(cell)
    for rank in ranks[num_first:]:
        held[rank] = some(rng, grid(rng, shape))[:4]
    for rank in ranks:
        rng.shuffle(held[rank])
        if not held[rank] and chance(rng, 30):
            del held[rank]
    return held


def side(rng: Random, on: Mesh, shape: tuple[int, ...], pending: Pending | None = None) -> Side:
    return Side(str(on), layout(rng, on, shape, pending))


def with_losses(rng: Random, have: Side, want: Side, shape: tuple[int, ...]) -> Side:
    """The source with ranks lost or boxes dropped, only such that nothing wanted is lost."""
    if have.boxes is None:
        ranks = sorted(have.held(shape))
        lost = rng.sample(ranks, rng.randint(1, max(1, len(ranks) // 2)))
        while lost:
            less = replace(have, layout=f"{have.layout} | without {rank_text(sorted(lost))}")
            if covered(less, want, shape):
                return less
            lost.pop()
        return have
    for rank in some(rng, list(have.boxes)):
        fewer = {r: list(cells)[: -1 if r == rank else None] for r, cells in have.boxes.items()}
        less = replace(have, boxes=fewer)
        have = less if covered(less, want, shape) else have
    return have


def lossy(rng: Random, case: Case) -> Case:
    """The case with a rank of the source lost, and the error that this must give, if any."""
    ranks = sorted(case.have.held(case.shape))
    lost = rank_text(sorted(some(rng, ranks, 1)))
    have = replace(case.have, layout=f"{case.have.layout} | without {lost}")
    error = None if covered(have, case.want, case.shape) else "CoverageError"
    return replace(case, have=have, error=error)


def random_case(
    rng: Random,
    sums: bool | None = None,
    by_boxes: bool | None = None,
    within: range = RANK_IDS,
) -> Case:
    """A pair of layouts; `sums` and `by_boxes` say whether to have pending sums and boxes."""
    sums = chance(rng, 15) if sums is None else sums
    by_boxes = chance(rng, 20) if by_boxes is None else by_boxes
    of_shape, first = shape(rng), mesh(rng, within)
    second = other_mesh(rng, first, within)
    dtype = rng.choice(SUM_DTYPES if sums else tuple(DTYPES))
    memory = rng.choice(MEMORY)
    op = None
    if sums:
        ops = oracle.OPS if dtype.startswith("float") else tuple(set(oracle.OPS) - {"avg"})
        op = Pending(rng.choice(sorted(ops)))
    have = side(rng, first, of_shape, op)
    want = side(rng, second, of_shape)
    if op and have.num_addends > 1 and chance(rng, 20):
        want = side(rng, second, of_shape, Pending(op.op, have.num_addends))
    if by_boxes:
        which = rng.choice(("have", "want", "both"))
        if which != "want" and not sums:
            have = Side(boxes=boxes(rng, first.ranks, of_shape, complete=True))
        if which != "have" or sums:
            want = Side(boxes=boxes(rng, second.ranks, of_shape, complete=False))
    case = Case(have, want, of_shape, dtype, memory)
    if chance(rng, 10) and want.boxes is None:
        lost = rank_text(sorted(rng.sample(sorted(second.ranks), 1)))
        case = replace(case, want=replace(want, layout=f"{want.layout} | without {lost}"))
    if chance(rng, 20):
        return replace(case, have=with_losses(rng, case.have, case.want, of_shape))
    return lossy(rng, case) if have.boxes is None and chance(rng, 3) else case


def random_side(rng: Random) -> tuple[Side, tuple[int, ...]]:
    """A layout and a shape that it fits, with all suffixes: what is said of one layout alone."""
    of_shape, on = shape(rng), mesh(rng)
    if chance(rng, 15):
        return Side(boxes=boxes(rng, on.ranks, of_shape, complete=chance(rng, 50))), of_shape
    drawn = side(rng, on, of_shape, Pending(rng.choice(oracle.OPS)) if chance(rng, 20) else None)
    if chance(rng, 20):
        lost = rank_text(sorted(some(rng, on.ranks, 1)))
        drawn = replace(drawn, layout=f"{drawn.layout} | without {lost}")
    return drawn, of_shape
