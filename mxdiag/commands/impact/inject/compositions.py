"""Corrections composed of the fast quantizer and float32 arithmetic: equal to the reference.

Each line is one that the reference evaluates in float64 and that float32 gives as well: a product
of two float32 numbers, a quotient, a power of two times a number, a difference that is exact.
Where that may fail (values that are not finite, blocks near the ends of float32's range) there is
no composition, and the reference is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxdiag.formats import E2M1, E4M3, FLOAT32_MANTISSA_BITS, MXFP4, MXFP8, NVFP4, RCEIL, scale_rule
from mxdiag.quantize import dispatch
from mxdiag.quantize.corrections.base import Correction
from mxdiag.quantize.corrections.bf16 import Bf16
from mxdiag.quantize.corrections.mbs import MacroBlock
from mxdiag.quantize.corrections.mbs_of import MacroBlockFallback
from mxdiag.quantize.corrections.mxfp8 import Mxfp8
from mxdiag.quantize.corrections.nvfp4 import Nvfp4
from mxdiag.quantize.corrections.of import Fallback
from mxdiag.quantize.corrections.scale_mse import ScaleMse

#: Block maxima outside of these may meet subnormal or overflowing intermediate results.
_LOWEST, _HIGHEST = 2.0**-90, 2.0**90
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def composed(
    x: Tensor, correction: Correction, axis: int, rule: str, backend: str, amax: float | None
) -> Tensor | None:
    """x_dq of a correction on x [rows, columns], rounded once to x's dtype.

    Parameters
    ----------
    axis
        The blocked axis, 0 or 1.
    amax
        Of the whole tensor, for corrections that need it.

    Returns
    -------
    Tensor or None
        None if this correction, or these values, have no composition.
    """
    made = _COMPOSITIONS.get(correction.kind)
    if made is None or backend == "reference" or x.dtype not in _FLOATS or not x.numel():
        return None
    if getattr(correction, "search", False) or not _ordinary(x, axis):
        return None
    return made(x.float(), correction, _Blocked(axis, rule, backend, amax)).to(x.dtype)


def _ordinary(x: Tensor, axis: int) -> bool:
    """Whether every block is finite, and either zero or well within float32's range."""
    tops = _grouped(x, axis, MXFP8.block_size).abs().amax(axis + 1).float()
    inside = (tops >= _LOWEST) & (tops <= _HIGHEST)
    return bool((inside | (tops == 0)).all())


