"""The `impact` part of a run as the page shows it: tables with noise marked, curves by depth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxdiag.commands.report.html.encode import place_of
from mxdiag.commands.report.impact_columns import (
    BACKWARD,
    ROLLOUT_TITLES,
    ImpactColumn,
    columns_of,
    deviations,
    is_noise,
    named,
    order,
)
from mxdiag.run.columns import finite
from mxdiag.run.run import Run, strict

PAGE_FORWARD = columns_of(
    "loss",
    "kl_mean",
    "kl_p95",
    "agreement",
    "entropy",
    "t_eff_measured",
    "t_eff_predicted",
    "routing_changed",
)
PAGE_ROLLOUT = columns_of(
    "first_divergence_mean",
    "identical",
    "log_ratio_mean",
    "log_ratio_abs_mean",
    "log_ratio_abs_p95",
    "ess",
    "outside_clip",
)
#: Splits have no reference of their own: their entropy has no value that means "no effect".
_SPLIT = (
    *columns_of("kl_mean", "agreement"),
    ImpactColumn("entropy", "entropy", 4, None, "entropy"),
)
_UNITS_SHOWN = 40
#: Fields whose value is the name of another field.
_NAMES_OF_FIELDS = ("predictor", "measure")


@dataclass(frozen=True, slots=True)
class TableCell:
    """A number of the table, whether it is noise, and its standard deviations.

    `sd` is the one over repeats, `boot` the one over resampled records; empty where there is none.
    """

    text: str
    sd: str = ""
    noise: bool = False
    boot: str = ""


@dataclass(frozen=True, slots=True)
class ImpactTable:
    """One table: heads as (column, glossary term), rows as leading texts and cells."""

    title: str
    heads: list[tuple[str, str | None]]
    rows: list[tuple[list[str], list[TableCell]]]
    note: str = ""
    open: bool = False


def _entries(found: Any) -> list[dict[str, Any]]:
    return [entry for entry in found or [] if isinstance(entry, dict)]


def _ordered(found: Any) -> list[dict[str, Any]]:
    return sorted(_entries(found), key=order)


def _fixed(value: float, digits: int) -> str:
    """Decimal places; two significant digits for what these would hardly show."""
    small = value and abs(value) < 10.0 ** (1 - digits)
    return f"{value:.2g}" if small else f"{value:.{digits}f}"


def _cell(
    entry: Mapping[str, Any], column: ImpactColumn, reference: Mapping[str, Any]
) -> TableCell:
    value = finite(entry.get(column.name))
    if value is None:
        return TableCell("n/a")
    sd, boot = ("" if d is None else f"{d:.1g}" for d in deviations(entry, column.name))
    return TableCell(_fixed(value, column.digits), sd, is_noise(entry, column, reference), boot)


def _measured(
    title: str,
    entries: Sequence[Mapping[str, Any]],
    columns: Iterable[ImpactColumn],
    reference: Mapping[str, Any],
    texts: Sequence[str] = ("config", "operands"),
    **more: Any,
) -> ImpactTable | None:
    """Those of the columns that the entries hold."""
    used = [c for c in columns if any(finite(entry.get(c.name)) is not None for entry in entries)]
    if not used:
        return None
    rows = [
        (
            [str(entry.get(name, "")) for name in texts],
            [_cell(entry, column, reference) for column in used],
        )
        for entry in entries
    ]
    heads: list[tuple[str, str | None]] = [(named(name), None) for name in texts]
    return ImpactTable(title, [*heads, *((c.head, c.term) for c in used)], rows, **more)


def _plain(title: str, found: Any, skip: Sequence[str] = (), note: str = "") -> ImpactTable | None:
    """A table of entries whose fields depend on what was measured: texts, then numbers."""
    entries = _entries(found)
    fields = dict.fromkeys(name for entry in entries for name in entry if name not in skip)
    texts = [name for name in fields if any(isinstance(entry.get(name), str) for entry in entries)]
    numbers = [
        ImpactColumn(name, named(name), 4, 0.0)
        for name in fields
        if name not in texts
        and not name.endswith("_sd")
        and any(finite(entry.get(name)) is not None for entry in entries)
    ]
    if not numbers:
        return None
    rows = []
    for entry in entries:
        cells = []
        for column in numbers:
            value, (sd, _) = finite(entry.get(column.name)), deviations(entry, column.name)
            shown = "n/a" if value is None else f"{value:.4g}"
            noise = is_noise(entry, column)
            cells.append(TableCell(shown, "" if sd is None else f"{sd:.1g}", noise))
        rows.append(([_text(name, entry.get(name)) for name in texts], cells))
    heads: list[tuple[str, str | None]] = [(named(name), None) for name in texts]
    return ImpactTable(title, [*heads, *((c.head, None) for c in numbers)], rows, note)


def _text(field: str, value: Any) -> str:
    text = str(value or "")
    return named(text) if field in _NAMES_OF_FIELDS else text


# ---- parts of it -------------------------------------------------------------------------------


def _split(found: Any) -> list[dict[str, Any]]:
    """The splits of entries, each an entry of its own, grouped by split."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for entry in _ordered(found):
        for name, values in (entry.get("splits") or {}).items():
            own = {key: entry.get(key, "") for key in ("config", "operands")}
            parts.setdefault(name, []).append({**values, **own, "part": named(name)})
    return [entry for group in parts.values() for entry in group]


