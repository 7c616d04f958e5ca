"""Adding up over the rows of a tile: float32 within a block, exact counts beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir
from numba.core import cgutils

from mxdiag.quantize.cpu.lanes import BLOCK
from mxdiag.quantize.cpu.simd import F32, I64, LANES, Lanes, constant

#: Rows added in float32 before a group's sum joins the block's: keeps the closure below 1e-6 even
#: where 32 equal terms would all be rounded the same way.
GROUP = 8


class Group:
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


class Totals:
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

    def raise_to(self, name: str, value: Lanes) -> None:
        """Make a total the larger of itself and `value`."""
        before = Lanes(self.builder, self.builder.load(self.slots[name]))
        before.maximum(value).store_in(self.slots[name])


class Counts:
    """Named int64 counts in memory from byte `address` on, kept in registers until `write`."""

    def __init__(self, builder: ir.IRBuilder, address: ir.Value, names: tuple[str, ...]) -> None:
        self.builder = builder
        self.pointers, self.slots = {}, {}
        for i, name in enumerate(names):
            place = builder.add(address, ir.Constant(I64, 8 * i))
            self.pointers[name] = builder.inttoptr(place, I64.as_pointer())
            self.slots[name] = cgutils.alloca_once(builder, I64)
            builder.store(builder.load(self.pointers[name]), self.slots[name])

    def add(self, name: str, where: Lanes) -> None:
        """Count the lanes in which the mask is set."""
        slot = self.slots[name]
        self.builder.store(self.builder.add(self.builder.load(slot), where.count()), slot)

    def write(self) -> None:
        """Put the counts back into memory."""
        for name, slot in self.slots.items():
            self.builder.store(self.builder.load(slot), self.pointers[name])


@contextmanager
def row_groups(builder: ir.IRBuilder, first: int = 0, last: int = BLOCK) -> Iterator[ir.Value]:
    """A loop over rows first .. last - 1 of a tile, GROUP at a time; gives a group's first row."""
    with cgutils.for_range(builder, ir.Constant(I64, (last - first) // GROUP)) as loop:
        start = builder.mul(loop.index, ir.Constant(I64, GROUP))
        yield builder.add(start, ir.Constant(I64, first))
