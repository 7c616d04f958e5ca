"""Filling a strip's tile from memory, and writing a tile back, for both layouts.

Rows: a block is 32 consecutive elements; sixteen blocks, each at its own address, are transposed in
registers. Columns: a block runs along the strided axis; sixteen neighbouring columns load as they are.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mxdiag.quantize.cpu_lanes import BLOCK, ROW_BYTES, TILE_BYTES
from mxdiag.quantize.cpu_simd import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    Lanes,
    constant,
    load,
    prefetch,
    transpose,
)
from mxdiag.quantize.cpu_variant import DTYPES, Dtype

_MAGNITUDE = 0x7FFFFFFF
#: Blocks with amax below 2^-60 are lifted (see `cpu_lanes`).
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
    """Largest and smallest magnitude per lane, as integers of the element's own width."""

    def __init__(self, dtype: Dtype) -> None:
        self.mask = 0x7FFF if dtype.bits == 16 else _MAGNITUDE
        self.largest: Lanes | None = None
        self.smallest: Lanes | None = None

    def add(self, bits: Lanes) -> None:
        """Take in a vector of elements' bits."""
        magnitude = bits & self.mask
        self.largest = magnitude if self.largest is None else self.largest.maximum(magnitude)
        self.smallest = magnitude if self.smallest is None else self.smallest.minimum(magnitude)


def _finish(largest: Lanes, smallest: Lanes, amax_address: ir.Value, dtype: Dtype) -> ir.Value:
    """Store amax (float32 bits, one 32-bit lane each); the strip's flags as an int32."""
    builder = largest.builder
    amax = widen(largest, dtype) if dtype.bits == 16 else largest
    amax.store(amax_address)
    special = (amax >= dtype.overflow) | ((amax < TINY) & amax.differs(0))
    zero = builder.zext(smallest.equals(0).any(), I32)
    return builder.or_(zero, builder.shl(builder.zext(special.any(), I32), ir.Constant(I32, 1)))


def _emit_pack_rows(
    builder: ir.IRBuilder, dtype: Dtype, pointers: ir.Value, tile: ir.Value, amax: ir.Value
) -> ir.Value:
    addresses = []
    for lane in range(LANES):
        slot = builder.add(pointers, ir.Constant(I64, 8 * lane))
        addresses.append(builder.load(builder.inttoptr(slot, I64.as_pointer())))
    extremes = _Extremes(dtype)
    if dtype.bits == 32:
        for half in range(2):
            columns = transpose([load(builder, a, I32, half * ROW_BYTES) for a in addresses])
            for i, column in enumerate(columns):
                extremes.add(column)
                column.store(tile, (LANES * half + i) * ROW_BYTES)
        assert extremes.largest is not None and extremes.smallest is not None
        return _finish(extremes.largest, extremes.smallest, amax, dtype)
    # A 32-bit lane carries two neighbouring elements of a block through the transposition.
    for i, pair in enumerate(transpose([load(builder, address, I32) for address in addresses])):
        extremes.add(pair.reinterpret(I16))
        low, high = pair & 0xFFFF, pair >> 16
        widen(low, dtype).store(tile, 2 * i * ROW_BYTES)
        widen(high, dtype).store(tile, (2 * i + 1) * ROW_BYTES)
    assert extremes.largest is not None and extremes.smallest is not None
    largest, smallest = extremes.largest.reinterpret(I32), extremes.smallest.reinterpret(I32)
    return _finish(
        (largest & 0xFFFF).maximum(largest >> 16),
        (smallest & 0xFFFF).minimum(smallest >> 16),
        amax,
        dtype,
    )


@intrinsic
def pack_rows(typingctx: Any, variant: Any, pointers: Any, tile: Any, amax: Any) -> Any:
    """Fill one tile with the blocks at sixteen addresses, and its amax; returns its flags."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        dtype = DTYPES[signature.args[0].variant.dtype]
        return _emit_pack_rows(builder, dtype, *args[1:])

    return types.int32(variant, types.int64, types.int64, types.int64), codegen


def _columns_packer(strips: int) -> Any:
    def emit(
        builder: ir.IRBuilder,
        dtype: Dtype,
        source: ir.Value,
        stride: ir.Value,
        tile: ir.Value,
        amax: ir.Value,
    ) -> ir.Value:
        element = I16 if dtype.bits == 16 else I32
        vector = ir.VectorType(element, LANES)
        slots = [
            (cgutils.alloca_once(builder, vector), cgutils.alloca_once(builder, vector))
            for _ in range(strips)
        ]
        for largest, smallest in slots:
            constant(builder, element, 0).store_in(largest)
            constant(builder, element, -1).store_in(smallest)
        with cgutils.for_range(builder, ir.Constant(I64, BLOCK)) as loop:
            row = builder.add(source, builder.mul(loop.index, stride))
            out = builder.add(tile, builder.mul(loop.index, ir.Constant(I64, ROW_BYTES)))
            for strip, (largest, smallest) in enumerate(slots):
                bits = load(builder, row, element, strip * LANES * dtype.itemsize)
                magnitude = bits & ((1 << (dtype.bits - 1)) - 1)
                magnitude.maximum(Lanes(builder, builder.load(largest))).store_in(largest)
                magnitude.minimum(Lanes(builder, builder.load(smallest))).store_in(smallest)
                wide = widen(bits.to(I32), dtype) if dtype.bits == 16 else bits
                wide.store(out, strip * TILE_BYTES)
            for line in range(0, strips * LANES * dtype.itemsize, 64):
                prefetch(builder, row, strips * LANES * dtype.itemsize + line)
        flags = ir.Constant(I32, 0)
        for strip, slot in enumerate(slots):
            largest, smallest = (Lanes(builder, builder.load(s)) for s in slot)
            if dtype.bits == 16:
                largest, smallest = largest.to(I32), smallest.to(I32)
            address = builder.add(amax, ir.Constant(I64, strip * ROW_BYTES))
            found = _finish(largest, smallest, address, dtype)
            flags = builder.or_(flags, builder.shl(found, ir.Constant(I32, 2 * strip)))
        return flags

    @intrinsic
    def pack(
        typingctx: Any, variant: Any, source: Any, stride: Any, tile: Any, amax: Any
    ) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            dtype = DTYPES[signature.args[0].variant.dtype]
            return emit(builder, dtype, *args[1:])

        return types.int32(variant, *(types.int64,) * 4), codegen

    return pack


#: Fill tiles with 32 rows of 16 (64) neighbouring columns: (variant, address of the first element,
#: byte distance of rows, tile, amax) -> two flag bits per strip. `STRIPS` tiles lie one after another.
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
