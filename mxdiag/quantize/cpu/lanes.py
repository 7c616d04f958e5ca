"""The arithmetic of the fused CPU path, one MX block per lane.

A strip is sixteen blocks: a tile of 32 x 16 float32 bit patterns, row i holding element i of every
block, and a record of rows of 16 lanes (`RECORD_ROWS`). Everything is done on y = x / s, exact
because s is a power of two:

    scale code   c = max(((bits(amax) + carry) >> 23) - 2, floor), s = 2^(c - 127)
    Q            q = y rounded to E2M1: (y + M) - M with M = 1.5 * 2^22 * max(2^floor(log2 |y|), 1),
                 whose unit in the last place is E2M1's quantum at y; ties go to the even code
    Q*           g = 6 y / ym rounded to E2M1 with ym = amax / s; then q* = (g / 6) ym, which is
    exact
                 for the largest elements (g / 6 = 1/4, 1/2, 1)
    errors       e = q - y,  e_scale = q - q*,  own = q* - y (deadzone where g = 0, grid elsewhere)

and a block's sums are weighted by s or s^2 in float64.

g must be decided as exact arithmetic would decide it. For 16-bit inputs (significands below 2^11) a
value 6 y / ym that is not a rounding threshold t of E2M1 differs from it by at least 2^-15, and one
that is a threshold is computed within 2^-20; so z = 6 y / ym is first rounded to multiples of
2^-16. For float32, |y| is compared with the seven t ym / 6, rounded to float32 in the direction
that leaves the comparison as it is: down for |y| > t ym / 6, where a tie goes to the value below,
up for >=.

No result depends on the flush-to-zero mode: blocks whose amax is below 2^-60 arrive multiplied by
2^96 (an exact integer operation of the caller), their record's `lift` saying so, and elsewhere
subnormal operands are too small beside the block's scale to change anything stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llvmlite import ir

from mxdiag.formats import E2M1, E8M0_BIAS, FLOAT32_MANTISSA_BITS, MXFP4, ElementFormat
from mxdiag.quantize.cpu.simd import F32, F64, I32, I64, LANES, Lanes, constant, load
from mxdiag.quantize.sums import TOKEN_FIELDS

BLOCK = MXFP4.block_size
TOP = MXFP4.element.max_normal
EMAX = MXFP4.element.emax
#: Byte distance between two rows of a tile.
ROW_BYTES = 4 * LANES
TILE_BYTES = BLOCK * ROW_BYTES
#: Rows of a strip's record, all of 32-bit words: amax bits of the blocks' first and second halves;
#: lift; position in the octave of delta, or scale codes; amax bits of the macro blocks of two and
#: of four blocks that a block belongs to. Then, in float64, the blocks' energies for token
#: statistics.
RECORD_ROWS = ("amax_low", "amax_high", "lift", "result", "amax_pair", "amax_four")
LOW_ROW, HIGH_ROW, LIFT_ROW, RESULT_ROW, PAIR_ROW, FOUR_ROW = range(len(RECORD_ROWS))
ENERGIES_OFFSET = len(RECORD_ROWS) * ROW_BYTES
ENERGY_BYTES = len(TOKEN_FIELDS) * 8 * LANES
RECORD_BYTES = ENERGIES_OFFSET + ENERGY_BYTES

#: Tiny blocks are multiplied by 2^LIFT.
LIFT = 96

#: Fields of a float32's bits.
SIGN = 0x80000000
MAGNITUDE = 0x7FFFFFFF
EXPONENT = 0x7F800000
MANTISSA = 0x007FFFFF
ONE = 0x3F800000
#: 1.5 * 2^23 * 2^-16: adding it rounds to multiples of 2^-16.
_SNAP = 192.0
#: E2M1's rounding thresholds and what crossing each adds to the value. Ties go to the even code: at
#: every second threshold, from the first on, to the value below.
STEPS = ((0.25, 0.5), (0.75, 0.5), (1.25, 0.5), (1.75, 0.5), (2.5, 1.0), (3.5, 1.0), (5.0, 2.0))


def scale_codes(amax: Lanes, carry: Lanes, lift: Lanes) -> Lanes:
    """E8M0 codes of sixteen blocks, plus `lift`: the scale rule on the bits of amax."""
    exponent = (amax + carry) >> FLOAT32_MANTISSA_BITS
    return exponent.maximum(lift + EMAX) - EMAX


def power_of_two(code: Lanes) -> Lanes:
    """2^(code - 127) in float32 for 1 <= code <= 254 (zero for 0)."""
    return (code << FLOAT32_MANTISSA_BITS).reinterpret(F32)


def wide_power_of_two(exponent: Lanes, bias: int) -> Lanes:
    """2^(exponent - bias) in float64."""
    return ((exponent + (1023 - bias)).to(I64) << 52).reinterpret(F64)


@dataclass(frozen=True, slots=True)
class Grid:
    """The values of an element format times a power of two, 2^(field - 127), one per lane.

    Rounding is to nearest, ties to even code: (y + M) - M, with M 1.5 * 2^(23 - mantissa bits)
    times the power of two at y, which is taken to be at least that of the smallest normal value.
    """

    floor: Lanes | int  # float32 bits of the smallest normal value
    rounder: float
    limit: Lanes | float | None = None  # where to saturate; None if |y| never rounds beyond

    @classmethod
    def of(cls, element: ElementFormat, saturate: bool) -> Grid:
        """The element format's own values."""
        limit = element.max_normal if saturate else None
        return cls((E8M0_BIAS + element.emin) << FLOAT32_MANTISSA_BITS, _rounder(element), limit)

    @classmethod
    def scaled(cls, element: ElementFormat, field: Lanes, saturate: bool) -> Grid:
        """The grid for float32 exponent fields of the scale, all at least 8."""
        floor = (field + element.emin) << FLOAT32_MANTISSA_BITS
        limit = power_of_two(field) * element.max_normal if saturate else None
        return cls(floor, _rounder(element), limit)

    def round(self, y: Lanes) -> Lanes:
        """Y on the grid; a zero may lose its sign."""
        power = (y.bits() & EXPONENT).maximum(self.floor).reinterpret(F32)
        q = power.times_plus(-self.rounder, power.times_plus(self.rounder, y))
        if self.limit is None:
            return q
        if isinstance(self.limit, Lanes):
            return q.minimum(self.limit).maximum(self.limit.negated())
        return q.minimum(self.limit).maximum(-self.limit)


