"""The decomposition of one strip: every statistic of `quantize.sums` in one pass over its tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types

from mxdiag.formats import E8M0_BIAS, FLOAT32_MANTISSA_BITS
from mxdiag.quantize.cpu.corrections import CorrectedSums, Strip, emit_corrections
from mxdiag.quantize.cpu.lanes import (
    ENERGIES_OFFSET,
    ENERGY_BYTES,
    MAGNITUDE,
    RESULT_ROW,
    ROW_BYTES,
    TOP,
    Block,
    IdealRounder,
    delta,
    octave_position,
    round_e2m1,
    wide_power_of_two,
)
from mxdiag.quantize.cpu.simd import (
    F32,
    F64,
    I32,
    I64,
    LANES,
    Lanes,
    align_stack,
    intrinsic,
    load,
    scalar,
    splat,
)
from mxdiag.quantize.cpu.totals import GROUP, Counts, Group, Totals, row_groups
from mxdiag.quantize.cpu.variant import DTYPES, SETTINGS, Variant
from mxdiag.quantize.sums import SUM_FIELDS, TOKEN_FIELDS

#: Counts over a unit of work that strips add to. `deadzone` and `underflow` include zeros of x,
#: `zero_blocks` absent and non-finite blocks.
STRIP_COUNTS = ("deadzone", "underflow", "saturated", "zero_blocks")
#: All int64 counts of a unit: those, then zeros (of padding and non-finite blocks too), padding
#: elements, absent blocks, non-finite blocks and their elements, bits of amax, lanes measured.
#: After them comes one underflow (with zeros) per correction.
UNIT_COUNTS = (
    *STRIP_COUNTS,
    "zeros",
    "padding",
    "absent",
    "nonfinite",
    "nonfinite_elements",
    "amax",
    "lanes",
)
#: Bytes of a unit's float64 lanes SUM_FIELDS; those of each correction follow.
SUMS_BYTES = len(SUM_FIELDS) * 8 * LANES

#: The octave of delta is cut into cells of 2^17 bit patterns, narrower than any of the 32 bins.
CELL_SHIFT = 17
OCTAVE_CELLS = 1 << (FLOAT32_MANTISSA_BITS - CELL_SHIFT)


@dataclass(frozen=True, slots=True)
class _Addresses:
    """Byte addresses that `measure_strip` works on."""

    tile: ir.Value
    record: ir.Value
    work: ir.Value
    settings: ir.Value
    sums: ir.Value
    largest: ir.Value
    counts: ir.Value
    octave: ir.Value
    row_energies: ir.Value


def _add_row(
    group: Group,
    counts: Counts,
    y: Lanes,
    block: Block,
    rounder: IdealRounder,
    covers: bool,
) -> tuple[Lanes, Lanes]:
    """Add one element of each block, y = x / s; returns e / s and where g is not zero."""
    q = round_e2m1(y, saturate=not covers)
    ideal, grid = rounder(y, unit=TOP)
    err = q - y
    scale_err = ideal.times_plus(block.top.negated(), q)
    own_err = ideal.times_plus(block.top, y.negated())
    grid_err = grid.select(own_err, 0.0)
    group.add_product("x2", y, y)
    group.add_product("e2", err, err)
    group.add_product("scale2", scale_err, scale_err)
    group.add_product("deadzone2", y, y, where=~grid)
    group.add_product("grid2", grid_err, grid_err)
    group.add_product("scale_grid", scale_err, grid_err)
    group.add_product("qx", q, y)
    group.add("e", err)
    counts.add("deadzone", ~grid)
    counts.add("underflow", q.equals(0.0))
    if not covers:
        group.add_product("scale_deadzone", scale_err, own_err, where=~grid)
        counts.add("saturated", (y > TOP) | (y < -TOP))
    return err, grid


def _emit_measure(builder: ir.IRBuilder, variant: Variant, at: _Addresses) -> None:
    carry = splat(builder, scalar(builder, at.settings, I64, SETTINGS.index("carry")), I32)
    block = Block.of(at.record, carry)
    largest = load(builder, at.largest, I32)
    largest.maximum(block.lift.equals(0).select(block.amax, 0)).store(at.largest)
    if variant.task == "amax":
        return
    _emit_histogram(block, octave_position(block, carry), at)
    scale = wide_power_of_two(block.code - block.lift, E8M0_BIAS)
    rounder = IdealRounder(block, exact_16_bit=DTYPES[variant.dtype].bits == 16)
    names = ("x2", "e2", "scale2", "deadzone2", "grid2", "scale_grid", "qx", "e")
    totals = Totals(builder, names if variant.covers else (*names, "scale_deadzone"))
    largest_err = Totals(builder, ("e",))
    counts = Counts(builder, at.counts, STRIP_COUNTS)
    with row_groups(builder) as first:
        offset = builder.mul(first, ir.Constant(I64, ROW_BYTES))
        rows, work = builder.add(at.tile, offset), builder.add(at.work, offset)
        group = Group()
        for row in range(GROUP):
            y = load(builder, rows, F32, row * ROW_BYTES) * block.inverse
            err, grid = _add_row(group, counts, y, block, rounder, variant.covers)
            if variant.row_tokens:
                _add_row_energies(at, first, row, scale * scale, (y, err, grid))
            if variant.corrections:
                y.store(rows, row * ROW_BYTES)
                err.store(work, row * ROW_BYTES)
                largest_err.raise_to("e", (err.bits() & MAGNITUDE).reinterpret(F32))
        totals.add(group.sums)
    counts.add("zero_blocks", ~block.nonzero)
    counts.write()
    sums = totals.read()
    _add_to_unit(at, block, scale, sums)
    if variant.corrections:
        underflows = builder.add(at.counts, ir.Constant(I64, 8 * len(UNIT_COUNTS)))
        results = CorrectedSums(builder.add(at.sums, ir.Constant(I64, SUMS_BYTES)), underflows)
        strip = Strip(builder, variant, block, scale, at.tile, at.work, at.record, at.settings)
        emit_corrections(strip, results, sums, largest_err.read()["e"].bits())


def _add_row_energies(
    at: _Addresses,
    first: ir.Value,
    row: int,
    weight: Lanes,
    element: tuple[Lanes, Lanes, Lanes],
) -> None:
    """Add TOKEN_FIELDS of one element of each block to its row's sums, lane by lane."""
    (y, err, grid), builder = element, weight.builder
    start = builder.mul(first, ir.Constant(I64, ENERGY_BYTES))
    energies = builder.add(at.row_energies, start)
    energy = y * y
    terms = {"x2": energy, "e2": err * err, "deadzone2": grid.select(0.0, energy)}
    for i, name in enumerate(TOKEN_FIELDS):
        term = terms[name]
        offset = row * ENERGY_BYTES + i * 8 * LANES
        before = load(builder, energies, F64, offset)
        (before + term.to(F64) * weight).store(energies, offset)


