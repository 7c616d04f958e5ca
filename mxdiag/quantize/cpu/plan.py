"""Which corrections the fused pass evaluates, and what its kernel is told of them."""

from __future__ import annotations

from mxdiag.formats import RCEIL, ScaleRule
from mxdiag.quantize.corrections.base import Correction
from mxdiag.quantize.corrections.mbs import MacroBlock
from mxdiag.quantize.corrections.mbs_of import MacroBlockFallback
from mxdiag.quantize.corrections.mxfp8 import Mxfp8
from mxdiag.quantize.corrections.nvfp4 import Nvfp4
from mxdiag.quantize.corrections.of import Fallback
from mxdiag.quantize.corrections.scale_mantissa import ScaleMantissa
from mxdiag.quantize.corrections.scale_mse import ScaleMse
from mxdiag.quantize.cpu.lanes import BLOCK
from mxdiag.quantize.cpu.measure_loops import MACRO

#: An entry of `variant.Variant.corrections`.
FusedPlan = tuple[object, ...]


def is_fused(correction: Correction) -> bool:
    """Whether `cpu.measure` evaluates a correction; the reference evaluates the others."""
    if isinstance(correction, MacroBlockFallback):
        return is_fused(correction.macro)
    if isinstance(correction, MacroBlock):
        return not correction.search and correction.size in (BLOCK, 2 * BLOCK, MACRO * BLOCK)
    return isinstance(correction, (Fallback, ScaleMse, ScaleMantissa, Nvfp4, Mxfp8))


def plan(correction: Correction, rule: ScaleRule) -> FusedPlan:
    """What `variant.Variant.corrections` says of a correction."""
    if not is_fused(correction):
        raise ValueError(f"{correction.name} is not evaluated by this backend")
    if isinstance(correction, MacroBlockFallback):
        return "mbs", correction.macro.size, correction.fallback.alpha
    if isinstance(correction, MacroBlock):
        return "mbs", correction.size, None
    if isinstance(correction, Fallback):
        return "of", correction.alpha
    if isinstance(correction, ScaleMse):
        return "scale:mse", rule is RCEIL
    if isinstance(correction, ScaleMantissa):
        return "scale:m", correction.bits
    return (correction.kind,)
