"""The values that an injection puts in an operand's place: the one door to every quantizer."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mxdiag.commands.impact.inject.compositions import composed
from mxdiag.commands.impact.inject.plan import Components, Corrected, Injection, Noisy
from mxdiag.quantize import dispatch
from mxdiag.quantize.corrections.base import Correction
from mxdiag.quantize.corrections.evaluate import correct
from mxdiag.quantize.corrections.sr import StochasticRounding

#: Elements that a correction takes at a time: its temporaries stay small.
_CHUNK = 1 << 20
_ALIGNED = 32


def injected(
    x: Tensor, injection: Injection, axis: int, rule: str, backend: str, seed: int
) -> Tensor:
    """What takes the place of x.

    Parameters
    ----------
    x
        [rows, columns], float16, bfloat16, float32 or float64.
    axis
        The blocked axis, 0 or 1.
    rule, backend
        Scale rule; which implementation computes it.
    seed
        Of noise and stochastic rounding.

    Returns
    -------
    Tensor
        In x's shape, dtype and device.
    """
    if isinstance(injection, Components):
        return dispatch.inject(x, injection.names, axis, rule, backend=backend)  # type: ignore[return-value]
    if isinstance(injection, Noisy):
        return _noisy(x, injection, axis, rule, backend, seed)
    return corrected(x, injection.correction, axis, rule, backend, seed)


def undefined(injection: Injection, operand: str, length: int) -> str | None:
    """Why an injection is not defined on an operand of that length along the blocked axis."""
    if not isinstance(injection, Corrected):
        return None
    return injection.correction.refusal(operand, length)


def _noisy(x: Tensor, noisy: Noisy, axis: int, rule: str, backend: str, seed: int) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(seed)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rms = torch.linalg.vector_norm(wide, dtype=torch.float64) / max(x.numel(), 1) ** 0.5
    noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=wide.dtype)
    noise.mul_(float(rms) * noisy.sigma).add_(wide)
    values = dispatch.quantize_dequantize(noise, axis, rule, backend=backend)
    return values.to(x.dtype)  # type: ignore[union-attr]


def corrected(
    x: Tensor, correction: Correction, axis: int, rule: str, backend: str, seed: int
) -> Tensor:
    """X as a correction leaves it, rounded once to x's dtype; a piece at a time."""
    amax = None
    if correction.needs_amax:
        amax = float(torch.where(x.isfinite(), x.abs(), 0).max())
    other = 1 - axis
    rows = max(1, _CHUNK // max(x.shape[axis], 1) // _ALIGNED) * _ALIGNED
    out = torch.empty_like(x)
    for number, start in enumerate(range(0, x.shape[other], rows)):
        if isinstance(correction, StochasticRounding):
            correction = dataclasses.replace(correction, seed=(seed + number) % (1 << 32))
        length = min(rows, x.shape[other] - start)
        piece = x.narrow(other, start, length)
        values = composed(piece, correction, axis, rule, backend, amax)
        if values is None:
            values = correct(piece, correction, axis, rule, amax=amax)
        out.narrow(other, start, length).copy_(values)
    return out
