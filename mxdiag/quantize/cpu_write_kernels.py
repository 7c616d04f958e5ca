"""The compiled loops that write: one result per element, in an array of x's shape."""

from __future__ import annotations

import numpy as np
from numba import njit

from mxdiag.formats import E8M0_NAN
from mxdiag.quantize.cpu_kernels import (
    LIFT,
    SIDE_BYTES,
    STRIP,
    UNIT_COUNTS,
    aligned,
    copy_columns,
    kernel,
    point,
    settle,
)
from mxdiag.quantize.cpu_lanes import BLOCK, ROW_BYTES, TILE_BYTES
from mxdiag.quantize.cpu_pack import HAS_SPECIAL, pack_columns, pack_rows, peek, poke
from mxdiag.quantize.cpu_simd import LANES
from mxdiag.quantize.cpu_write import transform_strip, unpack_columns, unpack_rows

#: Rows of a strip's record here: amax bits, lift, scale codes.
_RECORD_BYTES = 3 * ROW_BYTES
_NAN = 0x7FC00000


@njit
def _restore(tile, lift, nonfinite, encodes):
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
def _transform(variant, flags, overflow, rule_parts, tile, words, spans, tally, encodes):
    """Turn a packed tile into its results; returns the lanes of non-finite blocks as bits."""
    carry, parts = rule_parts
    nonfinite = 0
    if flags & HAS_SPECIAL:
        nonfinite = settle(flags, overflow, tile, words, spans, tally)
    transform_strip(variant, tile.ctypes.data, words.ctypes.data, carry, parts)
    if flags & HAS_SPECIAL:
        _restore(tile, words[LANES : 2 * LANES], nonfinite, encodes)
    return nonfinite


@kernel
def write_rows(variant, layout, units, blocks, rule, parts, out, scale_codes):
    """Write the blocks of units[0] to units[1] - 1; arguments as in `cpu_kernels.measure_rows`.

    Parameters
    ----------
    parts
        COMPONENT_BITS to inject.
    out
        Address and byte distance of rows of the result, whose elements are contiguous and as wide as
        those of x.
    scale_codes
        Result of a variant that encodes: uint8 [blocks in all]; else of length 0.
    """
    x, row_stride, size, itemsize = layout
    carry, overflow = rule
    total_blocks, per_row, _ = blocks
    out_at, out_stride = out
    encodes = scale_codes.shape[0] > 0
    memory = aligned(TILE_BYTES + _RECORD_BYTES + 2 * LANES * SIDE_BYTES)
    tile = memory[:TILE_BYTES].view(np.uint32)
    words = memory[TILE_BYTES : TILE_BYTES + _RECORD_BYTES].view(np.uint32)
    pointers, spans = np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)
    targets, tally = np.zeros(LANES, np.int64), np.zeros(UNIT_COUNTS, np.int64)
    tile_at, record_at = tile.ctypes.data, words.ctypes.data
    side_at = record_at + _RECORD_BYTES
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
        nonfinite = _transform(
            variant, flags, overflow, (carry, parts), tile, words, spans, tally, encodes
        )
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
                code = words[2 * LANES + lane]
                scale_codes[first + lane] = E8M0_NAN if nonfinite >> lane & 1 else code


@kernel
def write_columns(variant, layout, units, rule, parts, out, scale_codes):
    """Write units[0] to units[1] - 1 of a tensor blocked along a strided axis.

    Arguments as in `cpu_kernels.measure_columns` and `write_rows`; `out` is the address and the byte
    distances of the outer axis and of rows, `scale_codes` uint8 [outer * blocks along K, inner].
    """
    x, outer_stride, row_stride, size, inner, itemsize = layout
    carry, overflow = rule
    out_at, out_outer_stride, out_row_stride = out
    encodes = scale_codes.shape[0] > 0
    memory = aligned(TILE_BYTES + _RECORD_BYTES + 2 * LANES * SIDE_BYTES)
    tile = memory[:TILE_BYTES].view(np.uint32)
    words = memory[TILE_BYTES : TILE_BYTES + _RECORD_BYTES].view(np.uint32)
    spans, tally = np.zeros(LANES, np.int64), np.zeros(UNIT_COUNTS, np.int64)
    tile_at, record_at = tile.ctypes.data, words.ctypes.data
    side_at = record_at + _RECORD_BYTES
    spare_at, spare_stride = side_at + LANES * SIDE_BYTES, LANES * itemsize
    deep, chunks = (size + BLOCK - 1) // BLOCK, (inner + units[2] - 1) // units[2]
    for unit in range(units[0], units[1]):
        outer, block = divmod(unit // chunks, deep)
        rows = min(size - block * BLOCK, BLOCK)
        start = x + outer * outer_stride + block * BLOCK * row_stride
        start_out = out_at + outer * out_outer_stride + block * BLOCK * out_row_stride
        column = unit % chunks * units[2]
        last = min(column + units[2], inner)
        for column in range(column, last, LANES):
            source, target = start + column * itemsize, start_out + column * itemsize
            columns = min(LANES, last - column)
            whole = rows == BLOCK and columns == LANES
            if whole:
                flags = pack_columns(variant, source, row_stride, tile_at, record_at)
            else:
                copy_columns(variant, source, row_stride, rows, columns, side_at, itemsize)
                flags = pack_columns(variant, side_at, spare_stride, tile_at, record_at)
            nonfinite = _transform(
                variant, flags, overflow, (carry, parts), tile, words, spans, tally, encodes
            )
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
                    code = words[2 * LANES + lane]
                    byte = E8M0_NAN if nonfinite >> lane & 1 else code
                    scale_codes[unit // chunks, column + lane] = byte
