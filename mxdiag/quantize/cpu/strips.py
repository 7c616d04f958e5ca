"""Compiled helpers of the loops: where blocks lie, and what their arithmetic cannot take."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from mxdiag.quantize.cpu.lanes import BLOCK, HIGH_ROW, LIFT, LIFT_ROW, LOW_ROW
from mxdiag.quantize.cpu.measure import UNIT_COUNTS
from mxdiag.quantize.cpu.pack import HAS_SPECIAL, TINY, peek, poke
from mxdiag.quantize.cpu.simd import CACHE_LINE, LANES

STRIP = BLOCK * LANES
#: A padded copy of one block of the widest element.
SIDE_BYTES = 4 * BLOCK

ZEROS, PADDING, ABSENT, NONFINITE, NONFINITE_ELEMENTS, AMAX, MEASURED = (
    UNIT_COUNTS.index(name)
    for name in ("zeros", "padding", "absent", "nonfinite", "nonfinite_elements", "amax", "lanes")
)


def kernel(function: Any) -> Any:
    """Compile on first use, without the GIL, into numba's disk cache if there is one.

    numba refuses to decorate a function when it finds no writable place for its cache; such a
    function is compiled in every process instead.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except (RuntimeError, OSError):
        return njit(nogil=True)(function)


@njit
def aligned(size: int) -> np.ndarray:
    """`size` zeroed bytes that start at a cache line."""
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size]


@njit
def point(
    variant: Any,
    layout: tuple[int, int, int, int],
    per_row: int,
    first: int,
    last: int,
    pointers: np.ndarray,
    spans: np.ndarray,
    side: int,
) -> None:
    """Addresses and lengths of sixteen blocks from `first` on, below `last`.

    `per_row` may exceed the blocks a row has: such blocks are absent, of length 0. A block shorter
    than 32 is copied to its slot of `side` and padded there.
    """
    x, row_stride, size, itemsize = layout
    row, block = divmod(first, per_row)
    for lane in range(LANES):
        span = 0
        if first + lane < last:
            span = min(max(size - block * BLOCK, 0), BLOCK)
        start = x + row * row_stride + block * BLOCK * itemsize
        spans[lane] = span
        if span == BLOCK:
            pointers[lane] = start
        else:
            slot = side + lane * SIDE_BYTES
            pointers[lane] = slot
            for i in range(BLOCK):
                bits = peek(variant, start + i * itemsize) if i < span else 0
                poke(variant, slot + i * itemsize, bits)
        block += 1
        if block == per_row:
            row, block = row + 1, 0


@njit
def copy_columns(
    variant: Any, source: int, row_stride: int, rows: int, columns: int, side: int, itemsize: int
) -> None:
    """A piece of 32 x 16 elements, of which only `rows` x `columns` exist, into `side`, padded."""
    for row in range(BLOCK):
        for lane in range(LANES):
            bits = 0
            if row < rows and lane < columns:
                bits = peek(variant, source + row * row_stride + lane * itemsize)
            poke(variant, side + (row * LANES + lane) * itemsize, bits)


@njit
def settle(
    flags: int,
    overflow: int,
    tile: np.ndarray,
    record: np.ndarray,
    spans: np.ndarray,
    counts: np.ndarray,
) -> int:
    """Prepare and count what the strip's arithmetic cannot take as it is.

    Non-finite blocks are counted and zeroed; tiny ones are multiplied by 2^LIFT, by integers. Then
    zeros are counted, those of padding and of zeroed blocks included. Returns the lanes of
    non-finite blocks as bits.
    """
    nonfinite = 0
    if flags & HAS_SPECIAL:
        for lane in range(LANES):
            amax = max(record[LOW_ROW, lane], record[HIGH_ROW, lane])
            if amax >= overflow:
                nonfinite |= 1 << lane
                counts[NONFINITE] += 1
                counts[NONFINITE_ELEMENTS] += spans[lane]
                record[LOW_ROW, lane] = record[HIGH_ROW, lane] = 0
                for i in range(lane, STRIP, LANES):
                    tile[i] = 0
            elif 0 < amax < TINY:
                counts[AMAX] = max(counts[AMAX], amax)
                for row in (LOW_ROW, HIGH_ROW):
                    record[row, lane] = _lifted(record[row, lane])
                record[LIFT_ROW, lane] = LIFT
                for i in range(lane, STRIP, LANES):
                    tile[i] = _lifted(tile[i] & 0x7FFFFFFF) | (tile[i] & 0x80000000)
    zeros = 0
    for i in range(STRIP):
        zeros += (tile[i] & 0x7FFFFFFF) == 0
    counts[ZEROS] += zeros
    for lane in range(LANES):
        counts[PADDING] += BLOCK - spans[lane]
        counts[ABSENT] += spans[lane] == 0
    return nonfinite


@njit
def _lifted(magnitude: int) -> int:
    """Bits of 2^LIFT times a float32 below 2^-60, subnormals included."""
    if magnitude >= 1 << 23:
        return magnitude + (LIFT << 23)
    if magnitude == 0:
        return 0
    shift = 0
    while magnitude >> 23 == 0:
        magnitude <<= 1
        shift += 1
    return (magnitude & 0x7FFFFF) + ((LIFT + 1 - shift) << 23)
