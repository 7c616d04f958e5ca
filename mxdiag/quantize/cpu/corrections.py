"""Corrections of one strip, from its normalised tile: no further pass over memory.

Everything is in units of the block's scale s: y = x / s lies in the strip's tile, e / s = Q(y) - y
in the first work tile. A corrected value is x_dq = s (y + err), or s (y + err) / mu inside
macro-block scaling, with err of x_dq decided exactly as `correction_specs` defines and accumulated
in float32.

    mbs        err = Q(mu y) - mu y, in units of s / mu
    of         r = -e has a block scale s' of its own; err = e - alpha Q'(e)
    mbs+of     the same on mu y
    scale:mse  the better of two grids per block
    scale:mK   thresholds t s', all exact in float32
    nvfp4      q c - y with q = E2M1(y r), in halves of the block
    mxfp8      E4M3(y) - y
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir
from numba.core import cgutils

from mxdiag.formats import E2M1, E4M3, E8M0_BIAS, RCEIL, ElementFormat
from mxdiag.quantize.cpu.lanes import (
    BLOCK,
    FOUR_ROW,
    HIGH_ROW,
    LIFT,
    LOW_ROW,
    MAGNITUDE,
    PAIR_ROW,
    ROW_BYTES,
    STEPS,
    TILE_BYTES,
    TOP,
    Block,
    Grid,
    ThresholdRounder,
    power_of_two,
    record_row,
    wide_power_of_two,
)
from mxdiag.quantize.cpu.simd import F32, F64, I32, I64, LANES, Lanes, constant, load, scalar, splat
from mxdiag.quantize.cpu.totals import GROUP, Counts, Group, Totals, row_groups
from mxdiag.quantize.cpu.variant import DTYPES, SETTINGS, Variant

#: What is accumulated per correction: ||err||^2, <err, y>, sum of err.
CORRECTED_FIELDS = ("e2", "ey", "e")
CORRECTED_BYTES = len(CORRECTED_FIELDS) * 8 * LANES

#: Tiles a strip needs besides its own: of e / s, and of the residuals of macro-block scaling.
WORK_TILES = 2

LaneSums = dict[str, Lanes]

#: NVFP4: beyond this scale (in units of s) everything rounds to zero, whatever the scale.
_HUGE = 2.0**60
#: Bits of the mantissa of a macro block's mu.
_MU_BITS = 8


@dataclass(frozen=True, slots=True)
class CorrectedSums:
    """Byte addresses of a unit's float64 [corrections, FIELDS, 16] and int64 [corrections]."""

    sums: ir.Value
    underflows: ir.Value

    def underflow(self, builder: ir.IRBuilder, index: int) -> ir.Value:
        """Address of a correction's count."""
        return builder.add(self.underflows, ir.Constant(I64, 8 * index))

    def add(self, index: int, sums: LaneSums, err_scale: Lanes, scale: Lanes) -> None:
        """Add a strip's sums, err being in units of `err_scale` and y of `scale` (float64)."""
        weights = {"e2": err_scale * err_scale, "ey": err_scale * scale, "e": err_scale}
        for i, name in enumerate(CORRECTED_FIELDS):
            place = scale.builder.add(self.sums, ir.Constant(I64, index * CORRECTED_BYTES))
            before = load(scale.builder, place, F64, i * 8 * LANES)
            (before + sums[name].to(F64) * weights[name]).store(place, i * 8 * LANES)


@dataclass(frozen=True, slots=True)
class Strip:
    """A strip that has been measured: its tile holds y, the first tile of `work` e / s."""

    builder: ir.IRBuilder
    variant: Variant
    block: Block
    scale: Lanes  # s in float64
    tile: ir.Value
    work: ir.Value
    record: ir.Value
    settings: ir.Value

    def setting(self, name: str) -> Lanes:
        """The low 32 bits of a run-time setting in every lane."""
        value = scalar(self.builder, self.settings, I64, SETTINGS.index(name))
        return splat(self.builder, value, I32)

    @property
    def saturates(self) -> bool:
        """Whether the rule may give a scale below amax / max_normal."""
        return not self.variant.covers

    @property
    def exact_products(self) -> bool:
        """Whether mu y is exact in float32: 9 bits times at most 11."""
        return DTYPES[self.variant.dtype].bits == 16

    def grid(self, amax: Lanes, element: ElementFormat, carry: Lanes) -> tuple[Grid, Lanes]:
        """The element grid of blocks whose largest |y| is `amax` (bits), and its scale."""
        field = self.block.relative_field(amax, carry, element)
        return Grid.scaled(element, field, self.saturates), power_of_two(field)


