"""What theory predicts beside what the run measured, claim by claim."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mxdiag.commands.report.html.encode import place_of
from mxdiag.commands.report.summary import overall, percent
from mxdiag.errors import UsageError
from mxdiag.quantize.corrections.registry import parse_corrections
from mxdiag.run.columns import correction_of
from mxdiag.run.run import Run

_PAPER = "arXiv 2605.20402"
#: Last step of the scale-precision sweep, the one that is said to reach the floor.
_SWEEP_END = "scale:m8"
#: What the paper reports for the weights of Qwen2.5-3B.
_PAPER_WEIGHTS = {
    "scale_energy": ("‖e_scale‖² / ‖e‖²", 1.725),
    "deadzone_energy": ("‖e_dz‖² / ‖e‖²", 0.026),
    "grid_energy": ("‖e_grid‖² / ‖e‖²", 0.703),
    "cos_scale_grid": ("cos(e_scale, e_grid)", -0.657),
}
_NEEDED = ("recoverable", "irreducible", "rel_mse")


@dataclass(frozen=True, slots=True)
class Prediction:
    """One claim for one operand and GEMM: `predicted` beside `measured`, and what follows.

    `same_model` is False where the prediction is another model's measurement.
    """

    claim: str
    cell: str
    predicted: float
    measured: float
    remark: str
    source: str
    same_model: bool = True


def predictions(run: Run) -> list[Prediction]:
    """Every claim that this run's numbers can check, grouped by claim."""
    found: list[Prediction] = []
    rceil = (run.data.get("settings") or {}).get("scale_rule", "rceil") == "rceil"
    for total in overall(run):
        cell = f"{total['operand']}·{total['gemm']}"
        found += _corrections(total, cell)
        if rceil:
            found += _scale(run, total, cell)
        if rceil and total["operand"] == "W":
            found += _weights(total, cell)
    claims = {claim: order for order, claim in enumerate(dict.fromkeys(p.claim for p in found))}
    return sorted(found, key=lambda prediction: claims[prediction.claim])


def _corrections(total: dict[str, Any], cell: str) -> list[Prediction]:
    basis = {name: total.get(name) for name in _NEEDED}
    if any(value is None for value in basis.values()):
        return []
    found = []
    for column, measured in total.items():
        name = correction_of(column)
        if name is None:
            continue
        if measured is None or (name.startswith("scale:m") and name != _SWEEP_END):
            continue
        try:
            correction = parse_corrections([name])[0]
        except UsageError:  # a correction that this version does not know: measured all the same
            continue
        predicted = correction.predicted({key: float(value or 0) for key, value in basis.items()})
        if predicted is None:
            continue
        remark, reducible = "", total.get("reducible") or 0.0
        if correction.keeps_ideal and reducible > 0:
            remark = f"closes {percent((1 - measured) / reducible)} of the gap"
        claim = f"{name}: MSE ratio"
        found.append(Prediction(claim, cell, predicted, measured, remark, correction.source))
    return found


def _scale(run: Run, total: dict[str, Any], cell: str) -> list[Prediction]:
    found = []
    variances = depth_variances(run, total["operand"], total["gemm"])
    if variances:
        layers = len(variances)
        predicted, measured = math.sqrt(layers / 12), math.sqrt(math.fsum(variances))
        claim = f"Accumulated scale bias: √(L/12) octaves over {layers} layers"
        found.append(Prediction(claim, cell, predicted, measured, "", _PAPER))
    mean, spread = total.get("delta_mean"), total.get("delta_std")
    if mean is not None and spread is not None:
        claims = ("Mean of δ: uniform in [0, 1), octaves", "Standard deviation of δ: 1/√12 octaves")
        found.append(Prediction(claims[0], cell, 0.5, mean, "", _PAPER))
        found.append(Prediction(claims[1], cell, 1 / math.sqrt(12), spread, "", _PAPER))
    return found


def _weights(total: dict[str, Any], cell: str) -> list[Prediction]:
    return [
        Prediction(f"Weights, Qwen2.5-3B: {formula}", cell, value, total[name], "", _PAPER, False)
        for name, (formula, value) in _PAPER_WEIGHTS.items()
        if total.get(name) is not None
    ]


def depth_variances(run: Run, operand: str, gemm: str) -> list[float]:
    """Variance of δ at each depth, the mean over that depth's rows of one operand and GEMM."""
    groups: dict[tuple[str, int], list[float]] = {}
    for row in run.tensors:
        if (row["operand"], row["gemm"]) == (operand, gemm) and row.get("delta_std") is not None:
            place = place_of(row["layer"])
            if place is not None:
                groups.setdefault(place, []).append(row["delta_std"] ** 2)
    return [math.fsum(values) / len(values) for _, values in sorted(groups.items())]
