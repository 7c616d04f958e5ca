"""Making checkpoint files for tests, without the library that real ones are made with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.bool_): "BOOL",
}


def layout(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    """Header entries and data of a safetensors file that holds `arrays`."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {
            "dtype": DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": offsets,
        }
        data += raw
    return header, data


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """Write a safetensors file."""
    return write_raw(path, *layout(arrays))


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write a safetensors file from a header as given (JSON-able, or bytes) and a stated length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    stated = len(raw) if length is None else length
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(stated.to_bytes(8, "little") + raw + data)
    return path


def write_folder(
    folder: Path,
    shards: Mapping[str, Mapping[str, np.ndarray]],
    config: Mapping[str, Any] | None = None,
    index: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint folder; several shards get an index unless one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, arrays in shards.items():
        write(folder / name, arrays)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if index is None and len(shards) > 1:
        index = {tensor: name for name, arrays in shards.items() for tensor in arrays}
    if index is not None:
        text = json.dumps({"metadata": {}, "weight_map": dict(index)})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Reproducible N(0, 0.02) weights."""
    rng = np.random.default_rng([seed, *shape])
    return (rng.standard_normal(shape) * 0.02).astype(dtype)
