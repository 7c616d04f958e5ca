"""The HTML report: one file, no request, and a policy that allows only the scripts in it."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import asdict
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mxdiag.commands.report import summary
from mxdiag.commands.report.glossary import MAP_METRICS, TERMS
from mxdiag.commands.report.html import impact as impact_part
from mxdiag.commands.report.html.encode import encode_rows, script_json
from mxdiag.commands.report.predictions import Prediction, predictions
from mxdiag.commands.report.text.tables import targets_in_words
from mxdiag.formats import MXFP4, SCALE_RULES
from mxdiag.run.run import Run, strict

#: Vendored libraries, and the page's own scripts and styles in the order in which they load.
VENDOR_SCRIPT, VENDOR_STYLE = "vendor.min.js", "tabulator.min.css"
SCRIPTS = (
    "dom.js",
    "store.js",
    "chartkit.js",
    "maps.js",
    "curves.js",
    "detail.js",
    "table.js",
    "impact.js",
    "main.js",
)
STYLES = ("report.css", "components.css")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _policy(scripts: list[str], styles: list[str]) -> str:
    """Nothing but the given inline scripts and styles, by hash."""
    directives = (
        "default-src 'none'",
        f"script-src {' '.join(map(_hash, scripts))}",
        f"style-src {' '.join(map(_hash, styles))}",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join(directives)


def _share_bars(run: Run) -> dict[str, Any]:
    """The three shares of each operand and GEMM as bars on one scale, in percent of its width.

    A negative reducible share stands left of zero; the other two then reach beyond 1.
    """
    totals = [t for t in summary.overall(run) if t.get("reducible") is not None]
    low = min([0.0, *(total["reducible"] for total in totals)])
    high = max([1.0, *(total["recoverable"] + total["irreducible"] for total in totals)])

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 3)

    bars = []
    for total in totals:
        start, pieces = max(0.0, total["reducible"]), []
        pieces.append(("reducible", min(0.0, total["reducible"]), start))
        for name in summary.SHARES[1:]:
            pieces.append((name, start, start + total[name]))
            start += total[name]
        drawn = [
            {"name": name, "x": place(left), "width": round(place(right) - place(left), 3)}
            for name, left, right in pieces
        ]
        bars.append(
            {"total": total, "pieces": drawn, "operand": summary.OPERAND_WORDS[total["operand"]]}
        )
    missing = [
        {"operand": total["operand"], "gemm": total["gemm"]}
        for total in summary.overall(run)
        if total.get("reducible") is None
    ]
    return {"bars": bars, "zero": place(0.0), "one": place(1.0), "missing": missing}


def _facts(run: Run) -> list[tuple[str, str]]:
    """The line under the title: what was measured, how and with what."""
    model, settings = run.data["model"], run.data["settings"] or {}
    environment = run.data.get("environment") or {}
    calibration = settings.get("calib") or (
        None if settings.get("weights_only") else "built-in text"
    )
    candidates = (
        ("Architecture", model.get("architecture")),
        ("Parameters", summary.count(model["parameters"]) if model.get("parameters") else None),
        ("Revision", model.get("revision")),
        ("Scale rule", settings.get("scale_rule")),
        ("Calibration", calibration),
        ("Backend", environment.get("backend")),
        ("Device", environment.get("device")),
        ("Measured", str(run.data.get("created") or "")[:16].replace("T", " ")),
        ("mxdiag", run.data.get("mxdiag_version")),
    )
    return [(name, str(value)) for name, value in candidates if value not in (None, "")]


def _settings(run: Run) -> list[tuple[str, str]]:
    """Every setting and every fact of the environment, flat, for the section on method."""
    listed: list[tuple[str, str]] = []
    for group in ("settings", "environment"):
        for name, value in (run.data.get(group) or {}).items():
            if isinstance(value, dict):
                listed += [(f"{name}.{key}", str(item)) for key, item in value.items()]
            elif value not in (None, [], ()):
                text = (
                    ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
                )
                listed.append((name, text))
    return listed


def _gate(gate: dict[str, Any] | None) -> dict[str, Any] | None:
    """The verdict of a gate: `passed` and its violations, worst level first."""
    if gate is None:
        return None
    violations = [item for item in gate.get("violations") or [] if isinstance(item, dict)]
    ordered = sorted(violations, key=lambda item: item.get("level") == "warn")
    return {**gate, "passed": bool(gate.get("passed", not violations)), "violations": ordered}


def _page_data(run: Run) -> dict[str, Any]:
    """What the page's scripts read, besides the rows."""
    return {
        "terms": {name: asdict(term) for name, term in TERMS.items()},
        "mapMetrics": MAP_METRICS,
        "corrections": run.data.get("corrections") or {},
        "deltaLow": _delta_low(run),
        "totals": [
            {key: value for key, value in total.items() if not isinstance(value, (list, dict))}
            for total in run.data["totals"]
        ],
    }


