"""The three GEMMs of a linear layer and the axis along which each blocks its operands, as data.

    fprop   Y  = X W^T     A and W blocked along in_features
    dgrad   dX = dY W      G and W blocked along out_features
    wgrad   dW = dY^T X    G and A blocked along tokens

W is [out, in], A is [tokens, in], G is [tokens, out]. The same tensor is blocked differently per
GEMM, so a row of results is one (layer, operand, gemm).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mxdiag.errors import UsageError

OPERANDS = ("W", "A", "G")
GEMMS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True, slots=True)
class Cell:
    """One operand in one GEMM: the name of the contracted axis and its index in the 2-D tensor."""

    operand: str
    gemm: str
    block_axis: str
    axis: int


#: Every cell, in the order of rows; the first of each operand is its default.
CELLS = (
    Cell("W", "fprop", "in_features", 1),
    Cell("W", "dgrad", "out_features", 0),
    Cell("A", "fprop", "in_features", 1),
    Cell("A", "wgrad", "tokens", 0),
    Cell("G", "dgrad", "out_features", 1),
    Cell("G", "wgrad", "tokens", 0),
)


def choose_cells(operands: Iterable[str], gemms: Iterable[str] | None) -> tuple[Cell, ...]:
    """The cells to measure: each operand in its default GEMM, or in all of the given `gemms`.

    Raises
    ------
    UsageError
        If a name is unknown or the choice is empty.
    """
    operands = list(operands)
    _check(operands, OPERANDS, "operand")
    if gemms is None:
        return tuple(
            next(cell for cell in CELLS if cell.operand == operand)
            for operand in OPERANDS
            if operand in operands
        )
    gemms = list(gemms)
    _check(gemms, GEMMS, "GEMM")
    cells = tuple(cell for cell in CELLS if cell.operand in operands and cell.gemm in gemms)
    if not cells:
        raise UsageError(
            f"operands {','.join(operands)} take no part in {','.join(gemms)}",
            advice="fprop uses A and W, dgrad G and W, wgrad G and A",
        )
    return cells


def _check(names: list[str], known: tuple[str, ...], kind: str) -> None:
    if not names:
        raise UsageError(f"no {kind} given", advice=f"Use some of {','.join(known)}")
    for name in names:
        if name not in known:
            raise UsageError(f"unknown {kind} {name!r}", advice=f"Use some of {','.join(known)}")
