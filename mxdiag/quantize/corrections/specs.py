"""Candidate fixes as data: parameters, formula, source, cost and prediction of each. No torch.

One class is one correction. Its reference quantizer is registered under the same `kind` in
`mxdiag.quantize.corrections.reference`; adding a correction adds a class here, a function there.

Common to all: x is blocked along the contraction axis as the plain format is, in MX blocks of 32.
An MX block that holds a NaN or an infinity is taken as zeros and enters no sum, and no amax of
anything larger (macro block, 32x32 block, tensor). A ragged end is padded with zeros, which enter
no sum. Q is MXFP4 under the scale rule in use, its scale byte clamped to 0..254; zeros have byte 0.
`underflow` counts x != 0 whose corrected value is exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from mxdiag.formats import E2M1, E4M3, MXFP4, MXFP8, NVFP4
from mxdiag.quantize.corrections.base import Correction, Cost, one_parameter, whole_number

#: Relative MSE of N(0, 1) in MXFP4 under `rceil` (18.75 dB): what a rotation brings a block to.
GAUSSIAN_REL_MSE = 0.01334
#: Elements of a macro block where none are given.
MACRO_BLOCK = 128


def _floor(row: Mapping[str, float]) -> float:
    """What an ideal scale leaves of ||e||^2."""
    return row["recoverable"] + row["irreducible"]


@dataclass(frozen=True, slots=True)
class MacroBlock(Correction):
    """Macro-block scaling: x_dq = Q(mu x) / mu, with one mu in [1, 2) per macro block.

    A macro block is `size` elements along the blocked axis, counted from its start; the last may be
    shorter. With M its amax, mu = 1 + m/256 is the mantissa of 6/M cut to 8 bits: 6/M in float64,
    exponent dropped, all but the top 8 mantissa bits cleared. For a float32 M this is the exact
    quotient's mantissa: with F the 24-bit integer mantissa of M, 256 mu = floor(384 * 2^23 / F) if
    F <= 1.5 * 2^23, else floor(768 * 2^23 / F), and no such quotient that is not an integer comes
    nearer to one than 1/F. M = 0: mu = 1.

    y = mu x is rounded to 24 significant bits, to nearest even (one float32 product where it is
    normal; exact for float16 and bfloat16 x). Then Q(y) in blocks of 32, scale and elements decided
    on y as the plain quantizer decides on x; x_dq = Q(y) / mu in float64.

    With `search`, m in 0..255 is the one of least squared error over the macro block, the smallest
    such m (m = 0 is plain MXFP4). Two m whose errors agree to rounding may be swapped.
    """

    size: int = MACRO_BLOCK
    search: bool = False
    kind: ClassVar[str] = "mbs"
    acts_on: ClassVar[str | None] = "reducible"
    source: ClassVar[str] = "arXiv 2603.08713 (macro block scaling); arXiv 2605.20402"
    prediction: ClassVar[str | None] = "recoverable + irreducible: the floor is reached"
    keeps_ideal: ClassVar[bool] = True

    @property
    def cost(self) -> Cost:
        """One 8-bit mantissa per macro block."""
        return Cost(8 / self.size)

    def predicted(self, row: Mapping[str, float]) -> float | None:
        """arXiv 2605.20402: macro-block scaling removes the scale bias."""
        return _floor(row)

    @classmethod
    def parse(cls, name: str, parameters: tuple[str, ...]) -> Self:
        """`mbs`, `mbs:SIZE`, `mbs:search`, `mbs:SIZE:search`."""
        advice = "Use a multiple of 32, and `search`: mbs:64, mbs:search, mbs:64:search"
        search = parameters[-1:] == ("search",)
        size = one_parameter(
            name,
            parameters[:-1] if search else parameters,
            whole_number,
            lambda size: size > 0 and size % MXFP4.block_size == 0,
            advice,
        )
        return cls(name, size[0] if size else MACRO_BLOCK, search)


@dataclass(frozen=True, slots=True)
class Fallback(Correction):
    """Outlier fallback: x_dq = Q(x) + alpha Q(r), r = x - Q(x), a second MXFP4 product's worth.

    r is exact in float32 (Q(x) is within a factor of two of x, or 0); Q(r) has its own block scales
    under the same rule; the sum is float64. alpha is a float64 in (0, 1].
    """

    alpha: float = 0.5
    kind: ClassVar[str] = "of"
    acts_on: ClassVar[str | None] = "recoverable"
    source: ClassVar[str] = "arXiv 2605.20402 (outlier fallback)"
    prediction: ClassVar[str | None] = "(1 - alpha)^2 + alpha^2 rel_mse"

    @property
    def cost(self) -> Cost:
        """The residual at rest and a product with it."""
        return Cost(MXFP4.bits_per_element, gemm_passes=1)

    def predicted(self, row: Mapping[str, float]) -> float | None:
        """r keeps the share 1 - alpha, and alpha of it has MXFP4's own relative error."""
        return (1 - self.alpha) ** 2 + self.alpha**2 * row["rel_mse"]

    @classmethod
    def parse(cls, name: str, parameters: tuple[str, ...]) -> Self:
        """`of`, `of:ALPHA`."""
        advice = "Use a number above 0 and up to 1, such as of:1.0"
        alpha = one_parameter(name, parameters, float, lambda alpha: 0 < alpha <= 1, advice)
        return cls(name, *alpha)


