"""Judges a run by what an earlier one measured, and tells which bounds have room."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mxdiag.commands.diff.compare import settings_changes
from mxdiag.commands.gate.budget import (
    MORE_IS_BETTER,
    Allowance,
    Budget,
    ChangeLimit,
    ChangeRule,
    Limit,
    Rule,
)
from mxdiag.commands.gate.measures import UNMEASURED, Exact, Subject, Value, metric_of
from mxdiag.commands.gate.verdict import Check, Finding, Verdict, apart, metric_text
from mxdiag.commands.gate.violation import severity
from mxdiag.errors import BudgetError
from mxdiag.run.columns import Key, Row, correction_of, key_of
from mxdiag.run.run import Run

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


def judge_against_baseline(
    verdict: Verdict, subject: Subject, baseline: Run, budget: Budget
) -> None:
    """Add the checks, notes and hints that a baseline makes possible.

    Raises
    ------
    BudgetError
        If a `[[change]]` rule matches no row that both runs have, or bounds a correction that one
        of them did not evaluate.
    """
    run = subject.run
    now = {key_of(row): row for row in run.tensors}
    before = {key_of(row): row for row in baseline.tensors if row["status"] not in UNMEASURED}
    verdict.checks.append(_settings_check(run, baseline, budget))
    verdict.checks.append(_vanished_check(now, before, budget))
    pairs = [(before[key], row) for key, row in now.items() if key in before]
    pairs = [(old, new) for old, new in pairs if new["status"] not in UNMEASURED]
    for rule in budget.changes or (DEFAULT_CHANGES if pairs else ()):
        _require_corrections(rule, {"the run": run, "the baseline": baseline}, budget)
        verdict.checks += _judge_change(rule, pairs, budget)
    verdict.notes += _notes(now, before)
    verdict.hints += _hints(budget, subject, before)


def _notes(now: Mapping[Key, Row], before: Mapping[Key, Row]) -> Iterator[str]:
    """What the baseline cannot judge: whole layers, and single rows of layers that it has."""
    known = {key[0] for key in before}
    appeared = len({key[0] for key in now} - known)
    if appeared:
        yield f"{appeared} layers are not in the baseline; only rules judge them"
    rows = sum(
        key not in before and key[0] in known and row["status"] not in UNMEASURED
        for key, row in now.items()
    )
    if rows:
        yield f"{rows} rows were not measured in the baseline; only rules judge them"


def _require_corrections(rule: ChangeRule, runs: Mapping[str, Run], budget: Budget) -> None:
    for limit in rule.limits:
        name = correction_of(limit.metric)
        for which, run in runs.items():
            if name is not None and name not in run.corrections:
                raise BudgetError(
                    f"rule {rule.name!r} needs the correction {name!r}, which {which} did not "
                    "evaluate",
                    where=f"{budget.path}:{limit.line}",
                    advice=f"It evaluated {', '.join(run.corrections) or 'none'}",
                )


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
    judged = [pair for pair in selected if not _explained_zero(pair, budget)]
    checks = []
    for limit in rule.limits:
        for word, allowance in (("fall", limit.fall), ("rise", limit.rise)):
            if allowance is None:
                continue
            check_id = f"{rule.name}/{limit.metric}/{word}"
            found = [
                finding
                for old, new in judged
                if (finding := _moved(rule, limit, word, allowance, old, new)) is not None
            ]
            if not judged:
                found = [_vacuous(rule, limit, check_id, len(selected))]
            what = (
                f"{limit.metric} may {word} by {metric_text(limit.metric, allowance.absolute)} or "
                f"{allowance.relative:.3g} of the baseline's, for {rule.selection}"
            )
            checks.append(Check(check_id, rule.level, what, limit.line, len(judged), tuple(found)))
    return checks


def _vacuous(rule: ChangeRule, limit: ChangeLimit, check_id: str, selected: int) -> Finding:
    return Finding(
        check_id,
        rule.level,
        f"a row with {limit.metric}",
        f"each of the {selected} rows it selects is all zero, here or in the baseline",
        limit.line,
        metric=limit.metric,
        severity=math.inf,
    )


def _explained_zero(pair: tuple[Row, Row], budget: Budget) -> bool:
    """Whether a row is all zero in either run, and the budget allows it to be."""
    return any(row["status"] == "zero" for row in pair) and budget.coverage.allow_zero.match(
        pair[1]["layer"]
    )


def _moved(
    rule: ChangeRule, limit: ChangeLimit, word: str, allowance: Allowance, old: Row, new: Row
) -> Finding | None:
    """The finding if a metric moved further than it may, None if it did not.

    No number on either side is a finding, unless both rows lack it because both are exact, or both
    all zero: that is no change.
    """
    metric = limit.metric
    before, after = metric_of(old, metric), metric_of(new, metric)
    if before is None or after is None:
        if before is after and old["status"] == new["status"] in ("exact", "zero"):
            return None
        return _change_finding(rule, limit, word, (before, None, after), (old, new))
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
    return _change_finding(rule, limit, word, (before, edge, after), (old, new))


def _change_finding(
    rule: ChangeRule,
    limit: ChangeLimit,
    word: str,
    values: tuple[Value, float | None, Value],
    rows: tuple[Row, Row],
) -> Finding:
    _, edge, after = values
    metric, found = limit.metric, after if isinstance(after, float) else None
    expected, words = _change_words(limit, word, values, rows)
    new, infinite = rows[1], found is None or edge is None
    return Finding(
        f"{rule.name}/{metric}/{word}",
        rule.level,
        expected,
        words,
        limit.line,
        layer=new["layer"],
        role=new.get("role"),
        operand=new["operand"],
        gemm=new["gemm"],
        metric=metric,
        bound=edge,
        value=found,
        severity=math.inf if infinite else severity(metric, edge or 0.0, found or 0.0),
    )


def _change_words(
    limit: ChangeLimit,
    word: str,
    values: tuple[Value, float | None, Value],
    rows: tuple[Row, Row],
) -> tuple[str, str]:
    """What was expected, and what was found."""
    before, edge, after = values
    metric = limit.metric
    if before is None:
        return (
            f"a baseline's {metric} to compare with",
            f"the baseline has {_lack(metric, rows[0])}",
        )
    words = _lack(metric, rows[1]) if after is None else "no error at all"
    if isinstance(after, float):
        words = metric_text(metric, after)
    if isinstance(before, Exact):
        return "exact as in the baseline", words
    if edge is None:
        return f"a number (baseline {metric_text(metric, before)})", words
    texts = apart(metric, edge, after if isinstance(after, float) else edge)
    side = "at least" if word == "fall" else "at most"
    expected = f"{side} {texts[0]} (baseline {metric_text(metric, before)})"
    return expected, texts[1] if isinstance(after, float) else words


def _lack(metric: str, row: Row) -> str:
    why = {"zero": ": the tensor is all zero", "exact": ": the tensor is exact"}
    return f"no {metric}{why.get(row['status'], '')}"


def _hints(budget: Budget, subject: Subject, before: Mapping[Key, Row]) -> list[str]:
    """Bounds that every selected row of both runs clears by far: one run may have been lucky, two
    are a reason to tighten.
    """
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
                    f"{metric_text(limit.metric, tighter)} instead of "
                    f"{metric_text(limit.metric, limit.value)} ({budget.path}:{limit.line})"
                )
    return hints


def _tighter(rule: Rule, limit: Limit, rows: Iterable[Row]) -> float | None:
    values = [metric_of(row, limit.metric, rule.after) for row in rows]
    numbers = [value for value in values if isinstance(value, float)]
    if not numbers or None in values:
        return None
    room = _ROOM.get(limit.metric, _RELATIVE_ROOM * max(abs(limit.value), 1e-3))
    worst = min(numbers) if limit.side == "min" else max(numbers)
    slack = worst - limit.value if limit.side == "min" else limit.value - worst
    if slack <= 2 * room:
        return None
    return worst - room if limit.side == "min" else worst + room
