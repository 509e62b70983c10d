"""One kernel that copies all blocks of a launch table. Needs Triton: import it only to launch.

Every program copies one tile, which belongs to one block: it reads the block's row, turns the
numbers of its units into indices by multiplications, and moves each unit with one load and one
store per thread, 16 bytes wide where the row permits. Where the two sides of a long row are not on
the same grid, it loads the aligned words that 16 bytes of the destination come from, shifts them,
and stores the two ends of the row in smaller pieces.
"""
# Where Triton is not installed, mypy takes its decorator for untyped.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from reshard.live.copy.gpu_table import FIELDS as NUM_FIELDS
from reshard.live.copy.gpu_table import ROWS as ROWS_UNIT
from reshard.live.copy.gpu_table import SHIFTED as SHIFTED_UNIT

FIELDS = tl.constexpr(NUM_FIELDS)
SHIFTED = tl.constexpr(SHIFTED_UNIT)
ROWS = tl.constexpr(ROWS_UNIT)
FIRST_TILE = tl.constexpr(4)
UNITS = tl.constexpr(5)
UNIT = tl.constexpr(6)
WIDTHS = tl.constexpr(7)
MULTIPLIERS = tl.constexpr(10)
SHIFTS = tl.constexpr(13)
SOURCE_STRIDES = tl.constexpr(16)
DESTINATION_STRIDES = tl.constexpr(20)
LARGEST_E4M3 = tl.constexpr(464.0)


@triton.jit
def copy_tiles(
    rows: tl.tensor,
    tiles: tl.tensor,
    bases: tl.tensor,
    LANES: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    ONLY: tl.constexpr,
) -> None:
    """Copy bytes; ``ONLY`` is the one kind of units in the table, or 0 if there are several."""
    row = _row_of_tile(rows, tiles)
    if ONLY == ROWS:
        _copy_row(row, bases, tl.load(row + UNIT) - ROWS, LANES, NUM_DIMS, WIDE)
    elif ONLY == SHIFTED:
        source, destination, mask, place = _addresses(row, bases, LANES, NUM_DIMS, WIDE)
        _copy_shifted(source, destination, mask, place, tl.load(row + UNIT) - SHIFTED)
    elif ONLY:
        source, destination, mask, _ = _addresses(row, bases, LANES, NUM_DIMS, WIDE)
        _copy_units(source, destination, mask, ONLY)
    else:
        unit = tl.load(row + UNIT)
        if unit >= ROWS:
            _copy_row(row, bases, unit - ROWS, LANES, NUM_DIMS, WIDE)
        else:
            source, destination, mask, place = _addresses(row, bases, LANES, NUM_DIMS, WIDE)
            if unit >= SHIFTED:
                _copy_shifted(source, destination, mask, place, unit - SHIFTED)
            elif unit == 16:
                _copy_units(source, destination, mask, 16)
            elif unit == 8:
                _copy_units(source, destination, mask, 8)
            elif unit == 4:
                _copy_units(source, destination, mask, 4)
            elif unit == 2:
                _copy_units(source, destination, mask, 2)
            else:
                _copy_units(source, destination, mask, 1)


@triton.jit
def cast_tiles(
    rows: tl.tensor,
    tiles: tl.tensor,
    bases: tl.tensor,
    LANES: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    TOGETHER: tl.constexpr,
    HAVE: tl.constexpr,
    WANT: tl.constexpr,
) -> None:
    """Copy elements from one dtype to another, ``TOGETHER`` at once where the row permits."""
    row = _row_of_tile(rows, tiles)
    source, destination, mask, _ = _addresses(row, bases, LANES, NUM_DIMS, WIDE)
    if tl.load(row + UNIT) == TOGETHER:
        _cast_units(source, destination, mask, TOGETHER, HAVE, WANT)
    else:
        _cast_units(source, destination, mask, 1, HAVE, WANT)


@triton.jit
def _row_of_tile(rows: tl.tensor, tiles: tl.tensor) -> tl.tensor:
    block = tl.load(tiles + tl.program_id(0))
    return rows + block.to(tl.int64) * FIELDS


