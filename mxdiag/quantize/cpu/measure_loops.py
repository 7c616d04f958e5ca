"""The compiled loops that measure: units of work, each a run of blocks, strip by strip.

A unit's sums depend on nothing but its own elements, and the launcher adds units in order: so
results do not depend on how many threads there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from mxdiag.quantize.cpu.corrections import WORK_TILES
from mxdiag.quantize.cpu.lanes import (
    BLOCK,
    ENERGIES_OFFSET,
    ENERGY_BYTES,
    FOUR_ROW,
    HIGH_ROW,
    LIFT_ROW,
    LOW_ROW,
    PAIR_ROW,
    RECORD_BYTES,
    TILE_BYTES,
)
from mxdiag.quantize.cpu.measure import UNIT_COUNTS, measure_strip
from mxdiag.quantize.cpu.pack import (
    HAS_SPECIAL,
    HAS_ZERO,
    STRIPS,
    pack_columns,
    pack_rows,
    pack_wide_columns,
)
from mxdiag.quantize.cpu.simd import LANES
from mxdiag.quantize.cpu.strips import (
    AMAX,
    MEASURED,
    SIDE_BYTES,
    STRIP,
    aligned,
    copy_columns,
    kernel,
    point,
    settle,
)
from mxdiag.quantize.cpu.variant import SETTINGS
from mxdiag.quantize.sums import TOKEN_FIELDS

_OVERFLOW = SETTINGS.index("overflow")
#: Blocks of the largest macro block.
MACRO = 4


@njit
def _records(memory: np.ndarray) -> np.ndarray:
    """Records as 32-bit words [records, rows, 16]; the rows past RECORD_ROWS hold energies."""
    return memory.view(np.uint32).reshape(-1, RECORD_BYTES // (4 * LANES), LANES)


@njit
def _larger(record: np.ndarray, lane: int, plain: int, lifted: int) -> tuple[int, int]:
    """The larger of the given amax bits and a block's, among lifted blocks or among the others."""
    amax: int = np.int64(max(record[LOW_ROW, lane], record[HIGH_ROW, lane]))  # type: ignore[assignment]
    if record[LIFT_ROW, lane]:
        return plain, max(lifted, amax)
    return max(plain, amax), lifted


@njit
def _macro_rows(record: np.ndarray) -> None:
    """Enter the amax of macro blocks of two and four neighbouring lanes.

    Lifted blocks count only where all are lifted: any other amax is larger, and mu depends on the
    mantissa alone.
    """
    for row, size in ((PAIR_ROW, 2), (FOUR_ROW, 4)):
        for start in range(0, LANES, size):
            plain, lifted = 0, 0
            for lane in range(start, start + size):
                plain, lifted = _larger(record, lane, plain, lifted)
            for lane in range(start, start + size):
                record[row, lane] = plain if plain else lifted


@njit
def _macro_columns(records: np.ndarray, strip: int) -> None:
    """The same for macro blocks that run through the tiles of MACRO rows of blocks."""
    for row, size in ((PAIR_ROW, 2), (FOUR_ROW, 4)):
        for start in range(0, MACRO, size):
            for lane in range(LANES):
                plain, lifted = 0, 0
                for block in range(start, start + size):
                    record = records[block * STRIPS + strip]
                    plain, lifted = _larger(record, lane, plain, lifted)
                for block in range(start, start + size):
                    records[block * STRIPS + strip][row, lane] = plain if plain else lifted


@njit
def _finish_unit(
    lane_sums: np.ndarray, largest: np.ndarray, sums: np.ndarray, counts: np.ndarray
) -> None:
    """Add the lanes up, in order."""
    for i in range(sums.shape[0]):
        total = 0.0
        for lane in range(LANES):
            total += lane_sums[i * LANES + lane]
        sums[i] = total
    for lane in range(LANES):
        counts[AMAX] = max(counts[AMAX], largest[lane])


