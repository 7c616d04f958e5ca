"""MXFP4 on the CPU in one fused pass: numba and numpy, no torch.

The functions take a 3-D array [outer, K, inner] of float32, float16 or ml_dtypes.bfloat16, blocked
along K. They equal `quantize.reference` exactly on codes, scale bytes, decoded and injected values
and on counts; sums agree to float32 accumulation within a block and float64 beyond. Results do not
depend on the number of threads.

From the inside out: `simd` (vectors), `lanes` (the arithmetic, one block per lane), `pack` (memory
to tiles), `totals`, `measure` and `corrections` (statistics of a strip of sixteen blocks), `write`
(results to memory), `strips`, `measure_loops` and `write_loops` (the compiled loops), `layout`
(units of work) and this module (threads and results).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mxdiag.errors import TensorError
from mxdiag.formats import E2M1, E4M3, FLOAT32_MANTISSA_BITS, ScaleRule
from mxdiag.quantize.corrections.base import Correction
from mxdiag.quantize.cpu.corrections import CORRECTED_FIELDS
from mxdiag.quantize.cpu.lanes import BLOCK
from mxdiag.quantize.cpu.layout import ArrayLayout
from mxdiag.quantize.cpu.measure import CELL_SHIFT, OCTAVE_CELLS, UNIT_COUNTS
from mxdiag.quantize.cpu.measure_loops import MACRO, measure_columns, measure_rows
from mxdiag.quantize.cpu.plan import FusedPlan, is_fused, plan
from mxdiag.quantize.cpu.threads import share
from mxdiag.quantize.cpu.variant import DTYPES, SETTINGS, Dtype, Variant, kernel_sources
from mxdiag.quantize.cpu.write import COMPONENT_BITS
from mxdiag.quantize.cpu.write_loops import write_columns, write_rows
from mxdiag.quantize.sums import (
    CORRECTION_FIELDS,
    COUNT_FIELDS,
    DELTA_BINS,
    SUM_FIELDS,
    TOKEN_FIELDS,
    Sums,
)

__all__ = ["encode", "inject", "is_fused", "measure", "needs_compiling", "quantize_dequantize"]

_AMAX = UNIT_COUNTS.index("amax")
#: NVFP4: the largest scaled value, 6 * 448, and the least scale of a tensor.
_NVFP4_TOP, _NVFP4_LEAST = np.float32(E2M1.max_normal * E4M3.max_normal), np.float32(2.0**-121)


def measure(
    x: np.ndarray,
    rule: ScaleRule,
    *,
    tokens: bool = False,
    corrections: Sequence[Correction] = (),
    amax: float | None = None,
    threads: int | None = None,
) -> Sums:
    """Raw sums of x [outer, K, inner] in MXFP4 blocks along K.

    Parameters
    ----------
    tokens
        Also return sums per token: the outer index if inner is 1, the K index if outer is 1.
    corrections
        Corrections to evaluate in the same pass; all of them must be such that `is_fused`.
    amax
        The whole tensor's largest absolute value, over finite blocks, where x is a piece of it;
        taken from x, in a pass of its own, if None and a correction needs it.
    threads
        How many to use; all CPUs of this process if None.

    Raises
    ------
    TensorError
        If x is not 3-D, of another dtype, or `tokens` are asked for and there is no such axis.
    """
    dtype = _check(x)
    if tokens and x.shape[0] != 1 and x.shape[2] != 1:
        raise TensorError(f"no token axis in an array of shape {x.shape}")
    plans = tuple(plan(correction, rule) for correction in corrections)
    if any(correction.needs_amax for correction in corrections) and amax is None:
        amax = _run(x, dtype, rule, "amax", False, (), 0.0, threads).amax
    totals = _run(x, dtype, rule, "measure", tokens, plans, amax or 0.0, threads)
    sums, counts = totals.sums[: len(SUM_FIELDS)], totals.counts
    corrected = {}
    for i, correction in enumerate(corrections):
        first = len(SUM_FIELDS) + len(CORRECTED_FIELDS) * i
        parts = totals.sums[first : first + len(CORRECTED_FIELDS)]
        raw = dict(zip(CORRECTED_FIELDS, parts, strict=True))
        zeros = counts[UNIT_COUNTS.index("zeros")]
        fields = {
            "e2": raw["e2"],
            "qx": sums[SUM_FIELDS.index("x2")] + raw["ey"],
            "e": raw["e"],
            "underflow": counts[len(UNIT_COUNTS) + i] - zeros,
        }
        corrected[correction.name] = np.array([float(fields[name]) for name in CORRECTION_FIELDS])
    return Sums(
        sums=sums,
        counts=_count_fields(x.size, counts),
        amax=totals.amax,
        delta_hist=totals.delta_hist,
        tokens=totals.tokens,
        corrections=corrected,
    )


def _run(
    x: np.ndarray,
    dtype: Dtype,
    rule: ScaleRule,
    task: str,
    tokens: bool,
    plans: tuple[FusedPlan, ...],
    amax: float,
    threads: int | None,
) -> Sums:
    """Run a measuring kernel; sums and counts in the Sums are the kernel's own."""
    layout = ArrayLayout.of(
        x, fixed=tokens, group=MACRO if any("mbs" in plan for plan in plans) else 1
    )
    unit, chunks, units, blocks, _ = layout.division
    row_tokens = tokens and not layout.by_rows
    variant = _variant(dtype.name, task, _covers(rule), row_tokens, plans)
    sums = np.zeros((units, len(SUM_FIELDS) + len(CORRECTED_FIELDS) * len(plans)))
    counts = np.zeros((units, len(UNIT_COUNTS) + len(plans)), np.int64)
    depth = BLOCK * layout.group
    token_rows = units * depth if row_tokens else x.shape[0]
    token_sums = np.zeros((token_rows if tokens else 0, len(TOKEN_FIELDS)))
    settings, table, arguments = (
        _settings(rule, dtype, amax),
        octave_table(rule),
        layout.arguments(),
    )
    histograms = [np.zeros(DELTA_BINS, np.int64)]

    def work(first: int, last: int) -> None:
        octave = np.concatenate([table, histograms[0]])
        histograms.append(octave[table.size :])
        run = (first, last, unit)
        results = (settings, octave, sums, counts, token_sums)
        if layout.by_rows:
            measure_rows(variant, arguments, run, blocks, *results)
        else:
            measure_columns(variant, arguments, run, layout.group, *results)

    share(work, units, threads)
    if row_tokens and units:
        parts = token_sums.reshape(-1, chunks, depth, len(TOKEN_FIELDS)).sum(1)
        token_sums = parts.reshape(-1, len(TOKEN_FIELDS))[: x.shape[1]]
    elif row_tokens:
        token_sums = np.zeros((x.shape[1], len(TOKEN_FIELDS)))
    return Sums(
        sums=np.add.reduce(sums, axis=0),
        counts=np.add.reduce(counts, axis=0),
        amax=_float(np.maximum.reduce(counts[:, _AMAX], initial=0)),
        delta_hist=np.add.reduce(histograms),
        tokens=token_sums if tokens else None,
    )


