"""What moved between two runs: sorted by how much it matters, and shown in every format."""

from __future__ import annotations

import copy
import io
import json
import re

import pytest
from rich.console import Console

from mxdiag.commands.diff.compare import diff_runs, settings_changes
from mxdiag.commands.report.escape import markdown_code
from mxdiag.commands.report.text.diff import DIFF_FORMATS, diff_headline, render_diff
from mxdiag.commands.report.text.tables import printable
from mxdiag.errors import UsageError
from mxdiag.run.run import Run
from run_fixtures import HOSTILE, IMPACT, hostile_run, make_run, plain_run, row


def _copy(run: Run) -> Run:
    return Run(copy.deepcopy(run.data))


def _text(before: Run, after: Run) -> str:
    console = Console(file=io.StringIO(), width=100_000)
    console.print(render_diff(diff_runs(before, after)))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_does_not_differ_from_itself() -> None:
    run = plain_run()
    diff = diff_runs(run, _copy(run))
    assert (diff.changes, diff.settings, diff.totals, diff.impact) == ([], [], {}, [])
    assert diff.unchanged == len(run.tensors)


def test_rounding_has_not_moved_and_a_change_has() -> None:
    run = plain_run()
    other = _copy(run)
    # The fast paths agree with the reference to 1e-6 of the error's parts.
    other.tensors[0]["recoverable"] *= 1 + 1e-7
    other.tensors[0]["closure_residual"] = 1e-9
    other.tensors[1]["recoverable"] *= 1 + 1e-4
    (change,) = diff_runs(run, other).changes
    assert (change.layer, change.operand) == ("model.layers.0.q_proj", "A")
    assert set(change.metrics) == {"recoverable"}
    assert diff_runs(run, other, tolerance=1e-3).changes == []
    assert len(diff_runs(run, other, tolerance=1e-9).changes) == 2


def test_error_change_is_the_share_of_the_operands_whole_error() -> None:
    before = make_run(
        [
            row("small", numel=100, rel_mse=0.01),
            row("large", numel=900, rel_mse=0.01),
            row("small", operand="A", numel=10, rel_mse=0.5),
        ]
    )
    after = _copy(before)
    after.tensors[0]["rel_mse"] = 0.02  # its element share is 0.1, so + 0.1 of the error of W
    after.tensors[1]["rel_mse"] = 0.015  # 0.9, so + 0.45
    changes = diff_runs(before, after).changes
    assert [(c.layer, c.operand) for c in changes] == [("large", "W"), ("small", "W")]
    assert [c.error_change for c in changes] == pytest.approx([0.45, 0.1])
    better = diff_runs(after, before).changes
    assert better[0].error_change == pytest.approx(-0.45 / 1.55)


def test_more_tokens_alone_change_no_share() -> None:
    before = make_run([row("a", operand="A", numel=10), row("b", operand="A", numel=30)])
    after = _copy(before)
    for item in after.tensors:
        item["numel"] *= 7
    assert diff_runs(before, after).changes == []


def test_an_error_where_there_was_none_counts() -> None:
    before, after = make_run([row("a", "exact")]), make_run([row("a")])
    (change,) = diff_runs(before, after).changes
    assert change.kind == "status"
    assert change.status == ("exact", "ok")
    assert change.error_change == pytest.approx(1.0)
    (back,) = diff_runs(after, before).changes
    assert back.error_change == pytest.approx(-1.0)


def test_the_order_is_non_finite_vanished_then_by_error() -> None:
    before = make_run([row(name) for name in ("same", "moved", "gone", "broken", "silent", "tiny")])
    after = make_run(
        [
            row("same"),
            row("moved", "outliers"),
            row("broken", "nan"),
            row("silent", "unseen"),
            row("tiny", rel_mse=row("x")["rel_mse"] * 1.001),
            row("new", "laplace"),
        ]
    )
    diff = diff_runs(before, after)
    assert (diff.changes[0].layer, diff.changes[0].kind) == ("broken", "nonfinite")
    assert {(c.layer, c.kind) for c in diff.changes[1:3]} == {
        ("gone", "vanished"),
        ("silent", "vanished"),
    }
    rest = diff.changes[3:]
    assert rest[-1].layer == "tiny"
    assert {(c.layer, c.kind) for c in rest} == {
        ("moved", "moved"),
        ("new", "appeared"),
        ("tiny", "moved"),
    }
    assert [abs(c.error_change) for c in rest] == sorted(
        (abs(c.error_change) for c in rest), reverse=True
    )
    assert diff.unchanged == 1
    for words in ("1 non-finite", "2 vanished", "1 appeared", "2 moved", "1 unchanged"):
        assert words in diff_headline(diff)


