"""Q(x), codes, or x with chosen error components, written by a Triton kernel.

How blocks are read, scaled and rounded: `mxdiag.quantize.triton.tiles`. Decoded values are exact in
float32; injected ones are evaluated in float64, term by term as the reference does, so this kernel
is compiled without fused multiply-adds.
"""

# ruff: noqa: N803 - K as in the mathematics, and Triton's upper case for compile-time arguments
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxdiag.errors import TensorError
from mxdiag.formats import E8M0_NAN, MXFP4, ScaleRule, scale_rule
from mxdiag.quantize.reference import Encoded
from mxdiag.quantize.sums import COMPONENTS
from mxdiag.quantize.triton.tiles import (
    BLOCK,
    INFINITY,
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
    raw,
    round_to_grid,
    strides,
    tile,
)

_SIGN_CODE = tl.constexpr(MXFP4.element.sign_bit)
_SCALE_NAN = tl.constexpr(E8M0_NAN)
#: A NaN's float32 bit pattern.
_NAN = tl.constexpr(0x7FC00000)

#: What the kernel writes.
_CODES, _VALUES, _INJECTED = (tl.constexpr(what) for what in range(3))


@triton.jit
def _injected(bits, q, g, amax, byte, AXIS: tl.constexpr, COMPONENTS: tl.constexpr):
    """X with the components (bit 0 scale, 1 deadzone, 2 grid) injected, in float64, signed.

    g m / 6 is rounded once: for g = 1.5 * 2^j it is 2^j * m / 4, exact; else 2^j times fl(m / 6).
    """
    x = bits.to(tl.float32, bitcast=True).to(tl.float64)
    m = amax.to(tl.float32, bitcast=True).to(tl.float64)
    scale = ((byte.to(tl.int64) + (1023 - 127)) << 52).to(tl.float64, bitcast=True)
    g_bits = g.to(tl.int32, bitcast=True)
    power = (g_bits & INFINITY).to(tl.float32, bitcast=True).to(tl.float64)
    unit = tl.where(
        (g_bits & 0x400000) != 0, tl.expand_dims(m * 0.25, AXIS), tl.expand_dims(m / TOP, AXIS)
    )
    sign = tl.where(bits < 0, -1.0, 1.0).to(tl.float64)  # a negation may be 0 - x, losing -0.0
    q64 = q.to(tl.float64) * tl.expand_dims(scale, AXIS) * sign
    ideal = power * unit * sign
    on_deadzone = (g == 0.0) & ((bits & MAGNITUDE) != 0)
    own = (on_deadzone & ((COMPONENTS & 2) != 0)) | (~on_deadzone & ((COMPONENTS & 4) != 0))
    picked = q64 if COMPONENTS & 1 else ideal
    return tl.where(own, picked, x + (q64 - ideal) if COMPONENTS & 1 else x)