@dataclass(frozen=True, slots=True)
class Element:
    """One element of each block: row `row` of a group that starts at byte `offset` of a tile."""

    strip: Strip
    offset: ir.Value
    row: int

    def _load(self, base: ir.Value, tile: int = 0) -> Lanes:
        address = self.strip.builder.add(base, self.offset)
        return load(self.strip.builder, address, F32, tile * TILE_BYTES + self.row * ROW_BYTES)

    @property
    def y(self) -> Lanes:
        """The element."""
        return self._load(self.strip.tile)

    @property
    def err(self) -> Lanes:
        """Q(y) - y."""
        return self._load(self.strip.work)

    @property
    def residual(self) -> Lanes:
        """What `keep` kept."""
        return self._load(self.strip.work, tile=1)

    def keep(self, residual: Lanes) -> None:
        """Store lanes in the second work tile."""
        address = self.strip.builder.add(self.strip.work, self.offset)
        residual.store(address, TILE_BYTES + self.row * ROW_BYTES)


#: From one element of each block: err, and where the corrected value is zero.
ElementStep = Callable[[Element], tuple[Lanes, Lanes]]


def _sum(
    strip: Strip, underflow: ir.Value, row: ElementStep, first: int = 0, last: int = BLOCK
) -> LaneSums:
    """FIELDS over rows first .. last - 1; zeros are added to the count at `underflow`."""
    builder = strip.builder
    totals = Totals(builder, CORRECTED_FIELDS)
    counts = Counts(builder, underflow, ("underflow",))
    with row_groups(builder, first, last) as start:
        offset = builder.mul(start, ir.Constant(I64, ROW_BYTES))
        group = Group()
        for i in range(GROUP):
            element = Element(strip, offset, i)
            err, zero = row(element)
            group.add_product("e2", err, err)
            group.add_product("ey", err, element.y)
            group.add("e", err)
            counts.add("underflow", zero)
        totals.add(group.sums)
    counts.write()
    return totals.read()


def _nowhere(strip: Strip) -> ir.Value:
    """Address of a count that nobody reads."""
    unused = cgutils.alloca_once(strip.builder, I64)
    strip.builder.store(ir.Constant(I64, 0), unused)
    return strip.builder.ptrtoint(unused, I64)


def _magnitude(lanes: Lanes) -> Lanes:
    return (lanes.bits() & MAGNITUDE).reinterpret(F32)


def _fallback(strip: Strip, amax: Lanes, alpha: float) -> tuple[Callable[[Lanes], Lanes], Lanes]:
    """Alpha Q' for residuals of the largest magnitude `amax` (bits); up to where Q' gives zero."""
    grid, scale = strip.grid(amax, E2M1, strip.setting("carry"))
    return lambda residual: grid.round(residual) * alpha, scale * 0.25


def _of(strip: Strip, underflow: ir.Value, alpha: float, err_amax: Lanes) -> LaneSums:
    """Outlier fallback: err = e - alpha Q'(e), since the residual is -e.

    The value is zero where Q and Q' give zero, that is where |y| = |e| is a quarter of s' at most.
    """
    second, zero_below = _fallback(strip, err_amax, alpha)

    def row(element: Element) -> tuple[Lanes, Lanes]:
        err = element.err
        return err - second(err), _magnitude(element.y) <= zero_below

    return _sum(strip, underflow, row)


def _macro_scale(strip: Strip, size: int) -> Lanes:
    """mu: the mantissa of 6 / amax(macro block) cut to 8 bits, in float32."""
    row = {2 * BLOCK: PAIR_ROW, 4 * BLOCK: FOUR_ROW}.get(size)
    amax = strip.block.amax if row is None else record_row(strip.builder, strip.record, row)
    top = constant(strip.builder, F64, TOP)
    wide = amax.equals(0).select(top, amax.reinterpret(F32).to(F64))
    bits = ((top / wide).bits() >> (52 - _MU_BITS)) & ((1 << _MU_BITS) - 1)
    return bits.to(I32).to(F32) * 2.0**-_MU_BITS + 1.0


