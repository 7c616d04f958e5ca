"""How an array lies in memory, and its division into units of work for the compiled loops."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mxdiag.quantize.cpu.lanes import BLOCK
from mxdiag.quantize.cpu.simd import LANES

#: Elements of a unit of work. Part of the result: units are summed in float64, in order.
UNIT_ELEMENTS = 1 << 16


class Division(NamedTuple):
    """An array's units of work, and what the loops are told of it besides its address."""

    unit: int  # blocks (in rows) or columns of one unit
    chunks: int  # units in one row of blocks (in columns)
    units: int
    #: Blocks in all and in a row, whole groups; whether all of them lie one after another.
    blocks: tuple[int, int, int]
    extents: tuple[int, ...]  # strides, extents, bytes of an element


@dataclass(frozen=True, slots=True)
class ArrayLayout:
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
    def of(cls, x: np.ndarray, *, fixed: bool, group: int = 1) -> ArrayLayout:
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
    def division(self) -> Division:
        """How the work is divided."""
        x = self.x
        return _divide(x.shape, x.strides, x.itemsize, self.by_rows, self.group, self.whole_rows)

    def arguments(self) -> tuple[int, ...]:
        """What the loops take: address, strides, extents, bytes of an element."""
        return (self.address, *self.division.extents)

    def fits(self, out: np.ndarray) -> bool:
        """Whether results can be written straight to `out`, an array of x's shape."""
        return _contiguous(out, 1 if self.by_rows else 2)


def _contiguous(x: np.ndarray, axis: int) -> bool:
    return x.shape[axis] == 1 or x.strides[axis] == x.itemsize


@functools.lru_cache(maxsize=4096)
def _divide(
    shape: tuple[int, int, int],
    strides: tuple[int, int, int],
    itemsize: int,
    by_rows: bool,
    group: int,
    whole_rows: bool,
) -> Division:
    outer, size, inner = shape
    deep = -(-size // (BLOCK * group))
    per_row, unit = deep * group, UNIT_ELEMENTS // BLOCK
    if by_rows:
        if whole_rows and per_row:
            unit = per_row * max(1, unit // per_row)
        dense = size % (BLOCK * group) == 0
        linear = dense and (outer == 1 or strides[0] == size * itemsize)
        extents: tuple[int, ...] = (strides[0], size, itemsize)
        chunks, units = 1, -(-outer * per_row // unit)
    else:
        linear, extents = False, (strides[0], strides[1], size, inner, itemsize)
        chunks = -(-inner // unit)
        units = outer * deep * chunks
    if outer * size * inner == 0:
        units = 0
    return Division(unit, chunks, units, (outer * per_row, per_row, int(linear)), extents)
