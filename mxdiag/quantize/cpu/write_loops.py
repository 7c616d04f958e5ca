"""The compiled loops that write: one result per element, in an array of x's shape."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from mxdiag.formats import E8M0_NAN
from mxdiag.quantize.cpu.lanes import BLOCK, LIFT, LIFT_ROW, RECORD_BYTES, RESULT_ROW, TILE_BYTES
from mxdiag.quantize.cpu.measure import UNIT_COUNTS
from mxdiag.quantize.cpu.pack import HAS_SPECIAL, pack_columns, pack_rows, peek, poke
from mxdiag.quantize.cpu.simd import LANES
from mxdiag.quantize.cpu.strips import (
    SIDE_BYTES,
    STRIP,
    aligned,
    copy_columns,
    kernel,
    point,
    settle,
)
from mxdiag.quantize.cpu.variant import SETTINGS
from mxdiag.quantize.cpu.write import transform_strip, unpack_columns, unpack_rows

_NAN = 0x7FC00000
_CARRY, _OVERFLOW = SETTINGS.index("carry"), SETTINGS.index("overflow")


@njit
def _restore(tile: np.ndarray, lift: np.ndarray, nonfinite: int, encodes: bool) -> None:
    """Take the lift back from the tile's results and put NaN where blocks were not finite."""
    for lane in range(LANES):
        if nonfinite >> lane & 1 and not encodes:
            for i in range(lane, STRIP, LANES):
                tile[i] = _NAN
        elif lift[lane] and not encodes:
            for i in range(lane, STRIP, LANES):
                sign, magnitude = tile[i] & 0x80000000, tile[i] & 0x7FFFFFFF
                exponent = magnitude >> 23
                if exponent > LIFT:
                    magnitude -= LIFT << 23
                elif magnitude:
                    magnitude = (magnitude & 0x7FFFFF | 0x800000) >> (LIFT + 1 - exponent)
                tile[i] = sign | magnitude
        lift[lane] = 0


@njit
def _transform(
    variant: Any,
    flags: int,
    settings: np.ndarray,
    parts: int,
    tile: np.ndarray,
    record: np.ndarray,
    spans: np.ndarray,
    encodes: bool,
) -> int:
    """Turn a packed tile into its results; returns the lanes of non-finite blocks as bits."""
    nonfinite = 0
    if flags & HAS_SPECIAL:
        tally = np.zeros(len(UNIT_COUNTS), np.int64)
        nonfinite = settle(flags, settings[_OVERFLOW], tile, record, spans, tally)
    transform_strip(variant, tile.ctypes.data, record.ctypes.data, settings[_CARRY], parts)
    if flags & HAS_SPECIAL:
        _restore(tile, record[LIFT_ROW], nonfinite, encodes)
    return nonfinite


@kernel
def write_rows(
    variant: Any,
    layout: tuple[int, int, int, int],
    units: tuple[int, int, int],
    blocks: tuple[int, int, int],
    settings: np.ndarray,
    parts: int,
    out: tuple[int, int],
    scale_codes: np.ndarray,
) -> None:
    """Write the blocks of units[0] to units[1] - 1; arguments as in `measure_loops.measure_rows`.

    Parameters
    ----------
    parts
        COMPONENT_BITS to inject.
    out
        Address and byte distance of rows of the result, whose elements are contiguous and as wide
        as those of x.
    scale_codes
        Result of a variant that encodes: uint8 [blocks in all]; else of length 0.
    """
    x, row_stride, size, itemsize = layout
    total_blocks, per_row, _ = blocks
    out_at, out_stride = out
    encodes = scale_codes.shape[0] > 0
    memory = aligned(TILE_BYTES + RECORD_BYTES + 2 * LANES * SIDE_BYTES)
    tile = memory[:TILE_BYTES].view(np.uint32)
    record = memory[TILE_BYTES : TILE_BYTES + RECORD_BYTES].view(np.uint32).reshape(-1, LANES)
    pointers, spans = np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)
    targets = np.zeros(LANES, np.int64)
    tile_at, record_at = tile.ctypes.data, record.ctypes.data
    side_at = record_at + RECORD_BYTES
    spare_at = side_at + LANES * SIDE_BYTES
    pointers_at, targets_at = pointers.ctypes.data, targets.ctypes.data
    last = min(units[1] * units[2], total_blocks)
    for first in range(units[0] * units[2], last, LANES):
        row, block = divmod(first, per_row)
        whole = first + LANES <= last and (block + LANES) * BLOCK <= size
        if whole:
            for lane in range(LANES):
                offset = (block + lane) * BLOCK * itemsize
                pointers[lane] = x + row * row_stride + offset
                targets[lane] = out_at + row * out_stride + offset
                spans[lane] = BLOCK
        else:
            point(variant, layout, per_row, first, last, pointers, spans, side_at)
            for lane in range(LANES):
                row, block = divmod(first + lane, per_row)
                targets[lane] = out_at + row * out_stride + block * BLOCK * itemsize
                if spans[lane] < BLOCK:
                    targets[lane] = spare_at + lane * SIDE_BYTES
        flags = pack_rows(variant, pointers_at, tile_at, record_at)
        nonfinite = _transform(variant, flags, settings, parts, tile, record, spans, encodes)
        unpack_rows(variant, tile_at, targets_at)
        if not whole:
            for lane in range(LANES):
                if 0 < spans[lane] < BLOCK:
                    row, block = divmod(first + lane, per_row)
                    target = out_at + row * out_stride + block * BLOCK * itemsize
                    for i in range(spans[lane]):
                        bits = peek(variant, targets[lane] + i * itemsize)
                        poke(variant, target + i * itemsize, bits)
        if encodes:
            for lane in range(min(LANES, last - first)):
                code = record[RESULT_ROW, lane]
                scale_codes[first + lane] = E8M0_NAN if nonfinite >> lane & 1 else code


