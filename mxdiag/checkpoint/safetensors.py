"""Reading the safetensors format with nothing but the standard library: strict header, plain reads.

Format: 8 bytes little-endian header length, a JSON header, then the data. Each tensor has a
`dtype`, a `shape` and `data_offsets` [begin, end) counted from the end of the header; the tensors
must cover the data exactly, without holes or overlaps. Source: the format's description in the
safetensors repository. Every disagreement is a `CheckpointError`; sizes are checked before
anything is allocated.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mxdiag.errors import CheckpointError

#: The reference implementation's own limit on the header.
MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 100_000_000
MAX_AXES = 32

#: Bits of one element, for every dtype the format knows.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
DAMAGED = "Download or save the file again"
_LFS_MARK = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file stores it: `nbytes` bytes at byte `begin` of file `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Elements, by its stored shape."""
        count = 1
        for n in self.shape:
            count *= n
        return count


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for unbuffered reading; refuses folders, pipes and devices."""
    try:
        handle = io.FileIO(path, "rb", opener=_open_without_waiting)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be opened ({_reason(error)})", where=path) from None
    if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.close()
        raise CheckpointError("is not a regular file", where=path)
    return handle


def _open_without_waiting(path: str, flags: int) -> int:
    """A named pipe must not block the reader before it can be refused."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; strict: no NaN, no duplicate keys."""
    with open_regular(path) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{size:,} bytes of JSON are not plausible", where=path)
        raw = read_exactly(handle, 0, size, path)
    if raw.startswith(_LFS_MARK):
        raise _lfs_pointer(path)
    return parse_object(raw, path, "is not valid JSON")


def parse_object(raw: bytes, path: Path, complaint: str) -> dict[str, Any]:
    """Parse `raw` as one JSON object, or raise a `CheckpointError` starting with `complaint`."""
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError(
            f"{complaint}: nested too deeply", where=path, advice=DAMAGED
        ) from None
    except MemoryError:
        raise CheckpointError(f"{complaint}: too large", where=path, advice=DAMAGED) from None
    except ValueError as error:
        reason = str(error).replace("\n", " ")[:160]
        raise CheckpointError(f"{complaint}: {reason}", where=path, advice=DAMAGED) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{complaint}: not an object", where=path, advice=DAMAGED)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {twice!r}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def read_exactly(handle: BinaryIO, begin: int, count: int, path: Path) -> bytes:
    """`count` bytes at `begin`; fewer is an error that names the file."""
    buffer = bytearray(count)
    read_into(handle, begin, memoryview(buffer), path)
    return bytes(buffer)


def read_into(handle: BinaryIO, begin: int, view: memoryview, path: Path) -> None:
    """Fill `view` from byte `begin` of the file; a short file is an error that names it."""
    try:
        handle.seek(begin)
        done = 0
        while done < len(view):
            got = handle.readinto(view[done:])  # type: ignore[attr-defined]
            if not got:
                raise CheckpointError("ended early: it was cut short", where=path, advice=DAMAGED)
            done += got
    except OSError as error:
        raise CheckpointError(f"cannot be read ({_reason(error)})", where=path) from None


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file, in the order of their data.

    Raises
    ------
    CheckpointError
        The file is no safetensors file, is damaged, or contradicts itself.
    """
    with open_regular(path) as handle:
        size = os.fstat(handle.fileno()).st_size
        header, data_begin = _header_bytes(handle, size, path)
    table = parse_object(header, path, "has a damaged header")
    metadata = table.pop("__metadata__", None)
    if metadata is not None and not isinstance(metadata, dict):
        raise CheckpointError("has a damaged header: __metadata__ is not an object", where=path)
    tensors = sorted(_tensors(table, path, data_begin), key=lambda t: (t.begin, t.nbytes))
    _check_cover(tensors, data_begin, size, path)
    return tensors


def _header_bytes(handle: BinaryIO, size: int, path: Path) -> tuple[bytes, int]:
    if size == 0:
        raise CheckpointError("is empty", where=path, advice=DAMAGED)
    start = read_exactly(handle, 0, min(size, len(_LFS_MARK)), path)
    if start == _LFS_MARK:
        raise _lfs_pointer(path)
    if size < 8:
        raise CheckpointError(
            f"has only {size} bytes: no safetensors file", where=path, advice=DAMAGED
        )
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES or length > size - 8:
        raise CheckpointError(
            f"is no safetensors file or was cut short: header of {length:,} bytes, "
            f"file of {size:,}",
            where=path,
            advice=DAMAGED,
        )
    return read_exactly(handle, 8, length, path), 8 + length


def _lfs_pointer(path: Path) -> CheckpointError:
    return CheckpointError(
        "is a git-lfs pointer, not the file itself",
        where=path,
        advice="Fetch it with `git lfs pull`",
    )


def _tensors(table: Mapping[str, Any], path: Path, data_begin: int) -> Iterator[StoredTensor]:
    for name, entry in table.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            name.encode()
        except (TypeError, KeyError, ValueError, IndexError):
            raise _bad(path, name, "its header entry is malformed") from None
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            raise _bad(path, name, f"unknown dtype {str(dtype)[:40]!r}")
        if not isinstance(shape, list) or len(shape) > MAX_AXES or not all(map(_is_size, shape)):
            raise _bad(path, name, "its shape is not a list of sizes")
        if not (_is_size(begin) and _is_size(end)) or begin > end:
            raise _bad(path, name, "its data_offsets are not a range")
        tensor = StoredTensor(name, dtype, tuple(shape), path, data_begin + begin, end - begin)
        bits = tensor.numel * DTYPE_BITS[dtype]
        if bits % 8 or bits // 8 != end - begin:
            raise _bad(path, name, f"{end - begin:,} bytes do not hold shape {shape} of {dtype}")
        yield tensor


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_cover(tensors: list[StoredTensor], data_begin: int, size: int, path: Path) -> None:
    """The data ranges follow each other exactly and end where the file ends."""
    position = data_begin
    for tensor in tensors:
        if tensor.begin != position:
            what = (
                "overlaps another tensor" if tensor.begin < position else "leaves a hole before it"
            )
            raise _bad(path, tensor.name, f"its data {what}")
        position += tensor.nbytes
    if position > size:
        raise CheckpointError(
            f"was cut short: {position - size:,} of its {position:,} bytes are missing",
            where=path,
            advice=DAMAGED,
        )
    if position < size:
        raise CheckpointError(
            f"has {size - position:,} bytes that its header does not describe",
            where=path,
            advice=DAMAGED,
        )


def _bad(path: Path, name: str, what: str) -> CheckpointError:
    shown = name.encode("utf-8", "backslashreplace").decode()
    return CheckpointError(f"tensor {shown[:200]!r}: {what}", where=path, advice=DAMAGED)