def _splits(title: str, found: Any, columns: Iterable[ImpactColumn]) -> ImpactTable | None:
    columns = (ImpactColumn("tokens", named("tokens"), 0, None), *columns)
    return _measured(title, _split(found), columns, {}, ("config", "part", "operands"))


def _widest(found: Any, config: str = "all") -> dict[str, Any] | None:
    """The entry of a configuration on most operands."""
    return next((entry for entry in _ordered(found) if entry.get("config") == config), None)


def _worst(impact: Mapping[str, Any]) -> ImpactTable | None:
    """Where plain MXFP4 moves the model most; the run holds tokens by their id."""
    main = _widest(impact.get("forward")) or _widest(impact.get("both"))
    found = _entries((main or {}).get("worst"))
    if main is None or not found:
        return None
    rows = [
        (
            [_index(item.get(name)) for name in ("record", "position", "token")],
            [_cell(item, ImpactColumn("kl", "KL", 4, None), {})],
        )
        for item in found
    ]
    heads: list[tuple[str, str | None]] = [(name, None) for name in ("record", "position")]
    heads += [("token id to predict", None), ("KL", "kl_mean")]
    return ImpactTable(
        f"Positions moved most, {main['config']} on {main.get('operands', '')}",
        heads,
        rows,
        "Records and positions count from 0.",
    )


def _index(value: Any) -> str:
    number = finite(value)
    return "n/a" if number is None or number < 0 else f"{number:.0f}"


def _units(impact: Mapping[str, Any]) -> ImpactTable | None:
    found = _entries(impact.get("per_layer"))
    found.sort(key=lambda entry: -(finite(entry.get("kl_mean")) or 0.0))
    hidden = len(found) - _UNITS_SHOWN
    return _plain(
        "One layer at a time",
        found[:_UNITS_SHOWN],
        ("granularity", "config"),
        f"The {_UNITS_SHOWN} of greatest KL; run.json holds {hidden} more." if hidden > 0 else "",
    )


def _rollouts(impact: Mapping[str, Any]) -> list[ImpactTable | None]:
    found = _ordered(impact.get("rollout"))
    modes = dict.fromkeys(str(entry.get("mode", "")) for entry in found)
    tables: list[ImpactTable | None] = []
    for mode in modes:
        own = [entry for entry in found if str(entry.get("mode", "")) == mode]
        title = ROLLOUT_TITLES.get(mode) or f"Rollouts{f', {mode}' if mode else ''}"
        tables += [
            _measured(title, own, PAGE_ROLLOUT, {}),
            _splits(f"{title}, by advantage", own, PAGE_ROLLOUT),
        ]
    return tables


def tables(impact: Mapping[str, Any]) -> list[ImpactTable]:
    """The tables of the section, those without content left out."""
    reference = impact.get("reference") or {}
    forward, backward, both = (_ordered(impact.get(n)) for n in ("forward", "backward", "both"))
    main = "Forward: components and corrections"
    candidates = (
        _measured(main, forward, PAGE_FORWARD, reference, open=True),
        _splits("Forward by part of the records", forward, _SPLIT),
        _worst(impact),
        _measured("Backward: weight gradients", backward, BACKWARD, reference, open=True),
        _measured("Forward and backward together", both, (*PAGE_FORWARD, *BACKWARD), reference),
        *_rollouts(impact),
        _units(impact),
        _plain("What predicts that ranking", impact.get("per_layer_ranking")),
    )
    return [table for table in candidates if table is not None]


