"""The decomposition on a GPU: one fused Triton pass that reads each element once.

Q - x, e_scale = Q - g m/6 and the rest g m/6 - x (in units of the block's scale, m = amax / s_b, g
the grid value of Q*) use m/6 = r_hi + r_lo with 21 bits in r_hi: then g r_hi is exact, and the
parts cancel as they should even on a tensor that is almost MXFP4.

Sums stay in float32 inside a program, relative to the largest scale that each lane has seen; those
of the programs are added in float64 in one fixed order, so a tensor always gives the same bits. The
work is divided by the tensor's shape alone, never by the device.

How blocks are read, scaled and rounded: `mxdiag.quantize.triton.tiles`. What is written instead of
measured: `mxdiag.quantize.triton.write`.
"""

# ruff: noqa: N803 - K as in the mathematics, and Triton's upper case for compile-time arguments
# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from mxdiag.formats import E8M0_BIAS, MXFP4, ScaleRule, scale_rule
from mxdiag.quantize.sums import COUNT_FIELDS, DELTA_BINS, SUM_FIELDS, TOKEN_FIELDS, Sums
from mxdiag.quantize.triton.tiles import (
    BLOCK,
    MAGNITUDE,
    TOP,
    arranged,
    block_scale,
    check,
    grid_of,
    ideal_round,
    layout_of,
    load_bits,
    magnitudes,
    num_warps,
    power,
    raw,
    round_to_grid,
    strides,
    tile,
)

_BINS = tl.constexpr(DELTA_BINS)
_N_SUMS = tl.constexpr(len(SUM_FIELDS))  # as many as STORED_SUMS
_N_TOKEN = tl.constexpr(len(TOKEN_FIELDS))  # as many as STORED_TOKENS
#: int32 columns of a program's partial counts.
_N_COUNTS = tl.constexpr(8)

#: The columns of a program's partial sums, in the order in which the kernel stores them.
STORED_SUMS = (
    "x2",
    "e2",
    "scale2",
    "deadzone2",
    "grid2",
    "scale_grid",
    "scale_deadzone",
    "qx",
    "e",
    "delta",
    "delta2",
)
#: The columns of a token's sums, likewise.
STORED_TOKENS = ("x2", "e2", "deadzone2")
#: Where SUM_FIELDS and TOKEN_FIELDS are among them.
_SUM_COLUMNS = [STORED_SUMS.index(name) for name in SUM_FIELDS]
_TOKEN_COLUMNS = [STORED_SUMS.index(name) for name in TOKEN_FIELDS]
_STORED_TOKEN_COLUMNS = [STORED_TOKENS.index(name) for name in TOKEN_FIELDS]

_MAX_STEPS = 16  # tiles per program: bounds the float32 sums' rounding, and the packed counts
_WANTED_PROGRAMS = 2048  # what keeps a large GPU busy


