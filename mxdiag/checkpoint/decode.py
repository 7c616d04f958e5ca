"""From stored bytes to numbers, a range at a time: plain floats, scaled 8-bit codes, MXFP4, NVFP4.

Every class below is a `Values`: one stored weight seen as one flat row-major array of elements, of
which `read` returns any range that starts and ends at a multiple of `granule`. What can be decoded
exactly in bfloat16 (MXFP4) comes as bfloat16, other scaled formats as float32.

Sources: OCP Microscaling Formats v1.0 (E2M1, E8M0, two codes per byte, low nibble first); the FP8
and NVFP4 layouts of compressed-tensors and DeepSeek-V3's `weight_scale_inv` (value = code * scale).
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import BinaryIO, Protocol

import ml_dtypes
import numpy as np

from mxdiag.checkpoint.safetensors import StoredTensor, open_regular, read_into
from mxdiag.errors import CheckpointError
from mxdiag.formats import E8M0_NAN

#: Plain dtypes that are yielded as they are stored.
PLAIN_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
#: 8-bit floats.
FLOAT8 = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
#: Codes of one byte that become numbers when they are multiplied by a scale.
CODES = {**FLOAT8, "I8": np.dtype(np.int8)}
#: The lowest bit of each of the 16 codes in a 64-bit word.
_LOW_BITS = np.uint64(0x1111_1111_1111_1111)
_BYTES = np.uint64(0x0F0F_0F0F_0F0F_0F0F)


class Files:
    """Open files of one checkpoint, at most `limit` at a time, shared by threads."""

    def __init__(self, limit: int = 16) -> None:
        self._limit = limit
        self._open: dict[Path, BinaryIO] = {}
        self._lock = threading.Lock()

    def read_into(self, path: Path, begin: int, view: memoryview) -> None:
        """Fill `view` from byte `begin` of `path`; the oldest file is closed beyond the limit."""
        with self._lock:
            if path not in self._open:
                if len(self._open) >= self._limit:
                    self._open.pop(next(iter(self._open))).close()
                self._open[path] = open_regular(path)
            read_into(self._open[path], begin, view, path)

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()


class Buffers:
    """Scratch memory by name, kept between reads and grown when needed."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def get(self, name: str, count: int, dtype: np.dtype | type) -> np.ndarray:
        """A 1-D array of `count` elements, valid until the next `get` of the same name."""
        nbytes = count * np.dtype(dtype).itemsize
        held = self._held.get(name)
        if held is None or held.size < nbytes:
            held = self._held[name] = np.empty(nbytes, np.uint8)
        return held[:nbytes].view(dtype)


class Values(Protocol):
    """One stored weight as a flat array of numbers."""

    dtype: np.dtype
    granule: int

    def read(self, start: int, count: int, buffers: Buffers) -> np.ndarray:
        """Elements [start, start + count) as a 1-D array of `dtype`, valid until the next read."""
        ...


def read_bytes(
    files: Files, tensor: StoredTensor, first: int, count: int, buffers: Buffers, name: str
) -> np.ndarray:
    """Bytes [first, first + count) of a stored tensor, as uint8 in the scratch buffer `name`."""
    if first < 0 or first + count > tensor.nbytes:
        raise CheckpointError(f"tensor {tensor.name!r} is read beyond its end", where=tensor.path)
    raw = buffers.get(name, count, np.uint8)
    files.read_into(tensor.path, tensor.begin + first, raw.data)
    return raw


class PlainValues:
    """Floats that are used as they are stored."""

    granule = 1

    def __init__(self, tensor: StoredTensor, files: Files) -> None:
        self.dtype = PLAIN_DTYPES[tensor.dtype]
        self._tensor, self._files = tensor, files

    def read(self, start: int, count: int, buffers: Buffers) -> np.ndarray:
        """See `Values.read`."""
        size = self.dtype.itemsize
        raw = read_bytes(self._files, self._tensor, start * size, count * size, buffers, "raw")
        return raw.view(self.dtype)


