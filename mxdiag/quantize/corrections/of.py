"""Outlier fallback: the residual in a second MXFP4 tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from mxdiag.formats import MXFP4
from mxdiag.quantize.corrections.base import Context, Correction, Cost, one_parameter

if TYPE_CHECKING:
    from torch import Tensor

    from mxdiag.formats import ScaleRule


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
        """R keeps the share 1 - alpha, and alpha of it has MXFP4's own relative error."""
        return (1 - self.alpha) ** 2 + self.alpha**2 * row["rel_mse"]

    @classmethod
    def parse(cls, name: str, parameters: tuple[str, ...]) -> Self:
        """`of`, `of:ALPHA`."""
        advice = "Use a number above 0 and up to 1, such as of:1.0"
        alpha = one_parameter(name, parameters, float, lambda alpha: 0 < alpha <= 1, advice)
        return cls(name, *alpha)

    def quantize(self, rows: Tensor, rule: ScaleRule, context: Context) -> Tensor:
        """See `Correction.quantize`."""
        from mxdiag.quantize.corrections import arithmetic

        return arithmetic.with_fallback(rows, self.alpha, rule)
