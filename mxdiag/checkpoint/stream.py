"""Streaming a checkpoint's linear weights, one piece at a time.

    with open_checkpoint(path) as checkpoint:
        found = checkpoint_inventory(checkpoint, include=[], exclude=[])
        for chunk in stream(checkpoint, found.measured):
            ...                     # chunk.data: [rows, cols] of chunk.linear, a NumPy array
            if chunk.last: ...      # that was the last piece of chunk.linear

No torch and no transformers. Peak memory is a few buffers of about 8 MB, whatever the size of the
file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mxdiag.checkpoint.decode import Buffers, Values
from mxdiag.checkpoint.open import Checkpoint
from mxdiag.errors import CheckpointError
from mxdiag.layers.linears import Linear, view_span

#: Chunks begin at multiples of this along both axes: whole MX blocks, whole macro blocks of 128.
ALIGN = 128
#: Bytes of a chunk that is aimed at, and the most that `ALIGN` whole rows may take.
CHUNK_BYTES = 8 << 20
MAX_CHUNK_BYTES = 32 << 20


class Chunk(NamedTuple):
    """A piece of one weight.

    `data` is W[row : row + rows, col : col + cols] of W = [out, in], a view of a buffer that is
    reused once the next chunk is asked for: C-contiguous, or strided where W is stored [in, out]
    or interleaved with another segment. `row` and `col` are multiples of `align`, 128 or more:
    every 32-block along either axis, and every macro block of 128, lies in one chunk.
    """

    linear: Linear
    data: np.ndarray
    row: int
    col: int
    last: bool


class _Member(NamedTuple):
    """One layer within the stored rows of a group: rows are `major`, columns minor[...]."""

    linear: Linear
    transposed: bool
    columns: slice


@dataclass(slots=True)
class StoredRows:
    """Layers in the same stored rows: `count` rows of `width` elements from element `base`."""

    tensor: str
    base: int
    count: int
    width: int
    members: list[_Member] = field(default_factory=list)


class _Piece(NamedTuple):
    group: StoredRows
    first: int
    rows: int
    left: int
    cols: int
    last: bool


def stream(
    checkpoint: Checkpoint,
    linears: Iterable[Linear],
    *,
    ahead: bool = True,
    align: int = ALIGN,
) -> Iterator[Chunk]:
    """The weights of `linears`, piece by piece, in the order in which the files hold them.

    Layers that share stored rows (interleaved gate and up, GPT-2's q, k and v) are read once and
    their chunks alternate; `Chunk.last` marks a layer's last. With `ahead`, a thread reads the
    next piece while the caller works on the current one. Chunks begin at multiples of `align` along
    both axes, itself a multiple of 128. A chunk's data is valid until the next is asked for.

    Raises
    ------
    CheckpointError
        A file cannot be read, or a layer cannot be decoded.
    """
    pieces = _pieces(checkpoint, stored_rows(checkpoint, linears), align)
    if not ahead:
        buffers = Buffers()
        for piece, values in pieces:
            yield from _chunks(piece, _load(piece, values, buffers))
        return
    spare = [Buffers(), Buffers()]
    with ThreadPoolExecutor(1, thread_name_prefix="mxdiag-read") as reader:
        waiting = None
        for i, (piece, values) in enumerate(pieces):
            job = (piece, reader.submit(_load, piece, values, spare[i % 2]))
            if waiting is not None:
                yield from _chunks(waiting[0], waiting[1].result())
            waiting = job
        if waiting is not None:
            yield from _chunks(waiting[0], waiting[1].result())


def read(checkpoint: Checkpoint, linear: Linear) -> np.ndarray:
    """One whole weight [out, in], as a new array in the dtype that `stream` yields."""
    whole = np.empty(linear.shape, checkpoint.values(linear.tensor).dtype)
    for chunk in stream(checkpoint, [linear], ahead=False):
        rows, cols = chunk.data.shape
        whole[chunk.row : chunk.row + rows, chunk.col : chunk.col + cols] = chunk.data
    return whole


def stored_rows(checkpoint: Checkpoint, linears: Iterable[Linear]) -> list[StoredRows]:
    """The stored rows that hold the layers, in the order of the files."""
    groups: dict[tuple[str, int, int, int], StoredRows] = {}
    for linear in linears:
        (rows, cols), (down, right) = linear.shape, linear.stride
        transposed = cols > 1 and right > down
        count, width, minor, step = (
            (cols, right, rows, down) if transposed else (rows, down, cols, right)
        )
        if count == 1:
            width = max(width, (minor - 1) * step + 1)
        base = linear.offset // width * width
        first = linear.offset - base
        if first + (minor - 1) * step >= width or view_span(linear) > _numel(checkpoint, linear):
            raise CheckpointError(f"{linear.layer} is no view of its tensor", where=checkpoint.path)
        columns = slice(first, first + (minor - 1) * step + 1, step)
        key = (linear.tensor, base, count, width)
        group = groups.setdefault(key, StoredRows(linear.tensor, base, count, width))
        group.members.append(_Member(linear, transposed, columns))
    order = {name: i for i, name in enumerate(checkpoint.entries)}
    return sorted(groups.values(), key=lambda group: (order[group.tensor], group.base))


def _numel(checkpoint: Checkpoint, linear: Linear) -> int:
    entry = checkpoint.entries.get(linear.tensor)
    return 0 if entry is None else entry.numel


def _pieces(
    checkpoint: Checkpoint, groups: list[StoredRows], align: int
) -> Iterator[tuple[_Piece, Values]]:
    """Cut each group into aligned whole rows, or into aligned tiles where rows are huge."""
    for group in groups:
        values = checkpoint.values(group.tensor)
        row_bytes = group.width * values.dtype.itemsize
        rows = max(align, CHUNK_BYTES // row_bytes // align * align)
        cols = group.width
        if min(rows, group.count) * row_bytes > MAX_CHUNK_BYTES * (align // ALIGN):
            if (
                values.granule != 1
                or len(group.members) > 1
                or group.members[0].columns.step not in (1, None)
            ):
                raise CheckpointError(
                    f"{group.tensor}: rows of {group.width:,} elements are too long to decode",
                    where=checkpoint.path,
                )
            rows = align
            cols = max(align, CHUNK_BYTES // (align * values.dtype.itemsize) // align * align)
        first_col, end_col = _column_range(group, cols)
        for first in range(0, group.count, rows):
            many = min(rows, group.count - first)
            for left in range(first_col, end_col, cols):
                width = min(cols, end_col - left)
                last = first + many == group.count and left + width == end_col
                yield _Piece(group, first, many, left, width, last), values


def _column_range(group: StoredRows, cols: int) -> tuple[int, int]:
    """Columns to read: all, or the one layer's where rows are read in parts."""
    if cols == group.width:
        return 0, group.width
    columns = group.members[0].columns
    return columns.start, columns.stop


def _load(piece: _Piece, values: Values, buffers: Buffers) -> np.ndarray:
    """The piece's stored rows as [rows, cols]."""
    group = piece.group
    start = group.base + piece.first * group.width + piece.left
    if piece.cols == group.width:
        return values.read(start, piece.rows * group.width, buffers).reshape(piece.rows, -1)
    whole = buffers.get("tile", piece.rows * piece.cols, values.dtype).reshape(
        piece.rows, piece.cols
    )
    for i in range(piece.rows):
        whole[i] = values.read(start + i * group.width, piece.cols, buffers)
    return whole


def _chunks(piece: _Piece, stored: np.ndarray) -> Iterator[Chunk]:
    whole_rows = piece.cols == piece.group.width
    for linear, transposed, columns in piece.group.members:
        data = stored[:, columns] if whole_rows else stored
        minor = 0 if whole_rows else piece.left - columns.start
        if transposed:
            yield Chunk(linear, data.T, minor, piece.first, piece.last)
        else:
            yield Chunk(linear, data, piece.first, minor, piece.last)