def _add_to_unit(at: _Addresses, block: Block, scale: Lanes, sums: dict[str, Lanes]) -> None:
    """Weigh a strip's sums by s or s^2 in float64 and add them to the unit's, lane by lane."""
    builder = scale.builder
    square = scale * scale
    wide = {name: total.to(F64) * square for name, total in sums.items() if name != "e"}
    wide["e"] = sums["e"].to(F64) * scale
    wide["delta"] = delta(block).to(F64)
    wide["delta2"] = wide["delta"] * wide["delta"]
    for i, name in enumerate(SUM_FIELDS):
        if name in wide:
            offset = i * 8 * LANES
            (load(builder, at.sums, F64, offset) + wide[name]).store(at.sums, offset)
    for i, name in enumerate(TOKEN_FIELDS):
        wide[name].store(at.record, ENERGIES_OFFSET + i * 8 * LANES)


def _emit_histogram(block: Block, position: Lanes, at: _Addresses) -> None:
    """Enter the blocks into the histogram of delta.

    `octave` holds OCTAVE_CELLS int64 bins, as many int64 edges, then the int64 histogram itself: a
    cell of the octave starts in a bin and gives way to the next lower one at its edge.
    """
    builder = position.builder
    position.store(at.record, RESULT_ROW * ROW_BYTES)

    def pointer(base: ir.Value, index: ir.Value) -> ir.Value:
        address = builder.add(base, builder.shl(index, ir.Constant(I64, 3)))
        return builder.inttoptr(address, I64.as_pointer())

    edges = builder.add(at.octave, ir.Constant(I64, 8 * OCTAVE_CELLS))
    histogram = builder.add(at.octave, ir.Constant(I64, 16 * OCTAVE_CELLS))
    for lane in range(LANES):
        place = scalar(builder, at.record, I32, RESULT_ROW * LANES + lane)
        place = builder.zext(place, I64)
        cell = builder.lshr(place, ir.Constant(I64, CELL_SHIFT))
        passed = builder.icmp_unsigned(">=", place, builder.load(pointer(edges, cell)))
        entry = builder.load(pointer(at.octave, cell))
        target = pointer(histogram, builder.sub(entry, builder.zext(passed, I64)))
        present = builder.extract_element(block.nonzero.value, ir.Constant(I32, lane))
        builder.store(builder.add(builder.load(target), builder.zext(present, I64)), target)


@intrinsic
def measure_strip(
    typingctx: Any,
    variant: Any,
    tile: Any,
    record: Any,
    work: Any,
    settings: Any,
    sums: Any,
    largest: Any,
    counts: Any,
    octave: Any,
    row_energies: Any,
) -> Any:
    """Add one strip's statistics to a unit's.

    All are byte addresses: the strip's `tile` and `record`; `work`, room for two more tiles; the
    `settings`, int64; the unit's `sums`, float64 [fields, 16] (see SUMS_BYTES), bits of its
    `largest` magnitude, int32 [16], and its `counts` (see UNIT_COUNTS); the `octave` table with the
    histogram of delta (see `_emit_histogram`); and if the variant has `row_tokens`, `row_energies`,
    float64 [32, len(TOKEN_FIELDS), 16]. With corrections the tile is left holding y.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        align_stack(builder)
        _emit_measure(builder, signature.args[0].variant, _Addresses(*args[1:]))
        return context.get_dummy_value()

    return types.void(variant, *(types.int64,) * 9), codegen