def _prediction_matrix(run: Run) -> dict[str, Any]:
    """Predictions as one line per claim and one column per operand and GEMM."""
    found = predictions(run)
    claims: dict[str, dict[str, Prediction]] = {}
    for item in found:
        claims.setdefault(item.claim, {})[item.cell] = item
    return {
        "cells": list(dict.fromkeys(item.cell for item in found)),
        "claims": [
            (claim, next(iter(cells.values())).source, cells) for claim, cells in claims.items()
        ],
    }


def _recommendation(run: Run) -> dict[str, Any]:
    """The sentences of the run's recommendation, and its targets in words."""
    found = run.data.get("recommendation") or {}
    targets = found.get("targets") or {}
    words = targets_in_words(targets)
    return {"recommendation": found.get("sentences") or [], "targets": words}


def _delta_low(run: Run) -> float:
    """Lower end of the octave that the δ histograms span."""
    name = (run.data.get("settings") or {}).get("scale_rule") or "rceil"
    return SCALE_RULES[name].delta_low(MXFP4.element) if name in SCALE_RULES else 0.0


def render_html(run: Run, *, gate: dict[str, Any] | None = None) -> str:
    """The report as one self-contained HTML document.

    Parameters
    ----------
    run
        The run to show; the model is not needed.
    gate
        The verdict of a gate as `Verdict.as_dict` gives it (see `mxdiag.commands.gate`): `passed`,
        `budget` and `violations`. None if no gate ran.

    Returns
    -------
    str
        Loads nothing and runs nothing but its own scripts, whatever the layers are called.
    """
    scripts = [_asset(VENDOR_SCRIPT), "\n".join(["'use strict';", *map(_asset, SCRIPTS)])]
    styles = [_asset(VENDOR_STYLE), *map(_asset, STYLES)]
    environment = Environment(
        loader=PackageLoader("mxdiag.commands.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        breakable=_breakable,
        code_spans=_code_spans,
        percent=summary.percent,
        number=summary.number,
        count=summary.count,
        sig=_sig,
    )
    impact = impact_part.section(run)
    curves = impact_part.curves(run.data.get("impact") or {}) if impact else None
    rows = encode_rows(run)
    page = environment.get_template("report.html.j2").render(
        policy=_policy(scripts, styles),
        scripts=[Markup(script) for script in scripts],
        styles=[Markup(style) for style in styles],
        rows_json=Markup(script_json(rows)),
        page_json=Markup(script_json(strict(_page_data(run)))),
        impact_json=Markup(script_json(curves)),
        model=run.data["model"],
        facts=_facts(run),
        settings=_settings(run),
        shares=_share_bars(run),
        worst=summary.worst_layers(run),
        coverage=summary.coverage(run),
        warnings=[str(warning) for warning in run.data.get("warnings") or []],
        predictions=_prediction_matrix(run),
        **_recommendation(run),
        gate=_gate(gate),
        impact=impact,
        terms=TERMS,
        has_depth=bool(rows["places"]),
        has_experts=any(row.get("expert") is not None for row in run.tensors),
        has_sweep="mse_ratio:scale:m0" in rows["measures"],
        has_corrections=rows["measures"][-1].startswith("mse_ratio:"),
    )
    # A name may hold half of a surrogate pair, which no encoding can write.
    return page.encode("utf-8", "replace").decode("utf-8")


def _code_spans(text: str) -> Markup:
    """Text, escaped, with what stands in backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _breakable(name: str) -> Markup:
    """A dotted name that may wrap after its dots."""
    return Markup(".<wbr>").join(name.split("."))


def _sig(value: float | None, digits: int = 3) -> str:
    return "n/a" if value is None else f"{value:#.{digits}g}".removesuffix(".")
