"""The facts that a report opens with: shares per operand, coverage, the worst layers in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mxdiag.commands.report.html.encode import place_of
from mxdiag.run.columns import corrected_column
from mxdiag.run.run import Run

#: Operand and GEMM pairs in the order in which every list shows them.
CELL_ORDER = (
    ("W", "fprop"),
    ("A", "fprop"),
    ("G", "dgrad"),
    ("W", "dgrad"),
    ("A", "wgrad"),
    ("G", "wgrad"),
)
OPERAND_WORDS = {"W": "weights", "A": "activations", "G": "gradients"}
SHARES = ("reducible", "recoverable", "irreducible")

#: A correction is worth naming for a layer from this gain on; below it the best one is named.
_WORTHWHILE_DB = 3.0
#: A single token that holds this share of the energy makes energy-weighted numbers its own.
_LOUD_TOKEN = 0.5
#: The smallest of the three shares is named from here on.
_WORTH_SAYING = 0.1


def percent(value: float | None, digits: int = 0) -> str:
    """A share as a percentage, "n/a" where it is undefined."""
    return "n/a" if value is None else f"{100 * value:.{digits}f}\u00a0%"


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    """A number with its unit, "n/a" where it is undefined."""
    tail = f"\u00a0{unit}" if unit else ""
    return "n/a" if value is None else f"{value:.{digits}f}{tail}"


def count(value: int | None) -> str:
    """A large count in three digits: 1.24 B, 135 M, 32.8 k."""
    if value is None:
        return "n/a"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}\u00a0{unit}"
    return str(value)


def overall(run: Run) -> list[dict[str, Any]]:
    """Totals over all roles, one per operand and GEMM, in the order of `CELL_ORDER`."""
    totals = [total for total in run.data["totals"] if total.get("role") is None]
    order = {cell: index for index, cell in enumerate(CELL_ORDER)}
    known = [total for total in totals if (total["operand"], total["gemm"]) in order]
    return sorted(known, key=lambda total: order[total["operand"], total["gemm"]])


@dataclass(frozen=True, slots=True)
class Worst:
    """One of the worst layers.

    Attributes
    ----------
    row
        Index into the run's rows.
    layer, cell
        Its name, and operand·GEMM.
    headline
        The number that ranks it.
    words
        Sentences: what kind of error it is, and what would help.
    """

    row: int
    layer: str
    cell: str
    headline: str
    words: str


def worst_layers(run: Run, limit: int = 5) -> list[Worst]:
    """The rows of least SQNR, non-finite ones first; one per depth and role, so that the experts of
    one layer do not fill the list.
    """
    ranked = sorted(
        (row["status"] != "nonfinite", row["sqnr_db"] if _number(row, "sqnr_db") else 0.0, index)
        for index, row in enumerate(run.tensors)
        if row["status"] == "nonfinite" or (row["status"] == "ok" and _number(row, "sqnr_db"))
    )
    seen: dict[tuple[Any, ...], int] = {}
    for _, _, index in ranked:
        row = run.tensors[index]
        place = place_of(row["layer"]) if row.get("expert") is not None else None
        seen.setdefault((place, row.get("role")) if place else (row["layer"],), index)
        if len(seen) == limit:
            break
    return [_worst(run, index) for index in seen.values()]


def _number(row: dict[str, Any], name: str) -> bool:
    value = row.get(name)
    return isinstance(value, (int, float)) and math.isfinite(value)


def _worst(run: Run, index: int) -> Worst:
    row = run.tensors[index]
    cell = f"{row['operand']}·{row['gemm']}"
    if row["status"] == "nonfinite":
        blocks = row.get("nonfinite") or 0
        words = (
            f"{blocks} blocks hold a NaN or an infinity and enter no other number. The layer "
            "cannot pass a gate until they are gone."
        )
        return Worst(index, row["layer"], cell, "non-finite", words)
    sentences = [_mechanism(row), _tokens(row), _remedy(run, row)]
    words = " ".join(sentence for sentence in sentences if sentence)
    return Worst(index, row["layer"], cell, number(row["sqnr_db"], 1, "dB"), words)


def _mechanism(row: dict[str, Any]) -> str:
    shares = {name: row.get(name) for name in SHARES}
    if any(value is None for value in shares.values()):
        return ""
    phrases = {
        "reducible": f"{percent(shares['reducible'])} is scale bias that a finer block scale "
        "would remove",
        "recoverable": f"{percent(shares['recoverable'])} is values cut to zero "
        f"({percent(row.get('deadzone_frac'))} of the elements lie in the deadzone)",
        "irreducible": f"{percent(shares['irreducible'])} is noise of the 4-bit grid itself",
    }
    ordered = sorted(SHARES, key=lambda name: -float(shares[name] or 0))
    first, second, third = (phrases[name] for name in ordered)
    words = [first.replace(" is ", " of the error is ", 1), second]
    if float(shares[ordered[2]] or 0) >= _WORTH_SAYING:
        words.append(third)
    return "; ".join(words) + "."


def _tokens(row: dict[str, Any]) -> str:
    if row.get("tokens") == 1:
        return "Only one token was seen."
    if (row.get("top_token_share") or 0.0) < _LOUD_TOKEN:
        return ""
    return (
        f"One token holds {percent(row['top_token_share'], 1)} of the energy; the mean token has "
        f"{number(row.get('sqnr_db_token'), 1, 'dB')}."
    )


def _remedy(run: Run, row: dict[str, Any]) -> str:
    """The recommended correction, or the cheapest that gains 3 dB, or the best there is."""
    costs = run.data.get("corrections") or {}
    gains = {
        name: -10 * math.log10(row[corrected_column("mse_ratio", name)])
        for name in costs
        if _number(row, corrected_column("mse_ratio", name))
        and row[corrected_column("mse_ratio", name)] > 0
    }
    if not gains:
        return ""
    worthwhile = [name for name in gains if gains[name] >= _WORTHWHILE_DB]
    if row.get("recommended") in gains:
        name = str(row["recommended"])
    elif worthwhile:
        name = min(worthwhile, key=lambda name: (bits_of(costs[name]), -gains[name]))
    else:
        name = max(gains, key=lambda name: gains[name])
    bits = bits_of(costs[name])
    cost = "at no extra bits" if bits == 0 else f"for {bits:.3g} more bits per element"
    if bits < 0:
        cost = f"and saves {-bits:.3g} bits per element"
    if gains[name] <= 0:
        return "No evaluated correction helps here."
    return f"{name} brings it to {number(row['sqnr_db'] + gains[name], 1, 'dB')} {cost}."


def bits_of(cost: Any) -> float:
    """Declared cost of a correction in bits per element, 0 where none is declared."""
    value = cost.get("bits") if isinstance(cost, dict) else None
    return float(value) if isinstance(value, (int, float)) else 0.0


def coverage(run: Run) -> dict[str, Any]:
    """Coverage as a report shows it: shares of the matrix parameters, and lists with reasons."""
    data = run.data.get("coverage") or {}
    measured, parameters = data.get("measured_parameters"), data.get("parameters")
    parts: list[str] = []
    listed = {name: list(data.get(name) or []) for name in ("excluded", "unsupported")}
    for name, items in listed.items():
        size = sum(item.get("parameters") or 0 for item in items)
        if items:
            parts.append(f"{len(items)} {name} ({count(size)} parameters)")
    silent = list(data.get("not_observed") or [])
    if silent:
        parts.append(f"{len(silent)} rows not observed")
    return {
        "layers": data.get("measured"),
        "fraction": measured / parameters if measured is not None and parameters else None,
        "included_fraction": data.get("parameter_fraction"),
        "parameters": parameters,
        "remainder": f"{', '.join(parts)}." if parts else "Nothing was left out.",
        "not_observed": silent,
        "not_weights": list(data.get("not_weights") or []),
        "unmeasured_by_design": list(data.get("unmeasured_by_design") or []),
        **listed,
    }
