"""What takes the place of an operand, as data: error components, a correction, or noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mxdiag.gemms import CELLS
from mxdiag.layers.linears import Linear
from mxdiag.quantize.corrections.base import Correction


@dataclass(frozen=True, slots=True)
class Components:
    """x plus these components (`scale`, `deadzone`, `grid`) of its MXFP4 error; all three: Q(x)."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Corrected:
    """x as a correction leaves it; plain MXFP4 where the correction is not defined on x."""

    correction: Correction


@dataclass(frozen=True, slots=True)
class Noisy:
    """Q(x + eta), eta Gaussian of standard deviation `sigma` rms(x).

    Source: adaptive quantization noise, arXiv 2510.11696.
    """

    sigma: float


Injection = Components | Corrected | Noisy

#: (layer, operand, gemm) -> what takes the operand's place, None to leave it alone.
InjectionPlan = Callable[[Linear, str, str], Injection | None]

PLAIN_MXFP4 = Components(frozenset(("scale", "deadzone", "grid")))


def uniform(cells: Mapping[tuple[str, str], Injection]) -> InjectionPlan:
    """The same in every layer, by (operand, gemm)."""

    def plan(linear: Linear, operand: str, gemm: str) -> Injection | None:
        return cells.get((operand, gemm))

    return plan


def restricted(plan: InjectionPlan, layers: frozenset[str]) -> InjectionPlan:
    """A plan in these layers, by name; every other layer stays as it is."""

    def chosen(linear: Linear, operand: str, gemm: str) -> Injection | None:
        return plan(linear, operand, gemm) if linear.layer in layers else None

    return chosen


def cells_of(which: str, operands: str) -> list[tuple[str, str]]:
    """(operand, gemm) pairs of a pass (`forward`, `backward`, `both`) and a set such as `GWA`."""
    wanted = {
        "forward": ("fprop",),
        "backward": ("dgrad", "wgrad"),
        "both": ("fprop", "dgrad", "wgrad"),
    }[which]
    return [(c.operand, c.gemm) for c in CELLS if c.operand in operands and c.gemm in wanted]
