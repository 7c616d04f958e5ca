"""Judging runs by an earlier one: changes, what vanished, and hints."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_fixtures import judge, make_run, plain_run, row, rule

from mxdiag.errors import BudgetError
from mxdiag.run import Run

CHANGE = '[[change]]\nname = "c"\nbounds.sqnr_db.fall = { absolute = 0.2, relative = 0.02 }\n'


def _pair(before: float | None, after: float | None) -> tuple[Run, Run]:
    return make_run([row("a", sqnr_db=before)]), make_run([row("a", sqnr_db=after)])


@pytest.mark.parametrize(
    ("before", "after", "passes"),
    [
        (20.0, 19.61, True),  # within 2 % of 20
        (20.0, 19.59, False),
        (5.0, 4.81, True),  # beyond 2 % of 5, but within 0.2
        (5.0, 4.79, False),
        (20.0, 25.0, True),  # better
        (20.0, None, False),
        (-5.0, -5.21, False),
    ],
)
def test_change_needs_both_relative_and_absolute(
    tmp_path: Path, before: float, after: float | None, passes: bool
) -> None:
    old, new = _pair(before, after)
    verdict = judge(tmp_path, new, CHANGE, baseline=old)
    assert verdict.passed is passes
    if not passes:
        assert verdict.findings[0].rule == "c/sqnr_db/fall"


def test_a_rise_of_a_share(tmp_path: Path) -> None:
    text = '[[change]]\nname = "c"\nbounds.recoverable.rise.absolute = 0.01\n'
    old, new = make_run([row("a", recoverable=0.02)]), make_run([row("a", recoverable=0.04)])
    assert not judge(tmp_path, new, text, baseline=old).passed
    assert judge(tmp_path, old, text, baseline=new).passed


def test_change_from_and_to_exact(tmp_path: Path) -> None:
    exact, inexact = make_run([row("a", "exact")]), make_run([row("a")])
    (finding,) = judge(tmp_path, inexact, CHANGE, baseline=exact).findings
    assert finding.expected == "exact as in the baseline"
    assert judge(tmp_path, exact, CHANGE, baseline=inexact).passed
    assert judge(tmp_path, exact, CHANGE, baseline=exact).passed


def test_a_baseline_judges_without_change_rules_too(tmp_path: Path) -> None:
    text = rule("bounds.rms.min = 0.1")
    old, new = make_run([row("a", seed=1)]), make_run([row("a", "outliers", seed=1)])
    assert judge(tmp_path, old, text, baseline=old).passed
    verdict = judge(tmp_path, new, text, baseline=old)
    assert {f.rule for f in verdict.findings} >= {"baseline/recoverable/rise"}


def test_a_vanished_layer_fails(tmp_path: Path) -> None:
    old = make_run([row("a"), row("b"), row("b", operand="A")])
    new = make_run([row("a")])
    (finding,) = judge(tmp_path, new, CHANGE, baseline=old).findings
    assert (finding.rule, finding.layer) == ("baseline/vanished", "b")
    assert "the layer is gone (W·fprop, A·fprop)" in finding.found
    partly = make_run([row("a"), row("b")])
    (finding,) = judge(tmp_path, partly, CHANGE, baseline=old).findings
    assert finding.found == "A·fprop gone"
    allowed = CHANGE + '[baseline]\nallow_vanished = ["b"]\n'
    assert judge(tmp_path, new, allowed, baseline=old).passed


def test_other_settings_are_said(tmp_path: Path) -> None:
    old, new = plain_run(), plain_run()
    new.data["settings"] |= {"scale_rule": "floor", "out": "elsewhere"}
    verdict = judge(tmp_path, new, CHANGE, baseline=old)
    (finding,) = verdict.findings
    assert (finding.rule, finding.level) == ("baseline/settings", "warn")
    assert "'rceil'" in finding.expected
    assert "'floor'" in finding.found


def test_room_is_hinted_only_if_both_runs_have_it(tmp_path: Path) -> None:
    text = rule("bounds.sqnr_db.min = 10.0")
    good, poor = make_run([row("a", sqnr_db=18.0)]), make_run([row("a", sqnr_db=10.4)])
    (hint,) = judge(tmp_path, good, text, baseline=good).hints
    assert "r/sqnr_db/min could be 17.75 dB instead of 10.00 dB" in hint
    assert judge(tmp_path, good, text, baseline=poor).hints == []
    assert judge(tmp_path, good, text).hints == []


def test_change_rules_without_a_baseline_are_said_not_judged(tmp_path: Path) -> None:
    verdict = judge(tmp_path, plain_run(), CHANGE)
    assert verdict.passed
    assert "no baseline" in verdict.notes[0]


def test_a_change_rule_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="matches no row of both runs"):
        judge(tmp_path, make_run([row("b")]), CHANGE, baseline=make_run([row("a")]))
