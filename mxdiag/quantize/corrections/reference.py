"""The truth of every correction: its quantizer in plain torch, float64, as its class defines it.

A quantizer takes `rows` [outer, inner, K], float64, K padded to a multiple of 32 and non-finite MX
blocks zeroed, and returns x_dq in the same layout. See `mxdiag.quantize.corrections.specs` for the
formulas; the comments here tell only why a line is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mxdiag.errors import TensorError
from mxdiag.formats import (
    E4M3,
    MXFP4,
    MXFP8,
    NVFP4,
    RCEIL,
    BlockFormat,
    ElementFormat,
    ScaleRule,
    scale_rule,
)
from mxdiag.quantize.corrections import specs as specs
from mxdiag.quantize.corrections.base import Correction
from mxdiag.quantize.reference import (
    check_tensor,
    decode_scale,
    from_blocks,
    round_once,
    round_to_element,
    shared_scale_codes,
    to_blocks,
    to_float64,
)
from mxdiag.quantize.sums import CORRECTION_FIELDS

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Context:
    """What a quantizer must know of the whole tensor when `rows` is only a part of it.

    `length` is K before padding; `offset` the flat index of the first element; `tensor_amax` and
    `tensor_rms` are over the finite MX blocks of the whole tensor.
    """

    length: int
    tensor_amax: float
    tensor_rms: float
    offset: int = 0


# A quantizer's second argument is the class registered with it.
Quantizer = Callable[[torch.Tensor, Any, ScaleRule, Context], torch.Tensor]


def quantize_rows(rows: torch.Tensor, rule: ScaleRule, fmt: BlockFormat = MXFP4) -> torch.Tensor:
    """Q of rows [..., K] in a format with power-of-two scales, in blocks along the last axis."""
    blocks = to_blocks(rows, -1, fmt.block_size)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = decode_scale(shared_scale_codes(amax, fmt.element, rule))
    return from_blocks(_rounded(blocks, scale, fmt.element), rows, -1)


def _rounded(x: torch.Tensor, scale: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    return round_to_element(x / scale, element) * scale


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in float64, built from bits."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _to_float32_precision(y: torch.Tensor) -> torch.Tensor:
    """float64 y rounded to 24 significant bits, ties to even, the exponent unbounded."""
    bits = y.contiguous().view(torch.int64)
    dropped = 1 << 29
    odd = (bits >> 29) & 1
    return ((bits + (dropped // 2 - 1) + odd) & -dropped).view(torch.float64)


def _macro_scaled(
    rows: torch.Tensor, macro: specs.MacroBlock, rule: ScaleRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """mu x in float32 precision and mu, both in the layout of rows."""
    if macro.search:
        mu = _searched_mu(rows, macro.size, rule)
    else:
        amax = to_blocks(rows, -1, macro.size).abs().amax(-1)
        quotient = 6.0 / torch.where(amax == 0, 6.0, amax)
        mu = 1.0 + ((quotient.view(torch.int64) >> 44) & 0xFF).to(torch.float64) / 256
    mu = mu.repeat_interleave(macro.size, -1)[..., : rows.shape[-1]]
    return _to_float32_precision(rows * mu), mu


def _searched_mu(rows: torch.Tensor, size: int, rule: ScaleRule) -> torch.Tensor:
    """mu of least squared error per macro block [..., K / size]; the smallest where several tie."""
    best = best_error = torch.empty(0)
    for mantissa in range(256):
        mu = 1.0 + mantissa / 256
        error = quantize_rows(_to_float32_precision(rows * mu), rule) / mu - rows
        energy = to_blocks(error, -1, size).square().sum(-1)
        if mantissa == 0:
            best, best_error = torch.ones_like(energy), energy
        better = energy < best_error
        best = torch.where(better, mu, best)
        best_error = torch.where(better, energy, best_error)
    return best


def _mbs(
    rows: torch.Tensor, spec: specs.MacroBlock, rule: ScaleRule, context: Context
) -> torch.Tensor:
    scaled, mu = _macro_scaled(rows, spec, rule)
    return quantize_rows(scaled, rule) / mu


def _with_fallback(rows: torch.Tensor, alpha: float, rule: ScaleRule) -> torch.Tensor:
    q = quantize_rows(rows, rule)
    return q + alpha * quantize_rows(rows - q, rule)


def _of(
    rows: torch.Tensor, spec: specs.Fallback, rule: ScaleRule, context: Context
) -> torch.Tensor:
    return _with_fallback(rows, spec.alpha, rule)


def _mbs_of(
    rows: torch.Tensor, spec: specs.MacroBlockFallback, rule: ScaleRule, context: Context
) -> torch.Tensor:
    scaled, mu = _macro_scaled(rows, spec.macro, rule)
    return _with_fallback(scaled, spec.fallback.alpha, rule) / mu


def _scale_mse(
    rows: torch.Tensor, spec: specs.ScaleMse, rule: ScaleRule, context: Context
) -> torch.Tensor:
    blocks = to_blocks(rows, -1, MXFP4.block_size)
    upper = shared_scale_codes(blocks.abs().amax(-1, keepdim=True), MXFP4.element, RCEIL)
    lower = (upper.to(torch.int32) - 1).clamp(min=0).to(torch.uint8)
    coarse = _rounded(blocks, decode_scale(upper), MXFP4.element)
    fine = _rounded(blocks, decode_scale(lower), MXFP4.element)
    coarse_error = (coarse - blocks).square().sum(-1, keepdim=True)
    fine_error = (fine - blocks).square().sum(-1, keepdim=True)
    return from_blocks(torch.where(fine_error < coarse_error, fine, coarse), rows, -1)


def _scale_mantissa(
    rows: torch.Tensor, spec: specs.ScaleMantissa, rule: ScaleRule, context: Context
) -> torch.Tensor:
    blocks = to_blocks(rows, -1, MXFP4.block_size)
    amax = blocks.abs().amax(-1, keepdim=True)
    fraction, exponent = torch.frexp(amax / MXFP4.element.max_normal)
    unit = _power_of_two(exponent - 1 - spec.bits)
    scale = (fraction * 2.0 ** (spec.bits + 1)).ceil() * unit
    return from_blocks(_rounded(blocks, scale.clamp(2.0**-127, 2.0**127), MXFP4.element), rows, -1)


def _sylvester(size: int, like: torch.Tensor) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=like.dtype, device=like.device)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h


def _rotated(rows: torch.Tensor, size: int) -> torch.Tensor:
    groups = rows.unflatten(-1, (rows.shape[-1] // size, size))
    return ((groups @ _sylvester(size, rows)) / math.sqrt(size)).flatten(-2)


def _hadamard(
    rows: torch.Tensor, spec: specs.Hadamard, rule: ScaleRule, context: Context
) -> torch.Tensor:
    values = rows[..., : context.length]
    back = _rotated(quantize_rows(_rotated(values, spec.size), rule), spec.size)
    return torch.nn.functional.pad(back, (0, rows.shape[-1] - context.length))


def _nvfp4(
    rows: torch.Tensor, spec: specs.Nvfp4, rule: ScaleRule, context: Context
) -> torch.Tensor:
    element, scale_format = NVFP4.element, E4M3
    blocks = to_blocks(rows, -1, NVFP4.block_size).to(torch.float32)
    amax = torch.tensor(context.tensor_amax, dtype=torch.float32, device=rows.device)
    top = element.max_normal * scale_format.max_normal
    tensor_scale = (amax / top).clamp(min=2.0**-121)
    block_scale = blocks.abs().amax(-1, keepdim=True) / element.max_normal / tensor_scale
    # torchao keeps E4M3's subnormals out of the scale.
    clamped = block_scale.clamp(2.0**scale_format.emin, scale_format.max_normal)
    code = round_to_element(clamped.to(torch.float64), scale_format).to(torch.float32)
    scaled = blocks * ((1.0 / tensor_scale) / code)
    q = round_to_element(scaled.to(torch.float64), element)
    return from_blocks(q * (tensor_scale * code).to(torch.float64), rows, -1)


def _mxfp8(
    rows: torch.Tensor, spec: specs.Mxfp8, rule: ScaleRule, context: Context
) -> torch.Tensor:
    return quantize_rows(rows, rule, MXFP8)


def _bf16(rows: torch.Tensor, spec: specs.Bf16, rule: ScaleRule, context: Context) -> torch.Tensor:
    top = torch.finfo(torch.bfloat16).max
    return to_float64(round_once(rows.clamp(-top, top), torch.bfloat16))


def _block2d(
    rows: torch.Tensor, spec: specs.Block2d, rule: ScaleRule, context: Context
) -> torch.Tensor:
    size = MXFP4.block_size
    plane = rows.flatten(0, 1)
    padded = torch.nn.functional.pad(plane, (0, 0, 0, -plane.shape[0] % size))
    tiles = padded.unflatten(1, (padded.shape[1] // size, size))
    tiles = tiles.unflatten(0, (padded.shape[0] // size, size))
    amax = tiles.abs().amax((1, 3), keepdim=True)
    scale = decode_scale(shared_scale_codes(amax, MXFP4.element, rule))
    q = _rounded(tiles, scale, MXFP4.element).flatten(2, 3).flatten(0, 1)
    return q[: plane.shape[0]].reshape(rows.shape)


def _mix(h: torch.Tensor) -> torch.Tensor:
    """The 32-bit finalizer of `StochasticRounding`, on int64 tensors that hold 32-bit values."""
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _MASK32
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _MASK32
    return h ^ (h >> 16)


def _uniform(rows: torch.Tensor, seed: int, context: Context) -> torch.Tensor:
    """Uniform multiples of 2^-24 in [0, 1), one per element, from its flat index and the seed."""
    outer, inner, padded = rows.shape
    o = torch.arange(outer, device=rows.device)[:, None, None]
    i = torch.arange(inner, device=rows.device)[None, :, None]
    k = torch.arange(padded, device=rows.device)[None, None, :]
    index = (o * context.length + k) * inner + i + context.offset
    key = _mix(torch.tensor(seed, dtype=torch.int64, device=rows.device))
    hashed = _mix(_mix((index & _MASK32) ^ key) ^ (index >> 32))
    return (hashed >> 8).to(torch.float64) * 2.0**-24


def _sr(
    rows: torch.Tensor, spec: specs.StochasticRounding, rule: ScaleRule, context: Context
) -> torch.Tensor:
    element = MXFP4.element
    blocks = to_blocks(rows, -1, MXFP4.block_size)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = decode_scale(shared_scale_codes(amax, element, rule))
    grid = torch.tensor(element.grid, dtype=torch.float64, device=rows.device)
    y = (blocks.abs() / scale).clamp(max=element.max_normal)
    below = (torch.searchsorted(grid, y.contiguous(), right=True) - 1).clamp(max=len(grid) - 2)
    low, high = grid[below], grid[below + 1]
    uniform = _uniform(rows, spec.seed, context).view(blocks.shape)
    magnitude = torch.where(uniform < (y - low) / (high - low), high, low)
    return from_blocks(torch.copysign(magnitude, blocks) * scale, rows, -1)


def _aqn(
    rows: torch.Tensor, spec: specs.AdaptiveNoise, rule: ScaleRule, context: Context
) -> torch.Tensor:
    first, second = _uniform(rows, 1, context), _uniform(rows, 2, context)
    normal = torch.sqrt(-2 * torch.log(first + 2.0**-25)) * torch.cos(2 * math.pi * second)
    noisy = _to_float32_precision(rows + spec.sigma * context.tensor_rms * normal)
    noisy[..., context.length :] = 0
    return quantize_rows(noisy, rule)


QUANTIZERS: dict[str, Quantizer] = {
    specs.MacroBlock.kind: _mbs,
    specs.Fallback.kind: _of,
    specs.MacroBlockFallback.kind: _mbs_of,
    specs.ScaleMse.kind: _scale_mse,
    specs.ScaleMantissa.kind: _scale_mantissa,
    specs.Hadamard.kind: _hadamard,
    specs.Nvfp4.kind: _nvfp4,
    specs.Mxfp8.kind: _mxfp8,
    specs.Bf16.kind: _bf16,
    specs.Block2d.kind: _block2d,
    specs.StochasticRounding.kind: _sr,
    specs.AdaptiveNoise.kind: _aqn,
}


@dataclass(frozen=True, slots=True)
class _Prepared:
    """x3 as quantizers take it, and which elements count."""

    rows: torch.Tensor
    finite: torch.Tensor
    context: Context


def _prepare(
    x: torch.Tensor, amax: float | None = None, rms: float | None = None, offset: int = 0
) -> _Prepared:
    blocks = to_blocks(x, 1, MXFP4.block_size)
    finite = torch.isfinite(blocks).all(-1, keepdim=True).expand_as(blocks).flatten(-2)
    rows = torch.where(finite, blocks.flatten(-2), 0.0)
    if amax is None:
        amax = float(rows.abs().max()) if rows.numel() else 0.0
    if rms is None:
        counted = int(finite[..., : x.shape[1]].sum())
        rms = math.sqrt(float(rows.square().sum()) / max(counted, 1))
    return _Prepared(rows, finite, Context(x.shape[1], amax, rms, offset))


def evaluate_corrections(
    x: torch.Tensor,
    rule: str | ScaleRule,
    corrections: Iterable[Correction],
    *,
    amax: float | None = None,
    rms: float | None = None,
    offset: int = 0,
) -> dict[str, np.ndarray]:
    """Raw sums of each correction on x [outer, K, inner], blocked along K.

    Returns name -> float64 [len(CORRECTION_FIELDS)]: ||x_dq - x||^2, <x_dq, x>, sum of x_dq - x and
    the count of x != 0 with x_dq = 0, over finite MX blocks; additive over parts of a tensor. A
    correction that is not defined on this shape (`Correction.refusal`) has NaN in all of them, and
    NaN stays NaN when parts are added.

    Parameters
    ----------
    amax, rms
        Of the whole tensor's finite MX blocks where x is a part of it; taken from x if None.
    offset
        Flat index of x's first element in the whole tensor, which random draws go by.
    """
    check_tensor(x)
    rule = scale_rule(rule)
    prepared, results = _prepare(x, amax, rms, offset), {}
    for correction in corrections:
        if _refusal(correction, x) is None:
            results[correction.name] = _fields(prepared, correction, rule)
        else:
            results[correction.name] = np.full(len(CORRECTION_FIELDS), math.nan)
    return results


def _refusal(correction: Correction, x: torch.Tensor) -> str | None:
    """Why the correction is not defined on the shape of x [outer, K, inner]."""
    if correction.kind == specs.Block2d.kind and x.shape[0] > 1 and x.shape[2] > 1:
        return f"{correction.name} needs a matrix, not {x.dim()} axes"
    return correction.refusal(correction.operands[0], x.shape[1])


def _fields(prepared: _Prepared, correction: Correction, rule: ScaleRule) -> np.ndarray:
    x, quantizer = prepared.rows, QUANTIZERS[correction.kind]
    x_dq = torch.where(prepared.finite, quantizer(x, correction, rule, prepared.context), 0.0)
    error = x_dq - x
    sums = {
        "e2": error.square().sum(),
        "qx": (x_dq * x).sum(),
        "e": error.sum(),
        "underflow": ((x != 0) & (x_dq == 0)).sum(),
    }
    return np.array([float(sums[name]) for name in CORRECTION_FIELDS])


def correct(
    x: torch.Tensor,
    correction: Correction,
    axis: int = -1,
    rule: str | ScaleRule = "rceil",
    *,
    amax: float | None = None,
) -> torch.Tensor:
    """x_dq of one correction in float64, blocked along `axis`; non-finite MX blocks become NaN.

    Raises
    ------
    TensorError
        If the correction is not defined on this shape (`Correction.refusal`).
    """
    check_tensor(x)
    axis = axis % x.dim()
    before, after = x.shape[:axis].numel(), x.shape[axis + 1 :].numel()
    blocked = x.reshape(before, x.shape[axis], after)
    refusal = _refusal(correction, blocked)
    if refusal is not None:
        raise TensorError(refusal, advice="Leave this correction out for this tensor")
    prepared = _prepare(blocked, amax)
    x_dq = QUANTIZERS[correction.kind](
        prepared.rows, correction, scale_rule(rule), prepared.context
    )
    x_dq = torch.where(prepared.finite, x_dq, math.nan)[..., : x.shape[axis]]
    return x_dq.movedim(-1, 1).reshape(x.shape)
