"""Which corrections there are, and how their names are read. Imports no torch.

A correction is one file of this package; it is listed in `CORRECTIONS` below.
"""

from __future__ import annotations

from collections.abc import Iterable

from mxdiag.errors import UsageError
from mxdiag.quantize.corrections.aqn import AdaptiveNoise
from mxdiag.quantize.corrections.base import Correction
from mxdiag.quantize.corrections.bf16 import Bf16
from mxdiag.quantize.corrections.block2d import Block2d
from mxdiag.quantize.corrections.hadamard import Hadamard
from mxdiag.quantize.corrections.mbs import MacroBlock
from mxdiag.quantize.corrections.mbs_of import MacroBlockFallback
from mxdiag.quantize.corrections.mxfp8 import Mxfp8
from mxdiag.quantize.corrections.nvfp4 import Nvfp4
from mxdiag.quantize.corrections.of import Fallback
from mxdiag.quantize.corrections.scale_mantissa import ScaleMantissa
from mxdiag.quantize.corrections.scale_mse import ScaleMse
from mxdiag.quantize.corrections.sr import StochasticRounding

CORRECTIONS: tuple[type[Correction], ...] = (
    MacroBlock,
    Fallback,
    MacroBlockFallback,
    ScaleMse,
    ScaleMantissa,
    Nvfp4,
    Mxfp8,
    Bf16,
    Block2d,
    Hadamard,
    StochasticRounding,
    AdaptiveNoise,
)

DEFAULT_CORRECTIONS = ("mbs", "of", "mbs+of", "scale:mse", "nvfp4", "mxfp8")
#: Every definition once, with its default parameters; the scale sweep is asked for by itself.
ALL_CORRECTIONS = (
    *DEFAULT_CORRECTIONS,
    "mbs:search",
    "bf16",
    "block2d",
    "hadamard",
    "sr",
    "aqn",
)
#: The paper's sweep of scale precision.
SCALE_SWEEP = tuple(f"scale:m{bits}" for bits in range(9))


def parse_corrections(names: str | Iterable[str]) -> tuple[Correction, ...]:
    """The corrections of those names, in order, each once.

    Parameters
    ----------
    names
        A list, or text separated by commas, of names with parameters (`mbs`, `mbs:64`,
        `mbs:search`, `of:1.0`, `mbs:64+of:1.0`, `scale:mse`, `scale:m3`, `hadamard:32`, `nvfp4`,
        `mxfp8`, `bf16`, `block2d`, `sr:1`, `aqn`) or of the sets `default`, `all`, `sweep` (the
        scale precisions), `none`.

    Raises
    ------
    UsageError
        On an unknown name or parameter.
    """
    listed = names.split(",") if isinstance(names, str) else list(names)
    parsed: dict[str, Correction] = {}
    for text in listed:
        for name in _NAME_SETS.get(text.strip().lower(), (text,)):
            correction = _parse_one(name.strip().lower())
            parsed[correction.name] = correction
    return tuple(parsed.values())


_NAME_SETS: dict[str, tuple[str, ...]] = {
    "default": DEFAULT_CORRECTIONS,
    "all": ALL_CORRECTIONS,
    "sweep": SCALE_SWEEP,
    "none": (),
}


def _parse_one(name: str) -> Correction:
    for kind in CORRECTIONS:
        correction = kind.read(name)
        if correction is not None:
            return correction
    raise _unknown(name)


def _unknown(name: str) -> UsageError:
    known = ", ".join([*ALL_CORRECTIONS, "mbs:SIZE", "of:ALPHA", "scale:mBITS", "hadamard:SIZE"])
    return UsageError(f"unknown correction {name!r}", advice=f"Use one of {known}")