@kernel
def measure_rows(
    variant: Any,
    layout: tuple[int, int, int, int],
    units: tuple[int, int, int],
    blocks: tuple[int, int, int],
    settings: np.ndarray,
    octave: np.ndarray,
    sums: np.ndarray,
    counts: np.ndarray,
    tokens: np.ndarray,
) -> None:
    """Statistics of units[0] to units[1] - 1 of a tensor whose blocks are contiguous.

    Parameters
    ----------
    layout
        Address of the first element, byte distance of rows, elements in a row, bytes of an element.
    units
        First unit, one past the last, blocks of a unit (whole rows if there are `tokens`).
    blocks
        Blocks in all; those of one row, more than it has where macro blocks are to be kept
        together; and 1 if they lie in memory one after another across rows, else 0.
    settings
        SETTINGS.
    octave
        Tables for the histogram of delta, and the histogram (see `measure`).
    sums, counts, tokens
        Results: [units, SUM_FIELDS and FIELDS of each correction], [units, UNIT_COUNTS and one of
        each correction], [rows or 0, TOKEN_FIELDS].
    """
    x, row_stride, size, itemsize = layout
    total_blocks, per_row, linear = blocks
    tile_bytes = (1 + WORK_TILES) * TILE_BYTES
    memory = aligned(tile_bytes + RECORD_BYTES + LANES * SIDE_BYTES)
    tile = memory[:TILE_BYTES].view(np.uint32)
    record = _records(memory[tile_bytes : tile_bytes + RECORD_BYTES])[0]
    energies = memory[tile_bytes + ENERGIES_OFFSET : tile_bytes + RECORD_BYTES].view(np.float64)
    pointers, spans = np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)
    lane_sums, largest = np.zeros(sums.shape[1] * LANES), np.zeros(LANES, np.uint32)
    tile_at, record_at = tile.ctypes.data, record.ctypes.data
    work_at, side_at = tile_at + TILE_BYTES, record_at + RECORD_BYTES
    pointers_at, settings_at = pointers.ctypes.data, settings.ctypes.data
    sums_at, largest_at, octave_at = lane_sums.ctypes.data, largest.ctypes.data, octave.ctypes.data
    overflow, macro = settings[_OVERFLOW], counts.shape[1] > len(UNIT_COUNTS)
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
                settle(flags, overflow, tile, record, spans, tally)
            if macro:
                _macro_rows(record)
            measure_strip(
                variant,
                tile_at,
                record_at,
                work_at,
                settings_at,
                sums_at,
                largest_at,
                tally_at,
                octave_at,
                0,
            )
            tally[MEASURED] += LANES
            if flags & HAS_SPECIAL:
                record[LIFT_ROW] = 0
            if tokens.shape[0]:
                for lane in range(min(LANES, last - first)):
                    token = (first + lane) // per_row
                    for i in range(len(TOKEN_FIELDS)):
                        tokens[token, i] += energies[i * LANES + lane]
        _finish_unit(lane_sums, largest, sums[unit], tally)