def _grouped(x: Tensor, axis: int, size: int) -> Tensor:
    """X with `axis` split into groups of `size`, the last one padded with zeros."""
    padding = -x.shape[axis] % size
    if padding:
        x = torch.nn.functional.pad(x, (0, padding) if axis == 1 else (0, 0, 0, padding))
    return x.unflatten(axis, (x.shape[axis] // size, size))


class _Blocked:
    """How an operand is blocked, and its plain quantizer."""

    def __init__(self, axis: int, rule: str, backend: str, amax: float | None) -> None:
        self.axis, self.rule, self.amax = axis, rule, amax
        self._backend = backend

    def q(self, x: Tensor) -> Tensor:
        """Q(x), float32."""
        return dispatch.quantize_dequantize(x, self.axis, self.rule, backend=self._backend)  # type: ignore[return-value]

    def groups(self, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """X in groups along the axis, and the largest magnitude of each, ready to broadcast."""
        grouped = _grouped(x, self.axis, size)
        return grouped, grouped.abs().amax(self.axis + 1, keepdim=True)

    def back(self, grouped: Tensor, like: Tensor) -> Tensor:
        """Undo `groups`."""
        flat = grouped.flatten(self.axis, self.axis + 1)
        return flat.narrow(self.axis, 0, like.shape[self.axis])


def _scaled(x: Tensor, spec: MacroBlock, blocked: _Blocked) -> tuple[Tensor, Tensor]:
    """Y = mu x, in one float32 product, and mu by element."""
    grouped, amax = blocked.groups(x, spec.size)
    wide = amax.double()
    quotient = 6.0 / torch.where(wide == 0, 6.0, wide)
    mu = 1.0 + ((quotient.view(torch.int64) >> 44) & 0xFF).float() / 256
    return blocked.back(grouped * mu, x), blocked.back(mu.expand_as(grouped), x)


def _mbs(x: Tensor, spec: MacroBlock, blocked: _Blocked) -> Tensor:
    y, mu = _scaled(x, spec, blocked)
    return blocked.q(y.contiguous()) / mu


def _twice(y: Tensor, alpha: float, blocked: _Blocked) -> Tensor:
    """Q(y) + alpha Q(y - Q(y)), float64."""
    first = blocked.q(y)
    second = blocked.q(y - first)
    return first.double().add_(second.double(), alpha=alpha)


def _of(x: Tensor, spec: Fallback, blocked: _Blocked) -> Tensor:
    return _twice(x, spec.alpha, blocked)


def _mbs_of(x: Tensor, spec: MacroBlockFallback, blocked: _Blocked) -> Tensor:
    y, mu = _scaled(x, spec.macro, blocked)
    return _twice(y.contiguous(), spec.fallback.alpha, blocked) / mu


def _mxfp8(x: Tensor, spec: Mxfp8, blocked: _Blocked) -> Tensor:
    grouped, amax = blocked.groups(x, MXFP8.block_size)
    carry = scale_rule(blocked.rule).carry(E4M3)
    field = (amax.view(torch.int32) + carry) >> FLOAT32_MANTISSA_BITS
    scale = ((field - E4M3.emax).clamp(min=1) << FLOAT32_MANTISSA_BITS).view(torch.float32)
    elements = (grouped / scale).clamp(-E4M3.max_normal, E4M3.max_normal)
    return blocked.back(elements.to(torch.float8_e4m3fn).float() * scale, x)


def _scale_mse(x: Tensor, spec: ScaleMse, blocked: _Blocked) -> Tensor:
    grouped, amax = blocked.groups(x, MXFP4.block_size)
    field = (amax.view(torch.int32) + RCEIL.carry(E2M1)) >> FLOAT32_MANTISSA_BITS
    upper = ((field - E2M1.emax).clamp(min=1) << FLOAT32_MANTISSA_BITS).view(torch.float32)
    lower, top = upper / 2, E2M1.max_normal
    coarse = _to_e2m1(grouped / upper) * upper
    fine = _to_e2m1((grouped / lower).clamp(-top, top)) * lower
    errors = [
        (values - grouped).double().square_().sum(blocked.axis + 1, keepdim=True)
        for values in (coarse, fine)
    ]
    return blocked.back(torch.where(errors[1] < errors[0], fine, coarse), x)


def _nvfp4(x: Tensor, spec: Nvfp4, blocked: _Blocked) -> Tensor:
    element = NVFP4.element
    grouped, top = blocked.groups(x, NVFP4.block_size)
    whole = x.abs().max() if blocked.amax is None else torch.tensor(blocked.amax, device=x.device)
    tensor_scale = (whole.float() / (element.max_normal * E4M3.max_normal)).clamp(min=2.0**-121)
    clamped = (top / element.max_normal / tensor_scale).clamp(2.0**E4M3.emin, E4M3.max_normal)
    code = clamped.to(torch.float8_e4m3fn).float()
    y = (grouped * ((1.0 / tensor_scale) / code)).clamp(-element.max_normal, element.max_normal)
    return blocked.back(_to_e2m1(y) * (tensor_scale * code), x)


def _to_e2m1(y: Tensor) -> Tensor:
    """|y| <= 6 to the nearest element, ties to the even code: quanta 1/2 below 2, 1 below 4, 2."""
    size = y.abs()
    quantum = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (y / quantum).round() * quantum


def _bf16(x: Tensor, spec: Bf16, blocked: _Blocked) -> Tensor:
    return x.bfloat16().float()


_COMPOSITIONS: dict[str, Callable[[Tensor, Any, _Blocked], Tensor]] = {
    MacroBlock.kind: _mbs,
    Fallback.kind: _of,
    MacroBlockFallback.kind: _mbs_of,
    ScaleMse.kind: _scale_mse,
    Mxfp8.kind: _mxfp8,
    Nvfp4.kind: _nvfp4,
    Bf16.kind: _bf16,
}
