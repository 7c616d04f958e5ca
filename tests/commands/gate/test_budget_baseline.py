"""Judging runs by an earlier one: changes, what vanished, and hints."""

from __future__ import annotations

from pathlib import Path

import pytest

from mxdiag.errors import BudgetError
from mxdiag.run.run import Run
from run_fixtures import judge, make_run, plain_run, row, rule

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


TOKENS = '[[change]]\nname = "c"\nbounds.sqnr_db_token.fall.absolute = 0.2\n'


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (None, 20.0, "the baseline has no sqnr_db"),
        (20.0, None, "no sqnr_db"),
        (None, None, "the baseline has no sqnr_db"),
    ],
)
def test_no_number_on_either_side_fails(
    tmp_path: Path, before: float | None, after: float | None, found: str
) -> None:
    old, new = _pair(before, after)
    (finding,) = judge(tmp_path, new, CHANGE, baseline=old).findings
    assert (finding.rule, finding.level, finding.found) == ("c/sqnr_db/fall", "error", found)


def test_a_metric_that_rows_never_have_fails_as_it_does_in_a_rule(tmp_path: Path) -> None:
    """W has no tokens: a bound on per-token numbers that selects W is a mistake, not a pass."""
    run = make_run([row("a"), row("a", operand="A")])
    (finding,) = judge(tmp_path, run, TOKENS, baseline=run).findings
    (plain,) = judge(tmp_path, run, rule("bounds.sqnr_db_token.min = 1")).findings
    assert finding.operand == plain.operand == "W"


def test_exact_and_zero_rows_explain_their_missing_numbers(tmp_path: Path) -> None:
    text = '[[change]]\nname = "c"\nbounds.delta_mean.rise.absolute = 1.0\n'
    text += "bounds.cos_scale_grid.rise.absolute = 1.0\n"
    for kind in ("exact", "zero"):
        run = make_run([row("a", kind)])
        assert judge(tmp_path, run, CHANGE, baseline=run).passed, kind
        assert judge(tmp_path, run, text, baseline=run).passed, kind


@pytest.mark.parametrize(("before", "after"), [("normal", "zero"), ("zero", "normal")])
def test_becoming_zero_or_no_longer_being_it_fails_unless_allowed(
    tmp_path: Path, before: str, after: str
) -> None:
    old, new = make_run([row("a", before)]), make_run([row("a", after)])
    (finding,) = judge(tmp_path, new, CHANGE, baseline=old).findings
    assert "no sqnr_db: the tensor is all zero" in finding.found
    allowed = '[coverage]\nallow_zero = ["a"]\n' + CHANGE
    (finding,) = judge(tmp_path, new, allowed, baseline=old).findings  # nothing is left to judge
    assert "each of the 1 rows it selects is all zero" in finding.found
    old, new = (make_run([row("a", kind), row("b")]) for kind in (before, after))
    assert judge(tmp_path, new, allowed, baseline=old).passed


def test_a_row_that_the_baseline_did_not_measure_is_said(tmp_path: Path) -> None:
    for kind in ("unseen", "nan"):
        old = make_run([row("a"), row("a", kind, operand="A")])
        new = make_run([row("a"), row("a", operand="A")])
        verdict = judge(tmp_path, new, CHANGE, baseline=old)
        assert verdict.passed
        assert "1 rows were not measured in the baseline; only rules judge them" in verdict.notes


def test_a_correction_that_one_run_did_not_evaluate_is_an_error(tmp_path: Path) -> None:
    text = '[[change]]\nname = "c"\nbounds."mse_ratio:mbs".rise.absolute = 0.1\n'
    full, bare = make_run([row("a")]), make_run([row("a", ratios={})], corrections={})
    assert judge(tmp_path, full, text, baseline=full).passed
    for new, old, which in ((full, bare, "the baseline"), (bare, full, "the run")):
        with pytest.raises(BudgetError, match=f"'mbs', which {which} did not evaluate"):
            judge(tmp_path, new, text, baseline=old)
