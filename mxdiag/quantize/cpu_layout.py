"""How an array lies in memory, and its division into units of work for the compiled loops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mxdiag.quantize.cpu_lanes import BLOCK
from mxdiag.quantize.cpu_simd import LANES

#: Elements of a unit of work. Part of the result: units are summed in float64, in order.
UNIT_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Layout:
    """An array [outer, K, inner] that the loops can walk as it lies: blocks in rows or in columns.

    In rows (inner = 1) the elements of a block are neighbours; in columns, blocks along K have
    neighbouring blocks along inner. The array's other strides are free. `group` blocks along K are
    kept together, for macro blocks; with `whole_rows` a unit does not end inside a row.
    """

    x: np.ndarray
    by_rows: bool
    group: int = 1
    whole_rows: bool = False

    @classmethod
    def of(cls, x: np.ndarray, *, fixed: bool, group: int = 1) -> Layout:
        """The layout of x, or of a copy of it if none fits.

        A matrix that lies transposed is walked along its other axis, unless results are tied to the
        axes as they are (`fixed`).
        """
        outer, size, inner = x.shape
        if inner == 1:
            if _contiguous(x, 1):
                return cls(x, True, group, fixed)
            if _contiguous(x, 0) and not fixed and outer >= LANES:
                return cls(x.transpose(2, 1, 0), False, group)
            return cls(np.ascontiguousarray(x), True, group, fixed)
        if _contiguous(x, 2) and (inner >= LANES or fixed):
            return cls(x, False, group)
        if fixed:
            return cls(np.ascontiguousarray(x), False, group)
        rows = np.moveaxis(x, 1, 2).reshape(outer * inner, size, 1)
        return cls(rows if _contiguous(rows, 1) else np.ascontiguousarray(rows), True, group)

    @property
    def address(self) -> int:
        """Of the first element."""
        return int(self.x.__array_interface__["data"][0])

    @property
    def deep(self) -> int:
        """Groups of blocks along K."""
        return -(-self.x.shape[1] // (BLOCK * self.group))

    @property
    def unit(self) -> int:
        """Blocks (in rows) or columns of one unit."""
        if not (self.by_rows and self.whole_rows):
            return UNIT_ELEMENTS // BLOCK
        per_row = self.deep * self.group
        return per_row * max(1, UNIT_ELEMENTS // (BLOCK * per_row))

    @property
    def chunks(self) -> int:
        """Units in one row of blocks (in columns)."""
        return -(-self.x.shape[2] // self.unit)

    @property
    def units(self) -> int:
        """How many units there are."""
        if self.x.size == 0:
            return 0
        if self.by_rows:
            return -(-self.blocks()[0] // self.unit)
        return self.x.shape[0] * self.deep * self.chunks

    def arguments(self) -> tuple[int, ...]:
        """What the loops take: address, strides, extents, bytes of an element."""
        _, size, inner = self.x.shape
        strides, itemsize = self.x.strides, self.x.itemsize
        if self.by_rows:
            return self.address, strides[0], size, itemsize
        return self.address, strides[0], strides[1], size, inner, itemsize

    def blocks(self) -> tuple[int, int, int]:
        """Blocks in all and in a row, whole groups; whether all of them lie one after another."""
        outer, size, _ = self.x.shape
        row_bytes = size * self.x.itemsize
        dense = size % (BLOCK * self.group) == 0
        linear = dense and (outer == 1 or self.x.strides[0] == row_bytes)
        per_row = self.deep * self.group
        return outer * per_row, per_row, int(linear)

    def fits(self, out: np.ndarray) -> bool:
        """Whether results can be written straight to `out`, an array of x's shape."""
        return _contiguous(out, 1 if self.by_rows else 2)


def _contiguous(x: np.ndarray, axis: int) -> bool:
    return x.shape[axis] == 1 or x.strides[axis] == x.itemsize
