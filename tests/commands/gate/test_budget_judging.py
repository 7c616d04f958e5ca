"""Judging runs by budgets: what passes, what fails with which words, and what never passes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mxdiag.decomposition import decompose
from mxdiag.errors import BudgetError
from mxdiag.run.run import Run
from run_fixtures import IMPACT, judge, make_run, plain_run, row, rule, tensor


def test_within_and_over(tmp_path: Path) -> None:
    run = make_run([row("good"), row("bad", "laplace")])
    within = judge(tmp_path, run, rule("bounds.sqnr_db.min = 16.0"))
    assert within.passed
    assert within.exit_code == 0
    over = judge(tmp_path, run, "\n" + rule('layer = "*"\nbounds = { sqnr_db = { min = 18.3 } }'))
    assert over.exit_code == 1
    (finding,) = over.findings
    assert (finding.rule, finding.layer, finding.operand, finding.gemm) == (
        "r/sqnr_db/min",
        "bad",
        "W",
        "fprop",
    )
    assert finding.value == run.tensors[1]["sqnr_db"]
    assert finding.bound == 18.3
    assert finding.line == 5
    assert "at least 18.30 dB" in finding.expected


def test_a_warning_does_not_fail(tmp_path: Path) -> None:
    verdict = judge(tmp_path, plain_run(), rule('level = "warn"\nbounds.sqnr_db.min = 90'))
    assert verdict.findings
    assert verdict.exit_code == 0


def test_selectors_are_anded_and_lists_ored(tmp_path: Path) -> None:
    text = rule('role = ["q_proj", "k_proj"]\noperand = "A"\nbounds.sqnr_db.min = 90')
    verdict = judge(tmp_path, plain_run(), text)
    assert [f.subject for f in verdict.findings if f.operand == "A"] == [
        f.subject for f in verdict.findings
    ]
    assert {f.layer for f in verdict.findings} == {
        "model.layers.0.q_proj",
        "model.layers.1.q_proj",
    }


def test_values_that_print_alike_are_told_apart(tmp_path: Path) -> None:
    run = make_run([row("a", sqnr_db=17.9999999)])
    (finding,) = judge(tmp_path, run, rule("bounds.sqnr_db.min = 18")).findings
    assert finding.found != finding.expected.removeprefix("at least ")


@pytest.mark.parametrize("selector", ['layer = "none"', 'operand = "w"', 'gemm = "wgrad"'])
def test_a_rule_that_matches_nothing_is_an_error(tmp_path: Path, selector: str) -> None:
    with pytest.raises(BudgetError, match=r"budget.toml:1: rule 'r' matches no row"):
        judge(tmp_path, plain_run(), rule(f"{selector}\nbounds.rms.min = 0.1"))


def test_a_rule_whose_parts_match_apart_is_an_error(tmp_path: Path) -> None:
    text = rule('role = "q_proj"\nlayer = "*.down_proj"\nbounds.rms.min = 0.1')
    with pytest.raises(BudgetError, match="nothing matches all"):
        judge(tmp_path, plain_run(), text)


# What never passes, and what always does


@pytest.mark.parametrize("metric", ["sqnr_db", "recoverable", "rms", "amax", "delta_mean"])
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "18.7", True])
def test_a_value_that_is_no_number_never_passes(tmp_path: Path, metric: str, value: object) -> None:
    run = make_run([row("a", **{metric: value})])
    for bound in ("min = 0.0", "max = 1.0"):
        verdict = judge(tmp_path, run, rule(f"bounds.{metric} = {{ {bound} }}"))
        assert not verdict.passed


def test_non_finite_values_fail_whatever_the_budget_says(tmp_path: Path) -> None:
    run = make_run([row("a"), row("broken", "nan")])
    text = '[coverage]\nallow_not_observed = ["*"]\nallow_unsupported = ["*"]\n'
    verdict = judge(tmp_path, run, text + rule('layer = "a"\nbounds.rms.min = 0.1'))
    (finding,) = verdict.findings
    assert (finding.rule, finding.layer) == ("coverage/non-finite", "broken")
    assert verdict.exit_code == 1


def test_an_exact_tensor_passes_any_sqnr_minimum_and_has_no_share_to_bound(tmp_path: Path) -> None:
    run = make_run([row("a", "exact")])
    assert run.tensors[0]["status"] == "exact"
    bounds = "bounds.sqnr_db.min = 300\nbounds.recoverable.max = 0.0\nbounds.rel_mse.max = 0.0"
    assert judge(tmp_path, run, rule(bounds)).passed
    assert judge(tmp_path, run, rule('after = "mbs"\nbounds.sqnr_db.min = 300')).passed
    for aggregate in ("mean", "median", "p95", "worst", "energy"):
        text = rule(f'aggregate = "{aggregate}"\nbounds.sqnr_db.min = 300')
        assert judge(tmp_path, run, text).passed
    total = '[[total]]\nname = "t"\nbounds.sqnr_db.min = 300\n'
    assert judge(tmp_path, run, total).passed
    assert not judge(tmp_path, run, rule("bounds.sqnr_db.max = 300")).passed
    assert not judge(tmp_path, run, rule("bounds.irreducible.min = 0.1")).passed


def test_an_all_zero_tensor_has_no_sqnr_unless_it_is_allowed(tmp_path: Path) -> None:
    run = make_run([row("a"), row("z", "zero")])
    verdict = judge(tmp_path, run, rule("bounds.sqnr_db.min = 0"))
    assert [f.layer for f in verdict.findings] == ["z"]
    assert "all zero" in verdict.findings[0].found
    allowed = '[coverage]\nallow_zero = ["z"]\n'
    assert judge(tmp_path, run, allowed + rule("bounds.sqnr_db.min = 0")).passed


def test_what_was_not_observed_fails_once_unless_it_is_allowed(tmp_path: Path) -> None:
    run = make_run([row("a"), row("lost.experts.3", "unseen", operand="A")])
    text = rule("bounds.rms.min = 0.1")
    (finding,) = judge(tmp_path, run, text).findings
    assert (finding.rule, finding.layer) == ("coverage/not-observed", "lost.experts.3")
    assert "never called" in finding.found
    allowed = '[coverage]\nallow_not_observed = ["lost.*"]\n'
    assert judge(tmp_path, run, allowed + text).passed
    assert judge(tmp_path, run, text, allow_not_observed=["lost.*"]).passed
    assert not judge(tmp_path, run, text, allow_not_observed=["other"]).passed


def test_not_observed_in_the_coverage_alone_counts_too(tmp_path: Path) -> None:
    run = make_run([row("a")])
    run.data["coverage"]["not_observed"] = [{"layer": "b", "reason": "frozen"}]
    assert not judge(tmp_path, run, rule("bounds.rms.min = 0.1")).passed


def test_unsupported_layers_fail_unless_they_are_allowed(tmp_path: Path) -> None:
    run = make_run([row("a")])
    run.data["coverage"]["unsupported"] = [{"layer": "x", "reason": "GPTQ", "parameters": 4096}]
    text = rule("bounds.rms.min = 0.1")
    (finding,) = judge(tmp_path, run, text).findings
    assert finding.found == "unsupported: GPTQ (4,096 parameters)"
    assert judge(tmp_path, run, '[coverage]\nallow_unsupported = "x"\n' + text).passed


@pytest.mark.parametrize(("fraction", "passes"), [(0.95, True), (0.5, False), (None, False)])
def test_the_measured_fraction_of_parameters(
    tmp_path: Path, fraction: float | None, passes: bool
) -> None:
    run = make_run([row("a")])
    run.data["coverage"]["parameter_fraction"] = fraction
    assert judge(tmp_path, run, "[coverage]\nmin_parameter_fraction = 0.9").passed is passes


def test_a_rule_none_of_whose_rows_was_measured_fails(tmp_path: Path) -> None:
    run = make_run([row("a"), row("b", "unseen")])
    text = '[coverage]\nallow_not_observed = ["b"]\n' + rule('layer = "b"\nbounds.rms.min = 0.1')
    verdict = judge(tmp_path, run, text)
    assert not verdict.passed
    assert "none of the 1 rows" in verdict.findings[0].found


# Aggregates and totals


def _values(values: list[float]) -> Run:
    return make_run([row(f"l{i}", sqnr_db=value) for i, value in enumerate(values)])


@pytest.mark.parametrize(
    ("aggregate", "bound", "expected"),
    [
        ("mean", "min", 20.5),  # of 11 ... 30
        ("median", "min", 20.5),
        ("p95", "min", 12.0),  # 19 of 20 rows are at 12 or above
        ("p95", "max", 29.0),  # 19 of 20 rows are at 29 or below
        ("worst", "min", 11.0),
        ("worst", "max", 30.0),
    ],
)
def test_aggregates(tmp_path: Path, aggregate: str, bound: str, expected: float) -> None:
    run = _values([float(v) for v in range(11, 31)])
    beyond = expected + (0.01 if bound == "min" else -0.01)
    head = f'aggregate = "{aggregate}"\nbounds.sqnr_db'
    assert judge(tmp_path, run, rule(f"{head}.{bound} = {expected}")).passed
    (finding,) = judge(tmp_path, run, rule(f"{head}.{bound} = {beyond}")).findings
    assert finding.value == pytest.approx(expected)
    assert f"{aggregate} of 20 rows" in finding.found


@pytest.mark.parametrize(
    "metric", ["sqnr_db", "rel_mse", "recoverable", "cross_scale_grid", "deadzone_frac", "gain"]
)
def test_the_energy_aggregate_is_the_metric_of_all_elements_together(
    tmp_path: Path, metric: str
) -> None:
    tensors = [tensor("normal", 1), 10 * tensor("outliers", 2), 0 * tensor("normal", 3)]
    rows = [row("a", "normal", seed=1), row("c", "zero")]
    big = decompose(tensors[1], backend="reference")
    rows.insert(1, {**row("b", "outliers", seed=2), **big.metrics()})
    together = getattr(decompose(np.concatenate(tensors), backend="reference"), metric)
    # Energies from rms and relative error round; a mean over rows would be off by percents.
    for side, sign in (("min", 1), ("max", -1)):
        head = f'aggregate = "energy"\nbounds.{metric}.{side}'
        close = together - sign * 1e-9 * abs(together)
        beyond = together + sign * 1e-9 * abs(together)
        assert judge(tmp_path, make_run(rows), rule(f"{head} = {close!r}")).passed
        assert not judge(tmp_path, make_run(rows), rule(f"{head} = {beyond!r}")).passed


def test_an_aggregate_with_a_missing_number_never_passes(tmp_path: Path) -> None:
    run = make_run([row("a"), row("b", sqnr_db=None, rel_mse=None)])
    for aggregate in ("mean", "median", "p95", "worst", "energy"):
        text = rule(f'aggregate = "{aggregate}"\nbounds.sqnr_db.min = 0')
        assert not judge(tmp_path, run, text).passed


def test_totals(tmp_path: Path) -> None:
    run = plain_run()
    text = '[[total]]\nname = "t"\noperand = "A"\nbounds.sqnr_db.min = 90\n'
    verdict = judge(tmp_path, run, text)
    assert [(f.layer, f.operand) for f in verdict.findings] == [(None, "A")]
    by_role = judge(tmp_path, run, text.replace("operand", 'role = "q*"\noperand'))
    assert [(f.role, f.layer) for f in by_role.findings] == [("q_proj", "all q_proj")]
    with pytest.raises(BudgetError, match="matches no total"):
        judge(tmp_path, run, text.replace('"A"', '"X"'))


# Corrections


def test_after_a_correction(tmp_path: Path) -> None:
    run = make_run([row("a")])
    sqnr = run.tensors[0]["sqnr_db"]
    after = sqnr - 10 * math.log10(0.2)  # MBS+OF leaves 0.2 of the error in this fixture
    head = 'after = "mbs+of"\nbounds.sqnr_db.min'
    assert judge(tmp_path, run, rule(f"{head} = {after - 1e-9}")).passed
    assert not judge(tmp_path, run, rule(f"{head} = {after + 1e-9}")).passed
    rel = run.tensors[0]["rel_mse"] * 0.2
    assert judge(
        tmp_path, run, rule(f'after = "mbs+of"\nbounds.rel_mse.max = {rel + 1e-12}')
    ).passed


def test_after_a_correction_that_was_not_evaluated(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"needs the correction 'nvfp4'.*evaluated scale:mse"):
        judge(tmp_path, plain_run(), rule('after = "nvfp4"\nbounds.sqnr_db.min = 1'))
    with pytest.raises(BudgetError, match="needs the correction 'nope'"):
        judge(tmp_path, plain_run(), rule('bounds."mse_ratio:nope".max = 1'))
    run = make_run([row("a"), row("b", ratios={})])
    verdict = judge(tmp_path, run, rule('after = "mbs"\nbounds.sqnr_db.min = 1'))
    assert [f.layer for f in verdict.findings] == ["b"]
    assert "not evaluated here" in verdict.findings[0].found


def test_the_cheapest_correction_that_would_help_is_named(tmp_path: Path) -> None:
    run = make_run([row("a")])
    sqnr = run.tensors[0]["sqnr_db"]

    def fixes(gain: float, **more: str) -> list[str]:
        body = "".join(f'{key} = "{value}"\n' for key, value in more.items())
        verdict = judge(tmp_path, run, rule(f"{body}bounds.sqnr_db.min = {sqnr + gain}"))
        (finding,) = verdict.findings
        assert finding.fixes is not None
        return [fix.correction for fix in finding.fixes]

    # MSE ratios 0.97, 0.85, 0.01, 0.2 are worth 0.13, 0.71, 20, 7.0 dB.
    assert fixes(0.1) == ["scale:mse", "mbs", "mxfp8", "mbs+of"]
    assert fixes(0.5) == ["mbs", "mxfp8", "mbs+of"]
    assert fixes(7.5) == ["mxfp8"]
    assert fixes(25.0) == []
    assert fixes(0.5, aggregate="mean")[0] == "mbs"
    assert fixes(0.5, aggregate="energy")[0] == "mbs"
    assert "mbs" not in fixes(0.8, after="mbs")


def test_remedies_in_words(tmp_path: Path) -> None:
    run = make_run([row("a")])
    high = judge(tmp_path, run, rule("bounds.sqnr_db.min = 99")).findings[0]
    assert "no evaluated correction" in high.message
    near = judge(tmp_path, run, rule("bounds.sqnr_db.min = 18.8")).findings[0]
    assert near.message.endswith("scale:mse would satisfy it (18.80 dB)")
    share = judge(tmp_path, run, rule("bounds.recoverable.max = 0.0")).findings[0]
    assert share.remedy == ""


# Impact


def _impact(body: str) -> str:
    return f'[[impact]]\nname = "i"\n{body}\n'


@pytest.mark.parametrize(
    ("body", "passes"),
    [
        ('pass = "forward"\nconfig = "all"\nbounds.kl_mean.max = 0.05', False),
        ('pass = "forward"\nconfig = "all"\nbounds.kl_mean.max = 0.07', True),
        ('pass = "forward"\nconfig = "all"\nbounds.loss_delta.max = 0.11', True),
        ('pass = "forward"\nconfig = "all"\nbounds.loss_delta.max = 0.09', False),
        ('pass = "forward"\nbounds.agreement.min = 0.0', False),  # null in one entry
        ('pass = "backward"\nbounds.cosine_mean.min = 0.97', True),
        ('pass = "backward"\nlayer = "*.1.q_proj"\nbounds.cosine.min = 0.98', True),
        ('pass = "backward"\nlayer = "*"\nbounds.cosine.min = 0.98', False),
    ],
)
def test_impact(tmp_path: Path, body: str, passes: bool) -> None:
    run = make_run([row("a")], impact=IMPACT)
    assert judge(tmp_path, run, _impact(body)).passed is passes


def test_an_impact_violation_says_its_spread_and_layer(tmp_path: Path) -> None:
    run = make_run([row("a")], impact=IMPACT)
    body = 'pass = "forward"\nconfig = "all"\nbounds.kl_mean.max = 0.05'
    (finding,) = judge(tmp_path, run, _impact(body)).findings
    assert "standard deviation 0.004" in finding.found
    body = 'pass = "backward"\nlayer = "*"\nbounds.cosine.min = 0.98'
    (finding,) = judge(tmp_path, run, _impact(body)).findings
    assert finding.layer == "model.layers.0.q_proj"


def test_a_bound_on_an_impact_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    body = 'pass = "forward"\nbounds.loss.max = 9'
    with pytest.raises(BudgetError, match="the run has none"):
        judge(tmp_path, plain_run(), _impact(body))
    run = make_run([row("a")], impact=IMPACT)
    with pytest.raises(BudgetError, match="matches nothing of the impact"):
        judge(tmp_path, run, _impact('config = "deadzone"\n' + body))
    with pytest.raises(BudgetError, match="matches nothing of the impact"):
        judge(tmp_path, run, _impact('pass = "both"\nbounds.loss.max = 9'))
