"""The columns of a run's rows: their names, and what a value of one is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

Row = Mapping[str, Any]
#: (layer, operand, gemm)
Key = tuple[str, str, str]


def finite(value: object) -> float | None:
    """The number, or None if it is none, NaN or infinite."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        return None
    return float(value) if math.isfinite(value) else None


def key_of(row: Row) -> Key:
    """A row's identity."""
    return row["layer"], row["operand"], row["gemm"]