class ScaledCodesValues:
    """8-bit floats or integers times a scale per tensor, row, column or block, as float32.

    `blocks` is (rows, columns) that share a scale; the scale tensor is [lead..., ceil(R / rows),
    ceil(C / columns)] for a weight [lead..., R, C], or one number for everything.
    """

    dtype = np.dtype(np.float32)

    def __init__(
        self, tensor: StoredTensor, scale: StoredTensor, blocks: tuple[int, int], files: Files
    ) -> None:
        self._tensor, self._scale, self._blocks, self._files = tensor, scale, blocks, files
        self._rows, self.granule = tensor.shape[-2], tensor.shape[-1]
        self._scale_rows = -(-self._rows // blocks[0])
        self._scale_cols = -(-self.granule // blocks[1])
        self._table = _code_table(tensor.dtype)

    def read(self, start: int, count: int, buffers: Buffers) -> np.ndarray:
        """See `Values.read`."""
        cols = self.granule
        raw = read_bytes(self._files, self._tensor, start, count, buffers, "raw")
        out = buffers.get("out", count, np.float32)
        np.take(self._table, raw, out=out, mode="clip")
        scales = self._scales_of(start // cols, count // cols, buffers)
        matrix, width = out.reshape(-1, cols), self._blocks[1]
        whole = cols // width * width
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # a result beyond float32 is Inf, and counted as such
            if whole:
                blocks = matrix[:, :whole].reshape(len(matrix), -1, width)  # a view
                blocks *= scales[:, : whole // width, None]
            if whole < cols:
                matrix[:, whole:] *= scales[:, -1:]
        return out

    def _scales_of(self, first: int, count: int, buffers: Buffers) -> np.ndarray:
        """Scale rows [count, ceil(C / columns)] of the weight's rows, as float32."""
        if self._scale.numel == 1:
            one = read_scales(self._scale, 0, 1, self._files, buffers)
            return np.broadcast_to(one, (count, self._scale_cols))
        rows = np.arange(first, first + count)
        index = rows // self._rows * self._scale_rows + rows % self._rows // self._blocks[0]
        low, high = int(index[0]), int(index[-1]) + 1
        n = self._scale_cols
        block = read_scales(self._scale, low * n, (high - low) * n, self._files, buffers)
        return block.reshape(-1, n)[index - low]


class Fp4Values:
    """E2M1 codes, two to a byte, with one scale per `block` elements of a row.

    MXFP4 (block 32, E8M0 scale bytes) comes as bfloat16, exactly. NVFP4 (block 16, E4M3 scales and
    one float32 `tensor_scale`) comes as float32: code * (scale * tensor_scale), or scale /
    tensor_scale where `divide` (compressed-tensors stores the reciprocal).
    """

    def __init__(
        self,
        packed: StoredTensor,
        scale: StoredTensor,
        row: int,
        block: int,
        files: Files,
        tensor_scale: StoredTensor | None = None,
        divide: bool = False,
    ) -> None:
        self.packed, self.scale, self.block, self.files = packed, scale, block, files
        self.granule = row
        self._tensor_scale, self._divide = tensor_scale, divide
        self.dtype = np.dtype(ml_dtypes.bfloat16 if tensor_scale is None else np.float32)
        self._table = _fp4_pairs()

    def read_codes(self, start: int, count: int, buffers: Buffers) -> tuple[np.ndarray, np.ndarray]:
        """Packed codes [blocks, block / 2] and scale bytes [blocks] of a range of elements."""
        raw = read_bytes(self.files, self.packed, start // 2, count // 2, buffers, "raw")
        first, many = start // self.block, count // self.block
        scales = read_bytes(self.files, self.scale, first, many, buffers, "scale")
        return raw.reshape(many, -1), scales

    def read(self, start: int, count: int, buffers: Buffers) -> np.ndarray:
        """See `Values.read`."""
        raw = read_bytes(self.files, self.packed, start // 2, count // 2, buffers, "raw")
        pairs = buffers.get("pairs", count // 2, np.uint64)
        np.take(self._table, raw, out=pairs, mode="clip")
        numbers = pairs.view(np.float32)
        scales = read_scales(
            self.scale, start // self.block, count // self.block, self.files, buffers
        )
        with np.errstate(all="ignore"):  # overflow to Inf and NaN scales are counted by the kernel
            if self._tensor_scale is not None:
                one = read_scales(self._tensor_scale, 0, 1, self.files, buffers, "one")[0]
                scales = scales / one if self._divide else scales * one
            numbers.reshape(-1, self.block)[...] *= scales[:, None]
        if self._tensor_scale is not None:
            return numbers
        out = buffers.get("out", count, np.uint16)
        out[:] = numbers.view(np.uint16)[1::2]  # the low half of every product is zero
        return out.view(self.dtype)


class Mxfp4Counts:
    """What MXFP4 storage says about itself: codes and scale bytes, counted without decoding."""

    def __init__(self) -> None:
        self.scales = np.zeros(256, np.int64)
        self.codes = self.nonzero = self.top_blocks = self.zero_blocks = 0

    def add(self, packed: np.ndarray, scales: np.ndarray) -> None:
        """Count blocks `packed` [blocks, 16] uint8 with their scale bytes [blocks]."""
        words = np.ascontiguousarray(packed).view(np.uint64)  # 16 codes each
        once, twice = words >> np.uint64(1), words >> np.uint64(2)
        nonzero = (words | once | twice) & _LOW_BITS  # a code's magnitude is its low three bits
        top = words & once & twice & _LOW_BITS
        self.codes += words.size * 16
        pairs = (nonzero + (nonzero >> np.uint64(4))) & _BYTES  # nonzero codes of each byte
        self.nonzero += int(pairs.view(np.uint8).sum(dtype=np.int64))
        self.top_blocks += int(np.count_nonzero(top.any(axis=1)))
        self.zero_blocks += len(words) - int(np.count_nonzero(nonzero.any(axis=1)))
        self.scales += np.bincount(scales.reshape(-1), minlength=256)

    def summary(self) -> dict[str, float | int]:
        """The counts as shares.

        Returns
        -------
        dict
            `zero_code_frac` (share of codes that are +0 or -0), `top_code_frac` (share of blocks
            whose largest code is 6), `zero_block_frac` (share of blocks of zeros), `scale_min` and
            `scale_max` (E8M0 bytes), `scales_used` (distinct bytes), `nan_scales` (bytes 255).
        """
        used, blocks = np.flatnonzero(self.scales), int(self.scales.sum())
        return {
            "zero_code_frac": 1 - self.nonzero / self.codes,
            "top_code_frac": self.top_blocks / blocks,
            "zero_block_frac": self.zero_blocks / blocks,
            "scale_min": int(used[0]),
            "scale_max": int(used[-1]),
            "scales_used": len(used),
            "nan_scales": int(self.scales[E8M0_NAN]),
        }


def read_scales(
    scale: StoredTensor, first: int, count: int, files: Files, buffers: Buffers, name: str = "scale"
) -> np.ndarray:
    """`count` scales from element `first`, as float32; uint8 holds E8M0 exponents."""
    dtype = "F8_E8M0" if scale.dtype == "U8" else scale.dtype
    size = 1 if dtype in FLOAT8 else PLAIN_DTYPES[dtype].itemsize
    raw = read_bytes(files, scale, first * size, count * size, buffers, name)
    if dtype in FLOAT8:
        return _code_table(dtype)[raw]
    return raw.view(PLAIN_DTYPES[dtype]).astype(np.float32)


def _code_table(dtype: str) -> np.ndarray:
    """float32 value of each of the 256 codes."""
    return np.arange(256, dtype=np.uint8).view(CODES[dtype]).astype(np.float32)


def _fp4_pairs() -> np.ndarray:
    """The two float32 values of each byte, low nibble first, as one 64-bit word."""
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    byte = np.arange(256)
    return np.stack([values[byte & 15], values[byte >> 4]], axis=1).view(np.uint64).reshape(256)
