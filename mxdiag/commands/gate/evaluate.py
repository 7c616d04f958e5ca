"""Judges a run by a budget."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable

from mxdiag.commands.gate import against_baseline, coverage, impact
from mxdiag.commands.gate.budget import Budget, Globs, Limit, Rule
from mxdiag.commands.gate.measures import UNMEASURED, Subject, aggregate, metric_of, passes
from mxdiag.commands.gate.verdict import Check, Finding, Verdict
from mxdiag.commands.gate.violation import bound_text, check_id, description, violation
from mxdiag.errors import BudgetError
from mxdiag.run.columns import Row, correction_of
from mxdiag.run.run import Run


def evaluate(
    run: Run,
    budget: Budget,
    *,
    baseline: Run | None = None,
    allow_not_observed: Iterable[str] = (),
    allow_unsupported: Iterable[str] = (),
) -> Verdict:
    """Judge a run by a budget, and by a baseline if there is one.

    Rows that were not observed and layers that are unsupported fail unless the budget or the
    arguments allow them, rows with non-finite values always fail; no other rule judges them.

    Parameters
    ----------
    run, budget
        What is judged, and by what.
    baseline
        An earlier run: `[[change]]` rules compare with it, and what it measured must be there.
    allow_not_observed, allow_unsupported
        Patterns of layers, added to the budget's own.

    Raises
    ------
    BudgetError
        If a rule matches nothing, names a correction that the run did not evaluate, or bounds an
        impact that the run does not have.
    """
    budget = _allowing(budget, allow_not_observed, allow_unsupported)
    verdict = Verdict(
        run=run_label(run),
        budget=budget.path,
        baseline=None if baseline is None else run_label(baseline),
    )
    verdict.checks += coverage.judge_coverage(run, budget)
    subject = Subject(run)
    for rule in budget.rules:
        verdict.checks += _judge_rows(rule, _select(rule, subject, budget), subject, budget)
    for rule in budget.totals:
        verdict.checks += _judge_totals(rule, subject, budget)
    for rule in budget.impacts:
        verdict.checks += impact.judge_impact(rule, run, budget)
    if baseline is not None:
        against_baseline.judge_against_baseline(verdict, subject, baseline, budget)
    elif budget.changes:
        verdict.notes.append(
            f"{len(budget.changes)} [[change]] rules were not judged: no baseline was given"
        )
    return verdict


def run_label(run: Run) -> str:
    """The run's folder, or what it measured if it was never written."""
    if run.folder is not None:
        return str(run.folder)
    return str((run.data.get("model") or {}).get("source") or "run")


def _allowing(budget: Budget, not_observed: Iterable[str], unsupported: Iterable[str]) -> Budget:
    allowed = budget.coverage
    more = dataclasses.replace(
        allowed,
        allow_not_observed=Globs((*allowed.allow_not_observed.patterns, *not_observed)),
        allow_unsupported=Globs((*allowed.allow_unsupported.patterns, *unsupported)),
    )
    return dataclasses.replace(budget, coverage=more)


def _select(rule: Rule, subject: Subject, budget: Budget) -> list[Row]:
    """The rows that a rule is about, those without a measurement included."""
    _require_correction(rule, subject, budget)
    rows = [row for row in subject.rows(rule.select) if rule.selects(row)]
    if not rows:
        raise BudgetError(
            f"rule {rule.name!r} matches no row: {rule.selection}",
            where=f"{budget.path}:{rule.line}",
            advice=_nearest(rule, subject.run.tensors),
        )
    return rows


def _nearest(rule: Rule, items: Iterable[Row]) -> str:
    """Advice for a rule that matches nothing: a field none of whose values it selects."""
    items = list(items)
    for key, globs in rule.select.items():
        values = sorted({str(item.get(key)) for item in items if item.get(key) is not None})
        if any(globs.match(value) for value in values):
            continue
        close = difflib.get_close_matches(globs.patterns[0], values, n=3, cutoff=0.4)
        shown = close or values[:8]
        return (
            f"The run's {key} values include {', '.join(map(repr, shown))}"
            if shown
            else "It has no rows"
        )
    return "Each selector matches something, but nothing matches all of them"


def _require_correction(rule: Rule, subject: Subject, budget: Budget) -> None:
    names = {name for limit in rule.limits if (name := correction_of(limit.metric)) is not None}
    names |= {rule.after} if rule.after is not None else set()
    known = subject.corrections
    for name in sorted(names.difference(known)):
        raise BudgetError(
            f"rule {rule.name!r} needs the correction {name!r}, which the run did not evaluate",
            where=f"{budget.path}:{rule.line}",
            advice=f"It evaluated {', '.join(known) or 'none'}",
        )


def _judge_rows(rule: Rule, selected: list[Row], subject: Subject, budget: Budget) -> list[Check]:
    zero = budget.coverage.allow_zero
    rows = [
        row
        for row in selected
        if row["status"] not in UNMEASURED
        and not (row["status"] == "zero" and zero.match(row["layer"]))
    ]
    checks = []
    for limit in rule.limits:
        if not rows:
            found = [_vacuous(rule, limit, len(selected))]
        elif rule.aggregate:
            found = _judge_aggregate(rule, limit, rows, subject)
        else:
            found = [
                violation(rule, limit, value, [row], subject, row)
                for row in rows
                if not passes(value := metric_of(row, limit.metric, rule.after), limit)
            ]
        what = description(rule, limit, rule.selection)
        checks.append(
            Check(check_id(rule, limit), rule.level, what, limit.line, len(rows), tuple(found))
        )
    return checks


def _vacuous(rule: Rule, limit: Limit, selected: int) -> Finding:
    return Finding(
        check_id(rule, limit),
        rule.level,
        bound_text(limit),
        f"none of the {selected} rows it selects was measured",
        limit.line,
        metric=limit.metric,
        bound=limit.value,
        severity=math.inf,
    )


def _judge_aggregate(rule: Rule, limit: Limit, rows: list[Row], subject: Subject) -> list[Finding]:
    assert rule.aggregate is not None
    value, row = aggregate(rows, limit, rule.aggregate, rule.after)
    if passes(value, limit):
        return []
    return [violation(rule, limit, value, rows, subject, row)]


def _judge_totals(rule: Rule, subject: Subject, budget: Budget) -> list[Check]:
    _require_correction(rule, subject, budget)
    totals = [
        total
        for total in subject.run.data["totals"]
        if rule.selects(total) and ("role" in rule.select or total.get("role") is None)
    ]
    if not totals:
        raise BudgetError(
            f"rule {rule.name!r} matches no total: {rule.selection}",
            where=f"{budget.path}:{rule.line}",
            advice=_nearest(rule, subject.run.data["totals"]),
        )
    checks = []
    for limit in rule.limits:
        found = [
            violation(rule, limit, value, [total], subject, total)
            for total in totals
            if not passes(value := metric_of(total, limit.metric, rule.after), limit)
        ]
        what = description(rule, limit, f"totals of {rule.selection}")
        checks.append(
            Check(check_id(rule, limit), rule.level, what, limit.line, len(totals), tuple(found))
        )
    return checks
