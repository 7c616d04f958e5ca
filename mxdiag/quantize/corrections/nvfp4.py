"""NVFP4: smaller blocks, scales with a mantissa."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mxdiag.formats import E4M3, MXFP4, NVFP4
from mxdiag.quantize.corrections.base import Context, Correction, Cost

if TYPE_CHECKING:
    from torch import Tensor

    from mxdiag.formats import ScaleRule


@dataclass(frozen=True, slots=True)
class Nvfp4(Correction):
    """NVFP4: E2M1 elements, an E4M3 scale per 16, a float32 scale per tensor.

    Every operation below is one float32 operation, in this order, as in torchao:
    t = max(amax(tensor) / 2688, 2^-121); c = min(max((amax(block) / 6) / t, 2^-6), 448) rounded to
    E4M3; r = (1 / t) / c; y = x r clamped to +-6 and rounded to E2M1; x_dq = y (t c), that last
    product in float64. Blocks of 16 along the axis; the amax of the tensor must be given where only
    a part of it is seen. An all-zero tensor gives zeros.
    """

    kind: ClassVar[str] = "nvfp4"
    needs_amax: ClassVar[bool] = True
    source: ClassVar[str] = "NVIDIA NVFP4; torchao prototype/mx_formats/nvfp4_tensor.py"

    @property
    def cost(self) -> Cost:
        """A scale byte per 16 elements instead of 32."""
        return Cost(NVFP4.bits_per_element - MXFP4.bits_per_element)

    def quantize(self, rows: Tensor, rule: ScaleRule, context: Context) -> Tensor:
        """See `Correction.quantize`."""
        import torch

        from mxdiag.quantize.reference import from_blocks, round_to_element, to_blocks

        element, scale_format = NVFP4.element, E4M3
        blocks = to_blocks(rows, -1, NVFP4.block_size).to(torch.float32)
        amax = torch.tensor(context.tensor_amax, dtype=torch.float32, device=rows.device)
        top = element.max_normal * scale_format.max_normal
        tensor_scale = (amax / top).clamp(min=2.0**-121)
        block_scale = blocks.abs().amax(-1, keepdim=True) / element.max_normal / tensor_scale
        # torchao keeps E4M3's subnormals out of the scale.
        clamped = block_scale.clamp(2.0**scale_format.emin, scale_format.max_normal)
        code = round_to_element(clamped.to(torch.float64), scale_format).to(torch.float32)
        scaled = blocks * ((1.0 / tensor_scale) / code)
        q = round_to_element(scaled.to(torch.float64), element)
        return from_blocks(q * (tensor_scale * code).to(torch.float64), rows, -1)