def _mbs(strip: Strip, underflow: ir.Value, size: int) -> tuple[LaneSums, Lanes, Lanes]:
    """Macro-block scaling: the sums in units of s / mu, mu, and the largest |mu y - Q| as bits.

    Keeps each mu y - Q (negated where products are exact) for the fallback inside.
    """
    mu = _macro_scale(strip, size)
    grid, _ = strip.grid((strip.block.top * mu).bits(), E2M1, strip.setting("carry"))
    largest = Totals(strip.builder, ("residual",))

    def row(element: Element) -> tuple[Lanes, Lanes]:
        scaled = element.y * mu
        q = grid.round(scaled)
        err = element.y.times_plus(mu.negated(), q)
        residual = err if strip.exact_products else scaled - q
        element.keep(residual)
        largest.raise_to("residual", _magnitude(residual))
        return err, q.equals(0.0)

    return _sum(strip, underflow, row), mu, largest.read()["residual"].bits()


def _mbs_of(
    strip: Strip, underflow: ir.Value, mu: Lanes, residual_amax: Lanes, alpha: float
) -> LaneSums:
    """Outlier fallback inside macro-block scaling, after `_mbs`; in units of s / mu."""
    second, zero_below = _fallback(strip, residual_amax, alpha)

    def row(element: Element) -> tuple[Lanes, Lanes]:
        scaled, residual = element.y * mu, element.residual
        zero = _magnitude(scaled) <= zero_below
        if strip.exact_products:
            return residual - second(residual), zero
        q = scaled - residual
        return element.y.times_plus(mu.negated(), q) + second(residual), zero

    return _sum(strip, underflow, row)


def _scale_mse(strip: Strip, underflow: ir.Value, rceil: bool, base: LaneSums) -> LaneSums:
    """The better of the scale of `rceil` and half of it, where elements saturate."""
    builder, block = strip.builder, strip.block
    carry = constant(builder, I32, RCEIL.carry(E2M1))
    upper = block.relative_field(block.top.bits(), carry, E2M1)
    lower = (upper - 1).maximum(block.least_field())
    nowhere = _nowhere(strip)

    def errors(grid: Grid) -> ElementStep:
        def row(element: Element) -> tuple[Lanes, Lanes]:
            q = grid.round(element.y)
            return q - element.y, q.equals(0.0)

        return row

    if rceil:
        coarse = {"e2": base["e2"], "ey": base["qx"] - base["x2"], "e": base["e"]}
    else:
        coarse = _sum(strip, nowhere, errors(Grid.scaled(E2M1, upper, saturate=False)))
    fine = _sum(strip, nowhere, errors(Grid.scaled(E2M1, lower, saturate=True)))
    better = fine["e2"] < coarse["e2"]
    zero_below = power_of_two(better.select(lower, upper)) * 0.25
    counts = Counts(builder, underflow, ("underflow",))
    with row_groups(builder) as start:
        offset = builder.mul(start, ir.Constant(I64, ROW_BYTES))
        for i in range(GROUP):
            y = Element(strip, offset, i).y
            counts.add("underflow", _magnitude(y) <= zero_below)
    counts.write()
    return {name: better.select(fine[name], coarse[name]) for name in CORRECTED_FIELDS}


def _scale_mantissa(strip: Strip, underflow: ir.Value, bits: int) -> LaneSums:
    """A block scale of `bits` mantissa bits, the least that is not below amax / 6.

    It and all thresholds have few bits, so comparing |y| with them in float32 is exact.
    """
    builder, block = strip.builder, strip.block
    dropped = (1 << (52 - bits)) - 1
    ideal = block.top.to(F64) / constant(builder, F64, TOP)
    rounded = ((ideal.bits() + dropped) & ~dropped).reinterpret(F64)
    least = wide_power_of_two(
        constant(builder, I32, E8M0_BIAS) - (block.code - block.lift), E8M0_BIAS
    )
    scale = rounded.maximum(least).to(F32)
    rounder = ThresholdRounder([scale * t for t, _ in STEPS])

    def row(element: Element) -> tuple[Lanes, Lanes]:
        g, nonzero = rounder(element.y)
        return g.times_plus(scale, element.y.negated()), ~nonzero

    return _sum(strip, underflow, row)