def validation(recommendation: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the recommended corrections were expected to do beside what they did; None if not run.

    `table`, `sentences` and `notes` as `recommend --validate` left them in the run.
    """
    found = (recommendation or {}).get("validation")
    if not isinstance(found, dict):
        return None
    columns = (
        ImpactColumn("plain", "plain MXFP4", 4, None),
        ImpactColumn("recommended", "recommended", 4, None),
        ImpactColumn("predicted_ratio", "ratio expected", 3, None),
        ImpactColumn("predicted_by_sensitivity", "expected from single layers", 3, None),
        ImpactColumn("measured_ratio", "ratio measured", 3, 1.0),
    )
    rows = [
        {**row, "measure": named(str(row.get("measure", "")))}
        for row in _entries(found.get("comparison"))
    ]
    texts = ("pass", "operands", "measure")
    return {
        "table": _measured("", rows, columns, {}, texts),
        "sentences": found.get("sentences") or [],
        "notes": found.get("notes") or [],
    }


def depth_note(impact: Mapping[str, Any]) -> str | None:
    """The paper's prediction of the gradient's growth over the blocks beside what was measured."""
    predictor = impact.get("predictor") or {}
    said, spread = finite(predictor.get("log2_norm_ratio")), finite(predictor.get("log2_spread"))
    if said is None or spread is None:
        return None
    blocks = predictor.get("blocks")
    text = (
        f"Predicted by the paper from the last block to the first: 2^Σδ = 2^{said:.2f} times the "
        f"norm, with a spread of √({blocks}/12) = {spread:.2f} octaves."
    )
    main = _widest(impact.get("backward")) or _widest(impact.get("both")) or {}
    measured = finite(main.get("log2_norm_ratio"))
    if measured is None:
        return text
    sd, _ = deviations(main, "log2_norm_ratio")
    noise = "" if sd is None else f" (± {sd:.1g} octaves)"
    return f"{text} Measured, all on {main.get('operands', '')}: 2^{measured:.2f}{noise}."


def reference_facts(impact: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The reference's numbers as (name, text)."""
    reference = impact.get("reference") or {}
    return [
        (named(name), f"{value:.0f}" if float(value).is_integer() else f"{value:.4f}")
        for name, value in reference.items()
        if finite(value) is not None and not name.endswith("_sd")
    ]


def section(run: Run) -> dict[str, Any] | None:
    """All that the page's section shows besides its charts; None if nothing was measured."""
    impact, checked = run.data.get("impact"), validation(run.data.get("recommendation"))
    if not impact and checked is None:
        return None
    impact = impact or {}
    found = tables(impact)
    shown = [*found, checked["table"]] if checked and checked["table"] else found
    cells = [cell for table in shown for _, cells in table.rows for cell in cells]
    return {
        "tables": found,
        "facts": reference_facts(impact),
        "verdict": impact.get("verdict") or [],
        "depth": depth_note(impact),
        "validation": checked,
        "resampled": any(cell.boot for cell in cells),
    }


# ---- charts ------------------------------------------------------------------------------------


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
            values = [v for v in (finite(entry.get(name)) for entry in entries) if v is not None]
            point[name] = math.fsum(values) / len(values) if values else None
        result.append(point)
    return result


def _predicted(impact: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The predicted log2 of the norm ratio at each depth, and its spread: last block to first."""
    points = _entries((impact.get("predictor") or {}).get("depths"))
    return [
        {
            "depth": point.get("depth"),
            "log2_norm_ratio": finite(point.get("log2_norm_ratio")),
            "spread": math.sqrt(count / 12),
        }
        for count, point in enumerate(points, 1)
    ]


def _numbers(found: Any) -> list[dict[str, Any]]:
    """Entries without what is nested in them."""
    return [
        {key: value for key, value in entry.items() if not isinstance(value, (list, dict))}
        for entry in _entries(found)
    ]


def curves(impact: Mapping[str, Any]) -> dict[str, Any]:
    """What the charts of the section need: small whatever the model's size."""
    both = [entry for entry in impact.get("both") or [] if entry.get("layers")]
    backward = [*(impact.get("backward") or []), *both]
    rollout = _numbers(impact.get("rollout"))
    measures = [
        (column.name, column.head)
        for column in PAGE_ROLLOUT
        if any(finite(entry.get(column.name)) is not None for entry in rollout)
    ]
    content = {
        "reference": impact.get("reference") or {},
        "attribution": [
            {**entry, "measure": named(str(entry.get("measure", "")))}
            for entry in _entries(impact.get("attribution"))
        ],
        "forward": _numbers(impact.get("forward")),
        "backward": [
            {
                "config": entry.get("config"),
                "operands": entry.get("operands"),
                "pass": "both" if entry in both else "backward",
                "depth": _by_depth(entry.get("layers")),
            }
            for entry in backward
        ],
        "predictor": _predicted(impact),
        "rollout": rollout,
        "rolloutMeasures": measures,
    }
    return strict(content)
