"""The truth: MXFP4 in plain torch, evaluated in float64, written to be read.

Every fast path must equal this module exactly on codes, scale bytes and decoded values. All
functions block along `axis`, pad a ragged last block with zeros (padding never enters a result) and
accept float16, bfloat16, float32 and float64 tensors of one or more dimensions.

Exactness: a float32 amax m and element x make 6x and every threshold times m exact in float64, so
the ideal scale's rounding decisions, taken on fl(6x / m), are those of exact arithmetic: two such
numbers that differ do so by more than one part in 2^52.

No result depends on `torch.set_flush_denormal`: subnormal inputs and outputs pass as bits.

Source: OCP Microscaling Formats (MX) Specification v1.0, section 6.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from mxdiag.errors import TensorError
from mxdiag.formats import (
    E8M0_BIAS,
    E8M0_MAX,
    E8M0_NAN,
    MXFP4,
    BlockFormat,
    ElementFormat,
    ScaleRule,
    scale_rule,
)
from mxdiag.quantize.sums import COMPONENTS, DELTA_BINS, Sums

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Explicit mantissa bits and least normal exponent of the narrow types.
_PRECISIONS = {torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float32: (23, -126)}
#: Integers of the same width. float64 needs none: no sum can tell 2^-1022 from 0.
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A quantized tensor: uint8 `codes` in x's shape, uint8 E8M0 `scale_codes` with the blocked
    axis replaced by the block count. A non-finite block has scale byte 255 and codes 0.
    """

    codes: torch.Tensor
    scale_codes: torch.Tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """Float64 views of x in blocks [..., n_blocks, block_size], padded with zeros.

    `x` is the tensor with non-finite blocks zeroed, `q` its MXFP4 value, `q_star` its value under
    the ideal scale; `scale` and `amax` are [..., n_blocks, 1]; `finite` flags blocks to count.
    """

    x: torch.Tensor
    q: torch.Tensor
    q_star: torch.Tensor
    scale: torch.Tensor
    amax: torch.Tensor
    finite: torch.Tensor

    @property
    def deadzone(self) -> torch.Tensor:
        """Where x is not zero and its value under the ideal scale is."""
        return (self.x != 0) & (self.q_star == 0)


def check_tensor(x: torch.Tensor) -> None:
    """Refuse what cannot be blocked: not a floating-point tensor, or no axis."""
    if x.dtype not in _FLOAT_DTYPES:
        raise TensorError(
            f"cannot quantize a tensor of dtype {x.dtype}",
            advice="Pass float16, bfloat16, float32 or float64 values",
        )
    if x.dim() == 0:
        raise TensorError("cannot block a 0-dimensional tensor", advice="Pass at least one axis")


def to_float64(x: torch.Tensor) -> torch.Tensor:
    """X in float64, exactly: a thread that flushes subnormals would convert them to zero."""
    if x.dtype not in _BITS:
        return x.to(torch.float64)
    mantissa_bits, emin = _PRECISIONS[x.dtype]
    bits = x.view(_BITS[x.dtype])
    mantissa = bits & torch.iinfo(bits.dtype).max
    small = mantissa.to(torch.float64) * 2.0 ** (emin - mantissa_bits)
    small = torch.where(bits < 0, -small, small)
    return torch.where(mantissa < 1 << mantissa_bits, small, x.to(torch.float64))


