"""Macro-block scaling: one more mantissa for a run of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from mxdiag.formats import MXFP4
from mxdiag.quantize.corrections.base import (
    Context,
    Correction,
    Cost,
    floor,
    one_parameter,
    whole_number,
)

if TYPE_CHECKING:
    from torch import Tensor

    from mxdiag.formats import ScaleRule

#: Elements of a macro block where none are given.
MACRO_BLOCK = 128


@dataclass(frozen=True, slots=True)
class MacroBlock(Correction):
    """Macro-block scaling: x_dq = Q(mu x) / mu, with one mu in [1, 2) per macro block.

    A macro block is `size` elements along the blocked axis, counted from its start; the last may be
    shorter. With M its amax, mu = 1 + m/256 is the mantissa of 6/M cut to 8 bits: 6/M in float64,
    exponent dropped, all but the top 8 mantissa bits cleared. For a float32 M this is the exact
    quotient's mantissa: with F the 24-bit integer mantissa of M, 256 mu = floor(384 * 2^23 / F) if
    F <= 1.5 * 2^23, else floor(768 * 2^23 / F), and no such quotient that is not an integer comes
    nearer to one than 1/F. M = 0: mu = 1.

    y = mu x is rounded to 24 significant bits, to nearest even (one float32 product where it is
    normal; exact for float16 and bfloat16 x). Then Q(y) in blocks of 32, scale and elements decided
    on y as the plain quantizer decides on x; x_dq = Q(y) / mu in float64.

    With `search`, m in 0..255 is the one of least squared error over the macro block, the smallest
    such m (m = 0 is plain MXFP4). Two m whose errors agree to rounding may be swapped.
    """

    size: int = MACRO_BLOCK
    search: bool = False
    kind: ClassVar[str] = "mbs"
    acts_on: ClassVar[str | None] = "reducible"
    source: ClassVar[str] = "arXiv 2603.08713 (macro block scaling); arXiv 2605.20402"
    prediction: ClassVar[str | None] = "recoverable + irreducible: the floor is reached"
    keeps_ideal: ClassVar[bool] = True

    @property
    def cost(self) -> Cost:
        """One 8-bit mantissa per macro block."""
        return Cost(8 / self.size)

    def predicted(self, row: Mapping[str, float]) -> float | None:
        """ArXiv 2605.20402: macro-block scaling removes the scale bias."""
        return floor(row)

    @classmethod
    def parse(cls, name: str, parameters: tuple[str, ...]) -> Self:
        """`mbs`, `mbs:SIZE`, `mbs:search`, `mbs:SIZE:search`."""
        advice = "Use a multiple of 32, and `search`: mbs:64, mbs:search, mbs:64:search"
        search = parameters[-1:] == ("search",)
        size = one_parameter(
            name,
            parameters[:-1] if search else parameters,
            whole_number,
            lambda size: size > 0 and size % MXFP4.block_size == 0,
            advice,
        )
        return cls(name, size[0] if size else MACRO_BLOCK, search)

    @property
    def granule(self) -> int:
        """A whole macro block."""
        return self.size

    def quantize(self, rows: Tensor, rule: ScaleRule, context: Context) -> Tensor:
        """See `Correction.quantize`."""
        from mxdiag.quantize.corrections import arithmetic

        scaled, mu = arithmetic.macro_scaled(rows, self.size, self.search, rule)
        return arithmetic.quantize_rows(scaled, rule) / mu