def test_a_row_that_vanished_moves_no_other() -> None:
    before = make_run([row("a"), row("b"), row("c")])
    after = make_run([row("a"), row("b", rel_mse=1.001 * row("b")["rel_mse"])])
    changes = {change.layer: change.error_change for change in diff_runs(before, after).changes}
    # A vanished row counts by its share of the elements that are left to compare.
    assert changes["c"] == pytest.approx(-1 / 3)
    assert changes["b"] == pytest.approx(0.001 / 3)


def test_settings_that_change_the_measurement_are_told() -> None:
    before, after = plain_run(), plain_run()
    after.data["settings"] |= {"scale_rule": "even", "seed": 1, "out": "x", "device": "cuda"}
    after.data["model"]["architecture"] = "Other"
    names = [name for name, *_ in settings_changes(before, after)]
    assert names == ["scale_rule", "seed", "architecture"]
    assert "warning: scale_rule was 'rceil', is 'even'" in _text(before, after)


def test_totals_that_moved() -> None:
    before = make_run([row("a"), row("b", operand="A")])
    after = make_run([row("a", "outliers"), row("b", operand="A")])
    diff = diff_runs(before, after)
    assert set(diff.totals) == {("W", "fprop")}
    old, new = diff.totals["W", "fprop"]["sqnr_db"]
    assert (old, new) == (before.data["totals"][0]["sqnr_db"], after.data["totals"][0]["sqnr_db"])


def test_impact_below_two_deviations_is_noise() -> None:
    before = make_run([row("a")], impact=copy.deepcopy(IMPACT))
    after = make_run([row("a")], impact=copy.deepcopy(IMPACT))
    entry = after.data["impact"]["forward"][0]
    entry["kl_mean"] += 0.01  # deviation of the difference: 0.004 * sqrt(2), twice that 0.0113
    entry["loss"] += 0.05  # twice 0.01 * sqrt(2) is 0.028
    entry["agreement"] = 0.8  # no deviation was measured
    found = {change.metric: change.noise for change in diff_runs(before, after).impact}
    assert found == {"kl_mean": True, "loss": False, "agreement": None}
    assert "forward all WA: kl_mean 0.06 → 0.07 (noise" in _text(before, after)


def _hostile() -> tuple[Run, Run]:
    before = hostile_run()
    after = make_run([row(name, "laplace", role="r", seed=9) for name in HOSTILE])
    return before, after


def test_text_holds_every_name_whole() -> None:
    text = _text(*_hostile())
    for name in HOSTILE:
        assert f" {printable(name)} W·fprop: sqnr_db " in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


def test_json_is_strict_and_complete() -> None:
    def refuse(name: str) -> None:
        raise ValueError(name)

    data = json.loads(str(render_diff(diff_runs(*_hostile()), "json")), parse_constant=refuse)
    assert [c["layer"] for c in data["changes"]] != []
    assert {c["layer"] for c in data["changes"]} == set(HOSTILE)
    assert all(c["metrics"]["sqnr_db"][0] is not None for c in data["changes"])


def test_markdown_and_github() -> None:
    diff = diff_runs(*_hostile())
    markdown = str(render_diff(diff, "markdown"))
    for name in HOSTILE:
        assert f"| {markdown_code(f'{name} W·fprop')} | sqnr_db " in markdown
    assert "<img" not in re.sub(r"`[^`]*`", "", markdown)
    log = str(render_diff(diff, "github"))
    commands = [line for line in log.split("\n") if line.startswith("::")]
    assert len(commands) == 10  # as many notices as GitHub shows
    assert all(line.startswith("::notice title=mxdiag diff::") for line in commands)
    assert not any("##[" in line for line in log.split("\n") if not line.startswith("::"))


def test_a_format_that_makes_no_sense_is_refused() -> None:
    assert DIFF_FORMATS == ("text", "github", "json", "markdown")
    with pytest.raises(UsageError, match="unknown format 'sarif'"):
        render_diff(diff_runs(plain_run(), plain_run()), "sarif")