@functools.lru_cache(maxsize=256)
def _settings(rule: ScaleRule, dtype: Dtype, amax: float) -> np.ndarray:
    """SETTINGS for a rule, a stored type and a tensor's amax."""
    tensor_scale = np.maximum(np.float32(amax) / _NVFP4_TOP, _NVFP4_LEAST)
    values = {
        "carry": rule.carry(E2M1),
        "carry_e4m3": rule.carry(E4M3),
        "overflow": dtype.overflow,
        "tensor_scale": tensor_scale.view(np.uint32),
        "inverse_tensor_scale": (np.float32(1) / tensor_scale).view(np.uint32),
    }
    return np.array([int(values[name]) for name in SETTINGS], np.int64)


def quantize_dequantize(
    x: np.ndarray,
    rule: ScaleRule,
    *,
    out: np.ndarray | None = None,
    threads: int | None = None,
) -> np.ndarray:
    """Q(x) in x's dtype, in x's shape; non-finite blocks become NaN.

    Raises
    ------
    TensorError
        As `measure`; or if `out`, which the result is written to, has another shape or dtype.
    """
    dtype = _check(x)
    variant = Variant(dtype.name, "decode")
    return _write(x, rule, variant, 0, _output(x, out), None, threads)


def inject(
    x: np.ndarray,
    components: frozenset[str],
    rule: ScaleRule,
    *,
    out: np.ndarray | None = None,
    threads: int | None = None,
) -> np.ndarray:
    """X plus the named error components ("scale", "deadzone", "grid"), in x's dtype.

    See `reference.inject`. Raises a TensorError as `quantize_dequantize`, or for an unknown
    component.
    """
    dtype = _check(x)
    unknown = components - set(COMPONENT_BITS)
    if unknown:
        names = ", ".join(COMPONENT_BITS)
        raise TensorError(f"unknown error components {sorted(unknown)}", advice=f"Use {names}")
    target = _output(x, out)
    if not components:
        target[...] = x
        return target
    if components == set(COMPONENT_BITS):
        return quantize_dequantize(x, rule, out=target, threads=threads)
    variant = Variant(dtype.name, "inject")
    parts = sum(COMPONENT_BITS[name] for name in components)
    return _write(x, rule, variant, parts, target, None, threads)


