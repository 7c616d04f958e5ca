"""A rotation that spreads outliers over a block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from mxdiag.quantize.corrections.base import Context, Correction, Cost, one_parameter, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from mxdiag.formats import ScaleRule

#: Relative MSE of N(0, 1) in MXFP4 under `rceil` (18.75 dB): what a rotation brings a block to.
GAUSSIAN_REL_MSE = 0.01334


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

    @property
    def granule(self) -> int:
        """What is rotated together."""
        return max(self.size, 32)

    def quantize(self, rows: Tensor, rule: ScaleRule, context: Context) -> Tensor:
        """See `Correction.quantize`."""
        from torch.nn.functional import pad

        from mxdiag.quantize.corrections import arithmetic

        values = rows[..., : context.length]
        back = rotated(arithmetic.quantize_rows(rotated(values, self.size), rule), self.size)
        return pad(back, (0, rows.shape[-1] - context.length))


def rotated(rows: Tensor, size: int) -> Tensor:
    """Rows [..., K], K a multiple of `size`: each `size` elements times H / sqrt(size)."""
    import torch

    h = torch.ones(1, 1, dtype=rows.dtype, device=rows.device)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    groups = rows.unflatten(-1, (rows.shape[-1] // size, size))
    return ((groups @ h) / math.sqrt(size)).flatten(-2)
