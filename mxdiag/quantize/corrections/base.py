"""What every correction is: a name, a formula, a source, a cost, a prediction. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

from mxdiag.errors import UsageError

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
class Correction:
    """A candidate fix. `name` is what the user typed and what columns are called after.

    `keeps_ideal` tells that Q* under the correction is Q* without it (the ideal scale follows any
    scaling of the block): the deadzone and grid energies stay, so the decomposition after the
    correction is defined. `prediction` is the formula of `predicted`, None where no theory has one.
    `needs_amax` tells that the whole tensor's amax decides. `four_bit` tells that elements stay in
    4 bits (else it is a higher-precision fallback), `acts_on` which share of the error it goes for,
    `judged_by_error` whether a lower error is its purpose.
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

    @property
    def cost(self) -> Cost:
        """The declared cost."""
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
