"""Adaptive quantization noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from mxdiag.quantize.corrections.base import Context, Correction, Cost, one_parameter

if TYPE_CHECKING:
    from torch import Tensor

    from mxdiag.formats import ScaleRule


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
    needs_rms: ClassVar[bool] = True
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

    def quantize(self, rows: Tensor, rule: ScaleRule, context: Context) -> Tensor:
        """See `Correction.quantize`."""
        import torch

        from mxdiag.quantize.corrections import arithmetic

        first, second = (
            arithmetic.uniform_draws(rows, 1, context),
            arithmetic.uniform_draws(rows, 2, context),
        )
        normal = torch.sqrt(-2 * torch.log(first + 2.0**-25)) * torch.cos(2 * math.pi * second)
        noisy = arithmetic.to_float32_precision(rows + self.sigma * context.tensor_rms * normal)
        noisy[..., context.length :] = 0
        return arithmetic.quantize_rows(noisy, rule)
