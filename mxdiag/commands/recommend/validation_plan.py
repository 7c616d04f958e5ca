"""What a run recommends, as a plan for an injector, and what it lets expect; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mxdiag.commands.impact.inject.configurations import Configuration
from mxdiag.commands.impact.inject.plan import PLAIN_MXFP4, Corrected, Injection, cells_of
from mxdiag.commands.impact.per_layer.results import sensitivities
from mxdiag.commands.recommend.reasons import FALLBACK, NO_CORRECTION, read_row
from mxdiag.errors import UsageError
from mxdiag.gemms import CELLS
from mxdiag.layers.linears import Linear
from mxdiag.quantize.corrections.registry import parse_corrections
from mxdiag.run.run import Run

RECOMMENDED = "recommended"


class Recommended:
    """A plan: in each cell what the run's row recommends.

    Plain MXFP4 where that is `mxfp4` or nothing (a row without values); as it is where `bf16`. A
    cell that the run does not hold takes the choice of the same layer's operand in the GEMM that it
    does hold (a weight has one format in all its GEMMs), and plain MXFP4 without any.

    Parameters
    ----------
    run
        With recommendations in its rows.

    Attributes
    ----------
    borrowed, missing
        The (layer, operand, gemm) that took another row's choice; that had none.

    Raises
    ------
    UsageError
        If the run holds no recommendation.
    """

    def __init__(self, run: Run) -> None:
        rows = [row for row in run.tensors if row.get("recommended")]
        if not rows:
            raise UsageError(
                "the run holds no recommendation", advice="Run `mxdiag recommend` on it first"
            )
        self._choices: dict[tuple[str, str, str], Injection | None] = {
            (row["layer"], row["operand"], row["gemm"]): injection_of(row["recommended"])
            for row in rows
        }
        self.borrowed: dict[tuple[str, str, str], None] = {}
        self.missing: dict[tuple[str, str, str], None] = {}

    def __call__(self, linear: Linear, operand: str, gemm: str) -> Injection | None:
        """What takes the operand's place."""
        cell = (linear.layer, operand, gemm)
        if cell in self._choices:
            return self._choices[cell]
        for other in CELLS:
            held = (linear.layer, operand, other.gemm)
            if other.operand == operand and held in self._choices:
                self.borrowed.setdefault(cell)
                return self._choices[held]
        self.missing.setdefault(cell)
        return PLAIN_MXFP4

    def configuration(self, which: str, operands: str) -> Configuration:
        """The plan in one pass, on one set of operands."""
        cells = frozenset(cells_of(which, operands))

        def plan(linear: Linear, operand: str, gemm: str) -> Injection | None:
            return self(linear, operand, gemm) if (operand, gemm) in cells else None

        return Configuration(RECOMMENDED, operands, which, plan)

    @property
    def notes(self) -> list[str]:
        """What was run without a row of its own, by cell."""
        return [
            *_counted(
                self.borrowed, "without a row of their own took their operand's other choice"
            ),
            *_counted(self.missing, "without any choice ran in plain MXFP4"),
        ]


def injection_of(name: str) -> Injection | None:
    """What a recommended name puts in an operand's place."""
    if name == NO_CORRECTION:
        return PLAIN_MXFP4
    if name == FALLBACK:
        return None
    return Corrected(parse_corrections([name])[0])


def _counted(cells: Iterable[tuple[str, str, str]], words: str) -> list[str]:
    counts: dict[str, int] = {}
    for _, operand, gemm in cells:
        counts[f"{operand}·{gemm}"] = counts.get(f"{operand}·{gemm}", 0) + 1
    return [f"{count} layers' {name} {words}" for name, count in counts.items()]


# ---- what to expect ----------------------------------------------------------------------------


def predicted_ratios(run: Run) -> dict[tuple[str, str], float]:
    """Squared error with the recommended corrections over that of plain MXFP4, from the rows alone.

    By (pass, operands). A product's relative squared error is, to first order, the sum of those of
    its operands, so it is sum over layers of numel_W * sum over operands of rel_mse, after over
    before: in fprop for W, A and WA, in dgrad for G and GWA (W and G). To second order a KL is
    proportional to it, and so is the noise-to-signal ratio of gradients. Corrections that act on
    some layers more than the model feels them make it differ.
    """
    found = {}
    for which, operands, gemm in (
        ("forward", "W", "fprop"),
        ("forward", "A", "fprop"),
        ("forward", "WA", "fprop"),
        ("backward", "G", "dgrad"),
        ("backward", "GWA", "dgrad"),
    ):
        used = [op for op, its_gemm in cells_of(which, operands) if its_gemm == gemm]
        ratio = _ratio(run.tensors, used, gemm)
        if ratio is not None:
            found[which, operands] = ratio
    return found


