"""From single measurements to `per_layer`, its ranking, and costs to recommend by; no torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mxdiag.commands.impact.per_layer.journal import Done
from mxdiag.errors import UsageError
from mxdiag.run.run import Run

PREDICTORS = ("error_energy", "relative_error", "fisher", "first_order")
MEASURES = ("kl_mean", "loss_change")
_Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal
_ADVICE = "Measure them with `mxdiag impact --per-layer layer` on W"


def measured(done: Done, unit: str, repeats: int, tokens: Sequence[int]) -> dict[str, list[float]]:
    """kl_mean and loss_change of a unit, by repeat: over all tokens, and of the whole loss."""
    kl, loss = [], []
    for repeat in range(repeats):
        rows = [done[unit, repeat, record] for record in range(len(tokens))]
        kl.append(_total(row["kl"] for row in rows) / max(sum(tokens), 1))
        loss.append(_total(row["loss"] for row in rows))
    return {"kl_mean": kl, "loss_change": loss}


def _total(values: Iterable[float | None]) -> float:
    return math.fsum(math.nan if value is None else value for value in values)


def rankings(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How each predictor ranks the units, against each measure: see `rank_correlation`.

    The change of the loss is ranked by its size.
    """
    found = []
    for measure in MEASURES:
        for predictor in PREDICTORS:
            pairs = [(entry[predictor], entry[measure]) for entry in entries]
            known = [(x, abs(y)) for x, y in pairs if _finite(x) and _finite(y)]
            correlation = rank_correlation([x for x, _ in known], [y for _, y in known])
            found.append({"predictor": predictor, "measure": measure, **correlation})
    return found


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Spearman's rank correlation with its two-sided p-value and 95 % interval.

    The interval is tanh(atanh(rho) +- 1.96 sqrt((1 + rho^2 / 2) / (n - 3))) (Bonett and Wright,
    Psychometrika 65, 2000). None where it is not defined: fewer than 4 units, or all equal.

    Returns
    -------
    dict
        units, spearman, p_value, low, high.
    """
    result: dict[str, Any] = {"units": len(x)}
    result |= dict.fromkeys(("spearman", "p_value", "low", "high"))
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return result
    from scipy.stats import spearmanr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of perfect correlations, whose p-value is 0
        rho, p_value = (float(value) for value in spearmanr(x, y))
    result |= {"spearman": rho, "p_value": p_value}
    if len(x) > 3 and abs(rho) < 1:
        half = _Z95 * math.sqrt((1 + rho * rho / 2) / (len(x) - 3))
        low, high = np.tanh(math.atanh(rho) - half), np.tanh(math.atanh(rho) + half)
        result |= {"low": float(low), "high": float(high)}
    return result


def shares(errors: Sequence[float]) -> list[float]:
    """Each layer's share of a unit's cost, in proportion to its error; equal without any error."""
    total = math.fsum(errors)
    if total <= 0:
        return [1 / len(errors)] * len(errors)
    return [error / total for error in errors]


def sensitivities(run: Run) -> dict[str, float]:
    """Layer -> KL that plain MXFP4 on its weight costs, for `recommend(sensitivities=...)`.

    A unit of several layers (a role, a fused group) was measured as a whole; its KL is split over
    its layers in proportion to numel * rel_mse of their weights, the cost that a recommendation
    goes by without measurements.

    Raises
    ------
    UsageError
        If the run holds no measurement of single units, or one of activations.
    """
    impact = run.data.get("impact") or {}
    entries = impact.get("per_layer") or []
    if not entries:
        raise UsageError("the run holds no measured sensitivities", advice=_ADVICE)
    costs: dict[str, float] = {}
    for entry in entries:
        if entry.get("operands") != "W":
            raise UsageError(
                f"the sensitivities were measured on {entry.get('operands')}, a budget is of W",
                where=entry.get("unit"),
                advice=_ADVICE,
            )
        for member in entry["layers"]:
            value = entry.get("kl_mean")
            if _finite(value):
                costs[member["layer"]] = value * member["share"]
    return costs


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
