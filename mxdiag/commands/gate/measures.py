"""What a budget compares with its bounds: one row's metric, or an aggregate over rows.

A value is a float, `EXACT` where there is no error to measure, or None where there is no number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from mxdiag.commands.gate.budget import ENERGY_WEIGHTS, MORE_IS_BETTER, Globs, Limit
from mxdiag.run.columns import Row, corrected_column, correction_of, finite
from mxdiag.run.run import Run


class Exact(Enum):
    """The value of an error's metric where the error is zero."""

    EXACT = "exact"


EXACT = Exact.EXACT
Value = float | Exact | None


class Subject:
    """A run under judgement: what is asked of it again and again, looked up once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.corrections = run.corrections
        self.costs: Mapping[str, Any] = run.data.get("corrections") or {}
        self._by_layer: dict[str, list[Row]] = {}
        for row in run.tensors:
            self._by_layer.setdefault(row["layer"], []).append(row)

    def rows(self, select: Mapping[str, Globs]) -> Sequence[Row]:
        """The rows worth matching: by name where layers are named, so that a budget with a rule
        per row takes linear time.
        """
        names = select["layer"].literals if "layer" in select else None
        if names is None:
            return self.run.tensors
        return [row for name in dict.fromkeys(names) for row in self._by_layer.get(name, ())]


#: Statuses of rows that hold no measurement.
UNMEASURED = ("not_observed", "nonfinite")

#: Metrics that describe the error, so that none of them exists where there is no error.
_OF_THE_ERROR = frozenset(
    {
        "sqnr_db",
        "sqnr_db_token",
        "reducible",
        "recoverable",
        "recoverable_token",
        "irreducible",
        "scale_energy",
        "deadzone_energy",
        "grid_energy",
    }
)


def is_exact(row: Row) -> bool:
    """Whether the row (or total) was measured and has no error at all."""
    if row.get("status") is not None:
        return row["status"] == "exact"
    return row.get("sqnr_db") is None and row.get("rel_mse") == 0


def metric_of(row: Row, metric: str, after: str | None = None) -> Value:
    """A row's metric, as it is after a correction if one is named.

    SQNR after a correction is sqnr_db - 10 log10(mse_ratio), in dB.
    """
    value = finite(row.get(metric))
    if after is not None:
        return _corrected(row, metric, value, after)
    if value is None and is_exact(row) and (metric in _OF_THE_ERROR or correction_of(metric)):
        return EXACT
    return value


def _corrected(row: Row, metric: str, value: float | None, after: str) -> Value:
    if metric == "underflow_frac":
        return finite(row.get(corrected_column("underflow_frac", after)))
    ratio = finite(row.get(corrected_column("mse_ratio", after)))
    if is_exact(row):
        return EXACT if metric == "sqnr_db" else value
    if ratio is None or value is None or ratio < 0:
        return None
    if metric == "rel_mse":
        return value * ratio
    return value - 10 * math.log10(ratio) if ratio > 0 else EXACT


def passes(value: Value, limit: Limit) -> bool:
    """Whether a value is within a bound; no number never is.

    Without an error, every bound on how good SQNR must at least be holds, and every bound on how
    much an error or its parts may at most be.
    """
    if value is None:
        return False
    if isinstance(value, Exact):
        return limit.side == ("min" if limit.metric in MORE_IS_BETTER else "max")
    return limit.holds(value)


def energies(row: Row) -> tuple[float, float] | None:
    """(||x||^2, ||e||^2) of a row, from its rms and relative error; None if unknown."""
    rms, numel, rel_mse = (finite(row.get(key)) for key in ("rms", "numel", "rel_mse"))
    if rms is None or numel is None:
        return None
    signal = rms * rms * numel
    if rel_mse is None:
        return (signal, 0.0) if signal == 0 else None
    return signal, rel_mse * signal


def aggregate(
    rows: Sequence[Row], limit: Limit, how: str, after: str | None = None
) -> tuple[Value, Row | None]:
    """One value for many rows, with the row that it is taken from, if it is one row's.

    `mean` and `median` are over rows. `p95` is the value that 95 % of the rows are at least as good
    as, `worst` that all are, seen from the bound. `energy` is the metric of all rows' elements
    together. `mean` and `median` leave out rows without error, which are better than any number.

    Returns
    -------
    tuple
        None as the value if any row lacks its number; `EXACT` if no row has an error.
    """
    if how == "energy":
        return _energy(rows, limit.metric, after), None
    values = [(metric_of(row, limit.metric, after), row) for row in rows]
    if any(value is None for value, _ in values):
        return None, next(row for value, row in values if value is None)
    numbers = [(value, row) for value, row in values if isinstance(value, float)]
    if not numbers:
        return EXACT, None
    if how == "mean":
        return statistics.fmean(value for value, _ in numbers), None
    if how == "median":
        return statistics.median(value for value, _ in numbers), None
    ordered = sorted(numbers, key=lambda pair: pair[0], reverse=limit.side == "max")
    position = 0 if how == "worst" else len(values) // 20
    return ordered[position] if position < len(ordered) else (EXACT, None)


def _energy(rows: Sequence[Row], metric: str, after: str | None) -> Value:
    weight = ENERGY_WEIGHTS.get(metric, "error")
    if weight == "ratio":
        return _energy_ratio(rows, metric, after)
    name = metric if after is None else f"{metric}:{after}"
    top, bottom = [], []
    for row in rows:
        factor = _weight(row, weight)
        value = finite(row.get(name))
        if factor is None or (value is None and factor > 0):
            return None
        top.append(factor * (value or 0.0))
        bottom.append(factor)
    if any(bottom):
        return math.fsum(top) / math.fsum(bottom)
    return EXACT if weight == "error" else None


def _weight(row: Row, weight: str) -> float | None:
    if weight == "elements":
        return finite(row.get("numel"))
    pair = energies(row)
    return None if pair is None else pair[weight == "error"]


def _energy_ratio(rows: Sequence[Row], metric: str, after: str | None) -> Value:
    signal, error = [], []
    for row in rows:
        pair = energies(row)
        if pair is None:
            return None
        ratio = (
            1.0
            if after is None or pair[1] == 0
            else finite(row.get(corrected_column("mse_ratio", after)))
        )
        if ratio is None:
            return None
        signal.append(pair[0])
        error.append(pair[1] * ratio)
    total_signal, total_error = math.fsum(signal), math.fsum(error)
    if total_signal == 0:
        return None
    if metric == "rel_mse":
        return total_error / total_signal
    return 10 * math.log10(total_signal / total_error) if total_error > 0 else EXACT
