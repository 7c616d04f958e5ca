"""Outlier fallback inside macro-block scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from mxdiag.quantize.corrections.base import Context, Correction, Cost, floor
from mxdiag.quantize.corrections.mbs import MacroBlock
from mxdiag.quantize.corrections.of import Fallback

if TYPE_CHECKING:
    from torch import Tensor

    from mxdiag.formats import ScaleRule


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

    @classmethod
    def read(cls, name: str) -> Self | None:
        """`mbs+of`, each with its parameters: `mbs:64+of:1.0`."""
        first, _, second = name.partition("+")
        macro, fallback = MacroBlock.read(first), Fallback.read(second)
        return cls(name, macro, fallback) if macro and fallback else None

    def predicted(self, row: Mapping[str, float]) -> float | None:
        """Fallback's prediction on what macro-block scaling is predicted to leave."""
        left = floor(row)
        inner = self.fallback.predicted({"rel_mse": left * row["rel_mse"]})
        return None if inner is None else left * inner

    @property
    def granule(self) -> int:
        """A whole macro block."""
        return self.macro.size

    def quantize(self, rows: Tensor, rule: ScaleRule, context: Context) -> Tensor:
        """See `Correction.quantize`."""
        from mxdiag.quantize.corrections import arithmetic

        macro = self.macro
        scaled, mu = arithmetic.macro_scaled(rows, macro.size, macro.search, rule)
        return arithmetic.with_fallback(scaled, self.fallback.alpha, rule) / mu
