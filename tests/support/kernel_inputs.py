"""Arrays of every kind that the kernels are tried on."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

BF16 = np.dtype(ml_dtypes.bfloat16)

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": BF16, "float16": np.dtype(np.float16)}


def to_torch(x: np.ndarray) -> torch.Tensor:
    x = np.array(x, order="C")
    if x.dtype == BF16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def draw(seed: int, shape: tuple[int, ...], dtype: np.dtype, kind: str) -> np.ndarray:
    """Heavy tails: `plain`, with many `zeros`, over the dtype's `range`, or with `holes`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape) * 2)
    if kind == "zeros":
        x *= rng.random(shape) < 0.3
    elif kind == "range":
        low, high = (-8, 5) if dtype == np.float16 else (-46, 39)
        x *= 10.0 ** rng.integers(low, high, (shape[0], 1, shape[2]))
    elif kind == "holes":
        x = np.where(rng.random(shape) < 0.01, rng.choice([np.inf, np.nan, -np.inf], shape), x)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


KINDS = ("plain", "zeros", "range", "holes")