@triton.jit(do_not_specialize=["carry", "steps", "segments", "inner_tiles", "inner_step"])
def _measure_kernel(
    x,  # [outer, K, inner] int16 (bfloat16 bits), float16 or float32
    bounds,  # [32] float32: m <= bounds[i] where delta is in bin i or above
    sums,  # [programs, 11] float32, STORED_SUMS in units of the program's scale
    counts,  # [programs, 8] int32
    delta_hist,  # [programs, 32] int32: lanes' blocks in bin i or above
    tokens,  # [outer, inner_tiles, K, 3] float64, written only if K_TOKENS
    carry,
    K,
    inner,
    steps,
    segments,
    inner_tiles,
    inner_step,
    outer_stride,
    k_stride,
    inner_stride,
    AXIS: tl.constexpr,
    LANES: tl.constexpr,
    SHORT: tl.constexpr,
    K_TOKENS: tl.constexpr,
):
    """A program: `steps` tiles one after the other along K, at one place of outer and inner."""
    program = tl.program_id(0)
    segment = program % segments
    place = program // segments
    first_inner = (place % inner_tiles) * inner_step
    o = place // inner_tiles
    x_row = x + o.to(tl.int64) * outer_stride
    bin_bounds = tl.expand_dims(tl.load(bounds + tl.arange(0, _BINS)), 1 - AXIS)

    zero = tl.zeros([LANES], tl.float32)
    x2, e2, scale2, deadzone2, grid2 = zero, zero, zero, zero, zero
    scale_grid, scale_deadzone, qx, e_sum = zero, zero, zero, zero
    delta_sum, delta2 = zero, zero
    none = tl.zeros([LANES], tl.int32)
    top_byte, top_amax = none, none
    nonzero_underflow, deadzone_saturated, bad = none, none, none
    above = tl.zeros([LANES, _BINS] if AXIS == 1 else [_BINS, LANES], tl.int32)

    position = segment * steps
    end = position + steps
    while position < end:
        k, i, valid, start, _ = tile(position, first_inner, K, inner, AXIS, LANES)
        bits = load_bits(x_row, k * k_stride + i * inner_stride, valid)
        bits, finite, amax, byte = block_scale(bits, carry, AXIS)
        y, m = magnitudes(bits, amax, byte, AXIS)
        q = round_to_grid(y)
        g = ideal_round(y, m, AXIS, SHORT)

        r_hi = ((m / TOP).to(tl.int32, bitcast=True) & -8).to(tl.float32, bitcast=True)
        r_lo = tl.expand_dims((m - r_hi * TOP) / TOP, AXIS)
        r_hi = tl.expand_dims(r_hi, AXIS)
        err = q - y
        scale_err = (q - g * r_hi) - g * r_lo
        own_err = (g * r_hi - y) + g * r_lo
        dz_err = tl.where(g == 0.0, own_err, 0.0)
        grid_err = tl.where(g == 0.0, 0.0, own_err)
        signed = (err.to(tl.int32, bitcast=True) ^ (bits & ~MAGNITUDE)).to(tl.float32, bitcast=True)

        new_top = tl.maximum(top_byte, byte)
        keep, weight = power(top_byte - new_top), power(byte - new_top)
        keep2, weight2 = power(2 * (top_byte - new_top)), power(2 * (byte - new_top))
        top_byte = new_top
        x2 = x2 * keep2 + tl.sum(y * y, AXIS) * weight2
        e2 = e2 * keep2 + tl.sum(err * err, AXIS) * weight2
        scale2 = scale2 * keep2 + tl.sum(scale_err * scale_err, AXIS) * weight2
        deadzone2 = deadzone2 * keep2 + tl.sum(dz_err * dz_err, AXIS) * weight2
        grid2 = grid2 * keep2 + tl.sum(grid_err * grid_err, AXIS) * weight2
        scale_grid = scale_grid * keep2 + tl.sum(scale_err * grid_err, AXIS) * weight2
        scale_deadzone = scale_deadzone * keep2 + tl.sum(scale_err * dz_err, AXIS) * weight2
        qx = qx * keep2 + tl.sum(q * y, AXIS) * weight2
        e_sum = e_sum * keep + tl.sum(signed, AXIS) * weight

        # log2(6 / m), with the logarithm taken near 1, where its absolute error is smallest.
        delta = tl.where(amax > 0, 0.5849625007211562 - tl.log2(m * 0.25), 0.0)
        delta_sum += delta
        delta2 += delta * delta
        counted_m = tl.where(amax > 0, m, float("inf"))
        above += (tl.expand_dims(counted_m, AXIS) <= bin_bounds).to(tl.int32)

        nonzero = ((bits & MAGNITUDE) != 0).to(tl.int32)
        nonzero_underflow += tl.sum(nonzero + tl.where(q == 0.0, nonzero << 16, 0), AXIS)
        deadzone_saturated += tl.sum(
            tl.where(g == 0.0, nonzero, 0) + ((y > TOP).to(tl.int32) << 16), AXIS
        )
        length = tl.minimum(K - start, BLOCK).to(tl.int32)
        bad += tl.where(finite, 0, length + (1 << 16))
        top_amax = tl.maximum(top_amax, amax)

        if K_TOKENS:
            scale = ((byte.to(tl.int64) + (1023 - 127)) << 52).to(tl.float64, bitcast=True)
            scale = tl.expand_dims(scale, AXIS)
            x64 = (bits & MAGNITUDE).to(tl.float32, bitcast=True).to(tl.float64)
            e64 = err.to(tl.float64) * scale
            dz64 = tl.where(g == 0.0, x64, 0.0)
            token = tl.arange(0, BLOCK) + position.to(tl.int64) * BLOCK
            row = tokens + (place.to(tl.int64) * K + token) * _N_TOKEN
            tl.store(row, tl.sum(x64 * x64, 1 - AXIS), mask=token < K)
            tl.store(row + 1, tl.sum(e64 * e64, 1 - AXIS), mask=token < K)
            tl.store(row + 2, tl.sum(dz64 * dz64, 1 - AXIS), mask=token < K)

        position += 1

    program_byte = tl.max(top_byte, 0)
    unit, unit2 = power(top_byte - program_byte), power(2 * (top_byte - program_byte))
    sums += program.to(tl.int64) * _N_SUMS
    tl.store(sums, tl.sum(x2 * unit2, 0))
    tl.store(sums + 1, tl.sum(e2 * unit2, 0))
    tl.store(sums + 2, tl.sum(scale2 * unit2, 0))
    tl.store(sums + 3, tl.sum(deadzone2 * unit2, 0))
    tl.store(sums + 4, tl.sum(grid2 * unit2, 0))
    tl.store(sums + 5, tl.sum(scale_grid * unit2, 0))
    tl.store(sums + 6, tl.sum(scale_deadzone * unit2, 0))
    tl.store(sums + 7, tl.sum(qx * unit2, 0))
    tl.store(sums + 8, tl.sum(e_sum * unit, 0))
    tl.store(sums + 9, tl.sum(delta_sum, 0))
    tl.store(sums + 10, tl.sum(delta2, 0))

    counts += program.to(tl.int64) * _N_COUNTS
    tl.store(counts, program_byte)
    tl.store(counts + 1, tl.max(top_amax, 0))
    tl.store(counts + 2, tl.sum(nonzero_underflow & 0xFFFF, 0))
    tl.store(counts + 3, tl.sum(nonzero_underflow >> 16, 0))
    tl.store(counts + 4, tl.sum(deadzone_saturated & 0xFFFF, 0))
    tl.store(counts + 5, tl.sum(deadzone_saturated >> 16, 0))
    tl.store(counts + 6, tl.sum(bad & 0xFFFF, 0))
    tl.store(counts + 7, tl.sum(bad >> 16, 0))
    tl.store(
        delta_hist + program.to(tl.int64) * _BINS + tl.arange(0, _BINS), tl.sum(above, 1 - AXIS)
    )


