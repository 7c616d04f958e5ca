"""Filling a strip's tile from memory, and writing a tile back, for both layouts.

Rows: a block is 32 consecutive elements; sixteen blocks, each at its own address, are transposed in
registers. Columns: a block runs along the strided axis; sixteen neighbouring columns load as they
are.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from mxdiag.quantize.cpu.lanes import (
    BLOCK,
    HIGH_ROW,
    LOW_ROW,
    MAGNITUDE,
    RECORD_BYTES,
    ROW_BYTES,
    TILE_BYTES,
)
from mxdiag.quantize.cpu.simd import (
    CACHE_LINE,
    F32,
    I16,
    I32,
    I64,
    LANES,
    Lanes,
    constant,
    intrinsic,
    load,
    prefetch,
    transpose,
)
from mxdiag.quantize.cpu.variant import DTYPES, Dtype

#: Blocks with amax below 2^-60 are lifted (see `lanes`).
TINY = (127 - 60) << 23

#: What a packed strip holds, as bits of the packers' result.
HAS_ZERO, HAS_SPECIAL = 1, 2


def widen(halves: Lanes, dtype: Dtype) -> Lanes:
    """Float32 bits of 16-bit elements, given in the low halves of 32-bit lanes (high halves 0)."""
    if dtype.name == "bfloat16":
        return halves << 16
    magnitude = halves & 0x7FFF
    normal = (magnitude << 13) + ((127 - 15) << 23)
    subnormal = (magnitude.to(F32) * 2.0**-24).bits()
    return (magnitude < 0x400).select(subnormal, normal) | ((halves & 0x8000) << 16)


class _Extremes:
    """Largest magnitudes of the blocks' halves and the smallest of all, lane by lane.

    Kept as integers of the element's own width. Rows must come in order.
    """

    def __init__(self, dtype: Dtype, vectors: int) -> None:
        self.dtype, self.half = dtype, vectors // 2
        self.magnitudes: list[Lanes] = []

    def add(self, bits: Lanes) -> None:
        """Take in a vector of elements' bits."""
        self.magnitudes.append(bits & (0x7FFF if self.dtype.bits == 16 else MAGNITUDE))

    def store(self, record: ir.Value) -> ir.Value:
        """Put the amax of the halves (float32 bits) into a record; returns the strip's flags.

        A vector of twice as many 16-bit magnitudes holds two rows in each 32-bit lane.
        """
        largest, smallest = [], reduce(Lanes.minimum, self.magnitudes)
        for part in (self.magnitudes[: self.half], self.magnitudes[self.half :]):
            largest.append(reduce(Lanes.maximum, part))
        if smallest.value.type.count > LANES:
            wide = [vector.reinterpret(I32) for vector in (*largest, smallest)]
            halves = [(vector & 0xFFFF, vector >> 16) for vector in wide]
            largest = [low.maximum(high) for low, high in halves[:2]]
            smallest = halves[2][0].minimum(halves[2][1])
        return store_extremes(largest, smallest, record, self.dtype)


def store_extremes(
    largest: list[Lanes], smallest: Lanes, record: ir.Value, dtype: Dtype
) -> ir.Value:
    """Amax of both halves, 32-bit lanes in the element's own format, into a record; the flags."""
    builder = smallest.builder
    bits = [widen(vector, dtype) if dtype.bits == 16 else vector for vector in largest]
    for row, vector in zip((LOW_ROW, HIGH_ROW), bits, strict=True):
        vector.store(record, row * ROW_BYTES)
    amax = bits[0].maximum(bits[1])
    special = (amax >= dtype.overflow) | ((amax < TINY) & amax.differs(0))
    zero = builder.zext(smallest.equals(0).any(), I32)
    return builder.or_(zero, builder.shl(builder.zext(special.any(), I32), ir.Constant(I32, 1)))