@triton.jit(do_not_specialize=["carry", "positions", "inner_tiles", "inner_step"])
def _write_kernel(
    x,  # [outer, K, inner] int16 (bfloat16 bits), float16 or float32
    out,  # [outer, K, inner] like x, or uint8 codes
    scale_codes,  # [outer, ceil(K / 32), inner] uint8, written only with codes
    carry,
    K,
    inner,
    positions,
    inner_tiles,
    inner_step,
    outer_stride,
    k_stride,
    inner_stride,
    out_outer_stride,
    out_k_stride,
    out_inner_stride,
    scale_outer_stride,
    scale_k_stride,
    scale_inner_stride,
    AXIS: tl.constexpr,
    LANES: tl.constexpr,
    SHORT: tl.constexpr,
    WHAT: tl.constexpr,
    COMPONENTS: tl.constexpr,
):
    """A program: one tile. Codes and scale bytes, or Q(x), or x with COMPONENTS injected."""
    program = tl.program_id(0)
    position = program % positions
    place = program // positions
    first_inner = (place % inner_tiles) * inner_step
    o = (place // inner_tiles).to(tl.int64)
    k, i, valid, start, lane_i = tile(position, first_inner, K, inner, AXIS, LANES)
    bits = load_bits(x, o * outer_stride + k * k_stride + i * inner_stride, valid)
    bits, finite, amax, byte = block_scale(bits, carry, AXIS)
    y, m = magnitudes(bits, amax, byte, AXIS)
    q = round_to_grid(y)
    usable = tl.expand_dims(finite, AXIS)
    target = out + (o * out_outer_stride + k * out_k_stride + i * out_inner_stride)
    if WHAT == _CODES:
        # From 1 on a code is the float's exponent and first mantissa bit; below, twice the value.
        upper = (q.to(tl.int32, bitcast=True) >> 22) - (126 << 1)
        code = tl.where(q < 1.0, (q * 2).to(tl.int32), upper)
        code = tl.where(bits < 0, code | _SIGN_CODE, code)
        tl.store(target, tl.where(usable, code, 0).to(tl.uint8), mask=valid)
        at = o * scale_outer_stride + start // BLOCK * scale_k_stride + lane_i * scale_inner_stride
        stored = tl.where(finite, byte, _SCALE_NAN).to(tl.uint8)
        tl.store(scale_codes + at, stored, mask=(start < K) & (lane_i < inner))
    else:
        if WHAT == _VALUES:
            scale = tl.where(byte > 0, byte << 23, 1 << 22).to(tl.float32, bitcast=True)
            magnitude = (q * tl.expand_dims(scale, AXIS)).to(tl.int32, bitcast=True)
            value = magnitude | (bits & ~MAGNITUDE)
        else:
            g = ideal_round(y, m, AXIS, SHORT)
            injected = _injected(bits, q, g, amax, byte, AXIS, COMPONENTS)
            near = injected.to(tl.float32)
            value = near.to(tl.int32, bitcast=True)
            if SHORT:
                # Round to odd, so that rounding to 16 bits below is the only rounding: toward zero,
                # the last bit set if anything was lost.
                back = near.to(tl.float64)
                value -= (tl.abs(back) > tl.abs(injected)).to(tl.int32)
                value |= (back != injected).to(tl.int32)
        value = tl.where(usable, value, _NAN)
        if out.dtype.element_ty == tl.int16:
            rounded = (value + 0x7FFF + ((value >> 16) & 1)) >> 16
            tl.store(target, rounded.to(tl.int16), mask=valid)
        else:
            stored = value.to(tl.float32, bitcast=True).to(out.dtype.element_ty)
            tl.store(target, stored, mask=valid)


def _launch_write(
    x: torch.Tensor,
    out: torch.Tensor,
    scale_codes: torch.Tensor,
    rule: ScaleRule,
    what: tl.constexpr,
    components: int = 0,
) -> None:
    """Fill `out`, and `scale_codes` [outer, blocks, inner] if codes are written."""
    if x.numel() == 0:
        return
    x, out, scale_codes = arranged(x, out, scale_codes)
    outer, length, inner = x.shape
    layout = layout_of(x)
    with torch.cuda.device_of(x):
        _write_kernel[grid_of(outer * layout.inner_tiles * layout.positions)](
            raw(x),
            raw(out),
            scale_codes,
            rule.carry(MXFP4.element),
            length,
            inner,
            layout.positions,
            layout.inner_tiles,
            layout.lanes,
            *strides(x),
            *strides(out),
            *strides(scale_codes),
            AXIS=layout.axis,
            LANES=layout.lanes,
            SHORT=x.element_size() == 2,
            WHAT=what.value,
            COMPONENTS=components,
            num_warps=num_warps(),
            enable_fp_fusion=False,
        )


def quantize_dequantize(x: torch.Tensor, rule: str | ScaleRule = "rceil") -> torch.Tensor:
    """Q(x) of x [outer, K, inner] in blocks along K, in x's dtype; non-finite blocks become NaN."""
    rule = scale_rule(rule)
    check(x)
    out = x.new_empty(x.shape)
    _launch_write(x, out, _no_scale_codes(x), rule, _VALUES)
    return out


def inject(
    x: torch.Tensor, components: frozenset[str], rule: str | ScaleRule = "rceil"
) -> torch.Tensor:
    """X [outer, K, inner] plus the named error components, as `reference.inject` defines it.

    Evaluated in float64 and rounded once to x's dtype.
    """
    unknown = components - set(COMPONENTS)
    if unknown:
        raise TensorError(f"unknown error components {sorted(unknown)}", advice=f"Use {COMPONENTS}")
    rule = scale_rule(rule)
    check(x)
    if not components:
        return x.detach().clone()
    mask = sum(1 << bit for bit, name in enumerate(COMPONENTS) if name in components)
    out = x.new_empty(x.shape)
    _launch_write(x, out, _no_scale_codes(x), rule, _INJECTED, mask)
    return out


def encode(x: torch.Tensor, rule: str | ScaleRule = "rceil") -> Encoded:
    """Codes [outer, K, inner] and scale bytes [outer, blocks, inner] of x in blocks along K."""
    rule = scale_rule(rule)
    check(x)
    outer, length, inner = x.shape
    blocks = -(-length // MXFP4.block_size)
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    scale_codes = x.new_empty((outer, blocks, inner), dtype=torch.uint8)
    _launch_write(x, codes, scale_codes, rule, _CODES)
    return Encoded(codes, scale_codes)


def _no_scale_codes(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((1, 1, 1), dtype=torch.uint8)
