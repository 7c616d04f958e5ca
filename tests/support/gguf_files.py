"""Small GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest


def write_gguf(
    path: Path, arch: str, tensors: dict[str, tuple[np.ndarray, Any]], **keys: int
) -> Path:
    """A GGUF file; each tensor is (float32 values, quantization type or None)."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        writer.add_uint32(f"{arch}.{key.replace('__', '.')}", value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    for name, (array, kind) in tensors.items():
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