def _emit_pack_rows(
    builder: ir.IRBuilder, dtype: Dtype, pointers: ir.Value, tile: ir.Value, record: ir.Value
) -> ir.Value:
    addresses = []
    for lane in range(LANES):
        slot = builder.add(pointers, ir.Constant(I64, 8 * lane))
        addresses.append(builder.load(builder.inttoptr(slot, I64.as_pointer())))
    extremes = _Extremes(dtype, BLOCK * dtype.bits // 32)
    if dtype.bits == 32:
        for half in range(2):
            columns = transpose([load(builder, a, I32, half * ROW_BYTES) for a in addresses])
            for i, column in enumerate(columns):
                extremes.add(column)
                column.store(tile, (LANES * half + i) * ROW_BYTES)
        return extremes.store(record)
    # A 32-bit lane carries two neighbouring elements of a block through the transposition.
    for i, pair in enumerate(transpose([load(builder, address, I32) for address in addresses])):
        extremes.add(pair.reinterpret(I16))
        widen(pair & 0xFFFF, dtype).store(tile, 2 * i * ROW_BYTES)
        widen(pair >> 16, dtype).store(tile, (2 * i + 1) * ROW_BYTES)
    return extremes.store(record)


@intrinsic
def pack_rows(typingctx: Any, variant: Any, pointers: Any, tile: Any, record: Any) -> Any:
    """Fill a tile and the amax rows of its record with sixteen blocks; returns the strip's flags.

    All are byte addresses; `pointers` is of the blocks' sixteen.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        dtype = DTYPES[signature.args[0].variant.dtype]
        return _emit_pack_rows(builder, dtype, *args[1:])

    return types.int32(variant, types.int64, types.int64, types.int64), codegen


def _emit_pack_columns(
    builder: ir.IRBuilder,
    dtype: Dtype,
    strips: int,
    source: ir.Value,
    stride: ir.Value,
    tile: ir.Value,
    record: ir.Value,
) -> ir.Value:
    element = I16 if dtype.bits == 16 else I32
    width = strips * LANES * dtype.itemsize
    vector = ir.VectorType(element, LANES)
    # Largest of either half, smallest: LLVM turns these variables into registers.
    slots = [[cgutils.alloca_once(builder, vector) for _ in range(3)] for _ in range(strips)]
    for slot in slots:
        constant(builder, element, -1).store_in(slot[2])
    for half in range(2):
        for slot in slots:
            constant(builder, element, 0).store_in(slot[half])
        with cgutils.for_range(builder, ir.Constant(I64, BLOCK // 2)) as loop:
            number = builder.add(loop.index, ir.Constant(I64, half * BLOCK // 2))
            row = builder.add(source, builder.mul(number, stride))
            out = builder.add(tile, builder.mul(number, ir.Constant(I64, ROW_BYTES)))
            for strip, slot in enumerate(slots):
                bits = load(builder, row, element, strip * LANES * dtype.itemsize)
                magnitude = bits & ((1 << (dtype.bits - 1)) - 1)
                largest, smallest = (Lanes(builder, builder.load(slot[i])) for i in (half, 2))
                magnitude.maximum(largest).store_in(slot[half])
                magnitude.minimum(smallest).store_in(slot[2])
                wide = widen(bits.to(I32), dtype) if dtype.bits == 16 else bits
                wide.store(out, strip * TILE_BYTES)
            for line in range(0, width, CACHE_LINE):
                prefetch(builder, row, width + line)
    flags = ir.Constant(I32, 0)
    for strip, slot in enumerate(slots):
        found = [Lanes(builder, builder.load(variable)) for variable in slot]
        if dtype.bits == 16:
            found = [lanes.to(I32) for lanes in found]
        address = builder.add(record, ir.Constant(I64, strip * RECORD_BYTES))
        bit = store_extremes(found[:2], found[2], address, dtype)
        flags = builder.or_(flags, builder.shl(bit, ir.Constant(I32, 2 * strip)))
    return flags


def _columns_packer(strips: int) -> Any:
    @intrinsic
    def pack(typingctx: Any, variant: Any, source: Any, stride: Any, tile: Any, record: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            dtype = DTYPES[signature.args[0].variant.dtype]
            return _emit_pack_columns(builder, dtype, strips, *args[1:])

        return types.int32(variant, *(types.int64,) * 4), codegen

    return pack


#: Fill tiles and records with 32 rows of 16 (64) neighbouring columns: (variant, address of the
#: first element, byte distance of rows, tile, record) -> two flag bits per strip. The STRIPS tiles
#: of the wide one lie one after another, and so do the records.
STRIPS = 4
pack_columns = _columns_packer(1)
pack_wide_columns = _columns_packer(STRIPS)


@intrinsic
def peek(typingctx: Any, variant: Any, address: Any) -> Any:
    """The stored bits of the element at a byte address, as an int64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        kind = ir.IntType(DTYPES[signature.args[0].variant.dtype].bits)
        pointer = builder.inttoptr(args[1], kind.as_pointer())
        return builder.zext(builder.load(pointer, align=1), I64)

    return types.int64(variant, types.int64), codegen


@intrinsic
def poke(typingctx: Any, variant: Any, address: Any, bits: Any) -> Any:
    """Store an element's bits at a byte address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        kind = ir.IntType(DTYPES[signature.args[0].variant.dtype].bits)
        pointer = builder.inttoptr(args[1], kind.as_pointer())
        builder.store(builder.trunc(args[2], kind), pointer, align=1)
        return context.get_dummy_value()

    return types.void(variant, types.int64, types.int64), codegen