def _delta_bounds(rule: ScaleRule) -> np.ndarray:
    """Float32 [32]: m = amax / s_b has delta = log2(6 / m) in bin i or above if m <= bounds[i].

    Found as the last float32 whose delta, evaluated in float64 as the reference does, is in there.
    """
    low, top = rule.delta_low(MXFP4.element), MXFP4.element.max_normal
    bins = np.arange(1, DELTA_BINS)
    near = (top * 2.0 ** -(low + bins / DELTA_BINS)).astype(np.float32)
    bounds = np.nextafter(near, np.float32(0))
    for candidate in (near, np.nextafter(near, np.float32(np.inf))):
        delta = np.log2(top / candidate.astype(np.float64))
        inside = np.floor((delta - low) * DELTA_BINS) >= bins
        bounds = np.where(inside, candidate, bounds)
    return np.concatenate([[np.finfo(np.float32).max], bounds]).astype(np.float32)


def _sums_from(
    sums: torch.Tensor, counts: torch.Tensor, above: torch.Tensor, numel: int, blocks: int
) -> Sums:
    """Add the programs' partial statistics in float64.

    sums [programs, 11] float32, counts [programs, 8] int32, above [programs, 32] int32.
    """
    exponent = counts[:, :1].to(torch.int64) - E8M0_BIAS
    linear = ((exponent + 1023) << 52).view(torch.float64)
    square = ((2 * exponent + 1023) << 52).view(torch.float64)
    unit = torch.cat([square.expand(-1, 8), linear, torch.ones_like(linear).expand(-1, 2)], dim=1)
    totals = (sums.to(torch.float64) * unit).sum(0).cpu().numpy()
    top_amax = counts[:, 1].max().view(1).view(torch.float32)
    whole = torch.cat([counts[:, 2:], above], dim=1).sum(0, dtype=torch.int64).cpu().numpy()
    nonzero, underflow, deadzone, saturated, bad_elements, bad_blocks = whole[:6]
    at_least = np.append(whole[6:], 0)
    counted, live = numel - bad_elements, at_least[0]
    fields = {
        "numel": numel,
        "counted": counted,
        "zero": counted - nonzero,
        "deadzone": deadzone,
        "underflow": underflow,
        "saturated": saturated,
        "blocks": live,
        "zero_blocks": blocks - live - bad_blocks,
        "nonfinite_blocks": bad_blocks,
    }
    return Sums(
        sums=totals[_SUM_COLUMNS],
        counts=np.array([fields[name] for name in COUNT_FIELDS], dtype=np.int64),
        amax=float(top_amax),
        delta_hist=at_least[:-1] - at_least[1:],
    )


