"""What is asked of a run once it is there: recommend, gate, suggest, diff."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mxdiag import recommendation
from mxdiag.budget import Verdict, evaluate, load_budget, suggest_budget
from mxdiag.compare import Diff, diff_runs
from mxdiag.recommendation import Recommendation
from mxdiag.run import Run, strict


def recommend(run: Run, **options: Any) -> Recommendation:
    """Recommend a correction for every row, and put it into the run.

    Fills each row's `recommended` and `reason`, and `recommendation` in `run.json`. Options are
    those of `mxdiag.recommendation.recommend`.

    Raises
    ------
    UsageError
        On a target or a correction that the run cannot serve.
    """
    result = recommendation.recommend(run.tensors, impact=run.data.get("impact"), **options)
    for row, choice in zip(run.tensors, result.choices, strict=True):
        row["recommended"], row["reason"] = choice.recommended, choice.reason
    run.data["recommendation"] = strict(
        {
            "targets": result.targets,
            "totals": result.totals,
            "gap": result.gap,
            "schedule": result.schedule and dataclasses.asdict(result.schedule),
            "sentences": result.sentences,
        }
    )
    return result


def gate(
    run: Path | str,
    budget: Path | str,
    *,
    baseline: Path | str | None = None,
    allow_not_observed: Iterable[str] = (),
    allow_unsupported: Iterable[str] = (),
) -> Verdict:
    """Judge a run folder by a budget file: see `mxdiag.budget.evaluate`."""
    return evaluate(
        Run.load(run),
        load_budget(budget),
        baseline=None if baseline is None else Run.load(baseline),
        allow_not_observed=allow_not_observed,
        allow_unsupported=allow_unsupported,
    )


def suggest(run: Path | str, **margins: Any) -> str:
    """A budget that a run meets, as TOML: see `mxdiag.budget.suggest_budget`."""
    return suggest_budget(Run.load(run), **margins)


def diff(before: Path | str, after: Path | str) -> Diff:
    """What moved between two runs: see `mxdiag.compare.diff_runs`."""
    return diff_runs(Run.load(before), Run.load(after))
