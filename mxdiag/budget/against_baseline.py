"""Judges a run by what an earlier one measured, and tells which bounds have room."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from mxdiag.budget.measures import UNMEASURED, Exact, Row, Subject, Value, measure
from mxdiag.budget.model import (
    MORE_IS_BETTER,
    Allowance,
    Budget,
    ChangeLimit,
    ChangeRule,
    Limit,
    Rule,
)
from mxdiag.budget.verdict import Check, Finding, Verdict, apart, number
from mxdiag.budget.violation import severity
from mxdiag.compare import Key, key_of, settings_changes
from mxdiag.errors import BudgetError
from mxdiag.run import Run

#: What a baseline means to a budget without `[[change]]` rules.
DEFAULT_CHANGES = (
    ChangeRule(
        name="baseline",
        level="error",
        select={},
        line=1,
        limits=(
            ChangeLimit("sqnr_db", Allowance(absolute=0.25, relative=0.01), None, 1),
            ChangeLimit("recoverable", None, Allowance(absolute=0.02, relative=0.1), 1),
            ChangeLimit("deadzone_frac", None, Allowance(absolute=0.02, relative=0.1), 1),
        ),
    ),
)
#: A bound has room if the worst row of both runs clears it by twice this, in the metric's unit:
#: the margins of a suggested budget, which therefore never has room at once.
_ROOM = {
    "sqnr_db": 0.25,
    "sqnr_db_token": 0.25,
    "recoverable": 0.05,
    "recoverable_token": 0.05,
    "deadzone_frac": 0.05,
    "underflow_frac": 0.05,
}
#: The same for other metrics, relative to the bound.
_RELATIVE_ROOM = 0.05


def judge(verdict: Verdict, subject: Subject, baseline: Run, budget: Budget) -> None:
    """Add the checks, notes and hints that a baseline makes possible.

    Raises
    ------
    BudgetError
        If a `[[change]]` rule matches no row that both runs have.
    """
    run = subject.run
    now = {key_of(row): row for row in run.tensors}
    before = {key_of(row): row for row in baseline.tensors if row["status"] not in UNMEASURED}
    verdict.checks.append(_settings_check(run, baseline, budget))
    verdict.checks.append(_vanished_check(now, before, budget))
    pairs = [(before[key], row) for key, row in now.items() if key in before]
    pairs = [(old, new) for old, new in pairs if new["status"] not in UNMEASURED]
    for rule in budget.changes or (DEFAULT_CHANGES if pairs else ()):
        verdict.checks += _judge_change(rule, pairs, budget)
    appeared = len({row["layer"] for row in now.values()} - {key[0] for key in before})
    if appeared:
        verdict.notes.append(f"{appeared} layers are not in the baseline; only rules judge them")
    verdict.hints += _hints(budget, subject, before)


def _settings_check(run: Run, baseline: Run, budget: Budget) -> Check:
    rule, line = "baseline/settings", budget.coverage.line
    findings = tuple(
        Finding(
            rule,
            "warn",
            f"{name} {old} as in the baseline",
            f"{name} {new}: the numbers differ for that reason too",
            line,
        )
        for name, old, new in settings_changes(baseline, run)
    )
    return Check(rule, "warn", "measured as the baseline was", line, 1, findings)


def _vanished_check(now: Mapping[Key, Row], before: Mapping[Key, Row], budget: Budget) -> Check:
    rule, line = "baseline/vanished", budget.coverage.line
    gone: dict[str, list[Row]] = {}
    for key, row in before.items():
        if key not in now and not budget.coverage.allow_vanished.match(key[0]):
            gone.setdefault(key[0], []).append(row)
    layers = {key[0] for key in now}
    findings = []
    for layer, rows in gone.items():
        products = ", ".join(f"{row['operand']}·{row['gemm']}" for row in rows)
        found = f"{products} gone" if layer in layers else f"the layer is gone ({products})"
        findings.append(
            Finding(
                rule,
                "error",
                "what the baseline measured",
                found,
                line,
                layer=layer,
                role=rows[0].get("role"),
                severity=math.inf,
            )
        )
    what = "everything that the baseline measured is there"
    return Check(rule, "error", what, line, len(before), tuple(findings))


def _judge_change(
    rule: ChangeRule, pairs: Sequence[tuple[Row, Row]], budget: Budget
) -> list[Check]:
    selected = [(old, new) for old, new in pairs if rule.selects(new)]
    if not selected:
        raise BudgetError(
            f"rule {rule.name!r} matches no row of both runs: {rule.selection}",
            where=f"{budget.path}:{rule.line}",
        )
    checks = []
    for limit in rule.limits:
        for word, allowance in (("fall", limit.fall), ("rise", limit.rise)):
            if allowance is None:
                continue
            check_id = f"{rule.name}/{limit.metric}/{word}"
            found = [
                finding
                for old, new in selected
                if (finding := _moved(rule, limit, word, allowance, old, new)) is not None
            ]
            what = (
                f"{limit.metric} may {word} by {number(limit.metric, allowance.absolute)} or "
                f"{allowance.relative:.3g} of the baseline's, for {rule.selection}"
            )
            checks.append(
                Check(check_id, rule.level, what, limit.line, len(selected), tuple(found))
            )
    return checks


def _moved(
    rule: ChangeRule, limit: ChangeLimit, word: str, allowance: Allowance, old: Row, new: Row
) -> Finding | None:
    """The finding if a metric moved further than it may, None if it did not."""
    metric = limit.metric
    before, after = measure(old, metric), measure(new, metric)
    if before is None:
        return None  # nothing to compare with; the rules that bound values judge the row
    sign = 1 if word == "rise" else -1
    if isinstance(before, float) and isinstance(after, float):
        moved = sign * (after - before)
        if moved <= allowance.permitted(before):
            return None
    elif isinstance(after, Exact) or (
        # An error where there was none is worse than any bound on how much worse.
        isinstance(after, float) and (word == "fall") != (metric in MORE_IS_BETTER)
    ):
        return None
    edge = before + sign * allowance.permitted(before) if isinstance(before, float) else None
    return _change_finding(rule, limit, word, (before, edge, after), new)


def _change_finding(
    rule: ChangeRule,
    limit: ChangeLimit,
    word: str,
    values: tuple[Value, float | None, Value],
    row: Row,
) -> Finding:
    before, edge, after = values
    metric, found = limit.metric, after if isinstance(after, float) else None
    expected, words = "exact as in the baseline", f"no {metric}"
    if edge is not None and isinstance(before, float):
        texts = apart(metric, edge, edge if found is None else found)
        side = "at least" if word == "fall" else "at most"
        expected = f"{side} {texts[0]} (baseline {number(metric, before)})"
        words = texts[1] if found is not None else words
    elif found is not None:
        words = number(metric, found)
    infinite = found is None or edge is None
    return Finding(
        f"{rule.name}/{metric}/{word}",
        rule.level,
        expected,
        words,
        limit.line,
        layer=row["layer"],
        role=row.get("role"),
        operand=row["operand"],
        gemm=row["gemm"],
        metric=metric,
        bound=edge,
        value=found,
        severity=math.inf if infinite else severity(metric, edge or 0.0, found or 0.0),
    )


def _hints(budget: Budget, subject: Subject, before: Mapping[Key, Row]) -> list[str]:
    """Bounds that every selected row of both runs clears by far: one run may have been lucky, two
    are a reason to tighten."""
    hints = []
    for rule in budget.rules:
        if rule.aggregate:
            continue
        chosen = [row for row in subject.rows(rule.select) if rule.selects(row)]
        old = [before[key_of(row)] for row in chosen if key_of(row) in before]
        if not old:
            continue
        selected = [row for row in (*chosen, *old) if row["status"] not in UNMEASURED]
        for limit in rule.limits:
            tighter = _tighter(rule, limit, selected)
            if tighter is not None:
                hints.append(
                    f"{rule.name}/{limit.metric}/{limit.side} could be "
                    f"{number(limit.metric, tighter)} instead of "
                    f"{number(limit.metric, limit.value)} ({budget.path}:{limit.line})"
                )
    return hints


def _tighter(rule: Rule, limit: Limit, rows: Iterable[Row]) -> float | None:
    values = [measure(row, limit.metric, rule.after) for row in rows]
    numbers = [value for value in values if isinstance(value, float)]
    if not numbers or None in values:
        return None
    room = _ROOM.get(limit.metric, _RELATIVE_ROOM * max(abs(limit.value), 1e-3))
    worst = min(numbers) if limit.side == "min" else max(numbers)
    slack = worst - limit.value if limit.side == "min" else limit.value - worst
    if slack <= 2 * room:
        return None
    return worst - room if limit.side == "min" else worst + room
