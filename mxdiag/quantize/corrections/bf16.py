"""bfloat16: no quantization at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mxdiag.formats import MXFP4
from mxdiag.quantize.corrections.base import Context, Correction, Cost

if TYPE_CHECKING:
    from torch import Tensor

    from mxdiag.formats import ScaleRule


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

    def quantize(self, rows: Tensor, rule: ScaleRule, context: Context) -> Tensor:
        """See `Correction.quantize`."""
        import torch

        from mxdiag.quantize.reference import round_once, to_float64

        top = torch.finfo(torch.bfloat16).max
        return to_float64(round_once(rows.clamp(-top, top), torch.bfloat16))
