"""Arithmetic that the reference quantizers of several corrections share. Plain torch, float64.

`rows` are [outer, inner, K], float64, K padded to a multiple of 32 and non-finite MX blocks zeroed.
The comments tell only why a line is exact.
"""

from __future__ import annotations

import torch

from mxdiag.formats import MXFP4, BlockFormat, ElementFormat, ScaleRule
from mxdiag.quantize.corrections.base import Context
from mxdiag.quantize.reference import (
    decode_scale,
    from_blocks,
    round_to_element,
    shared_scale_codes,
    to_blocks,
)

_MASK32 = 0xFFFFFFFF


def quantize_rows(rows: torch.Tensor, rule: ScaleRule, fmt: BlockFormat = MXFP4) -> torch.Tensor:
    """Q of rows [..., K] in a format with power-of-two scales, in blocks along the last axis."""
    blocks = to_blocks(rows, -1, fmt.block_size)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = decode_scale(shared_scale_codes(amax, fmt.element, rule))
    return from_blocks(rounded(blocks, scale, fmt.element), rows, -1)


def rounded(x: torch.Tensor, scale: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """X on the element grid times its scale."""
    return round_to_element(x / scale, element) * scale


def two_to_the(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in float64, built from bits."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def to_float32_precision(y: torch.Tensor) -> torch.Tensor:
    """float64 y rounded to 24 significant bits, ties to even, the exponent unbounded."""
    bits = y.contiguous().view(torch.int64)
    dropped = 1 << 29
    odd = (bits >> 29) & 1
    return ((bits + (dropped // 2 - 1) + odd) & -dropped).view(torch.float64)


def macro_scaled(
    rows: torch.Tensor, size: int, search: bool, rule: ScaleRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mu x in float32 precision and mu, both in the layout of rows."""
    if search:
        mu = _searched_mu(rows, size, rule)
    else:
        amax = to_blocks(rows, -1, size).abs().amax(-1)
        quotient = 6.0 / torch.where(amax == 0, 6.0, amax)
        mu = 1.0 + ((quotient.view(torch.int64) >> 44) & 0xFF).to(torch.float64) / 256
    mu = mu.repeat_interleave(size, -1)[..., : rows.shape[-1]]
    return to_float32_precision(rows * mu), mu


def _searched_mu(rows: torch.Tensor, size: int, rule: ScaleRule) -> torch.Tensor:
    """Mu of least squared error per macro block [..., K / size]; the smallest where several tie."""
    best = best_error = torch.empty(0)
    for mantissa in range(256):
        mu = 1.0 + mantissa / 256
        error = quantize_rows(to_float32_precision(rows * mu), rule) / mu - rows
        energy = to_blocks(error, -1, size).square().sum(-1)
        if mantissa == 0:
            best, best_error = torch.ones_like(energy), energy
        better = energy < best_error
        best = torch.where(better, mu, best)
        best_error = torch.where(better, energy, best_error)
    return best


def with_fallback(rows: torch.Tensor, alpha: float, rule: ScaleRule) -> torch.Tensor:
    """Q(x) + alpha Q(x - Q(x))."""
    q = quantize_rows(rows, rule)
    return q + alpha * quantize_rows(rows - q, rule)


def _mix(h: torch.Tensor) -> torch.Tensor:
    """The 32-bit finalizer of `StochasticRounding`, on int64 tensors that hold 32-bit values."""
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _MASK32
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _MASK32
    return h ^ (h >> 16)


def uniform_draws(rows: torch.Tensor, seed: int, context: Context) -> torch.Tensor:
    """Uniform multiples of 2^-24 in [0, 1), one per element, from the seed and the element's flat
    index in the C order of the whole tensor.
    """
    outer, inner, padded = rows.shape
    o = torch.arange(outer, device=rows.device)[:, None, None] + context.start[0]
    k = torch.arange(padded, device=rows.device)[None, None, :] + context.start[1]
    i = torch.arange(inner, device=rows.device)[None, :, None] + context.start[2]
    index = (o * context.whole[1] + k) * context.whole[2] + i
    key = _mix(torch.tensor(seed, dtype=torch.int64, device=rows.device))
    hashed = _mix(_mix((index & _MASK32) ^ key) ^ (index >> 32))
    return (hashed >> 8).to(torch.float64) * 2.0**-24
