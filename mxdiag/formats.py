"""Element formats, block formats and scale rules, as data.

Sources: OCP Microscaling Formats (MX) Specification v1.0, sections 5.2 to 5.4 and 6.3; NVIDIA's
NVFP4 (block 16, E4M3 block scale, one float32 scale per tensor). A format with power-of-two scales
is an instance here, and `quantize.reference` encodes and decodes it; the exact split of the error,
and the kernels, are of MXFP4 alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mxdiag.errors import UsageError

#: Explicit mantissa bits of float32, whose bit pattern decides every scale.
FLOAT32_MANTISSA_BITS = 23

#: E8M0 (OCP MX 5.4.1): byte b is 2^(b - 127), byte 255 is NaN.
E8M0_BIAS = 127
E8M0_MAX = 254
E8M0_NAN = 255


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """A small floating-point element format: sign, exponent, mantissa; no infinities.

    `max_normal` is stored because formats spend their top codes on NaN differently.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_normal: float

    @property
    def bits(self) -> int:
        """Bits of one element, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_bit(self) -> int:
        """The code's sign bit, as a mask."""
        return 1 << (self.bits - 1)

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest normal number."""
        return math.frexp(self.max_normal)[1] - 1

    @property
    def min_subnormal(self) -> float:
        """The smallest positive number."""
        return 2.0 ** (self.emin - self.mantissa_bits)

    @property
    def grid(self) -> tuple[float, ...]:
        """Every non-negative value in code order, 0 first."""
        values = []
        for code in range(self.sign_bit):
            exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
            if exponent == 0:
                value = mantissa * self.min_subnormal
            else:
                value = (1 + mantissa / (1 << self.mantissa_bits)) * 2.0 ** (exponent - self.bias)
            if value <= self.max_normal:
                values.append(value)
        return tuple(values)


E2M1 = ElementFormat("e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max_normal=6.0)
E4M3 = ElementFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max_normal=448.0)


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """How the block's amax becomes a power-of-two scale.

    Write amax = f * 2^e with f in [1, 2). The shared scale is 2^(e - element.emax), doubled when f
    is above `threshold(element)`, or at it if `raises_at_threshold`. Both are read from the bits of
    amax: no logarithm is ever taken.
    """

    name: str
    formula: str
    threshold: Callable[[ElementFormat], float]
    raises_at_threshold: bool

    def carry(self, element: ElementFormat) -> int:
        """What to add to amax's float32 bit pattern so that its exponent field is then e or e + 1.

        Adding it carries out of the mantissa exactly when f exceeds (reaches) the threshold; the
        scale byte is that exponent field less `element.emax`, clamped at 0.
        """
        mantissa = round((self.threshold(element) - 1.0) * (1 << FLOAT32_MANTISSA_BITS))
        return (1 << FLOAT32_MANTISSA_BITS) - mantissa - (0 if self.raises_at_threshold else 1)

    def delta_low(self, element: ElementFormat) -> float:
        """Lower end of the octave that holds delta = log2(s_b / s*_b) of every unclamped scale.

        delta = log2(max_normal / 2^emax / f), plus one where the scale is doubled: over one octave
        of amax it sweeps the unit interval that starts here.
        """
        return math.log2(element.max_normal / 2.0**element.emax / self.threshold(element))


RCEIL = ScaleRule(
    "rceil",
    "2^ceil(log2(amax / max_normal))",
    threshold=lambda element: element.max_normal / 2.0**element.emax,
    raises_at_threshold=False,
)
FLOOR = ScaleRule(
    "floor",
    "2^(floor(log2 amax) - emax)",
    threshold=lambda element: 2.0,
    raises_at_threshold=True,
)
CEIL = ScaleRule(
    "ceil",
    "2^(ceil(log2 amax) - emax)",
    threshold=lambda element: 1.0,
    raises_at_threshold=False,
)
EVEN = ScaleRule(
    "even",
    "2^(floor(log2 r) - emax), r = amax to nearest even at the element's mantissa width",
    threshold=lambda element: 2.0 - 2.0 ** -(element.mantissa_bits + 1),
    raises_at_threshold=True,
)
SCALE_RULES = {rule.name: rule for rule in (RCEIL, FLOOR, CEIL, EVEN)}


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Elements that share one scale per block along the contraction axis.

    `scale` is None for the E8M0 power of two, else the element format that holds the block scale
    (NVFP4), which then needs one float32 scale per tensor as well.
    """

    name: str
    element: ElementFormat
    block_size: int
    scale: ElementFormat | None = None

    @property
    def bits_per_element(self) -> float:
        """Bits at rest per element, block scales included, a per-tensor scale neglected."""
        return self.element.bits + 8 / self.block_size


MXFP4 = BlockFormat("mxfp4", E2M1, 32)
MXFP8 = BlockFormat("mxfp8", E4M3, 32)
NVFP4 = BlockFormat("nvfp4", E2M1, 16, scale=E4M3)
BLOCK_FORMATS = {fmt.name: fmt for fmt in (MXFP4, MXFP8, NVFP4)}


def scale_rule(name: str | ScaleRule) -> ScaleRule:
    """The scale rule of that name.

    Raises
    ------
    UsageError
        If there is none.
    """
    if isinstance(name, ScaleRule):
        return name
    if name not in SCALE_RULES:
        raise UsageError(
            f"unknown scale rule {name!r}", advice=f"Use one of {', '.join(SCALE_RULES)}"
        )
    return SCALE_RULES[name]