@kernel
def write_columns(
    variant: Any,
    layout: tuple[int, int, int, int, int, int],
    units: tuple[int, int, int],
    settings: np.ndarray,
    parts: int,
    out: tuple[int, int, int],
    scale_codes: np.ndarray,
) -> None:
    """Write units[0] to units[1] - 1 of a tensor blocked along a strided axis.

    Arguments as in `measure_loops.measure_columns` and `write_rows`; `out` is the address and the
    byte distances of the outer axis and of rows, `scale_codes` uint8 [outer * blocks along K,
    inner].
    """
    x, outer_stride, row_stride, size, inner, itemsize = layout
    out_at, out_outer_stride, out_row_stride = out
    encodes = scale_codes.shape[0] > 0
    memory = aligned(TILE_BYTES + RECORD_BYTES + 2 * LANES * SIDE_BYTES)
    tile = memory[:TILE_BYTES].view(np.uint32)
    record = memory[TILE_BYTES : TILE_BYTES + RECORD_BYTES].view(np.uint32).reshape(-1, LANES)
    spans = np.zeros(LANES, np.int64)
    tile_at, record_at = tile.ctypes.data, record.ctypes.data
    side_at = record_at + RECORD_BYTES
    spare_at, spare_stride = side_at + LANES * SIDE_BYTES, LANES * itemsize
    deep, chunks = (size + BLOCK - 1) // BLOCK, (inner + units[2] - 1) // units[2]
    for unit in range(units[0], units[1]):
        outer, block = divmod(unit // chunks, deep)
        rows = min(size - block * BLOCK, BLOCK)
        start = x + outer * outer_stride + block * BLOCK * row_stride
        start_out = out_at + outer * out_outer_stride + block * BLOCK * out_row_stride
        first = unit % chunks * units[2]
        last = min(first + units[2], inner)
        for column in range(first, last, LANES):
            source, target = start + column * itemsize, start_out + column * itemsize
            columns = min(LANES, last - column)
            whole = rows == BLOCK and columns == LANES
            if whole:
                flags = pack_columns(variant, source, row_stride, tile_at, record_at)
            else:
                copy_columns(variant, source, row_stride, rows, columns, side_at, itemsize)
                flags = pack_columns(variant, side_at, spare_stride, tile_at, record_at)
            nonfinite = _transform(variant, flags, settings, parts, tile, record, spans, encodes)
            if whole:
                unpack_columns(variant, tile_at, target, out_row_stride)
            else:
                unpack_columns(variant, tile_at, spare_at, spare_stride)
                for row in range(rows):
                    for lane in range(columns):
                        bits = peek(variant, spare_at + row * spare_stride + lane * itemsize)
                        poke(variant, target + row * out_row_stride + lane * itemsize, bits)
            if encodes:
                for lane in range(columns):
                    code = record[RESULT_ROW, lane]
                    byte = E8M0_NAN if nonfinite >> lane & 1 else code
                    scale_codes[unit // chunks, column + lane] = byte
