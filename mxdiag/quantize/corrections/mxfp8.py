"""MXFP8: eight bits an element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mxdiag.formats import E4M3, MXFP4, MXFP8
from mxdiag.quantize.corrections.base import Context, Correction, Cost

if TYPE_CHECKING:
    from torch import Tensor

    from mxdiag.formats import ScaleRule


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

    def quantize(self, rows: Tensor, rule: ScaleRule, context: Context) -> Tensor:
        """See `Correction.quantize`."""
        from mxdiag.quantize.corrections import arithmetic

        return arithmetic.quantize_rows(rows, rule, MXFP8)
