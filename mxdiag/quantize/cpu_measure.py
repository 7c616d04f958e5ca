"""The decomposition of one strip: every statistic of `quantize.sums` from one pass over its tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mxdiag.formats import E8M0_BIAS, FLOAT32_MANTISSA_BITS
from mxdiag.quantize.cpu_lanes import (
    BLOCK,
    ROW_BYTES,
    TOP,
    Block,
    IdealRounder,
    delta,
    octave_position,
    round_e2m1,
    tile_row,
    wide_power_of_two,
)
from mxdiag.quantize.cpu_simd import F32, F64, I32, I64, LANES, Lanes, broadcast, constant, load
from mxdiag.quantize.cpu_variant import DTYPES, Variant
from mxdiag.quantize.sums import SUM_FIELDS, TOKEN_FIELDS

#: Rows added in float32 before a group's sum joins the block's: keeps the closure below 1e-6 even
#: where 32 equal terms would all be rounded the same way.
GROUP = 8

#: Integer counts over a unit of work; `deadzone` and `underflow` include zeros of x. `zero_blocks`
#: includes absent and non-finite ones; `amax` is a maximum of bits.
STRIP_COUNTS = ("deadzone", "underflow", "saturated", "zero_blocks")
#: A strip's record, 16 lanes each: int32 amax bits, lift, largest amax bits of the unit so far, position
#: in the octave of delta; then the float64 energies TOKEN_FIELDS of each block.
ENERGIES_OFFSET = 4 * ROW_BYTES
ENERGY_BYTES = len(TOKEN_FIELDS) * 8 * LANES
RECORD_BYTES = ENERGIES_OFFSET + ENERGY_BYTES

#: The octave of delta is cut into cells of 2^17 bit patterns, narrower than any of the 32 bins.
CELL_SHIFT = 17
OCTAVE_CELLS = 1 << (FLOAT32_MANTISSA_BITS - CELL_SHIFT)


class _Group:
    """Float32 sums over one group of rows, created by their first term."""

    def __init__(self) -> None:
        self.sums: dict[str, Lanes] = {}

    def add(self, name: str, term: Lanes) -> None:
        """Add a term."""
        self.sums[name] = self.sums[name] + term if name in self.sums else term

    def add_product(self, name: str, a: Lanes, b: Lanes, where: Lanes | None = None) -> None:
        """Add a * b, in those lanes where the mask is set."""
        if name not in self.sums:
            self.sums[name] = a * b if where is None else where.select(a * b, 0.0)
            return
        total = a.times_plus(b, self.sums[name])
        self.sums[name] = total if where is None else where.select(total, self.sums[name])


def _add_row(
    group: _Group,
    counts: _Counts,
    y: Lanes,
    block: Block,
    rounder: IdealRounder,
    covers: bool,
) -> tuple[Lanes, Lanes]:
    """Add one element of each block, y = x / s, to the sums and counts; e / s, and where g != 0."""
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


class _Totals:
    """Named float32 lanes in local variables, zero at first; LLVM turns them into registers."""

    def __init__(self, builder: ir.IRBuilder, names: tuple[str, ...]) -> None:
        self.builder = builder
        kind = ir.VectorType(F32, LANES)
        self.slots = {name: cgutils.alloca_once(builder, kind) for name in names}
        for slot in self.slots.values():
            constant(builder, F32, 0).store_in(slot)

    def read(self) -> dict[str, Lanes]:
        """Current values."""
        return {n: Lanes(self.builder, self.builder.load(slot)) for n, slot in self.slots.items()}

    def add(self, values: dict[str, Lanes]) -> None:
        """Add to each named total."""
        for name, total in self.read().items():
            (total + values[name]).store_in(self.slots[name])


class _Counts:
    """STRIP_COUNTS in memory: int64 at `address`, kept in registers over a strip."""

    def __init__(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        self.builder, self.address = builder, address
        self.slots = {name: cgutils.alloca_once(builder, I64) for name in STRIP_COUNTS}
        for name, slot in self.slots.items():
            builder.store(builder.load(self._pointer(name)), slot)

    def _pointer(self, name: str) -> ir.Value:
        offset = ir.Constant(I64, 8 * STRIP_COUNTS.index(name))
        return self.builder.inttoptr(self.builder.add(self.address, offset), I64.as_pointer())

    def add(self, name: str, where: Lanes) -> None:
        """Count the lanes in which the mask is set."""
        slot = self.slots[name]
        self.builder.store(self.builder.add(self.builder.load(slot), where.count()), slot)

    def write(self) -> None:
        """Put the counts back into memory."""
        for name, slot in self.slots.items():
            self.builder.store(self.builder.load(slot), self._pointer(name))


@dataclass(frozen=True, slots=True)
class _Addresses:
    """Byte addresses (int64) that `measure_strip` works on, and the scale rule's carry."""

    tile: ir.Value
    record: ir.Value
    carry: ir.Value
    sums: ir.Value
    counts: ir.Value
    octave: ir.Value
    row_energies: ir.Value