def _rounder(element: ElementFormat) -> float:
    return 1.5 * 2.0 ** (FLOAT32_MANTISSA_BITS - element.mantissa_bits)


def round_e2m1(y: Lanes, saturate: bool) -> Lanes:
    """Y to the nearest E2M1 value, ties to even code. Needs |y| < 7 unless it is to `saturate`."""
    return Grid.of(E2M1, saturate).round(y)


def copy_sign(magnitude: Lanes, sign: Lanes) -> Lanes:
    """`magnitude` (not negative, or of the same sign) with the sign bit of `sign`."""
    return (magnitude.bits() | (sign.bits() & SIGN)).reinterpret(F32)


@dataclass(frozen=True, slots=True)
class Block:
    """What is constant along a block: sixteen blocks, one per lane."""

    amax: Lanes  # bits
    nonzero: Lanes
    lift: Lanes
    code: Lanes  # scale code plus lift
    inverse: Lanes  # 1 / s
    top: Lanes  # ym = amax / s, 1 for an all-zero block

    @classmethod
    def of(cls, record: ir.Value, carry: Lanes) -> Block:
        """From a strip's record and the scale rule's carry."""
        low, high, lift = (record_row(carry.builder, record, i) for i in range(3))
        amax = low.maximum(high)
        code = scale_codes(amax, carry, lift)
        inverse = power_of_two(constant(amax.builder, I32, 2 * E8M0_BIAS) - code)
        nonzero = amax.differs(0)
        top = nonzero.select(amax.reinterpret(F32) * inverse, 1.0)
        return cls(amax, nonzero, lift, code, inverse, top)

    def relative_field(self, amax: Lanes, carry: Lanes | int, element: ElementFormat) -> Lanes:
        """127 + log2(s' / s) for the scale s' that a rule gives a block of the largest |y| `amax`.

        `amax` is float32 bits; the carry is the rule's for `element`. The scale code is clamped at
        0 as any is, and the result at 8, which is far below where y matters.
        """
        exponent = (amax + carry) >> FLOAT32_MANTISSA_BITS
        return exponent.maximum(self.least_field() + element.emax) - element.emax

    def least_field(self) -> Lanes:
        """The least value of `relative_field`."""
        code = self.code - self.lift
        bias = constant(code.builder, I32, E8M0_BIAS)
        return (code < E8M0_BIAS - 8).select(bias - code, 8)