@triton.jit
def _addresses(
    row: tl.tensor,
    bases: tl.tensor,
    LANES: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Addresses of the units of this tile on both sides, which there are, their place in a row."""
    unit = _first_unit(row, LANES) + tl.arange(0, LANES)
    mask = unit < tl.load(row + UNITS).to(tl.int32)
    source, destination, place = _places(row, bases, unit, NUM_DIMS, WIDE)
    return source, destination, mask, place


@triton.jit
def _first_unit(row: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """The number of this tile's first unit in its block."""
    return (tl.program_id(0) - tl.load(row + FIRST_TILE).to(tl.int32)) * LANES


@triton.jit
def _places(
    row: tl.tensor, bases: tl.tensor, unit: tl.tensor, NUM_DIMS: tl.constexpr, WIDE: tl.constexpr
) -> tl.tensor:
    """Addresses of units on both sides, and their place in a row, from their numbers."""
    source = tl.load(bases + tl.load(row)) + tl.load(row + 1)
    destination = tl.load(bases + tl.load(row + 2)) + tl.load(row + 3)
    rest = unit.to(tl.uint32)
    for inner in tl.static_range(NUM_DIMS):
        index = rest
        if inner < NUM_DIMS - 1:
            width = tl.load(row + WIDTHS + 2 - inner).to(tl.uint32)
            multiplier = tl.load(row + MULTIPLIERS + 2 - inner).to(tl.uint32)
            shift = tl.load(row + SHIFTS + 2 - inner).to(tl.uint32)
            rest = (tl.umulhi(index, multiplier) + index) >> shift
            index -= rest * width
        if inner == 0:
            place = index
        source += _distance(index, tl.load(row + SOURCE_STRIDES + 3 - inner), WIDE)
        destination += _distance(index, tl.load(row + DESTINATION_STRIDES + 3 - inner), WIDE)
    return source, destination, place


@triton.jit
def _distance(index: tl.tensor, stride: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """Bytes from index 0 to this one; 32 bits of them where the table permits."""
    if WIDE:
        return index.to(tl.int64) * stride
    else:
        return (index * stride.to(tl.uint32)).to(tl.int64)


@triton.jit
def _copy_units(
    source: tl.tensor, destination: tl.tensor, mask: tl.tensor, UNIT_BYTES: tl.constexpr
) -> None:
    if UNIT_BYTES == 16:
        word = tl.arange(0, 2)[None, :]
        have = source[:, None].to(tl.pointer_type(tl.int64)) + word
        want = destination[:, None].to(tl.pointer_type(tl.int64)) + word
        have = tl.max_contiguous(tl.multiple_of(have, [8, 16]), [1, 2])
        want = tl.max_contiguous(tl.multiple_of(want, [8, 16]), [1, 2])
        tl.store(want, tl.load(have, mask=mask[:, None]), mask=mask[:, None])
    elif UNIT_BYTES == 8:
        _copy_words(source, destination, mask, tl.int64)
    elif UNIT_BYTES == 4:
        _copy_words(source, destination, mask, tl.int32)
    elif UNIT_BYTES == 2:
        _copy_words(source, destination, mask, tl.int16)
    else:
        _copy_words(source, destination, mask, tl.int8)


@triton.jit
def _copy_row(
    row: tl.tensor,
    bases: tl.tensor,
    length: tl.tensor,
    LANES: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Copy a part of one row as `_copy_shifted` does; the first one also copies the row's ends.

    All units are shifted alike, so that most is computed once per tile.
    """
    source, destination, place = _places(row, bases, _first_unit(row, LANES), NUM_DIMS, WIDE)
    head = -destination & 15
    have, want, low = source + head, destination + head, (source + head) & 15
    lane = tl.arange(0, LANES)
    mask = lane < ((length - head) >> 4).to(tl.int32) - place.to(tl.int32)
    words = (have - low).to(tl.pointer_type(tl.uint64)) + _pairs(lane)
    words = tl.max_contiguous(tl.multiple_of(words, [8, 16]), [1, 2])
    a, b = tl.split(tl.load(words, mask=mask[:, None], other=0))
    c, d = tl.split(tl.load(words + 2, mask=(mask & (low > 0))[:, None], other=0))
    pair = want.to(tl.pointer_type(tl.uint64)) + _pairs(lane)
    pair = tl.max_contiguous(tl.multiple_of(pair, [8, 16]), [1, 2])
    tl.store(pair, _shift(a, b, c, d, low), mask=mask[:, None])
    if place == 0:
        byte = tl.arange(0, 32)
        at = tl.where(byte < 16, byte, head + ((length - head) & ~15) + byte - 16)
        inside = tl.where(byte < 16, at < head, at < length)
        _copy_words(source + at, destination + at, inside, tl.int8)


@triton.jit
def _pairs(lane: tl.tensor) -> tl.tensor:
    """The numbers of the two words of each unit."""
    return lane[:, None] * 2 + tl.arange(0, 2)[None, :]


@triton.jit
def _shift(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, low: tl.tensor) -> tl.tensor:
    """The two words that begin at byte ``low`` of four."""
    far = low >= 8
    first, second, third = tl.where(far, b, a), tl.where(far, c, b), tl.where(far, d, c)
    bits = ((low & 7) * 8).to(tl.uint64)
    lower = (first >> bits) | ((second << 1) << (63 - bits))
    return tl.join(lower, (second >> bits) | ((third << 1) << (63 - bits)))


@triton.jit
def _copy_shifted(
    source: tl.tensor, destination: tl.tensor, mask: tl.tensor, place: tl.tensor, length: tl.tensor
) -> None:
    """Copy what a row has in 16 bytes of the destination's grid, from aligned words of the source.

    Only words with a byte of the row are loaded, so they are memory of the tensor. The first and
    the last unit of a row may be partial; they are never the same one, because rows are long.
    """
    phase = destination & 15
    at = place.to(tl.int32) * 16 - phase.to(tl.int32)
    begin, end = tl.maximum(-at, 0), tl.minimum(length.to(tl.int32) - at, 16)
    mask = mask & (begin < end)
    have, want = source - phase, destination - phase
    low = (have & 15).to(tl.int32)
    word = tl.arange(0, 2)[None, :]
    words = (have & ~15)[:, None].to(tl.pointer_type(tl.uint64)) + word
    words = tl.max_contiguous(tl.multiple_of(words, [8, 16]), [1, 2])
    a, b = tl.split(tl.load(words, mask=(mask & (begin + low < 16))[:, None], other=0))
    c, d = tl.split(tl.load(words + 2, mask=(mask & (end + low > 16))[:, None], other=0))
    value = _shift(a, b, c, d, low)
    pair = want[:, None].to(tl.pointer_type(tl.uint64)) + word
    pair = tl.max_contiguous(tl.multiple_of(pair, [8, 16]), [1, 2])
    whole = end - begin == 16
    tl.store(pair, value, mask=(mask & whole)[:, None])
    lower, upper = tl.split(value)
    part = mask & (end - begin < 16)
    _store_piece(want, lower, upper, begin, end, part, 8, tl.uint64)
    _store_piece(want, lower, upper, begin, end, part, 4, tl.uint32)
    _store_piece(want, lower, upper, begin, end, part, 2, tl.uint16)
    _store_piece(want, lower, upper, begin, end, part, 1, tl.uint8)


@triton.jit
def _store_piece(
    want: tl.tensor,
    lower: tl.tensor,
    upper: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    mask: tl.tensor,
    SIZE: tl.constexpr,
    WORD: tl.constexpr,
) -> None:
    """Store the piece of this size of a partial unit, if it has one.

    The bytes up to the end of a unit are pieces of growing sizes, those from its start of shrinking
    ones: 9 to 15 are 1, 2 and 4 bytes at 9, 10 and 12; 0 to 12 are 8, 4 and 1 bytes at 0, 8 and 12.
    """
    is_head = begin > 0
    at = tl.where(is_head, (begin + (SIZE - 1)) & -SIZE, end & -(2 * SIZE))
    mask = mask & ((tl.where(is_head, at, end) & SIZE) != 0)
    value = tl.where(at >= 8, upper, lower) >> ((at & 7) * 8).to(tl.uint64)
    tl.store((want + at).to(tl.pointer_type(WORD)), value.to(WORD), mask=mask)


@triton.jit
def _copy_words(
    source: tl.tensor, destination: tl.tensor, mask: tl.tensor, WORD: tl.constexpr
) -> None:
    have = source.to(tl.pointer_type(WORD))
    want = destination.to(tl.pointer_type(WORD))
    tl.store(want, tl.load(have, mask=mask), mask=mask)


@triton.jit
def _cast_units(
    source: tl.tensor,
    destination: tl.tensor,
    mask: tl.tensor,
    NUM: tl.constexpr,
    HAVE: tl.constexpr,
    WANT: tl.constexpr,
) -> None:
    have_bytes: tl.constexpr = HAVE.primitive_bitwidth // 8
    want_bytes: tl.constexpr = WANT.primitive_bitwidth // 8
    element = tl.arange(0, NUM)[None, :]
    have = source[:, None].to(tl.pointer_type(HAVE)) + element
    want = destination[:, None].to(tl.pointer_type(WANT)) + element
    have = tl.max_contiguous(tl.multiple_of(have, [have_bytes, NUM * have_bytes]), [1, NUM])
    want = tl.max_contiguous(tl.multiple_of(want, [want_bytes, NUM * want_bytes]), [1, NUM])
    value = tl.load(have, mask=mask[:, None])
    tl.store(want, _cast(value, HAVE, WANT), mask=mask[:, None])


@triton.jit
def _cast(value: tl.tensor, HAVE: tl.constexpr, WANT: tl.constexpr) -> tl.tensor:
    """As torch casts: halves and smaller by way of float32, so that both round alike."""
    if WANT.primitive_bitwidth < 32:
        value = value.to(tl.float32)
    if WANT.is_fp8e4nv():
        return _to_e4m3(value)
    else:
        return value.to(WANT)


@triton.jit
def _to_e4m3(value: tl.tensor) -> tl.tensor:
    """torch gives NaN for what is too large; the hardware would give the largest number."""
    bits = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    sign = (value.to(tl.uint32, bitcast=True) >> 24).to(tl.uint8) & 0x80
    bits = tl.where(tl.abs(value) <= LARGEST_E4M3, bits, sign | 0x7F)
    return bits.to(tl.float8e4nv, bitcast=True)
