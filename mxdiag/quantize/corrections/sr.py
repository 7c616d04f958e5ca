"""Stochastic rounding of the elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from mxdiag.formats import MXFP4
from mxdiag.quantize.corrections.base import Context, Correction, Cost, one_parameter, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from mxdiag.formats import ScaleRule


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

        element = MXFP4.element
        blocks = to_blocks(rows, -1, MXFP4.block_size)
        amax = blocks.abs().amax(-1, keepdim=True)
        scale = decode_scale(shared_scale_codes(amax, element, rule))
        grid = torch.tensor(element.grid, dtype=torch.float64, device=rows.device)
        y = (blocks.abs() / scale).clamp(max=element.max_normal)
        below = (torch.searchsorted(grid, y.contiguous(), right=True) - 1).clamp(max=len(grid) - 2)
        low, high = grid[below], grid[below + 1]
        uniform = arithmetic.uniform_draws(rows, self.seed, context).view(blocks.shape)
        magnitude = torch.where(uniform < (y - low) / (high - low), high, low)
        return from_blocks(torch.copysign(magnitude, blocks) * scale, rows, -1)
