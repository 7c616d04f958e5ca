"""Judges the numbers that injection measured on the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mxdiag.commands.gate.budget import LAYER_RANGES, Budget, Limit, Rule
from mxdiag.commands.gate.measures import passes
from mxdiag.commands.gate.verdict import Check, Finding, apart, metric_text
from mxdiag.commands.gate.violation import bound_text, check_id, description, severity
from mxdiag.errors import BudgetError
from mxdiag.run.columns import finite
from mxdiag.run.run import Run

_DELTAS = {"loss_delta": "loss", "entropy_delta": "entropy"}


def judge_impact(rule: Rule, run: Run, budget: Budget) -> list[Check]:
    """The checks of one `[[impact]]` table.

    Raises
    ------
    BudgetError
        If the run has no impact, or none of its entries is selected.
    """
    where = f"{budget.path}:{rule.line}"
    impact = run.data.get("impact")
    if not impact:
        raise BudgetError(
            f"rule {rule.name!r} bounds the impact, and the run has none",
            where=where,
            advice="Run `mxdiag impact` with the same --out first",
        )
    entries = [entry for entry in _entries(impact, rule) if rule.selects(entry)]
    if not entries:
        raise BudgetError(
            f"rule {rule.name!r} matches nothing of the impact: {rule.selection}",
            where=where,
            advice=_available(impact),
        )
    checks = []
    for limit in rule.limits:
        found = [
            _violation(rule, limit, entry, value)
            for entry in entries
            if not passes(value := _value(entry, limit.metric, impact), limit)
        ]
        what = description(rule, limit, f"the impact, {rule.selection}")
        checks.append(
            Check(check_id(rule, limit), rule.level, what, limit.line, len(entries), tuple(found))
        )
    return checks


def _entries(impact: Mapping[str, Any], rule: Rule) -> Iterable[Mapping[str, Any]]:
    """The impact's entries with their pass; their layers where the rule is about layers."""
    for name in ("forward", "backward", "both"):
        for entry in impact.get(name) or []:
            if "layer" not in rule.select:
                yield {**entry, "pass": name}
                continue
            identity = {"pass": name, "config": entry["config"], "operands": entry["operands"]}
            for layer in entry.get("layers") or []:
                yield {**layer, **identity}


def _available(impact: Mapping[str, Any]) -> str:
    entries = [
        f"{name} {entry.get('config')} {entry.get('operands')}"
        for name in ("forward", "backward", "both")
        for entry in impact.get(name) or []
    ]
    return f"It has {', '.join(entries[:8]) or 'no entries'}"


def _value(entry: Mapping[str, Any], metric: str, impact: Mapping[str, Any]) -> float | None:
    if metric not in _DELTAS:
        return finite(entry.get(metric))
    name = _DELTAS[metric]
    value, reference = finite(entry.get(name)), finite((impact.get("reference") or {}).get(name))
    return None if value is None or reference is None else value - reference


def _violation(rule: Rule, limit: Limit, entry: Mapping[str, Any], value: float | None) -> Finding:
    expected, words = bound_text(limit), f"no {limit.metric}"
    if value is not None:
        bound, words = apart(limit.metric, limit.value, value)
        expected = f"{'at least' if limit.side == 'min' else 'at most'} {bound}"
        spread = finite(entry.get(f"{_DELTAS.get(limit.metric, limit.metric)}_sd"))
        if spread is not None:
            words += f" (standard deviation {metric_text(limit.metric, spread)})"
    layer = entry.get("layer") if limit.metric in LAYER_RANGES else None
    return Finding(
        check_id(rule, limit),
        rule.level,
        expected,
        words,
        limit.line,
        layer=layer,
        operand=entry.get("operands"),
        gemm=f"{entry['pass']}·{entry['config']}",
        metric=limit.metric,
        bound=limit.value,
        value=value,
        severity=float("inf") if value is None else severity(limit.metric, limit.value, value),
    )