@dataclass(frozen=True, slots=True)
class MacroBlockFallback(Correction):
    """Outlier fallback inside macro-block scaling: x_dq = (Q(y) + alpha Q(y - Q(y))) / mu.

    mu and y as in `MacroBlock` (y in 24 significant bits, so y - Q(y) is exact there), alpha as in
    `Fallback`; numerator and quotient in float64. With `search` mu is that of `MacroBlock` alone.
    """

    macro: MacroBlock
    fallback: Fallback
    kind: ClassVar[str] = "mbs+of"
    acts_on: ClassVar[str | None] = "recoverable"
    source: ClassVar[str] = "arXiv 2605.20402"
    prediction: ClassVar[str | None] = "f ((1 - alpha)^2 + alpha^2 f rel_mse), f the floor"

    @property
    def cost(self) -> Cost:
        """Both."""
        return Cost(self.macro.cost.bits + self.fallback.cost.bits, gemm_passes=1)

    def predicted(self, row: Mapping[str, float]) -> float | None:
        """Fallback's prediction on what macro-block scaling is predicted to leave."""
        left = _floor(row)
        inner = self.fallback.predicted({"rel_mse": left * row["rel_mse"]})
        return None if inner is None else left * inner


@dataclass(frozen=True, slots=True)
class ScaleMse(Correction):
    """Per block, the better of the two powers of two around the ideal scale amax / 6.

    The candidates are s = 2^ceil(log2(amax / 6)) (`rceil`'s scale, whatever the rule in use) and
    s/2, each with the byte clamped to 0..254; under s/2 elements saturate at 3 s. The squared
    errors of the block are compared in float64 and s/2 is taken only where strictly better.
    2 s cannot be better than s: up to amax its grid is part of the grid of s.
    """

    kind: ClassVar[str] = "scale:mse"
    acts_on: ClassVar[str | None] = "reducible"
    source: ClassVar[str] = "common practice in weight quantizers (search of the block scale)"
    keeps_ideal: ClassVar[bool] = True

    @property
    def cost(self) -> Cost:
        """None: the scale stays one byte."""
        return Cost(0.0)


@dataclass(frozen=True, slots=True)
class ScaleMantissa(Correction):
    """Block scale with K mantissa bits, rounded up: the least (1 + j/2^K) 2^e that is >= amax / 6.

    Rounded up under every rule, so K = 0 is plain MXFP4 under `rceil`. With q = amax / 6 in float64
    (exact enough: for a float32 amax and K <= 16, q 2^K is no closer than 2^-40 relative to an
    integer it does not equal), j is the ceiling of (mantissa(q) - 1) 2^K, a carry goes into e, and
    the scale is clamped to 2^-127 .. 2^127. Elements are rounded on x / s; s and every threshold
    t s (t = 0.25, 0.75, ...) have at most K + 4 bits, so comparing |x| with t s decides the same.
    """

    bits: int
    kind: ClassVar[str] = "scale:m"
    acts_on: ClassVar[str | None] = "reducible"
    source: ClassVar[str] = "arXiv 2605.20402 (scale precision sweep)"
    prediction: ClassVar[str | None] = "recoverable + irreducible, as K grows"
    keeps_ideal: ClassVar[bool] = True
    max_bits: ClassVar[int] = 16

    @property
    def cost(self) -> Cost:
        """K bits per block."""
        return Cost(self.bits / MXFP4.block_size)

    def predicted(self, row: Mapping[str, float]) -> float | None:
        """arXiv 2605.20402: the sweep falls to the floor."""
        return _floor(row)


