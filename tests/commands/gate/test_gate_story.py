"""The whole story on one layer that goes bad: suggest, pass, corrupt, fail, diff."""

from __future__ import annotations

from pathlib import Path

from mxdiag.commands.diff.compare import diff_runs
from mxdiag.commands.gate.evaluate import evaluate
from mxdiag.commands.gate.parse import load_budget
from mxdiag.commands.gate.suggest import suggest_budget
from mxdiag.run.run import Run
from run_fixtures import make_run, row


def test_a_corrupted_layer_fails_by_name_and_leads_the_diff(tmp_path: Path) -> None:
    names = [f"model.layers.{depth}.q_proj" for depth in range(4)]
    make_run([row(name, seed=i) for i, name in enumerate(names)]).write(tmp_path / "before")
    before = Run.load(tmp_path / "before")
    (tmp_path / "budget.toml").write_text(suggest_budget(before))
    budget = load_budget(tmp_path / "budget.toml")
    assert evaluate(before, budget, baseline=before).exit_code == 0

    kinds = ["normal", "normal", "outliers", "normal"]
    rows = [
        row(name, kind, seed=i) for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    make_run(rows).write(tmp_path / "after")
    after = Run.load(tmp_path / "after")
    verdict = evaluate(after, budget, baseline=before)
    assert verdict.exit_code == 1
    assert {finding.layer for finding in verdict.findings} == {names[2]}
    assert [change.layer for change in diff_runs(before, after).changes] == [names[2]]
