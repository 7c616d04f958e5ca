"""Writing a strip's values: decoded, with injected error components, or as codes.

`transform_strip` replaces the tile's elements by the result, still as float32 bit patterns (or
codes) and scaled by 2^lift like the input; the unpackers narrow them to the stored type and put
them in place. Every result is exactly a value of the stored type, so narrowing never rounds.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from mxdiag.formats import E8M0_BIAS
from mxdiag.quantize.cpu.lanes import (
    BLOCK,
    EXPONENT,
    MAGNITUDE,
    ONE,
    RESULT_ROW,
    ROW_BYTES,
    SIGN,
    TOP,
    Block,
    IdealRounder,
    copy_sign,
    power_of_two,
    round_e2m1,
    tile_row,
    wide_power_of_two,
)
from mxdiag.quantize.cpu.simd import (
    F32,
    F64,
    I16,
    I32,
    I64,
    LANES,
    Lanes,
    constant,
    intrinsic,
    load,
    splat,
    transpose,
)
from mxdiag.quantize.cpu.variant import DTYPES, Dtype, Variant
from mxdiag.quantize.sums import COMPONENTS

#: Components to inject, as bits of a run-time argument.
COMPONENT_BITS = {name: 1 << bit for bit, name in enumerate(COMPONENTS)}

_SIGN_64 = 1 << 63
_EXPONENT_64 = 0x7FF << 52
_MANTISSA_BIT = 0x400000
_ROWS_A_TURN = 4


def _round_to_precision(value: Lanes, mantissa_bits: int, lowest: Lanes) -> Lanes:
    """float64 to the nearest number of `mantissa_bits` explicit bits, ties to even; keeps signs.

    `lowest` is the exponent field, in place, of the smallest normal number: below it there is only
    one quantum.
    """
    power = (value.bits() & _EXPONENT_64).maximum(lowest)
    magic = (power + (((52 - mantissa_bits) << 52) + (1 << 51))).reinterpret(F64)
    rounded = (value + magic) - magic
    return (rounded.bits() | (value.bits() & _SIGN_64)).reinterpret(F64)


def _to_stored(value: Lanes, dtype: Dtype, lift: Lanes) -> Lanes:
    """float64 to the float32 bits of a stored value, rounded once to the stored type."""
    mantissa_bits, emin = (dtype.mantissa_bits, dtype.emin) if dtype.bits == 16 else (23, -126)
    lowest = (lift + (1023 + emin)).to(I64) << 52
    return _round_to_precision(value, mantissa_bits, lowest).to(F32).bits()


def _codes(q: Lanes, x: Lanes) -> Lanes:
    """E2M1 codes of q with the sign of x: exponent and mantissa bit; 1 for the subnormal 0.5."""
    magnitude = q.bits() & MAGNITUDE
    normal = (magnitude >> 22) - (126 << 1)
    subnormal = magnitude.equals(0).select(magnitude, 1)
    return (magnitude < ONE).select(subnormal, normal) | ((x.bits() >> 31) << 3)


class _Injector:
    """x plus chosen components of its error, evaluated in float64 as the reference does.

    q* = RN(g m / 6) is a power of two times m / 4 (g = 1.5, 3, 6) or RN(m / 6) (else), so one
    division per block is enough.
    """

    def __init__(self, block: Block, dtype: Dtype, rounder: IdealRounder, parts: ir.Value) -> None:
        builder = block.amax.builder
        self.block, self.dtype, self.rounder = block, dtype, rounder
        amax = block.amax.reinterpret(F32).to(F64)
        self.quarter, self.sixth = amax * 0.25, amax / constant(builder, F64, TOP)
        self.scale = wide_power_of_two(block.code, E8M0_BIAS)
        flags = splat(builder, parts, I32)
        self.wants = {name: (flags & bit).differs(0) for name, bit in COMPONENT_BITS.items()}

    def __call__(self, x: Lanes, y: Lanes, q: Lanes) -> Lanes:
        """Bits of the result, from one element of each block."""
        g, grid = self.rounder(y)
        g = copy_sign(g, x)
        odd = (g.bits() & _MANTISSA_BIT).differs(0)
        power = (g.bits() & (EXPONENT | SIGN)).reinterpret(F32)
        ideal = power.to(F64) * odd.select(self.quarter, self.sixth)
        decoded, wide = q.to(F64) * self.scale, x.to(F64)
        nonzero = (x.bits() & MAGNITUDE).differs(0)
        deadzone = nonzero & ~grid
        own = deadzone.select(self.wants["deadzone"], self.wants["grid"])
        scale = self.wants["scale"]
        value = own.select(
            scale.select(decoded, ideal), scale.select(wide + (decoded - ideal), wide)
        )
        # x itself is passed on as bits: as a number, a subnormal might be flushed to zero.
        unmoved = deadzone & q.equals(0.0)
        kept = ~own & (~scale | unmoved)
        return kept.select(x.bits(), _to_stored(value, self.dtype, self.block.lift))


def _emit_transform(
    builder: ir.IRBuilder,
    variant: Variant,
    tile: ir.Value,
    record: ir.Value,
    carry: ir.Value,
    parts: ir.Value,
) -> None:
    dtype = DTYPES[variant.dtype]
    block = Block.of(record, splat(builder, carry, I32))
    (block.code - block.lift).store(record, RESULT_ROW * ROW_BYTES)
    scale = power_of_two(block.code)
    injector = None
    if variant.task == "inject":
        injector = _Injector(block, dtype, IdealRounder(block, dtype.bits == 16), parts)
    with cgutils.for_range(builder, ir.Constant(I64, BLOCK // _ROWS_A_TURN)) as loop:
        distance = ir.Constant(I64, _ROWS_A_TURN * ROW_BYTES)
        rows = builder.add(tile, builder.mul(loop.index, distance))
        for row in range(_ROWS_A_TURN):
            x = tile_row(builder, rows, row)
            y = x * block.inverse
            q = copy_sign(round_e2m1(y, saturate=not variant.covers), x)
            if injector is not None:
                result = injector(x, y, q)
            elif variant.task == "encode":
                result = _codes(q, x)
            else:
                result = (q * scale).bits()
            result.store(rows, row * ROW_BYTES)


@intrinsic
def transform_strip(
    typingctx: Any, variant: Any, tile: Any, record: Any, carry: Any, parts: Any
) -> Any:
    """Replace a tile by the variant's result; scale codes go into the record's result row.

    `tile` and `record` are byte addresses, `carry` is the scale rule's, `parts` are the
    COMPONENT_BITS to inject.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _emit_transform(builder, signature.args[0].variant, *args[1:])
        return context.get_dummy_value()

    return types.void(variant, *(types.int64,) * 4), codegen