def _nvfp4(strip: Strip, underflow: ir.Value) -> LaneSums:
    """NVFP4 in the two halves of each block; every float32 operation as the definition has it."""
    builder, lift = strip.builder, strip.block.lift
    tensor_scale = strip.setting("tensor_scale").reinterpret(F32)
    inverse = strip.setting("inverse_tensor_scale").reinterpret(F32)
    codes, elements = Grid.of(E4M3, saturate=False), Grid.of(E2M1, saturate=True)
    unlift = lift.equals(0).select(constant(builder, F32, 1.0), 2.0**-LIFT)
    total: LaneSums = {}
    for half, amax_row in enumerate((LOW_ROW, HIGH_ROW)):
        amax = record_row(builder, strip.record, amax_row).reinterpret(F32) * unlift
        wanted = amax / constant(builder, F32, TOP) / tensor_scale
        code = codes.round(wanted.maximum(2.0**E4M3.emin).minimum(E4M3.max_normal))
        ratio = ((inverse / code).to(F64) * strip.scale).to(F32)
        step = ((tensor_scale * code).to(F64) / strip.scale).minimum(_HUGE).to(F32)

        def row(element: Element, ratio: Lanes = ratio, step: Lanes = step) -> tuple[Lanes, Lanes]:
            q = elements.round(element.y * ratio)
            return q.times_plus(step, element.y.negated()), q.equals(0.0)

        first = half * BLOCK // 2
        sums = _sum(strip, underflow, row, first, first + BLOCK // 2)
        total = {
            name: total[name] + sums[name] if half else sums[name] for name in CORRECTED_FIELDS
        }
    return total


def _mxfp8(strip: Strip, underflow: ir.Value) -> LaneSums:
    """MXFP8 under the scale rule in use."""
    grid, _ = strip.grid(strip.block.top.bits(), E4M3, strip.setting("carry_e4m3"))

    def row(element: Element) -> tuple[Lanes, Lanes]:
        q = grid.round(element.y)
        return q - element.y, q.equals(0.0)

    return _sum(strip, underflow, row)


def _emit_macro(strip: Strip, results: CorrectedSums, size: int) -> None:
    """All corrections with macro blocks of `size`: one common loop, then one for each fallback."""
    inner = {
        alpha: index
        for index, plan in enumerate(strip.variant.corrections)
        if plan[:2] == ("mbs", size)
        for alpha in plan[2:]
    }
    plain = inner.pop(None, None)
    place = _nowhere(strip) if plain is None else results.underflow(strip.builder, plain)
    sums, mu, residual_amax = _mbs(strip, place, size)
    scale = strip.scale / mu.to(F64)
    if plain is not None:
        results.add(plain, sums, scale, strip.scale)
    for alpha, index in inner.items():
        underflow = results.underflow(strip.builder, index)
        sums = _mbs_of(strip, underflow, mu, residual_amax, alpha)
        results.add(index, sums, scale, strip.scale)


def emit_corrections(strip: Strip, results: CorrectedSums, base: LaneSums, err_amax: Lanes) -> None:
    """Measure the variant's corrections and add them to a unit's results.

    `base` holds the strip's own sums in units of s, `err_amax` the largest |e / s| as bits.
    """
    alone: dict[str, Callable[..., LaneSums]] = {
        "of": lambda underflow, alpha: _of(strip, underflow, alpha, err_amax),
        "scale:mse": lambda underflow, rceil: _scale_mse(strip, underflow, rceil, base),
        "scale:m": lambda underflow, bits: _scale_mantissa(strip, underflow, bits),
        "nvfp4": lambda underflow: _nvfp4(strip, underflow),
        "mxfp8": lambda underflow: _mxfp8(strip, underflow),
    }
    for index, (kind, *parameters) in enumerate(strip.variant.corrections):
        if kind in alone:
            sums = alone[kind](results.underflow(strip.builder, index), *parameters)
            results.add(index, sums, strip.scale, strip.scale)
    for size in sorted({plan[1] for plan in strip.variant.corrections if plan[0] == "mbs"}):
        _emit_macro(strip, results, size)
