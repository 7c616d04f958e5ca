"""The compiled loops: units of work, each a run of blocks, strip by strip.

A unit's sums depend on nothing but its own elements, and the launcher adds units in order: so
results do not depend on how many threads there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from mxdiag.quantize.cpu_lanes import BLOCK, TILE_BYTES
from mxdiag.quantize.cpu_measure import (
    ENERGIES_OFFSET,
    ENERGY_BYTES,
    RECORD_BYTES,
    STRIP_COUNTS,
    measure_strip,
)
from mxdiag.quantize.cpu_pack import (
    HAS_SPECIAL,
    HAS_ZERO,
    STRIPS,
    TINY,
    pack_columns,
    pack_rows,
    pack_wide_columns,
    peek,
    poke,
)
from mxdiag.quantize.cpu_simd import LANES
from mxdiag.quantize.sums import SUM_FIELDS, TOKEN_FIELDS

#: Tiny blocks are multiplied by 2^LIFT (see `cpu_lanes`).
LIFT = 96
#: Integer results of a unit: STRIP_COUNTS, then zeros (those of padding and of non-finite blocks
#: included), padding elements, absent blocks, non-finite blocks, their elements, bits of amax; last, all
#: lanes that were measured.
ZEROS, PADDING, ABSENT, NONFINITE, NONFINITE_ELEMENTS, AMAX, BLOCKS, UNIT_COUNTS = range(
    len(STRIP_COUNTS), len(STRIP_COUNTS) + 8
)

STRIP = BLOCK * LANES
#: A padded copy of one block of the widest element.
SIDE_BYTES = 4 * BLOCK
_CACHE_LINE = 64


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
def aligned(size):
    memory = np.zeros(size + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return memory[start : start + size]


@njit
def point(variant, layout, per_row, first, last, pointers, spans, side):
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
def copy_columns(variant, source, row_stride, rows, columns, side, itemsize):
    """A piece of 32 x 16 elements, of which only `rows` x `columns` exist, into `side`, padded."""
    for row in range(BLOCK):
        for lane in range(LANES):
            bits = 0
            if row < rows and lane < columns:
                bits = peek(variant, source + row * row_stride + lane * itemsize)
            poke(variant, side + (row * LANES + lane) * itemsize, bits)


@njit
def settle(flags, overflow, tile, words, spans, counts):
    """Prepare and count what the strip's arithmetic cannot take as it is.

    Non-finite blocks are counted and zeroed; tiny ones are multiplied by 2^LIFT, by integers. Then
    zeros are counted, those of padding and of zeroed blocks included. Returns the lanes of non-finite
    blocks as bits.
    """
    nonfinite = 0
    amax, lift = words[:LANES], words[LANES : 2 * LANES]
    if flags & HAS_SPECIAL:
        for lane in range(LANES):
            if amax[lane] >= overflow:
                nonfinite |= 1 << lane
                counts[NONFINITE] += 1
                counts[NONFINITE_ELEMENTS] += spans[lane]
                amax[lane] = 0
                for i in range(lane, STRIP, LANES):
                    tile[i] = 0
            elif 0 < amax[lane] < TINY:
                counts[AMAX] = max(counts[AMAX], amax[lane])
                amax[lane] = _lifted(amax[lane])
                lift[lane] = LIFT
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
def _lifted(magnitude):
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


@njit
def _finish_unit(lane_sums, largest, sums, counts):
    """Add the lanes up, in order."""
    for i in range(len(SUM_FIELDS)):
        total = 0.0
        for lane in range(LANES):
            total += lane_sums[i * LANES + lane]
        sums[i] = total
    for lane in range(LANES):
        counts[AMAX] = max(counts[AMAX], largest[lane])


@kernel
def measure_rows(variant, layout, units, blocks, rule, octave, sums, counts, tokens):
    """Statistics of units[0] to units[1] - 1 of a tensor whose blocks are contiguous.

    Parameters
    ----------
    layout
        Address of the first element, byte distance of rows, elements in a row, bytes of an element.
    units
        First unit, one past the last, blocks of a unit (whole rows if there are `tokens`).
    blocks
        Blocks in all; those of one row, more than it has where macro blocks are to be kept together;
        and 1 if they lie in memory one after another across rows, else 0.
    rule
        The scale rule's carry; the smallest magnitude bits that are not finite.
    octave
        Tables for the histogram of delta, and the histogram (see `cpu_measure`).
    sums, counts, tokens
        Results: [units, len(SUM_FIELDS)], [units, UNIT_COUNTS], [rows or 0, len(TOKEN_FIELDS)].
    """
    x, row_stride, size, itemsize = layout
    carry, overflow = rule
    total_blocks, per_row, linear = blocks
    memory = aligned(TILE_BYTES + RECORD_BYTES + LANES * SIDE_BYTES)
    tile = memory[:TILE_BYTES].view(np.uint32)
    record = memory[TILE_BYTES : TILE_BYTES + RECORD_BYTES]
    words, energies = record[:ENERGIES_OFFSET].view(np.uint32), record[ENERGIES_OFFSET:].view(np.float64)
    lift, largest = words[LANES : 2 * LANES], words[2 * LANES : 3 * LANES]
    pointers, spans = np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)
    lane_sums = np.zeros(len(SUM_FIELDS) * LANES)
    tile_at, record_at = tile.ctypes.data, record.ctypes.data
    side_at = record_at + RECORD_BYTES
    pointers_at, sums_at, octave_at = pointers.ctypes.data, lane_sums.ctypes.data, octave.ctypes.data
    for unit in range(units[0], units[1]):
        lane_sums[:] = 0
        largest[:] = 0
        tally = counts[unit]
        tally_at = tally.ctypes.data
        last = min((unit + 1) * units[2], total_blocks)
        for first in range(unit * units[2], last, LANES):
            row, block = divmod(first, per_row)
            if first + LANES <= last and (linear or (block + LANES) * BLOCK <= size):
                start = x + row * row_stride + block * BLOCK * itemsize
                for lane in range(LANES):
                    pointers[lane] = start + lane * BLOCK * itemsize
                    spans[lane] = BLOCK
            else:
                point(variant, layout, per_row, first, last, pointers, spans, side_at)
            flags = pack_rows(variant, pointers_at, tile_at, record_at)
            if flags:
                settle(flags, overflow, tile, words, spans, tally)
            measure_strip(variant, tile_at, record_at, carry, sums_at, tally_at, octave_at, 0)
            tally[BLOCKS] += LANES
            if flags & HAS_SPECIAL:
                lift[:] = 0
            if tokens.shape[0]:
                for lane in range(min(LANES, last - first)):
                    token = (first + lane) // per_row
                    for i in range(len(TOKEN_FIELDS)):
                        tokens[token, i] += energies[i * LANES + lane]
        _finish_unit(lane_sums, largest, sums[unit], tally)


@kernel
def measure_columns(variant, layout, units, rule, octave, sums, counts, tokens):
    """Statistics of units[0] to units[1] - 1 of a tensor blocked along a strided axis.

    A unit is a run of columns of one row of blocks: units[2] columns; they go through the columns
    first, then the blocks along K, then the outer axis.

    Parameters
    ----------
    layout
        Address of the first element; byte distances of the outer axis and of rows; elements along
        K and along the (contiguous) inner axis; bytes of an element.
    rule, octave, sums, counts
        As in `measure_rows`.
    tokens
        Result: [32 * units or 0, len(TOKEN_FIELDS)], a unit's part of the sums of its rows.
    """
    x, outer_stride, row_stride, size, inner, itemsize = layout
    carry, overflow = rule
    tiles_bytes = STRIPS * TILE_BYTES
    memory = aligned(tiles_bytes + RECORD_BYTES + LANES * SIDE_BYTES + BLOCK * ENERGY_BYTES)
    tiles = memory[:tiles_bytes].view(np.uint32)
    record = memory[tiles_bytes : tiles_bytes + RECORD_BYTES]
    words = record[:ENERGIES_OFFSET].view(np.uint32)
    lift, largest = words[LANES : 2 * LANES], words[2 * LANES : 3 * LANES]
    row_energies = memory[-BLOCK * ENERGY_BYTES :].view(np.float64)
    amax, spans = np.zeros(STRIPS * LANES, np.uint32), np.zeros(LANES, np.int64)
    lane_sums = np.zeros(len(SUM_FIELDS) * LANES)
    tiles_at, record_at, amax_at = tiles.ctypes.data, record.ctypes.data, amax.ctypes.data
    side_at, energies_at = record_at + RECORD_BYTES, row_energies.ctypes.data
    sums_at, octave_at = lane_sums.ctypes.data, octave.ctypes.data
    deep, chunks = (size + BLOCK - 1) // BLOCK, (inner + units[2] - 1) // units[2]
    for unit in range(units[0], units[1]):
        lane_sums[:] = 0
        largest[:] = 0
        row_energies[:] = 0
        tally = counts[unit]
        tally_at = tally.ctypes.data
        outer, block = divmod(unit // chunks, deep)
        rows = min(size - block * BLOCK, BLOCK)
        start = x + outer * outer_stride + block * BLOCK * row_stride
        column = unit % chunks * units[2]
        last = min(column + units[2], inner)
        while column < last:
            source = start + column * itemsize
            wide = rows == BLOCK and column + STRIPS * LANES <= last
            columns = STRIPS * LANES if wide else min(LANES, last - column)
            if wide:
                flags = pack_wide_columns(variant, source, row_stride, tiles_at, amax_at)
            else:
                copy_columns(variant, source, row_stride, rows, columns, side_at, itemsize)
                flags = pack_columns(variant, side_at, LANES * itemsize, tiles_at, amax_at)
            for lane in range(LANES):
                spans[lane] = rows if lane < columns else 0
            for strip in range(STRIPS if wide else 1):
                words[:LANES] = amax[strip * LANES : (strip + 1) * LANES]
                found = flags >> (2 * strip) & (HAS_ZERO | HAS_SPECIAL)
                if found:
                    tile = tiles[strip * STRIP : (strip + 1) * STRIP]
                    settle(found, overflow, tile, words, spans, tally)
                tile_at = tiles_at + strip * TILE_BYTES
                measure_strip(
                    variant, tile_at, record_at, carry, sums_at, tally_at, octave_at, energies_at
                )
                tally[BLOCKS] += LANES
                if found & HAS_SPECIAL:
                    lift[:] = 0
            column += columns
        _finish_unit(lane_sums, largest, sums[unit], tally)
        if tokens.shape[0]:
            for row in range(BLOCK):
                for i in range(len(TOKEN_FIELDS)):
                    total = 0.0
                    for lane in range(LANES):
                        total += row_energies[(row * len(TOKEN_FIELDS) + i) * LANES + lane]
                    tokens[unit * BLOCK + row, i] = total