def _emit_measure(builder: ir.IRBuilder, variant: Variant, at: _Addresses) -> None:
    carry = broadcast(builder, builder.trunc(at.carry, I32))
    amax, lift = load(builder, at.record, I32), load(builder, at.record, I32, ROW_BYTES)
    block = Block.of(amax, carry, lift)
    _emit_histogram(block, octave_position(block, carry), at.record, at.octave)
    weight = wide_power_of_two(block.code - block.lift, E8M0_BIAS)
    square = weight * weight
    rounder = IdealRounder(block, exact_16_bit=DTYPES[variant.dtype].bits == 16)
    names = ("x2", "e2", "scale2", "deadzone2", "grid2", "scale_grid", "qx", "e")
    totals = _Totals(builder, names if variant.covers else (*names, "scale_deadzone"))
    counts = _Counts(builder, at.counts)
    with cgutils.for_range(builder, ir.Constant(I64, BLOCK // GROUP)) as loop:
        rows = builder.add(at.tile, builder.mul(loop.index, ir.Constant(I64, GROUP * ROW_BYTES)))
        energies = builder.mul(loop.index, ir.Constant(I64, GROUP * ENERGY_BYTES))
        energies = builder.add(at.row_energies, energies)
        group = _Group()
        for row in range(GROUP):
            y = tile_row(builder, rows, row) * block.inverse
            err, grid = _add_row(group, counts, y, block, rounder, variant.covers)
            if variant.row_tokens:
                terms = (y * y, err * err, grid.select(0.0, y * y))
                for i, term in enumerate(terms):
                    offset = row * ENERGY_BYTES + i * 8 * LANES
                    before = load(builder, energies, F64, offset)
                    (before + term.to(F64) * square).store(energies, offset)
        totals.add(group.sums)
    counts.add("zero_blocks", ~block.nonzero)
    counts.write()
    largest = load(builder, at.record, I32, 2 * ROW_BYTES)
    largest.maximum(lift.equals(0).select(amax, 0)).store(at.record, 2 * ROW_BYTES)
    weights = dict.fromkeys(names, square) | {"e": weight, "scale_deadzone": square}
    wide = {name: total.to(F64) * weights[name] for name, total in totals.read().items()}
    wide["delta"] = delta(block).to(F64)
    wide["delta2"] = wide["delta"] * wide["delta"]
    for i, name in enumerate(SUM_FIELDS):
        if name in wide:
            offset = i * 8 * LANES
            (load(builder, at.sums, F64, offset) + wide[name]).store(at.sums, offset)
    for i, name in enumerate(TOKEN_FIELDS):
        wide[name].store(at.record, ENERGIES_OFFSET + i * 8 * LANES)


def _emit_histogram(block: Block, position: Lanes, record: ir.Value, octave: ir.Value) -> None:
    """Enter the blocks into the histogram of delta.

    `octave` holds OCTAVE_CELLS int64 bins, as many int64 edges, then the int64 histogram itself: a
    cell of the octave starts in a bin and gives way to the next lower one at its edge.
    """
    builder = position.builder
    position.store(record, 3 * ROW_BYTES)

    def pointer(base: ir.Value, index: ir.Value) -> ir.Value:
        address = builder.add(base, builder.shl(index, ir.Constant(I64, 3)))
        return builder.inttoptr(address, I64.as_pointer())

    edges = builder.add(octave, ir.Constant(I64, 8 * OCTAVE_CELLS))
    histogram = builder.add(octave, ir.Constant(I64, 16 * OCTAVE_CELLS))
    for lane in range(LANES):
        slot = builder.add(record, ir.Constant(I64, 3 * ROW_BYTES + 4 * lane))
        place = builder.zext(builder.load(builder.inttoptr(slot, I32.as_pointer())), I64)
        cell = builder.lshr(place, ir.Constant(I64, CELL_SHIFT))
        passed = builder.icmp_unsigned(">=", place, builder.load(pointer(edges, cell)))
        entry = builder.load(pointer(octave, cell))
        target = pointer(histogram, builder.sub(entry, builder.zext(passed, I64)))
        present = builder.extract_element(block.nonzero.value, ir.Constant(I32, lane))
        builder.store(builder.add(builder.load(target), builder.zext(present, I64)), target)


@intrinsic
def measure_strip(
    typingctx: Any,
    variant: Any,
    tile: Any,
    record: Any,
    carry: Any,
    sums: Any,
    counts: Any,
    octave: Any,
    row_energies: Any,
) -> Any:
    """Add one strip's statistics to a unit's.

    All but `carry`, the scale rule's, are byte addresses: the strip's `tile` and `record`; the unit's
    `sums`, float64 [len(SUM_FIELDS), 16], and `counts`, int64 [len(STRIP_COUNTS)]; the `octave`
    table with the histogram of delta (see `_emit_histogram`); and if the variant has `row_tokens`,
    `row_energies`, float64 [32, len(TOKEN_FIELDS), 16].
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _emit_measure(builder, signature.args[0].variant, _Addresses(*args[1:]))
        return context.get_dummy_value()

    return types.void(variant, *(types.int64,) * 7), codegen
