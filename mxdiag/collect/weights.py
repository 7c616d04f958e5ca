"""Streaming a checkpoint's linear weights, one piece at a time, and accounting for every parameter.

    with open_checkpoint(path) as checkpoint:
        found = inventory(checkpoint, include=[], exclude=[])
        for chunk in stream(checkpoint, found.measured):
            ...                     # chunk.data: [rows, cols] of chunk.linear, a NumPy array
            if chunk.last: ...      # that was the last piece of chunk.linear

No torch and no transformers. Peak memory is a few buffers of about 8 MB, whatever the size of the
file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from mxdiag.collect.checkpoint import Checkpoint, open_checkpoint
from mxdiag.collect.decode import Buffers, Fp4Values, Mxfp4Counts, Values
from mxdiag.collect.tied import tied_embedding
from mxdiag.errors import CheckpointError
from mxdiag.linears import Linear, classify, is_mask, view_span
from mxdiag.roles import TIED_ROLE, exclusion_of_tied

__all__ = [
    "Checkpoint",
    "Chunk",
    "Inventory",
    "Unmeasured",
    "inventory",
    "open_checkpoint",
    "read",
    "stored_statistics",
    "stream",
]

#: Chunks begin at multiples of this along both axes: whole MX blocks, whole macro blocks of 128.
ALIGN = 128
#: Bytes of a chunk that is aimed at, and the most that `ALIGN` whole rows may take.
CHUNK_BYTES = 8 << 20
MAX_CHUNK_BYTES = 32 << 20


class Chunk(NamedTuple):
    """A piece of one weight.

    `data` is W[row : row + rows, col : col + cols] of W = [out, in], a view of a buffer that is
    reused once the next chunk is asked for: C-contiguous, or strided where W is stored [in, out]
    or interleaved with another segment. `row` and `col` are multiples of 128, so every 32-block
    along either axis, and every macro block of 128, lies in one chunk.
    """

    linear: Linear
    data: np.ndarray
    row: int
    col: int
    last: bool


# ---- accounting --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A stored tensor, or one layer of it, that is not measured, and the `rule` or reason."""

    name: str
    rule: str
    parameters: int


@dataclass(slots=True)
class Inventory:
    """Where every parameter of two or more axes ends: measured, excluded or unsupported.

    `parameters` counts all parameters, `matrix_parameters` those of two or more axes; the three
    groups add up to the latter exactly. Index and mask buffers are listed with 0 parameters, and
    an output head that the config ties to the embedding counts once.
    """

    measured: list[Linear] = field(default_factory=list)
    excluded: list[Unmeasured] = field(default_factory=list)
    unsupported: list[Unmeasured] = field(default_factory=list)
    parameters: int = 0
    matrix_parameters: int = 0

    @property
    def measured_parameters(self) -> int:
        """Parameters of the measured layers."""
        return sum(linear.numel for linear in self.measured)

    @property
    def excluded_parameters(self) -> int:
        """Parameters that a rule or an option leaves out."""
        return sum(item.parameters for item in self.excluded)

    @property
    def unsupported_parameters(self) -> int:
        """Parameters that cannot be read or placed."""
        return sum(item.parameters for item in self.unsupported)

    @property
    def parameter_fraction(self) -> float:
        """Share of `matrix_parameters` that is measured or excluded by a named rule."""
        if not self.matrix_parameters:
            return 1.0
        return 1.0 - self.unsupported_parameters / self.matrix_parameters


