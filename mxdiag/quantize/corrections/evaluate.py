"""Corrections evaluated by the reference: raw sums of each, or the corrected values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from mxdiag.errors import TensorError
from mxdiag.formats import MXFP4, ScaleRule, scale_rule
from mxdiag.quantize.corrections.base import Context, Correction
from mxdiag.quantize.reference import check_tensor, to_blocks
from mxdiag.quantize.sums import CORRECTION_FIELDS


@dataclass(frozen=True, slots=True)
class _Prepared:
    """x3 as quantizers take it, and which elements count."""

    rows: torch.Tensor
    finite: torch.Tensor
    context: Context


def _prepare(
    x: torch.Tensor, context: Context | None = None, amax: float | None = None
) -> _Prepared:
    blocks = to_blocks(x, 1, MXFP4.block_size)
    finite = torch.isfinite(blocks).all(-1, keepdim=True).expand_as(blocks).flatten(-2)
    rows = torch.where(finite, blocks.flatten(-2), 0.0)
    if context is None:
        if amax is None:
            amax = float(rows.abs().max()) if rows.numel() else 0.0
        counted = int(finite[..., : x.shape[1]].sum())
        rms = math.sqrt(float(rows.square().sum()) / max(counted, 1))
        context = Context(x.shape[1], (x.shape[0], x.shape[1], x.shape[2]), (0, 0, 0), amax, rms)
    return _Prepared(rows, finite, context)


def block_energy(x: torch.Tensor) -> tuple[float, int]:
    """||x||^2 over the finite MX blocks of x [outer, K, inner] along K, and their elements."""
    prepared = _prepare(x)
    return float(prepared.rows.square().sum()), int(prepared.finite[..., : x.shape[1]].sum())


def evaluate_corrections(
    x: torch.Tensor,
    rule: str | ScaleRule,
    corrections: Iterable[Correction],
    *,
    context: Context | None = None,
) -> dict[str, np.ndarray]:
    """Raw sums of each correction on x [outer, K, inner], blocked along K.

    Returns name -> float64 [len(CORRECTION_FIELDS)]: ||x_dq - x||^2, <x_dq, x>, sum of x_dq - x and
    the count of x != 0 with x_dq = 0, over finite MX blocks; additive over parts of a tensor. A
    correction that is not defined on this shape (`Correction.refusal`) has NaN in all of them, and
    NaN stays NaN when parts are added.

    Parameters
    ----------
    context
        Of the whole tensor where x is a part of it.

    Raises
    ------
    TensorError
        If the part's ends split what a correction takes together (`Correction.granule`).
    """
    check_tensor(x)
    rule = scale_rule(rule)
    prepared, results = _prepare(x, context), {}
    for correction in corrections:
        if _refusal(correction, x, prepared.context) is None:
            _check_cut(correction, prepared.context)
            results[correction.name] = _fields(prepared, correction, rule)
        else:
            results[correction.name] = np.full(len(CORRECTION_FIELDS), math.nan)
    return results


def _refusal(correction: Correction, x: torch.Tensor, context: Context) -> str | None:
    """Why the correction is not defined on the shape of x [outer, K, inner]."""
    if correction.square and x.shape[0] > 1 and x.shape[2] > 1:
        return f"{correction.name} needs a matrix, not {x.dim()} axes"
    return correction.refusal(correction.operands[0], context.whole[1])


def _check_cut(correction: Correction, context: Context) -> None:
    start, end = context.start[1], context.start[1] + context.length
    size = correction.granule
    if start % size or (end % size and end != context.whole[1]):
        raise TensorError(
            f"{correction.name} takes {size} elements together, and a piece from {start} to {end}"
            f" of {context.whole[1]} splits them",
            advice=f"Cut at multiples of {size}",
        )


def _fields(prepared: _Prepared, correction: Correction, rule: ScaleRule) -> np.ndarray:
    x = prepared.rows
    x_dq = torch.where(prepared.finite, correction.quantize(x, rule, prepared.context), 0.0)
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
    prepared = _prepare(blocked, amax=amax)
    refusal = _refusal(correction, blocked, prepared.context)
    if refusal is not None:
        raise TensorError(refusal, advice="Leave this correction out for this tensor")
    x_dq = correction.quantize(prepared.rows, scale_rule(rule), prepared.context)
    x_dq = torch.where(prepared.finite, x_dq, math.nan)[..., : x.shape[axis]]
    return x_dq.movedim(-1, 1).reshape(x.shape)