def _narrow(bits: Lanes, variant: Variant) -> Lanes:
    """16-bit patterns, in 32-bit lanes, of float32 bits they can represent; codes as they are."""
    dtype = DTYPES[variant.dtype]
    if variant.task == "encode":
        return bits
    if dtype.name == "bfloat16":
        return bits >> 16
    magnitude = bits & MAGNITUDE
    normal = (magnitude - ((127 - 15) << 23)) >> 13
    subnormal = (magnitude.reinterpret(F32) * 2.0**24).to(I32)
    finite = (magnitude < (127 - 14) << 23).select(subnormal, normal)
    infinite = (magnitude > EXPONENT).select(constant(bits.builder, I32, 0x7E00), 0x7C00)
    return (magnitude < dtype.overflow).select(finite, infinite) | ((bits >> 31) << 15)


def _emit_unpack_rows(
    builder: ir.IRBuilder, variant: Variant, tile: ir.Value, pointers: ir.Value
) -> None:
    dtype, addresses = DTYPES[variant.dtype], []
    for lane in range(LANES):
        slot = builder.add(pointers, ir.Constant(I64, 8 * lane))
        addresses.append(builder.load(builder.inttoptr(slot, I64.as_pointer())))
    for part in range(dtype.bits // 16):
        if dtype.bits == 32:
            rows = [load(builder, tile, I32, (LANES * part + i) * ROW_BYTES) for i in range(LANES)]
        else:
            wide = [load(builder, tile, I32, i * ROW_BYTES) for i in range(BLOCK)]
            halves = [_narrow(bits, variant) for bits in wide]
            rows = [halves[2 * i] | (halves[2 * i + 1] << 16) for i in range(LANES)]
        for address, block in zip(addresses, transpose(rows), strict=True):
            block.store(address, part * ROW_BYTES)


@intrinsic
def unpack_rows(typingctx: Any, variant: Any, tile: Any, pointers: Any) -> Any:
    """Write a tile's blocks to sixteen addresses, 32 elements to each."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _emit_unpack_rows(builder, signature.args[0].variant, *args[1:])
        return context.get_dummy_value()

    return types.void(variant, types.int64, types.int64), codegen


@intrinsic
def unpack_columns(typingctx: Any, variant: Any, tile: Any, target: Any, stride: Any) -> Any:
    """Write a tile's 32 rows of 16 neighbouring elements, `stride` bytes apart."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        variant = signature.args[0].variant
        _, tile, target, stride = args
        with cgutils.for_range(builder, ir.Constant(I64, BLOCK)) as loop:
            row = builder.add(tile, builder.mul(loop.index, ir.Constant(I64, ROW_BYTES)))
            bits = load(builder, row, I32)
            if DTYPES[variant.dtype].bits == 16:
                bits = _narrow(bits, variant).to(I16)
            bits.store(builder.add(target, builder.mul(loop.index, stride)))
        return context.get_dummy_value()

    return types.void(variant, *(types.int64,) * 3), codegen