def encode(
    x: np.ndarray, rule: ScaleRule, *, threads: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes, uint8 in x's shape, and E8M0 scale codes, uint8 with K replaced by ceil(K / 32).

    A non-finite block has scale code 255 and codes 0.
    """
    dtype = _check(x)
    outer, size, inner = x.shape
    scale_codes = np.zeros((outer, -(-size // BLOCK), inner), np.uint8)
    codes = np.empty(x.shape, np.uint16 if dtype.bits == 16 else np.uint32)
    _write(x, rule, Variant(dtype.name, "encode"), 0, codes, scale_codes, threads)
    return codes.astype(np.uint8), scale_codes


def _output(x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    if out is None:
        return np.empty(x.shape, x.dtype)
    if out.shape != x.shape or out.dtype != x.dtype:
        raise TensorError(f"the output is {out.dtype} {out.shape}, the tensor {x.dtype} {x.shape}")
    return out


def _write(
    x: np.ndarray,
    rule: ScaleRule,
    variant: Variant,
    parts: int,
    out: np.ndarray,
    scale_codes: np.ndarray | None,
    threads: int | None,
) -> np.ndarray:
    """Run a writing kernel from x into `out`, by way of copies where one of them lies awkwardly."""
    if x.size == 0:
        return out
    layout = ArrayLayout.of(x, fixed=True)
    target = out if layout.fits(out) else np.empty(x.shape, out.dtype)
    result = ArrayLayout(target, layout.by_rows).arguments()
    settings = _settings(rule, DTYPES[variant.dtype], 0.0)
    encodes = scale_codes is not None
    flat = np.zeros(scale_codes.size if scale_codes is not None else 0, np.uint8)

    division = layout.division

    def work(first: int, last: int) -> None:
        run = (first, last, division.unit)
        if layout.by_rows:
            write_rows(
                variant, layout.arguments(), run, division.blocks, settings, parts, result[:2], flat
            )
        else:
            codes = flat.reshape(-1, x.shape[2]) if encodes else flat.reshape(0, 1)
            write_columns(variant, layout.arguments(), run, settings, parts, result[:3], codes)

    share(work, division.units, threads)
    if scale_codes is not None:
        scale_codes[...] = flat.reshape(scale_codes.shape)
    if target is not out:
        out[...] = target
    return out


def needs_compiling() -> bool:
    """Whether the first call will have to compile its kernel, which takes seconds.

    That is so where neither this process nor numba's disk cache holds a kernel as recent as its
    source.
    """
    loops = (measure_rows, measure_columns, write_rows, write_columns)
    if any(loop.signatures for loop in loops):
        return False
    newest = max(path.stat().st_mtime for path in kernel_sources())
    folder = measure_rows.stats.cache_path
    indexes = Path(folder).glob("*_loops.*.nbi") if folder else ()
    return not any(index.stat().st_mtime > newest for index in indexes)


def _check(x: np.ndarray) -> Dtype:
    """Refuse what the kernels cannot take."""
    if x.ndim != 3:
        raise TensorError(f"expected an array [outer, K, inner], not one of shape {x.shape}")
    dtype = _stored(x.dtype)
    if dtype is None:
        raise TensorError(
            f"cannot quantize an array of dtype {x.dtype}",
            advice=f"Pass {', '.join(DTYPES)} values",
        )
    return dtype


@functools.cache  # numpy makes a dtype's name anew at every request
def _stored(dtype: np.dtype) -> Dtype | None:
    return DTYPES.get(dtype.name)


_variant = functools.lru_cache(maxsize=256)(Variant)


@functools.cache
def _covers(rule: ScaleRule) -> bool:
    """Whether the rule never gives a scale below the ideal one."""
    return rule.threshold(E2M1) <= E2M1.max_normal / 2.0**E2M1.emax


@functools.cache  # a constant of each rule
def octave_table(rule: ScaleRule) -> np.ndarray:
    """Bins and edges for the histogram of delta: int64 [2 * OCTAVE_CELLS] (see `measure`).

    delta - delta_low is at least j / 32 up to the float32 f = threshold * 2^(1 - j / 32); no such f
    but the octave's ends is a float32, so float64 places every edge between two of them exactly.
    """
    threshold, unit = rule.threshold(E2M1), 1 << FLOAT32_MANTISSA_BITS
    edges = []
    for bin_number in range(DELTA_BINS - 1, 0, -1):
        f = threshold * 2.0 ** (1 - bin_number / DELTA_BINS)
        pattern = (f - 1) * unit if f < 2 else f / 2 * unit
        edges.append(math.floor(pattern) + rule.carry(E2M1) - unit + 1)
    starts = np.arange(OCTAVE_CELLS) << CELL_SHIFT
    passed = np.searchsorted(edges, starts, side="right")
    following = np.append(edges, unit)[passed]
    return np.concatenate([DELTA_BINS - 1 - passed, following]).astype(np.int64)


def _count_fields(numel: int, totals: np.ndarray) -> np.ndarray:
    """COUNT_FIELDS from the units' raw counts, which include padding and non-finite blocks."""
    raw = dict(zip(UNIT_COUNTS, totals.tolist(), strict=False))
    fields = {
        "numel": numel,
        "counted": numel - raw["nonfinite_elements"],
        "zero": raw["zeros"] - raw["padding"] - raw["nonfinite_elements"],
        "deadzone": raw["deadzone"] - raw["zeros"],
        "underflow": raw["underflow"] - raw["zeros"],
        "saturated": raw["saturated"],
        "blocks": raw["lanes"] - raw["zero_blocks"],
        "zero_blocks": raw["zero_blocks"] - raw["absent"] - raw["nonfinite"],
        "nonfinite_blocks": raw["nonfinite"],
    }
    return np.array([fields[name] for name in COUNT_FIELDS], dtype=np.int64)


def _float(bits: int) -> float:
    """The float32 of a bit pattern; exact for subnormals whatever the flush-to-zero mode."""
    exponent, mantissa = divmod(int(bits), 1 << FLOAT32_MANTISSA_BITS)
    if exponent:
        mantissa += 1 << FLOAT32_MANTISSA_BITS
    return math.ldexp(mantissa, max(exponent, 1) - 127 - FLOAT32_MANTISSA_BITS)