class ThresholdRounder:
    """Rounds to E2M1 values by comparing |y| with the thresholds between them, one set per lane."""

    def __init__(self, thresholds: list[Lanes]) -> None:
        self.thresholds = thresholds

    def __call__(self, y: Lanes, unit: float = 1.0) -> tuple[Lanes, Lanes]:
        """The E2M1 value g over `unit`, with the sign of y, and where it is not zero."""
        magnitude = (y.bits() & MAGNITUDE).reinterpret(F32)
        nonzero = magnitude > self.thresholds[0]
        g = nonzero.select(constant(y.builder, F32, STEPS[0][1] / unit), 0.0)
        for i, (_, step) in enumerate(STEPS[1:], start=1):
            threshold = self.thresholds[i]
            passed = magnitude >= threshold if i % 2 else magnitude > threshold
            g = passed.select(g + step / unit, g)
        return copy_sign(g, y), nonzero


class IdealRounder:
    """Rounds y to the E2M1 value g of 6 y / ym, as exact arithmetic would."""

    def __init__(self, block: Block, exact_16_bit: bool) -> None:
        top = block.top
        self.snapped = exact_16_bit
        if exact_16_bit:
            self.ratio = constant(top.builder, F32, TOP) / top
        else:
            self.by_thresholds = ThresholdRounder(_thresholds(top))

    def __call__(self, y: Lanes, unit: float = 1.0) -> tuple[Lanes, Lanes]:
        """G / unit, a zero with the sign of y or none, and where it is not zero."""
        if not self.snapped:
            return self.by_thresholds(y, unit)
        z = y.times_plus(self.ratio, _SNAP) - _SNAP
        g = round_e2m1(z, saturate=False)
        return (g if unit == 1 else g * (1 / unit)), g.differs(0.0)


def _thresholds(top: Lanes) -> list[Lanes]:
    """The seven t ym / 6 in float32, rounded down where a tie goes down, else up.

    In float64 t ym is exact and its product with 1 / 6 errs by less than 2^-52, so scaled by 1 +
    2^-50 (1 - 2^-50) it is not below (above) the quotient; and it does not reach the next float32,
    since a quotient by 6 that is no float32 is a third of a unit away from one. Cutting off the low
    29 bits then rounds down (after adding 2^29 - 1, up).
    """
    wide, low = top.to(F64), (1 << 29) - 1

    def down(t: float) -> Lanes:
        product = wide * (t / TOP * (1 + 2.0**-50))
        return (product.bits() & ~low).reinterpret(F64).to(F32)

    def up(t: float) -> Lanes:
        product = wide * (t / TOP * (1 - 2.0**-50))
        return ((product.bits() + low) & ~low).reinterpret(F64).to(F32)

    five, seven = down(1.25), up(1.75)
    return [down(0.25), top * 0.125, five, seven, five * 2.0, seven * 2.0, five * 4.0]


def delta(block: Block) -> Lanes:
    """log2(s / s*) in float32, within 2e-7 of max(|delta|, 1) and exact where it is an integer.

    With amax = f 2^n and t = (f - 1.5) / (f + 1.5), log2(f / 1.5) is the odd series
    2 / ln 2 * (t + t^3 / 3 + t^5 / 5 + ...), |t| <= 1/5; 0 for an all-zero block.
    """
    f = ((block.amax & MANTISSA) | ONE).reinterpret(F32)
    t = (f - 1.5) / (f + 1.5)
    square = t * t
    terms = [2 / (math.log(2) * odd) for odd in (13, 11, 9, 7, 5, 3, 1)]
    series = constant(f.builder, F32, terms[0])
    for term in terms[1:]:
        series = series.times_plus(square, term)
    octaves = block.code + EMAX - (block.amax >> FLOAT32_MANTISSA_BITS)
    return block.nonzero.select(octaves.to(F32) - t * series, 0.0)


def octave_position(block: Block, carry: Lanes) -> Lanes:
    """Where amax lies in the octave over which delta runs once: 0 at its start to 2^23 - 1.

    The start is where the scale doubles, so delta falls from delta_low + 1 as this grows. A clamped
    scale, whose delta is larger still, is put at the start.
    """
    raised = block.amax + carry
    clamped = (raised >> FLOAT32_MANTISSA_BITS) < block.lift + EMAX
    return clamped.select(0, raised & MANTISSA)


def record_row(builder: ir.IRBuilder, record: ir.Value, row: int) -> Lanes:
    """A row of the record at a byte address, as 32-bit integers."""
    return load(builder, record, I32, row * ROW_BYTES)


def tile_row(builder: ir.IRBuilder, tile: ir.Value, row: int) -> Lanes:
    """Row `row` of a tile at byte address `tile`, in float32."""
    return load(builder, tile, F32, row * ROW_BYTES)