@kernel
def measure_columns(
    variant: Any,
    layout: tuple[int, int, int, int, int, int],
    units: tuple[int, int, int],
    group: int,
    settings: np.ndarray,
    octave: np.ndarray,
    sums: np.ndarray,
    counts: np.ndarray,
    tokens: np.ndarray,
) -> None:
    """Statistics of units[0] to units[1] - 1 of a tensor blocked along a strided axis.

    A unit is units[2] columns of `group` rows of blocks, 1 or MACRO; units go through the columns
    first, then along K, then along the outer axis.

    Parameters
    ----------
    layout
        Address of the first element; byte distances of the outer axis and of rows; elements along
        K and along the (contiguous) inner axis; bytes of an element.
    settings, octave, sums, counts
        As in `measure_rows`.
    tokens
        Result: [32 * group * units or 0, TOKEN_FIELDS], a unit's part of the sums of its rows.
    """
    x, outer_stride, row_stride, size, inner, itemsize = layout
    tiles_bytes, records_bytes = group * STRIPS * TILE_BYTES, group * STRIPS * RECORD_BYTES
    memory = aligned(tiles_bytes + WORK_TILES * TILE_BYTES + records_bytes + LANES * SIDE_BYTES)
    tiles = memory[:tiles_bytes].view(np.uint32)
    start = tiles_bytes + WORK_TILES * TILE_BYTES
    records = _records(memory[start : start + records_bytes])
    row_energies = np.zeros(group * BLOCK * ENERGY_BYTES // 8)
    flags, spans = np.zeros(MACRO, np.int64), np.zeros(LANES, np.int64)
    lane_sums, largest = np.zeros(sums.shape[1] * LANES), np.zeros(LANES, np.uint32)
    tiles_at, records_at = tiles.ctypes.data, records.ctypes.data
    work_at, side_at = tiles_at + tiles_bytes, records_at + records_bytes
    energies_at, settings_at = row_energies.ctypes.data, settings.ctypes.data
    sums_at, largest_at, octave_at = lane_sums.ctypes.data, largest.ctypes.data, octave.ctypes.data
    overflow = settings[_OVERFLOW]
    deep, chunks = -(-size // (group * BLOCK)), -(-inner // units[2])
    for unit in range(units[0], units[1]):
        lane_sums[:] = 0
        largest[:] = 0
        row_energies[:] = 0
        tally = counts[unit]
        tally_at = tally.ctypes.data
        outer, macro = divmod(unit // chunks, deep)
        first_row = macro * group * BLOCK
        column = unit % chunks * units[2]
        last = min(column + units[2], inner)
        while column < last:
            source = x + outer * outer_stride + first_row * row_stride + column * itemsize
            wide = first_row + group * BLOCK <= size and column + STRIPS * LANES <= last
            columns = STRIPS * LANES if wide else min(LANES, last - column)
            for block in range(group):
                at = source + block * BLOCK * row_stride
                tile_at = tiles_at + block * STRIPS * TILE_BYTES
                record_at = records_at + block * STRIPS * RECORD_BYTES
                rows = max(min(size - first_row - block * BLOCK, BLOCK), 0)
                if wide:
                    flags[block] = pack_wide_columns(variant, at, row_stride, tile_at, record_at)
                else:
                    copy_columns(variant, at, row_stride, rows, columns, side_at, itemsize)
                    stride = LANES * itemsize
                    flags[block] = pack_columns(variant, side_at, stride, tile_at, record_at)
                if flags[block]:
                    for lane in range(LANES):
                        spans[lane] = rows if lane < columns else 0
                    for strip in range(STRIPS if wide else 1):
                        found = flags[block] >> (2 * strip) & (HAS_ZERO | HAS_SPECIAL)
                        if found:
                            number = block * STRIPS + strip
                            tile = tiles[number * STRIP : (number + 1) * STRIP]
                            settle(found, overflow, tile, records[number], spans, tally)
            for strip in range(STRIPS if wide else 1):
                if group > 1:
                    _macro_columns(records, strip)
                for block in range(group):
                    number = block * STRIPS + strip
                    measure_strip(
                        variant,
                        tiles_at + number * TILE_BYTES,
                        records_at + number * RECORD_BYTES,
                        work_at,
                        settings_at,
                        sums_at,
                        largest_at,
                        tally_at,
                        octave_at,
                        energies_at + block * BLOCK * ENERGY_BYTES,
                    )
                    tally[MEASURED] += LANES
                    if flags[block] >> (2 * strip) & HAS_SPECIAL:
                        records[number, LIFT_ROW] = 0
            column += columns
        _finish_unit(lane_sums, largest, sums[unit], tally)
        if tokens.shape[0]:
            for row in range(group * BLOCK):
                for i in range(len(TOKEN_FIELDS)):
                    total = 0.0
                    for lane in range(LANES):
                        total += row_energies[(row * len(TOKEN_FIELDS) + i) * LANES + lane]
                    tokens[unit * group * BLOCK + row, i] = total