def _from_float64(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Y (float64) in `dtype`, subnormal results as bits; rounded by torch, and so, to 16 bits, by
    way of float32.
    """
    if dtype not in _BITS:
        return y.to(dtype)
    mantissa_bits, emin = _PRECISIONS[dtype]
    integers = _BITS[dtype]
    is_small = y.abs() < 2.0**emin
    steps = (torch.where(is_small, y.abs(), 0.0) * 2.0 ** (mantissa_bits - emin)).round()
    sign = torch.where(torch.signbit(y), torch.iinfo(integers).min, 0).to(integers)
    return torch.where(is_small, steps.to(integers) | sign, y.to(dtype).view(integers)).view(dtype)


def to_blocks(x: torch.Tensor, axis: int, block_size: int) -> torch.Tensor:
    """X in float64 as [..., n_blocks, block_size]: `axis` moved last and padded with zeros."""
    check_tensor(x)
    moved = to_float64(x.detach()).movedim(axis, -1)
    padding = -moved.shape[-1] % block_size
    padded = torch.nn.functional.pad(moved, (0, padding))
    return padded.unflatten(-1, (padded.shape[-1] // block_size, block_size))


def from_blocks(blocks: torch.Tensor, like: torch.Tensor, axis: int) -> torch.Tensor:
    """Undo `to_blocks`: cut the padding off and move the axis back; the dtype stays."""
    return blocks.flatten(-2)[..., : like.shape[axis]].movedim(-1, axis).contiguous()


def _round_to_precision(y: torch.Tensor, mantissa_bits: int, emin: int) -> torch.Tensor:
    """Y (float64) to the nearest number of so many mantissa bits, ties to even; keeps -0.0."""
    exponent = torch.frexp(y).exponent - 1
    quantum = torch.ldexp(torch.ones_like(y), exponent.clamp(min=emin) - mantissa_bits)
    return (y / quantum).round() * quantum


def round_to_element(y: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """Y (float64) to the nearest value of the format, ties to even code, saturating; keeps -0.0."""
    rounded = _round_to_precision(y, element.mantissa_bits, element.emin)
    return rounded.clamp(-element.max_normal, element.max_normal)


def round_once(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Y (float64) in `dtype`, rounded once: torch's own conversion to 16 bits rounds twice, by way
    of float32. Beyond the dtype's range it is infinite.
    """
    if dtype in (torch.bfloat16, torch.float16):
        finite = _round_to_precision(y, *_PRECISIONS[dtype])
        y = torch.where(torch.isfinite(y), finite, y)
    return _from_float64(y, dtype)


def shared_scale_codes(amax: torch.Tensor, element: ElementFormat, rule: ScaleRule) -> torch.Tensor:
    """E8M0 bytes (uint8) of block maxima (float64): 0 where amax is 0, 255 where not finite."""
    finite = torch.isfinite(amax)
    half_fraction, exponent = torch.frexp(torch.where(finite, amax, 0.0))
    fraction, threshold = 2 * half_fraction, rule.threshold(element)
    raised = fraction >= threshold if rule.raises_at_threshold else fraction > threshold
    code = exponent - 1 - element.emax + raised.to(exponent.dtype) + E8M0_BIAS
    code = torch.where(amax == 0, 0, code.clamp(0, E8M0_MAX))
    return torch.where(finite, code, E8M0_NAN).to(torch.uint8)


def decode_scale(scale_codes: torch.Tensor) -> torch.Tensor:
    """Shared scales in float64; byte 255 is NaN."""
    exponent = scale_codes.to(torch.int32) - E8M0_BIAS
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
    return torch.where(scale_codes == E8M0_NAN, math.nan, scale)


def parts(
    x: torch.Tensor,
    axis: int = -1,
    rule: str | ScaleRule = "rceil",
    fmt: BlockFormat = MXFP4,
) -> Parts:
    """x, Q(x) and Q*(x) in blocks: all that the decomposition needs."""
    blocks = to_blocks(x, axis, fmt.block_size)
    finite = torch.isfinite(blocks).all(-1, keepdim=True)
    blocks = torch.where(finite, blocks, 0.0)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = decode_scale(shared_scale_codes(amax, fmt.element, scale_rule(rule)))
    q = round_to_element(blocks / scale, fmt.element) * scale
    top = fmt.element.max_normal
    ideal = torch.where(amax == 0, 1.0, amax)
    q_star = round_to_element(top * blocks / ideal, fmt.element) * ideal / top
    return Parts(blocks, q, q_star, scale, amax, finite)


def encode(
    x: torch.Tensor,
    axis: int = -1,
    rule: str | ScaleRule = "rceil",
    fmt: BlockFormat = MXFP4,
) -> Encoded:
    """Codes and scale bytes of x in a format with power-of-two scales."""
    p = parts(x, axis, rule, fmt)
    grid = torch.tensor(fmt.element.grid, dtype=torch.float64, device=x.device)
    magnitude = torch.searchsorted(grid, (p.q / p.scale).abs().contiguous()).to(torch.uint8)
    codes = magnitude | torch.where(torch.signbit(p.q), fmt.element.sign_bit, 0).to(torch.uint8)
    codes = torch.where(p.finite, codes, 0).to(torch.uint8)
    amax = torch.where(p.finite, p.amax, math.nan)
    scale_codes = shared_scale_codes(amax, fmt.element, scale_rule(rule)).squeeze(-1)
    return Encoded(from_blocks(codes, x, axis), scale_codes.movedim(-1, axis).contiguous())


def decode(encoded: Encoded, axis: int = -1, fmt: BlockFormat = MXFP4) -> torch.Tensor:
    """Decoded values in float64; a block with scale byte 255 is NaN."""
    grid = torch.tensor(fmt.element.grid, dtype=torch.float64, device=encoded.codes.device)
    sign_bit = fmt.element.sign_bit
    values = grid[(encoded.codes & (sign_bit - 1)).long()]
    values = torch.where((encoded.codes & sign_bit) != 0, -values, values)
    scale = decode_scale(encoded.scale_codes).repeat_interleave(fmt.block_size, dim=axis)
    return values * scale.narrow(axis, 0, values.shape[axis])


def quantize_dequantize(
    x: torch.Tensor,
    axis: int = -1,
    rule: str | ScaleRule = "rceil",
    fmt: BlockFormat = MXFP4,
) -> torch.Tensor:
    """Q(x), rounded once to x's dtype; non-finite blocks become NaN."""
    p = parts(x, axis, rule, fmt)
    return _from_float64(from_blocks(torch.where(p.finite, p.q, math.nan), x, axis), x.dtype)


def inject(
    x: torch.Tensor,
    components: frozenset[str],
    axis: int = -1,
    rule: str | ScaleRule = "rceil",
) -> torch.Tensor:
    """X plus the named error components, rounded once to x's dtype; non-finite blocks become NaN.

    Values are picked, not summed: with the element's own component (deadzone on the deadzone, grid
    off it) the result is Q with scale and Q* without; else x + Q - Q* with scale and x without.
    So all three together give exactly Q(x), and none gives exactly x.
    """
    unknown = components - set(COMPONENTS)
    if unknown:
        raise TensorError(f"unknown error components {sorted(unknown)}", advice=f"Use {COMPONENTS}")
    if not components:
        return x.detach().clone()
    p = parts(x, axis, rule)
    own = torch.where(p.deadzone, "deadzone" in components, "grid" in components)
    if "scale" in components:
        picked = torch.where(own, p.q, p.x + (p.q - p.q_star))
    else:
        picked = torch.where(own, p.q_star, p.x)
    return round_once(from_blocks(torch.where(p.finite, picked, math.nan), x, axis), x.dtype)


def measure(x: torch.Tensor, rule: str | ScaleRule = "rceil", *, tokens: bool = False) -> Sums:
    """Raw sums of x [outer, K, inner] in MXFP4 blocks along K.

    With `tokens`, also sums per token: the outer index if inner is 1, the K index if outer is 1.
    """
    element, rule = MXFP4.element, scale_rule(rule)
    p = parts(x, 1, rule)
    scale_err, total_err = p.q - p.q_star, p.q - p.x
    own_err, deadzone = p.q_star - p.x, p.deadzone
    dz_err, grid_err = torch.where(deadzone, own_err, 0.0), torch.where(deadzone, 0.0, own_err)
    counted = p.finite.squeeze(-1)
    nonzero = (p.amax > 0).squeeze(-1)
    delta = torch.log2(element.max_normal * p.scale / p.amax).squeeze(-1)[nonzero]
    sums = [
        (p.x**2).sum(),
        (total_err**2).sum(),
        (scale_err**2).sum(),
        (dz_err**2).sum(),
        (grid_err**2).sum(),
        (scale_err * grid_err).sum(),
        (scale_err * dz_err).sum(),
        (p.q * p.x).sum(),
        total_err.sum(),
        delta.sum(),
        (delta**2).sum(),
    ]
    valid = from_blocks(p.finite.expand_as(p.x), x, 1)
    counts = [
        torch.tensor(x.numel()),
        valid.sum(),
        (valid & (x == 0)).sum(),
        deadzone.sum(),
        ((p.x != 0) & (p.q == 0)).sum(),
        (p.x.abs() > element.max_normal * p.scale).sum(),
        nonzero.sum(),
        (counted & ~nonzero).sum(),
        (~counted).sum(),
    ]
    bins = ((delta - rule.delta_low(element)) * DELTA_BINS).floor().clamp(0, DELTA_BINS - 1)
    return Sums(
        sums=np.array([float(value) for value in sums]),
        counts=np.array([int(value) for value in counts], dtype=np.int64),
        amax=float(p.amax.max()) if p.amax.numel() else 0.0,
        delta_hist=torch.bincount(bins.long(), minlength=DELTA_BINS).cpu().numpy(),
        tokens=_token_sums(x, p.x**2, total_err**2, dz_err**2) if tokens else None,
    )


def _token_sums(x: torch.Tensor, *energies: torch.Tensor) -> np.ndarray:
    """Energies in blocks, summed over everything but the token axis: [n_tokens, len(energies)]."""
    token_axis = 0 if x.shape[2] == 1 else 1
    others = tuple(axis for axis in range(3) if axis != token_axis)
    columns = [from_blocks(energy, x, 1).sum(others) for energy in energies]
    return torch.stack(columns, dim=1).cpu().numpy()
