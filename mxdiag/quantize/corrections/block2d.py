"""Square blocks, one scale for both directions of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mxdiag.formats import E2M1, MXFP4
from mxdiag.quantize.corrections.base import Context, Correction, Cost

if TYPE_CHECKING:
    from torch import Tensor

    from mxdiag.formats import ScaleRule


@dataclass(frozen=True, slots=True)
class Block2d(Correction):
    """One scale per 32x32 block of W, from its amax under the rule, for fprop and dgrad alike.

    The other axis is the outer one if inner = 1, else the inner one (outer = 1); both are counted
    from their start, so a part of a tensor must start at a multiple of 32 rows.
    """

    kind: ClassVar[str] = "block2d"
    source: ClassVar[str] = "NVIDIA's NVFP4 training recipe, arXiv 2509.25149 (2-D weight scaling)"
    operands: ClassVar[tuple[str, ...]] = ("W",)
    square: ClassVar[bool] = True
    keeps_ideal: ClassVar[bool] = True

    @property
    def cost(self) -> Cost:
        """One scale byte per 1024 elements."""
        return Cost(E2M1.bits + 8 / MXFP4.block_size**2 - MXFP4.bits_per_element)

    def quantize(self, rows: Tensor, rule: ScaleRule, context: Context) -> Tensor:
        """See `Correction.quantize`."""
        import torch

        from mxdiag.quantize.corrections import arithmetic
        from mxdiag.quantize.reference import decode_scale, shared_scale_codes

        size = MXFP4.block_size
        plane = rows.flatten(0, 1)
        padded = torch.nn.functional.pad(plane, (0, 0, 0, -plane.shape[0] % size))
        tiles = padded.unflatten(1, (padded.shape[1] // size, size))
        tiles = tiles.unflatten(0, (padded.shape[0] // size, size))
        amax = tiles.abs().amax((1, 3), keepdim=True)
        scale = decode_scale(shared_scale_codes(amax, MXFP4.element, rule))
        q = arithmetic.rounded(tiles, scale, MXFP4.element).flatten(2, 3).flatten(0, 1)
        return q[: plane.shape[0]].reshape(rows.shape)
