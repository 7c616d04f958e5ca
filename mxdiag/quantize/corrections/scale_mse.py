"""The better of two power-of-two scales per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from mxdiag.formats import MXFP4, RCEIL
from mxdiag.quantize.corrections.base import Context, Correction, Cost

if TYPE_CHECKING:
    from torch import Tensor

    from mxdiag.formats import ScaleRule


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

    @classmethod
    def read(cls, name: str) -> Self | None:
        """`scale:mse`."""
        return cls(name) if name == cls.kind else None

    def quantize(self, rows: Tensor, rule: ScaleRule, context: Context) -> Tensor:
        """See `Correction.quantize`."""
        import torch

        from mxdiag.quantize.corrections import arithmetic
        from mxdiag.quantize.reference import (
            decode_scale,
            from_blocks,
            shared_scale_codes,
            to_blocks,
        )

        blocks = to_blocks(rows, -1, MXFP4.block_size)
        upper = shared_scale_codes(blocks.abs().amax(-1, keepdim=True), MXFP4.element, RCEIL)
        lower = (upper.to(torch.int32) - 1).clamp(min=0).to(torch.uint8)
        coarse = arithmetic.rounded(blocks, decode_scale(upper), MXFP4.element)
        fine = arithmetic.rounded(blocks, decode_scale(lower), MXFP4.element)
        coarse_error = (coarse - blocks).square().sum(-1, keepdim=True)
        fine_error = (fine - blocks).square().sum(-1, keepdim=True)
        return from_blocks(torch.where(fine_error < coarse_error, fine, coarse), rows, -1)