def _ratio(rows: Sequence[Mapping[str, Any]], operands: Sequence[str], gemm: str) -> float | None:
    sizes = {row["layer"]: _elements(row) for row in rows if row["operand"] == "W"}
    before = after = 0.0
    for source in rows:
        operand, layer = source["operand"], source["layer"]
        own = source["gemm"] == gemm
        if operand not in operands or not own or not source.get("recommended"):
            continue
        row = read_row(source)
        weight = sizes.get(layer, row.numel)
        left = row.error_of(source["recommended"])
        before += weight * row.error
        after += weight * (row.error if left is None else left)
    return after / before if before > 0 else None


def predicted_by_sensitivity(run: Run) -> float | None:
    """KL with the recommended corrections of W over that of plain MXFP4, from single layers' KL.

    Sum over layers of KL * MSE ratio, over the sum of KL: layers that the model feels count more.
    None if the run holds no measured sensitivities of W.
    """
    try:
        costs = sensitivities(run)
    except UsageError:
        return None
    before = after = 0.0
    for source in run.tensors:
        cost = max(costs.get(source["layer"], 0.0), 0.0)
        cell = source["operand"], source["gemm"]
        if cell != ("W", "fprop") or not source.get("recommended"):
            continue
        row = read_row(source)
        left = row.error_of(source["recommended"])
        before += cost
        after += cost if left is None or not row.error else cost * left / row.error
    return after / before if before > 0 else None


def _elements(row: Mapping[str, Any]) -> int:
    return int(row.get("numel") or 0)


def comparison(
    impact: Mapping[str, Any],
    predicted: Mapping[tuple[str, str], float],
    by_sensitivity: float | None = None,
) -> list[dict[str, Any]]:
    """What was expected beside what came out, by pass and operands.

    Returns
    -------
    list of dict
        pass, operands, measure (`kl_mean`; `noise_to_signal` of gradients, 10^(-snr_db / 10)),
        plain, recommended, measured_ratio, measured_ratio_sd, predicted_ratio, and
        predicted_by_sensitivity (forward on W).
    """
    found = []
    for which in ("forward", "backward"):
        entries = {(e["config"], e["operands"]): e for e in impact.get(which) or ()}
        for operands in dict.fromkeys(e["operands"] for e in impact.get(which) or ()):
            plain, better = (entries.get((name, operands)) for name in ("all", RECOMMENDED))
            if plain is None or better is None:
                continue
            measure = "kl_mean" if which == "forward" else "noise_to_signal"
            before, after = (_value(entry, measure) for entry in (plain, better))
            ratio, sd = _quotient(after, before)
            found.append(
                {
                    "pass": which,
                    "operands": operands,
                    "measure": measure,
                    "plain": before[0],
                    "recommended": after[0],
                    "measured_ratio": ratio,
                    "measured_ratio_sd": sd,
                    "predicted_ratio": predicted.get((which, operands)),
                    "predicted_by_sensitivity": by_sensitivity
                    if (which, operands) == ("forward", "W")
                    else None,
                }
            )
    return found


ValueWithSd = tuple[float | None, float | None]


def _value(entry: Mapping[str, Any], measure: str) -> ValueWithSd:
    """A measure and its standard deviation."""
    if measure != "noise_to_signal":
        return entry.get(measure), entry.get(f"{measure}_sd")
    snr, sd = entry.get("snr_db_mean"), entry.get("snr_db_mean_sd")
    if snr is None:
        return None, None
    value = 10 ** (-snr / 10)
    return value, None if sd is None else value * sd * math.log(10) / 10


def _quotient(top: ValueWithSd, bottom: ValueWithSd) -> ValueWithSd:
    """Top / bottom with the standard deviation of independent ones."""
    if top[0] is None or not bottom[0]:
        return None, None
    ratio = top[0] / bottom[0]
    if top[1] is None or bottom[1] is None:
        return ratio, None
    return ratio, math.hypot(top[1], ratio * bottom[1]) / abs(bottom[0])


def comparison_in_words(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """One sentence for each comparison."""
    names = {"kl_mean": "KL", "noise_to_signal": "the gradients' noise-to-signal ratio"}
    sentences = []
    for row in rows:
        if row["measured_ratio"] is None:
            continue
        sd, said = row["measured_ratio_sd"], row["predicted_ratio"]
        text = (
            f"{row['pass'].capitalize()} on {row['operands']}, the recommended corrections take "
            f"{names[row['measure']]} from {row['plain']:.4g} to {row['recommended']:.4g}: "
            f"{row['measured_ratio']:.3f} of it" + ("" if sd is None else f" ± {sd:.1g}")
        )
        if said is not None:
            text += f", {said:.3f} expected from the error of the tensors"
        if row["predicted_by_sensitivity"] is not None:
            text += f", {row['predicted_by_sensitivity']:.3f} from the KL of single layers"
        sentences.append(text)
    return sentences
