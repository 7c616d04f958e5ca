"""MXFP4 by hand: the definitions written out in numpy float64, without any of mxdiag's code."""

from __future__ import annotations

import numpy as np

GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK = 32


def nearest(y: np.ndarray) -> np.ndarray:
    """To the nearest element, ties to the even code, saturating."""
    distance = np.abs(np.abs(y)[..., None] - GRID)
    best = distance.min(-1, keepdims=True)
    candidates = distance == best
    codes = np.arange(len(GRID))
    even = np.where(candidates, np.where(codes % 2 == 0, codes, codes + 100), 1000)
    return np.copysign(GRID[even.argmin(-1)], y)


def _blocks(x: np.ndarray, axis: int) -> np.ndarray:
    moved = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    padded = np.pad(moved, [(0, 0)] * (x.ndim - 1) + [(0, -moved.shape[-1] % BLOCK)])
    return padded.reshape(*padded.shape[:-1], -1, BLOCK)


def _back(blocks: np.ndarray, x: np.ndarray, axis: int) -> np.ndarray:
    flat = blocks.reshape(*blocks.shape[:-2], -1)[..., : x.shape[axis]]
    return np.moveaxis(flat, -1, axis)


def both(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Q(x) with a power-of-two scale rounded up, and Q*(x) with the ideal scale amax / 6."""
    blocks = _blocks(x, axis)
    amax = np.abs(blocks).max(-1, keepdims=True)
    ideal = np.where(amax == 0, 1.0, amax / 6)
    scale = 2.0 ** np.ceil(np.log2(ideal))
    return (
        _back(nearest(blocks / scale) * scale, x, axis),
        _back(nearest(blocks / ideal) * ideal, x, axis),
    )


def q(x: np.ndarray, axis: int) -> np.ndarray:
    """Q(x)."""
    return both(x, axis)[0]


def injected(x: np.ndarray, components: frozenset[str], axis: int) -> np.ndarray:
    """x plus the named components of Q(x) - x, rounded once to float32."""
    value, ideal = both(x, axis)
    wide = np.asarray(x, np.float64)
    dead = (wide != 0) & (ideal == 0)
    error = np.zeros_like(wide)
    if "scale" in components:
        error += value - ideal
    if "deadzone" in components:
        error += np.where(dead, ideal - wide, 0)
    if "grid" in components:
        error += np.where(dead, 0, ideal - wide)
    return (wide + error).astype(np.float32)
