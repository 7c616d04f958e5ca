"""Block scales with mantissa bits: the sweep of scale precision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from mxdiag.formats import MXFP4
from mxdiag.quantize.corrections.base import Context, Correction, Cost, floor

if TYPE_CHECKING:
    from torch import Tensor

    from mxdiag.formats import ScaleRule


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
        """ArXiv 2605.20402: the sweep falls to the floor."""
        return floor(row)

    @classmethod
    def read(cls, name: str) -> Self | None:
        """`scale:m0` to `scale:m16`."""
        match = re.fullmatch(r"scale:m([0-9]+)", name)
        known = match is not None and int(match[1]) <= cls.max_bits
        return cls(name, int(match[1])) if match and known else None

    def quantize(self, rows: Tensor, rule: ScaleRule, context: Context) -> Tensor:
        """See `Correction.quantize`."""
        import torch

        from mxdiag.quantize.corrections import arithmetic
        from mxdiag.quantize.reference import from_blocks, to_blocks

        blocks = to_blocks(rows, -1, MXFP4.block_size)
        amax = blocks.abs().amax(-1, keepdim=True)
        fraction, exponent = torch.frexp(amax / MXFP4.element.max_normal)
        unit = arithmetic.two_to_the(exponent - 1 - self.bits)
        scale = (fraction * 2.0 ** (self.bits + 1)).ceil() * unit
        q = arithmetic.rounded(blocks, scale.clamp(2.0**-127, 2.0**127), MXFP4.element)
        return from_blocks(q, rows, -1)
