"""What every correction is: a name, a formula, a source, a cost, a prediction, a quantizer.

Importing a correction imports no torch; its reference quantizer does once it is called.

Common to all: x is blocked along the contraction axis as the plain format is, in MX blocks of 32.
An MX block that holds a NaN or an infinity is taken as zeros and enters no sum, and no amax of
anything larger (macro block, 32x32 block, tensor). A ragged end is padded with zeros, which enter
no sum. Q is MXFP4 under the scale rule in use, its scale byte clamped to 0..254; zeros have byte 0.
`underflow` counts x != 0 whose corrected value is exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from mxdiag.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from mxdiag.formats import ScaleRule

_Number = TypeVar("_Number", int, float)

ALL_OPERANDS = ("W", "A", "G")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a correction costs relative to plain MXFP4.

    `bits` are per element at rest, on top of MXFP4's 4.25; `gemm_passes` are matrix products on top
    of the first; `transforms` are rotations of the operand (its partner in the product needs the
    same one).
    """

    bits: float
    gemm_passes: int = 0
    transforms: int = 0


@dataclass(frozen=True, slots=True)
class Whole:
    """The matrix that a piece is cut from, so that pieces are corrected as the whole is.

    Attributes
    ----------
    shape
        [rows, columns] of the whole.
    start
        Row and column of the piece's first element.
    amax, rms
        Of the whole's finite MX blocks along the blocked axis; what no correction asks for
        (`needs_amax`, `needs_rms`) may be 0.
    """

    shape: tuple[int, int]
    start: tuple[int, int]
    amax: float = 0.0
    rms: float = 0.0


@dataclass(frozen=True, slots=True)
class Context:
    """What a quantizer must know of the whole tensor [outer, K, inner] when it sees a part of it.

    `length` is the part's K before padding, `whole` the whole's sizes, `start` the place of the
    part's first element in it; `tensor_amax` and `tensor_rms` are over the finite MX blocks of the
    whole.
    """

    length: int
    whole: tuple[int, int, int]
    start: tuple[int, int, int]
    tensor_amax: float
    tensor_rms: float


@dataclass(frozen=True, slots=True)
class Correction:
    """A candidate fix. `name` is what the user typed and what columns are called after.

    Attributes
    ----------
    prediction
        The formula of `predicted`, None where no theory has one.
    operands
        What it applies to.
    keeps_ideal
        Q* under the correction is Q* without it (the ideal scale follows any scaling of the block):
        the deadzone and grid energies stay, so the decomposition after it is defined.
    four_bit
        Elements stay in 4 bits; else it is a higher-precision fallback.
    acts_on
        Which share of the error it goes for.
    judged_by_error
        A lower error is its purpose.
    needs_amax, needs_rms
        The whole tensor's amax or rms decides.
    square
        Its blocks span both axes of a matrix.
    """

    name: str
    kind: ClassVar[str]
    source: ClassVar[str]
    prediction: ClassVar[str | None] = None
    operands: ClassVar[tuple[str, ...]] = ALL_OPERANDS
    keeps_ideal: ClassVar[bool] = False
    four_bit: ClassVar[bool] = True
    acts_on: ClassVar[str | None] = None
    judged_by_error: ClassVar[bool] = True
    needs_amax: ClassVar[bool] = False
    needs_rms: ClassVar[bool] = False
    square: ClassVar[bool] = False

    @property
    def cost(self) -> Cost:
        """The declared cost."""
        raise NotImplementedError

    @property
    def granule(self) -> int:
        """Elements along either axis, a multiple of 32, that a cut of the tensor must not split."""
        return 32

    def quantize(self, rows: Tensor, rule: ScaleRule, context: Context) -> Tensor:
        """x_dq: the truth of this correction.

        Parameters
        ----------
        rows
            [outer, inner, K], float64, K padded to a multiple of 32, non-finite MX blocks zeroed.
        rule
            The scale rule in use.
        context
            Of the whole tensor.

        Returns
        -------
        Tensor
            Float64, in the layout of `rows`.
        """
        raise NotImplementedError

    def predicted(self, row: Mapping[str, float]) -> float | None:
        """The MSE ratio of theory, from a row's `recoverable`, `irreducible` and `rel_mse`."""
        return None

    def refusal(self, operand: str, length: int) -> str | None:
        """Why it is not defined on an operand of that `length` along the blocked axis, or None."""
        if operand not in self.operands:
            return f"{self.name} applies to {', '.join(self.operands)} only"
        return None

    @classmethod
    def read(cls, name: str) -> Self | None:
        """Build it from its full name, such as `mbs:64`; None if the name is not of this kind.

        Raises
        ------
        UsageError
            If a parameter is not one of this correction's.
        """
        head, *parameters = name.split(":")
        if head != cls.kind or "+" in name:
            return None
        return cls.parse(name, tuple(parameters))

    @classmethod
    def parse(cls, name: str, parameters: tuple[str, ...]) -> Self:
        """Build it from the text parameters after its name; the base takes none.

        Raises
        ------
        UsageError
            If a parameter is not one of this correction's.
        """
        if parameters:
            raise bad_parameter(name, parameters[0], "It takes none")
        return cls(name)


def floor(row: Mapping[str, float]) -> float:
    """The share of ||e||^2 that an ideal scale leaves."""
    return row["recoverable"] + row["irreducible"]


def bad_parameter(name: str, parameter: str, advice: str) -> UsageError:
    """The error for a parameter that the correction does not take."""
    return UsageError(f"unknown parameter {parameter!r} of the correction {name!r}", advice=advice)


def whole_number(text: str) -> int:
    """A decimal number without a sign; ValueError otherwise."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def one_parameter(
    name: str,
    parameters: tuple[str, ...],
    convert: Callable[[str], _Number],
    valid: Callable[[_Number], bool],
    advice: str,
) -> tuple[_Number, ...]:
    """The converted parameter of a correction that takes at most one, or () without it."""
    if len(parameters) > 1:
        raise bad_parameter(name, parameters[1], advice)
    for parameter in parameters:
        try:
            value = convert(parameter)
        except ValueError:
            raise bad_parameter(name, parameter, advice) from None
        if not valid(value):
            raise bad_parameter(name, parameter, advice)
        return (value,)
    return ()