def inventory(
    checkpoint: Checkpoint, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Inventory:
    """Sort every tensor of a checkpoint into measured layers, excluded and unsupported ones.

    `include` and `exclude` are globs on layer names: see `mxdiag.linears.exclusion`.
    """
    result = Inventory()
    table = tied_embedding(checkpoint.entries.values(), checkpoint.config)
    copy = _tied_head(checkpoint, table)
    for entry in checkpoint.entries.values():
        if entry.integer or is_mask(entry.name, entry.shape):
            if len(entry.shape) > 1:
                result.excluded.append(
                    Unmeasured(entry.name, f"not a linear weight: {entry.dtype} buffer", 0)
                )
            continue
        if entry.name == copy:
            result.excluded.append(Unmeasured(entry.name, "tied to the input embedding", 0))
            continue
        result.parameters += entry.numel
        if len(entry.shape) < 2:
            continue
        result.matrix_parameters += entry.numel
        if entry.unsupported is not None:
            result.unsupported.append(Unmeasured(entry.name, entry.unsupported, entry.numel))
            continue
        verdict = classify(entry.name, entry.shape, checkpoint.config, out_in=entry.out_in)
        if verdict.unsupported is not None:
            result.unsupported.append(Unmeasured(entry.name, verdict.unsupported, entry.numel))
        elif verdict.rule is not None:
            result.excluded.append(Unmeasured(entry.name, verdict.rule, entry.numel))
        for linear in verdict.linears:
            names = [linear.layer]
            if entry.name == table:  # named as a live model names it
                linear, names = replace(linear, role=TIED_ROLE), [linear.layer, TIED_ROLE]
            rule = exclusion_of_tied(names, linear.role, include, exclude)
            if rule is None:
                result.measured.append(linear)
            else:
                result.excluded.append(Unmeasured(linear.layer, rule, linear.numel))
    return result


def _tied_head(checkpoint: Checkpoint, table: str | None) -> str | None:
    """Name of a stored output head that is a copy of the embedding `table`."""
    head = checkpoint.entries.get("lm_head.weight")
    if table is None or head is None or head.shape != checkpoint.entries[table].shape:
        return None
    return head.name


def stored_statistics(checkpoint: Checkpoint, linear: Linear) -> dict[str, float | int] | None:
    """What a weight that is stored as MXFP4 says about itself; None for any other encoding.

    Reads the weight's packed bytes once, without decoding them. See `decode.Mxfp4Counts.summary`
    for the keys.
    """
    if checkpoint.entries[linear.tensor].dtype != "mxfp4":
        return None
    values = checkpoint.values(linear.tensor)
    assert isinstance(values, Fp4Values)
    group = _groups(checkpoint, [linear])[0]
    columns = group.members[0].columns
    first, last = columns.start // values.block, -(-columns.stop // values.block)
    counts, buffers = Mxfp4Counts(), Buffers()
    step = max(1, CHUNK_BYTES // group.width)
    for row in range(0, group.count, step):
        rows = min(step, group.count - row)
        start = group.base + row * group.width
        packed, scales = values.read_codes(start, rows * group.width, buffers)
        counts.add(
            packed.reshape(rows, -1, values.block // 2)[:, first:last].reshape(
                -1, values.block // 2
            ),
            scales.reshape(rows, -1)[:, first:last],
        )
    return counts.summary()


# ---- streaming ---------------------------------------------------------------------------------


class _Member(NamedTuple):
    """One layer within the stored rows of a group: rows are `major`, columns minor[...]."""

    linear: Linear
    transposed: bool
    columns: slice


@dataclass(slots=True)
class _Group:
    """Layers in the same stored rows: `count` rows of `width` elements from element `base`."""

    tensor: str
    base: int
    count: int
    width: int
    members: list[_Member] = field(default_factory=list)


class _Piece(NamedTuple):
    group: _Group
    first: int
    rows: int
    left: int
    cols: int
    last: bool


def stream(
    checkpoint: Checkpoint, linears: Iterable[Linear], *, ahead: bool = True
) -> Iterator[Chunk]:
    """The weights of `linears`, piece by piece, in the order in which the files hold them.

    Layers that share stored rows (interleaved gate and up, GPT-2's q, k and v) are read once and
    their chunks alternate; `Chunk.last` marks a layer's last. With `ahead`, a thread reads the
    next piece while the caller works on the current one. A chunk's data is valid until the next is
    asked for.

    Raises
    ------
    CheckpointError
        A file cannot be read, or a layer cannot be decoded.
    """
    pieces = _pieces(checkpoint, _groups(checkpoint, linears))
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


def _groups(checkpoint: Checkpoint, linears: Iterable[Linear]) -> list[_Group]:
    groups: dict[tuple[str, int, int, int], _Group] = {}
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
        group = groups.setdefault(key, _Group(linear.tensor, base, count, width))
        group.members.append(_Member(linear, transposed, columns))
    order = {name: i for i, name in enumerate(checkpoint.entries)}
    return sorted(groups.values(), key=lambda group: (order[group.tensor], group.base))


def _numel(checkpoint: Checkpoint, linear: Linear) -> int:
    entry = checkpoint.entries.get(linear.tensor)
    return 0 if entry is None else entry.numel


def _pieces(checkpoint: Checkpoint, groups: list[_Group]) -> Iterator[tuple[_Piece, Values]]:
    """Cut each group into aligned whole rows, or into aligned tiles where rows are huge."""
    for group in groups:
        values = checkpoint.values(group.tensor)
        row_bytes = group.width * values.dtype.itemsize
        rows = max(ALIGN, CHUNK_BYTES // row_bytes // ALIGN * ALIGN)
        cols = group.width
        if min(rows, group.count) * row_bytes > MAX_CHUNK_BYTES:
            if (
                values.granule != 1
                or len(group.members) > 1
                or group.members[0].columns.step not in (1, None)
            ):
                raise CheckpointError(
                    f"{group.tensor}: rows of {group.width:,} elements are too long to decode",
                    where=checkpoint.path,
                )
            rows = ALIGN
            cols = max(ALIGN, CHUNK_BYTES // (ALIGN * values.dtype.itemsize) // ALIGN * ALIGN)
        first_col, end_col = _column_range(group, cols)
        for first in range(0, group.count, rows):
            many = min(rows, group.count - first)
            for left in range(first_col, end_col, cols):
                width = min(cols, end_col - left)
                last = first + many == group.count and left + width == end_col
                yield _Piece(group, first, many, left, width, last), values


def _column_range(group: _Group, cols: int) -> tuple[int, int]:
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
