"""What the Triton kernels share: blocks of a tile in registers, and how tiles cover a tensor.

A block's arithmetic is on y = |x| / s_b in float32, which is exact: s_b is a power of two, read
from the bits of the block's amax. With m = amax / s_b the ideal scale is m / 6 in units of y.

Q(x): y to the grid {0, .5, 1, 1.5, 2, 3, 4, 6} by adding and taking away 2^(22 + e), e = max(floor
log2 y, 0), whose last place is the grid's spacing at y: one rounding, ties to even code.

Q*(x): the same rounding of 6 y / m, decided as exact arithmetic would. It goes up at y > m/24,
y >= m/8, y > 5m/24, y >= 7m/24 and at twice or four times the last two; a threshold that float32
cannot hold is rounded down for > and up for >=, from the integer mantissa of m. A 16-bit x needs no
thresholds: at a rounding point T, 24 y and 4 T m are integers below 2^16 times one power of two, so
6 y / m is T or differs from it by more than one part in 2^16, and an approximate 6 y / m snapped to
19 bits falls on the side, or on the tie, that exact arithmetic finds.

Nothing flushes subnormals: Triton compiles float32 arithmetic without `ftz`, and the tests look.
Fused multiply-adds change none of these decisions: the products that feed a sum are exact.

x is [outer, K, inner] with any strides; bfloat16 is passed as its int16 bits. A tile holds LANES
blocks of 32 elements: along K (AXIS = 1, tile [LANES, 32], inner is 1), or side by side along inner
(AXIS = 0, tile [32, LANES]). Element offsets are 64-bit.

Side by side, one thread should hold one block, so that nothing is reduced across threads. Triton
gives a thread as many neighbours as it can load at once. So the kernels tell it that neighbours lie
next to each other, but not how they are aligned: the step from tile to tile, LANES, reaches them as
`inner_step`, a number that Triton is kept from specializing on.

Source: OCP Microscaling Formats (MX) Specification v1.0, section 6.3. The truth is
`mxdiag.quantize.reference`: scale bytes, codes, written values and counts equal it exactly.
"""

# ruff: noqa: N803 - K as in the mathematics, and Triton's upper case for compile-time arguments
# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mxdiag.errors import TensorError
from mxdiag.formats import MXFP4

BLOCK = tl.constexpr(MXFP4.block_size)
EMAX = tl.constexpr(MXFP4.element.emax)
TOP = tl.constexpr(MXFP4.element.max_normal)

#: Float32 bit patterns: everything but the sign, and infinity (also the exponent field's mask).
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)

ROW_LANES = 32  # blocks per tile, along K
SIDE_LANES = 128  # blocks per tile, side by side: one per thread
THREADS = 128  # per program


@triton.jit
def load_bits(x, offsets, valid):
    """Float32 bit patterns (int32) of elements of x, exact; 0 where not valid."""
    value = tl.load(x + offsets, mask=valid, other=0)
    if x.dtype.element_ty == tl.int16:
        bits = value.to(tl.int32) << 16
    else:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def tile(position, first_inner, K, inner, AXIS: tl.constexpr, LANES: tl.constexpr):
    """Where a tile lies, in int64: indices along K and inner of its elements and which of them are
    inside x, broadcastable to the tile; then per lane the block's first K index and inner index.
    """
    lane = tl.arange(0, LANES)
    within = tl.expand_dims(tl.arange(0, BLOCK), 1 - AXIS)
    if AXIS == 1:
        start = position.to(tl.int64) * (LANES * BLOCK) + lane * BLOCK
        lane_i = tl.zeros([LANES], tl.int64)
        k = tl.expand_dims(start, 1) + within
        i = tl.zeros([1, 1], tl.int64)
        valid = k < K
    else:
        start = position.to(tl.int64) * BLOCK + tl.zeros([LANES], tl.int64)
        lane_i = first_inner.to(tl.int64) + lane
        k = position.to(tl.int64) * BLOCK + within
        i = tl.expand_dims(lane_i, 0)
        valid = (k < K) & (i < inner)
    return k, i, valid, start, lane_i