@dataclass(frozen=True, slots=True)
class Hadamard(Correction):
    """Rotation of each `size` consecutive elements: x_dq = H Q(z) / sqrt(n), z = (H x) / sqrt(n).

    H is Sylvester's matrix of +-1, n = `size`. H x is summed in float64 and divided by sqrt(n)
    after that, so that what cancels is exactly zero; likewise H Q(z) is an exact sum of multiples
    of half the scale, divided at the end. Q blocks z by 32 along the same axis.
    """

    size: int = 32
    kind: ClassVar[str] = "hadamard"
    acts_on: ClassVar[str | None] = "recoverable"
    source: ClassVar[str] = "QuaRot, arXiv 2404.00456; block-wise for MX: arXiv 2502.20586"
    prediction: ClassVar[str | None] = f"{GAUSSIAN_REL_MSE} / rel_mse: rotated blocks are Gaussian"

    @property
    def cost(self) -> Cost:
        """A rotation of this operand, and of its partner."""
        return Cost(0.0, transforms=1)

    def predicted(self, row: Mapping[str, float]) -> float | None:
        """The rotation keeps ||x||^2 and leaves a Gaussian's relative error."""
        return GAUSSIAN_REL_MSE / row["rel_mse"] if row["rel_mse"] > 0 else None

    def refusal(self, operand: str, length: int) -> str | None:
        """A rotation cannot straddle the end of the axis."""
        if length % self.size:
            return (
                f"{self.name} needs a multiple of {self.size} along the blocked axis, not {length}"
            )
        return None

    @classmethod
    def parse(cls, name: str, parameters: tuple[str, ...]) -> Self:
        """`hadamard`, `hadamard:SIZE`."""
        advice = "Use a power of two from 2 to 1024, such as hadamard:32"
        size = one_parameter(
            name,
            parameters,
            whole_number,
            lambda size: 2 <= size <= 1024 and size & (size - 1) == 0,
            advice,
        )
        return cls(name, *size)


@dataclass(frozen=True, slots=True)
class Nvfp4(Correction):
    """NVFP4: E2M1 elements, an E4M3 scale per 16, a float32 scale per tensor.

    Every operation below is one float32 operation, in this order, as in torchao:
    t = max(amax(tensor) / 2688, 2^-121); c = min(max((amax(block) / 6) / t, 2^-6), 448) rounded to
    E4M3; r = (1 / t) / c; y = x r clamped to +-6 and rounded to E2M1; x_dq = y (t c), that last
    product in float64. Blocks of 16 along the axis; the amax of the tensor must be given where only
    a part of it is seen. An all-zero tensor gives zeros.
    """

    kind: ClassVar[str] = "nvfp4"
    needs_amax: ClassVar[bool] = True
    source: ClassVar[str] = "NVIDIA NVFP4; torchao prototype/mx_formats/nvfp4_tensor.py"

    @property
    def cost(self) -> Cost:
        """A scale byte per 16 elements instead of 32."""
        return Cost(NVFP4.bits_per_element - MXFP4.bits_per_element)


@dataclass(frozen=True, slots=True)
class Mxfp8(Correction):
    """MXFP8: E4M3 elements, the scale rule in use with the thresholds of E4M3, blocks of 32."""

    kind: ClassVar[str] = "mxfp8"
    four_bit: ClassVar[bool] = False
    source: ClassVar[str] = "OCP Microscaling Formats v1.0, section 5.2"
    prediction: ClassVar[str | None] = "2^-6 / 28 / rel_mse: uniform rounding in each binade"

    @property
    def cost(self) -> Cost:
        """Eight bits an element instead of four."""
        return Cost(MXFP8.bits_per_element - MXFP4.bits_per_element)

    def predicted(self, row: Mapping[str, float]) -> float | None:
        """Error quantum^2 / 12 over a uniform mantissa's mean square 7/3."""
        uniform = 4.0**-E4M3.mantissa_bits / 28
        return uniform / row["rel_mse"] if row["rel_mse"] > 0 else None


@dataclass(frozen=True, slots=True)
class Bf16(Correction):
    """bfloat16, rounded to nearest even, saturating: exact for bfloat16 x."""

    kind: ClassVar[str] = "bf16"
    four_bit: ClassVar[bool] = False
    source: ClassVar[str] = "the unquantized fallback"

    @property
    def cost(self) -> Cost:
        """Sixteen bits an element."""
        return Cost(16 - MXFP4.bits_per_element)