def _empty_sums(n_tokens: int | None) -> Sums:
    return Sums(
        sums=np.zeros(len(SUM_FIELDS)),
        counts=np.zeros(len(COUNT_FIELDS), dtype=np.int64),
        amax=0.0,
        delta_hist=np.zeros(DELTA_BINS, dtype=np.int64),
        tokens=None if n_tokens is None else np.zeros((n_tokens, len(TOKEN_FIELDS))),
    )


def _launch_measure(
    x: torch.Tensor, rule: ScaleRule, k_tokens: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial sums, counts and histograms of each program, and token sums along K if asked for."""
    outer, length, inner = x.shape
    layout = layout_of(x)
    places = outer * layout.inner_tiles
    wanted = places * layout.positions // _WANTED_PROGRAMS
    steps = max(1, min(wanted, _MAX_STEPS, layout.positions))
    segments = -(-layout.positions // steps)
    programs = places * segments
    sums = x.new_empty((programs, len(SUM_FIELDS)), dtype=torch.float32)
    counts = x.new_empty((programs, _N_COUNTS.value), dtype=torch.int32)
    above = x.new_empty((programs, DELTA_BINS), dtype=torch.int32)
    token_shape = (outer, layout.inner_tiles, length, len(TOKEN_FIELDS)) if k_tokens else (1,)
    tokens = x.new_empty(token_shape, dtype=torch.float64)
    with torch.cuda.device_of(x):
        _measure_kernel[grid_of(programs)](
            raw(x),
            torch.from_numpy(_delta_bounds(rule)).to(x.device),
            sums,
            counts,
            above,
            tokens,
            rule.carry(MXFP4.element),
            length,
            inner,
            steps,
            segments,
            layout.inner_tiles,
            layout.lanes,
            *strides(x),
            AXIS=layout.axis,
            LANES=layout.lanes,
            SHORT=x.element_size() == 2,
            K_TOKENS=k_tokens,
            num_warps=num_warps(),
            enable_fp_fusion=True,
        )
    return sums, counts, above, tokens


def measure(x: torch.Tensor, rule: str | ScaleRule = "rceil", *, tokens: bool = False) -> Sums:
    """Raw sums of x [outer, K, inner] in MXFP4 blocks along K, in one pass over x.

    Parameters
    ----------
    x
        float32, bfloat16 or float16 on a GPU (on a CPU under TRITON_INTERPRET=1), any strides.
    rule
        The scale rule.
    tokens
        Also the sums per token: the outer index if inner is 1, the K index if outer is 1. Along K
        they are taken in float64, which is slow on a GPU made for games.

    Raises
    ------
    TensorError
        If the kernels cannot read x.
    """
    rule = scale_rule(rule)
    check(x)
    numel, (outer, length, inner) = x.numel(), x.shape
    rows = inner == 1
    if numel == 0:
        return _empty_sums((outer if rows else length) if tokens else None)
    if not tokens:
        (x,) = arranged(x)
    sums, counts, above, by_k = _launch_measure(x, rule, tokens and not rows)
    blocks = outer * -(-length // MXFP4.block_size) * inner
    result = _sums_from(sums, counts, above, numel, blocks)
    if tokens and rows:
        square = ((2 * (counts[:, :1].to(torch.int64) - E8M0_BIAS) + 1023) << 52).view(
            torch.float64
        )
        energies = sums[:, _TOKEN_COLUMNS].to(torch.float64) * square
        result.tokens = energies.view(outer, -1, len(TOKEN_FIELDS)).sum(1).cpu().numpy()
    elif tokens:
        result.tokens = by_k.sum((0, 1)).cpu().numpy()[:, _STORED_TOKEN_COLUMNS]
    return result