@triton.jit
def power(exponent):
    """2^exponent in float32 for exponents up to 127; 0 below -126."""
    return (tl.maximum(exponent + 127, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def block_scale(bits, carry, AXIS: tl.constexpr):
    """The tile with its non-finite blocks zeroed; then per lane whether the block is finite, the
    bit pattern of its amax and its scale byte, both 0 if it is not.
    """
    amax = tl.max(bits & MAGNITUDE, AXIS)
    finite = amax < INFINITY
    amax = tl.where(finite, amax, 0)
    byte = tl.maximum(((amax + carry) >> 23) - EMAX, 0)
    return tl.where(tl.expand_dims(finite, AXIS), bits, 0), finite, amax, byte


@triton.jit
def magnitudes(bits, amax, byte, AXIS: tl.constexpr):
    """Y = |x| / s_b over the tile, and m = amax / s_b per lane (1 in an all-zero block)."""
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    y = (bits & MAGNITUDE).to(tl.float32, bitcast=True) * tl.expand_dims(inverse, AXIS)
    m = tl.where(amax > 0, amax.to(tl.float32, bitcast=True) * inverse, 1.0)
    return y, m


@triton.jit
def round_to_grid(y):
    """Y >= 0 to the nearest grid value, ties to even code, at most 6."""
    exponent = tl.maximum(y, 1.0).to(tl.int32, bitcast=True) & INFINITY
    shifter = (exponent + (22 << 23)).to(tl.float32, bitcast=True)
    return tl.minimum((y + shifter) - shifter, TOP)


@triton.jit
def _threshold(m, NUMERATOR: tl.constexpr, UP: tl.constexpr):
    """NUMERATOR m / 24 = NUMERATOR mantissa / 3 * 2^(e - 26), rounded to float32, up or down.

    NUMERATOR is 3 to 8: the quotient then has 24 bits or more before the point, and rounding it to
    an integer first takes nothing away.
    """
    m_bits = m.to(tl.int32, bitcast=True)
    product = ((m_bits & 0x7FFFFF) | 0x800000) * NUMERATOR
    unit = ((m_bits >> 23) - 26 << 23).to(tl.float32, bitcast=True)
    if UP:
        whole = (product + 2) // 3
        nearest = whole.to(tl.float32)
        step = (nearest.to(tl.int32) < whole).to(tl.int32)
    else:
        whole = product // 3
        nearest = whole.to(tl.float32)
        step = -(nearest.to(tl.int32) > whole).to(tl.int32)
    return (nearest.to(tl.int32, bitcast=True) + step).to(tl.float32, bitcast=True) * unit


@triton.jit
def ideal_round(y, m, AXIS: tl.constexpr, SHORT: tl.constexpr):
    """The grid value g of 6 y / m, so that Q* = g m / 6. SHORT: x has a 16-bit type."""
    if SHORT:
        ratio = y * tl.expand_dims(1.0 / m * TOP, AXIS)
        g = round_to_grid(
            ((ratio.to(tl.int32, bitcast=True) + 16) & -32).to(tl.float32, bitcast=True)
        )
    else:
        above_zero = tl.expand_dims(_threshold(m, 4, False) * 0.25, AXIS)
        above_one = tl.expand_dims(_threshold(m, 5, False), AXIS)
        from_two = tl.expand_dims(_threshold(m, 7, True), AXIS)
        g = tl.where(y > above_zero, 0.5, 0.0)
        g = tl.where(y >= tl.expand_dims(m * 0.125, AXIS), 1.0, g)
        g = tl.where(y > above_one, 1.5, g)
        g = tl.where(y >= from_two, 2.0, g)
        g = tl.where(y > 2 * above_one, 3.0, g)
        g = tl.where(y >= 2 * from_two, 4.0, g)
        g = tl.where(y > 4 * above_one, 6.0, g)
    return g


@dataclass(frozen=True, slots=True)
class Tiling:
    """How tiles cover a tensor [outer, K, inner]: AXIS and LANES of the kernels, tiles along K and
    along inner.
    """

    axis: int
    lanes: int
    positions: int
    inner_tiles: int


def layout_of(x: torch.Tensor) -> Tiling:
    """The tiles of x [outer, K, inner], decided by its shape alone."""
    _, length, inner = x.shape
    blocks = -(-length // MXFP4.block_size)
    if inner == 1:
        lanes = min(ROW_LANES, triton.next_power_of_2(blocks))
        return Tiling(1, lanes, -(-blocks // lanes), 1)
    return Tiling(0, SIDE_LANES, blocks, -(-inner // SIDE_LANES))


def check(x: torch.Tensor) -> None:
    """Refuse what the kernels cannot read."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TensorError(
            f"the Triton kernels cannot read {x.dtype}",
            advice="Pass float32, bfloat16 or float16, or use backend=reference",
        )
    if x.dim() != 3:
        raise TensorError(f"expected [outer, K, inner], not {x.dim()} axes")
    if x.device.type == "cpu" and isinstance(load_bits, triton.JITFunction):
        raise TensorError(
            "the Triton kernels need a tensor on a GPU",
            advice="Move it there, use backend=cpu, or set TRITON_INTERPRET=1",
        )


def raw(x: torch.Tensor) -> torch.Tensor:
    """X as the kernels take it: bfloat16 as int16 bits, which no conversion can alter."""
    x = x.detach()
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def arranged(x: torch.Tensor, *results: torch.Tensor) -> list[torch.Tensor]:
    """Views of x and of results in its shape (or with blocks for K), the same for all, that suit
    the tiles: a matrix is read along K or side by side, whichever lies closer together in memory,
    and rows of whole blocks that follow one another become one long row.
    """
    views = [x, *results]
    outer, _, inner = x.shape
    if outer == 1 and inner > 1:
        turn = x.stride(1) <= x.stride(2)
    else:
        turn = inner == 1 and outer > 1 and x.stride(0) < x.stride(1)
    if turn:
        views = [view.permute(2, 1, 0) for view in views]
    outer, length, inner = views[0].shape
    one_row = all(view.stride(0) == view.shape[1] * view.stride(1) for view in views)
    if inner == 1 and length % MXFP4.block_size == 0 and one_row:
        views = [view.view(1, -1, 1) for view in views]
    return views


def strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of x [outer, K, inner], in elements."""
    return x.stride(0), x.stride(1), x.stride(2)


def grid_of(programs: int) -> tuple[int]:
    """A one-dimensional grid, which every device allows up to 2^31 - 1."""
    if programs >= 1 << 31:
        raise TensorError(f"the tensor would take {programs} programs", advice="Split it")
    return (programs,)


def num_warps() -> int:
    """Warps of a program, whose THREADS a wave of AMD's data-centre GPUs holds 64 at a time."""
    return THREADS // (64 if torch.version.hip else 32)