@dataclass(frozen=True, slots=True)
class Block2d(Correction):
    """One scale per 32x32 block of W, from its amax under the rule, for fprop and dgrad alike.

    The other axis is the outer one if inner = 1, else the inner one (outer = 1); both are counted
    from their start, so a part of a tensor must start at a multiple of 32 rows.
    """

    kind: ClassVar[str] = "block2d"
    source: ClassVar[str] = "NVIDIA's NVFP4 training recipe, arXiv 2509.25149 (2-D weight scaling)"
    operands: ClassVar[tuple[str, ...]] = ("W",)
    keeps_ideal: ClassVar[bool] = True

    @property
    def cost(self) -> Cost:
        """One scale byte per 1024 elements."""
        return Cost(E2M1.bits + 8 / MXFP4.block_size**2 - MXFP4.bits_per_element)


@dataclass(frozen=True, slots=True)
class StochasticRounding(Correction):
    """Elements rounded up or down at random, the mean at x: no bias, about twice the variance.

    With s the block's scale and y = |x| / s between grid neighbours a <= y < b, the result is b if
    u < (y - a) / (b - a), else a (y > 6 saturates; y - a and the quotient are exact in float32).
    u = (hash(i) >> 8) 2^-24, i the element's flat index in the C order of the tensor as
    [outer, K, inner] (`offset` is that of the first element seen), and
    hash(i) = mix(mix(i mod 2^32 ^ mix(seed)) ^ (i >> 32)), where mix(h) is h ^= h >> 16;
    h *= 0x7feb352d; h ^= h >> 15; h *= 0x846ca68b; h ^= h >> 16, all modulo 2^32.
    """

    seed: int = 0
    kind: ClassVar[str] = "sr"
    judged_by_error: ClassVar[bool] = False
    source: ClassVar[str] = (
        "arXiv 2502.20586 (stochastic rounding of MXFP4 gradients); mix: hash-prospector lowbias32"
    )
    prediction: ClassVar[str | None] = "2: twice the variance of rounding to nearest"

    @property
    def cost(self) -> Cost:
        """Nothing at rest."""
        return Cost(0.0)

    def predicted(self, row: Mapping[str, float]) -> float | None:
        """Mean of p (1 - p) = 1/6 of a step squared, against 1/12."""
        return 2.0

    @classmethod
    def parse(cls, name: str, parameters: tuple[str, ...]) -> Self:
        """`sr`, `sr:SEED`."""
        advice = "Use a seed below 2^32, such as sr:1"
        seed = one_parameter(name, parameters, whole_number, lambda seed: seed < 1 << 32, advice)
        return cls(name, *seed)


@dataclass(frozen=True, slots=True)
class AdaptiveNoise(Correction):
    """Q(W + eta), eta Gaussian of standard deviation `sigma` rms(W), drawn before a rollout.

    It acts on the policy's entropy; its error is measured to show what it adds. In training sigma
    decays exponentially from `START` to `END`; measured is one draw at `sigma`. eta comes from
    uniforms u1, u2 of `StochasticRounding`'s hash with seeds 1 and 2 on the same index, by Box and
    Muller: sqrt(-2 ln(u1 + 2^-25)) cos(2 pi u2), float64; W + eta is rounded to 24 bits.
    """

    sigma: float = 0.01
    kind: ClassVar[str] = "aqn"
    judged_by_error: ClassVar[bool] = False
    source: ClassVar[str] = "arXiv 2510.11696 (adaptive quantization noise); arXiv 2605.20402"
    prediction: ClassVar[str | None] = "1 + sigma^2 / rel_mse: the noise adds to the error"
    operands: ClassVar[tuple[str, ...]] = ("W",)
    START: ClassVar[float] = 0.01
    END: ClassVar[float] = 0.001

    @property
    def cost(self) -> Cost:
        """Nothing at rest."""
        return Cost(0.0)

    def predicted(self, row: Mapping[str, float]) -> float | None:
        """Independent noise of relative energy sigma^2."""
        return 1 + self.sigma**2 / row["rel_mse"] if row["rel_mse"] > 0 else None

    @classmethod
    def parse(cls, name: str, parameters: tuple[str, ...]) -> Self:
        """`aqn`, `aqn:SIGMA`."""
        advice = "Use a fraction of the tensor's rms above 0 and up to 1, such as aqn:0.01"
        sigma = one_parameter(name, parameters, float, lambda sigma: 0 < sigma <= 1, advice)
        return cls(name, *sigma)
