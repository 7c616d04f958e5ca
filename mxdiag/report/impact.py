"""The `impact` part of a run as the page shows it: tables with noise marked, curves by depth."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mxdiag.report.encode import place_of
from mxdiag.run import strict

#: Column, its term in the glossary, digits, and the value that "no effect" has (a name: the
#: reference's).
FORWARD = (
    ("loss", "loss", 4, "loss"),
    ("kl_mean", "kl_mean", 4, 0.0),
    ("kl_p95", "kl_mean", 3, 0.0),
    ("agreement", "agreement", 3, 1.0),
    ("entropy", "entropy", 4, "entropy"),
    ("t_eff_measured", "t_eff", 3, 1.0),
    ("t_eff_predicted", "t_eff", 3, 1.0),
)
BACKWARD = (("cosine_mean", "cosine", 4, 1.0), ("norm_ratio_mean", "cosine", 4, 1.0))
#: A difference from "no effect" below this many standard deviations is noise.
NOISE_SDS = 2.0


@dataclass(frozen=True, slots=True)
class Cell:
    """A number of the table, its standard deviation over repeats, and whether it is noise."""

    text: str
    sd: str
    noise: bool


@dataclass(frozen=True, slots=True)
class Table:
    """One table: heads as (column, glossary term), rows as leading texts and cells."""

    title: str
    heads: list[tuple[str, str | None]]
    rows: list[tuple[list[str], list[Cell]]]


def _finite(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _cell(entry: dict[str, Any], name: str, digits: int, neutral: float | None) -> Cell:
    value, sd = _finite(entry.get(name)), _finite(entry.get(f"{name}_sd"))
    if value is None:
        return Cell("n/a", "", False)
    noise = sd is not None and neutral is not None and abs(value - neutral) < NOISE_SDS * sd
    return Cell(f"{value:.{digits}f}", "" if sd is None else f"{sd:.1g}", noise)


def _measured(
    title: str,
    entries: Any,
    columns: Iterable[tuple[str, str, int, Any]],
    reference: dict[str, Any],
) -> Table | None:
    entries = [entry for entry in entries or [] if isinstance(entry, dict)]
    used = [column for column in columns if any(column[0] in entry for entry in entries)]
    if not used:
        return None
    rows = []
    for entry in entries:
        cells = []
        for name, _, digits, neutral in used:
            base = _finite(reference.get(neutral)) if isinstance(neutral, str) else neutral
            cells.append(_cell(entry, name, digits, base))
        rows.append(([str(entry.get("config", "")), str(entry.get("operands", ""))], cells))
    heads = [("config", None), ("operands", None), *((name, term) for name, term, *_ in used)]
    return Table(title, heads, rows)


def _plain(title: str, entries: Any, limit: int | None = None) -> Table | None:
    """A table of entries whose fields this page does not know by name: texts, then numbers."""
    entries = [entry for entry in entries or [] if isinstance(entry, dict)]
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    texts = [name for name in names if any(isinstance(entry.get(name), str) for entry in entries)]
    numbers = [
        name
        for name in names
        if name not in texts
        and not name.endswith("_sd")
        and any(_finite(entry.get(name)) is not None for entry in entries)
    ]
    if not numbers:
        return None
    rows = []
    for entry in entries[:limit]:
        cells = []
        for name in numbers:
            value, sd = _finite(entry.get(name)), _finite(entry.get(f"{name}_sd"))
            noise = value is not None and sd is not None and abs(value) < NOISE_SDS * sd
            shown = "n/a" if value is None else f"{value:.4g}"
            cells.append(Cell(shown, "" if sd is None else f"{sd:.1g}", noise))
        rows.append(([str(entry.get(name) or "") for name in texts], cells))
    return Table(title, [(name, None) for name in [*texts, *numbers]], rows)


def tables(impact: dict[str, Any]) -> list[Table]:
    """The tables of the section, those without content left out."""
    reference = impact.get("reference") or {}
    both = (*FORWARD, *BACKWARD)
    candidates = (
        _measured("Forward: components and corrections", impact.get("forward"), FORWARD, reference),
        _measured("Backward: weight gradients", impact.get("backward"), BACKWARD, reference),
        _measured("Forward and backward together", impact.get("both"), both, reference),
        _plain("Rollouts", impact.get("rollout")),
        _plain("One layer at a time", impact.get("per_layer"), 40),
        _plain("What predicts that ranking", impact.get("per_layer_ranking")),
    )
    return [table for table in candidates if table is not None]


def reference_facts(impact: dict[str, Any]) -> list[tuple[str, str]]:
    """The reference's numbers as (name, text)."""
    reference = impact.get("reference") or {}
    return [
        (name, f"{value:.0f}" if float(value).is_integer() else f"{value:.4f}")
        for name, value in reference.items()
        if _finite(value) is not None and not name.endswith("_sd")
    ]


def _by_depth(layers: Any) -> list[dict[str, Any]]:
    """Means over the layers of each depth, first to last."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for layer in layers or []:
        place = place_of(str(layer.get("layer", "")))
        if place is not None:
            groups.setdefault(place, []).append(layer)
    result = []
    for (_, depth), entries in sorted(groups.items()):
        point: dict[str, Any] = {"depth": depth}
        for name in ("cosine", "norm_ratio", "snr_db"):
            values = [v for v in (_finite(entry.get(name)) for entry in entries) if v is not None]
            point[name] = math.fsum(values) / len(values) if values else None
        result.append(point)
    return result


def curves(impact: dict[str, Any]) -> dict[str, Any]:
    """What the charts of the section need: small whatever the model's size."""
    both = [entry for entry in impact.get("both") or [] if entry.get("layers")]
    backward = [*(impact.get("backward") or []), *both]
    content = {
        "reference": impact.get("reference") or {},
        "attribution": impact.get("attribution") or [],
        "forward": [
            {key: value for key, value in entry.items() if not isinstance(value, (list, dict))}
            for entry in impact.get("forward") or []
        ],
        "backward": [
            {
                "config": entry.get("config"),
                "operands": entry.get("operands"),
                "pass": "both" if entry in both else "backward",
                "depth": _by_depth(entry.get("layers")),
            }
            for entry in backward
        ],
        "rollout": [
            {key: value for key, value in entry.items() if not isinstance(value, (list, dict))}
            for entry in impact.get("rollout") or []
        ],
    }
    return strict(content)
