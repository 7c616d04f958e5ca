"""Turns a value beyond its bound into a finding, with the corrections that would help."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mxdiag.commands.gate.budget import AFTER_METRICS, Limit, Rule
from mxdiag.commands.gate.measures import Exact, Subject, Value, aggregate, metric_of, passes
from mxdiag.commands.gate.verdict import Finding, Fix, apart, metric_text
from mxdiag.run.columns import Row, finite

_SIDES = {"min": "at least", "max": "at most"}


def check_id(rule: Rule, limit: Limit) -> str:
    """The stable id of one bound."""
    return f"{rule.name}/{limit.metric}/{limit.side}"


def bound_text(limit: Limit) -> str:
    """The bound in words."""
    return f"{_SIDES[limit.side]} {metric_text(limit.metric, limit.value)}"


def description(rule: Rule, limit: Limit, of: str) -> str:
    """What a check checks, in words."""
    after = f" after {rule.after}" if rule.after else ""
    what = f"{rule.aggregate} of {limit.metric}" if rule.aggregate else limit.metric
    return f"{what}{after} is {bound_text(limit)} for {of}"


def violation(
    rule: Rule,
    limit: Limit,
    value: Value,
    rows: Sequence[Row],
    subject: Subject,
    row: Row | None,
) -> Finding:
    """The finding for rows (one, or those of an aggregate) whose value is not within the bound."""
    found = value if isinstance(value, float) else None
    expected = bound_text(limit)
    words = _no_number(value, limit, rule, row)
    if found is not None:
        texts = apart(limit.metric, limit.value, found)
        expected, words = f"{_SIDES[limit.side]} {texts[0]}", texts[1]
    if rule.aggregate:
        words = f"{words} ({rule.aggregate} of {len(rows)} rows)"
    identity = {key: (row or {}).get(key) for key in ("layer", "role", "operand", "gemm")}
    if identity["layer"] is None and identity["role"] is not None:
        identity["layer"] = f"all {identity['role']}"
    return Finding(
        check_id(rule, limit),
        rule.level,
        expected,
        words if rule.after is None else f"{words} after {rule.after}",
        limit.line,
        metric=limit.metric,
        bound=limit.value,
        value=found,
        severity=math.inf if found is None else severity(limit.metric, limit.value, found),
        fixes=None if found is None else _fixes(rule, limit, rows, subject),
        **identity,
    )


def severity(metric: str, bound: float, found: float) -> float:
    """How far beyond the bound, so that violations of unlike metrics can be sorted: decibels as a
    ratio of errors, everything else relative to the bound.
    """
    excess = abs(found - bound)
    if metric.removesuffix("_token").endswith("_db"):
        return excess / 10
    return math.log10(1 + excess / max(abs(bound), 1e-3))


def _no_number(value: Value, limit: Limit, rule: Rule, row: Row | None) -> str:
    if isinstance(value, Exact):
        return "no error at all"
    status = (row or {}).get("status")
    if status == "zero":
        return f"no {limit.metric}: the tensor is all zero"
    if rule.after is not None and row is not None and metric_of(row, limit.metric) is not None:
        return f"no {limit.metric}: {rule.after} was not evaluated here"
    return f"no {limit.metric}"


def _fixes(
    rule: Rule, limit: Limit, rows: Sequence[Row], subject: Subject
) -> tuple[Fix, ...] | None:
    """The corrections under which the bound would hold, cheapest first: fewer GEMM passes, then
    fewer bits, then a lower error.
    """
    names = subject.corrections
    if limit.metric not in AFTER_METRICS or not names:
        return None
    fixes = []
    for name in names:
        if name == rule.after:
            continue
        value = (
            aggregate(rows, limit, rule.aggregate, name)[0]
            if rule.aggregate
            else metric_of(rows[0], limit.metric, name)
        )
        if value is not None and passes(value, limit):
            cost = subject.costs.get(name) or {}
            bits, gemm_passes = finite(cost.get("bits")), finite(cost.get("gemm_passes"))
            reached = None if isinstance(value, Exact) else value
            fixes.append(Fix(name, reached, bits, gemm_passes))
    return tuple(sorted(fixes, key=_cost))


def _cost(fix: Fix) -> tuple[float, float, str]:
    unknown = math.inf
    return (
        unknown if fix.gemm_passes is None else fix.gemm_passes,
        unknown if fix.bits is None else fix.bits,
        fix.correction,
    )
