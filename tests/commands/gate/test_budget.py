"""Budget files: what is read, what is refused at which line, and what a run suggests."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from mxdiag.commands.gate.budget import METRIC_RANGES, Globs
from mxdiag.commands.gate.evaluate import evaluate
from mxdiag.commands.gate.parse import load_budget
from mxdiag.commands.gate.positions import line_numbers, line_of
from mxdiag.commands.gate.suggest import suggest_budget
from mxdiag.decomposition import METRICS
from mxdiag.errors import BudgetError, UsageError
from mxdiag.run.run import Run
from paths import ROOT
from run_fixtures import HOSTILE, hostile_run, judge, load, make_run, plain_run, row, rule

CONFIGS = ROOT / "sample_configs"


# Reading

BAD = {
    "syntax": ('a = 1\n[[rule]\nname = "x"', "line 2", "TOML"),
    "unknown key at the top": ('[[rules]]\nname = "x"', ":1:", "did you mean 'rule'"),
    "unknown key in a rule": (rule('operands = "W"\nbounds.rms.min = 1'), ":3:", "'operand'"),
    "unknown metric": (rule("bounds = { sqnr = { min = 1 } }"), ":3:", "unknown metric 'sqnr'"),
    "ratio without a name": (rule('bounds."mse_ratio:".max = 1'), ":3:", "unknown metric"),
    "nan": (rule("bounds.sqnr_db.min = nan"), ":3:", "bounds nothing"),
    "infinity": (rule("bounds.sqnr_db.min = -inf"), ":3:", "bounds nothing"),
    "integer beyond floats": (rule(f"bounds.rms.max = 1{'0' * 400}"), ":3:", "bounds nothing"),
    "negative fraction": (rule("bounds.deadzone_frac.min = -0.1"), ":3:", "0 to 1"),
    "fraction above one": (rule("bounds.deadzone_frac.max = 18"), ":3:", "0 to 1"),
    "negative share": (rule("bounds.recoverable.max = -0.1"), ":3:", "0 and above"),
    "min above max": (rule("bounds.rms = { min = 2, max = 1 }"), ":3:", "no rms can pass"),
    "text for a number": (rule('bounds.rms.min = "18"'), ":3:", "a text, not a number"),
    "boolean for a number": (rule("bounds.rms.min = true"), ":3:", "a boolean, not a number"),
    "no number": (rule("bounds.rms = {}"), ":3:", "neither min nor max"),
    "number for a table": (rule("bounds.rms = 3"), ":3:", "not a table"),
    "nothing bounded": (rule('layer = "*"'), ":1:", "bounds nothing"),
    "bad level": (rule('level = "fatal"\nbounds.rms.min = 1'), ":3:", "error, warn"),
    "bad aggregate": (rule('aggregate = "max"\nbounds.rms.min = 1'), ":3:", "worst"),
    "no name": ("\n[[rule]]\nbounds.rms.min = 1", ":2:", "lacks 'name'"),
    "empty name": (rule("bounds.rms.min = 1", name=""), ":2:", "an empty text"),
    "reserved name": (rule("bounds.rms.min = 1", name="coverage/x"), ":2:", "taken"),
    "name used twice": (
        rule("bounds.rms.min = 1") + '[[total]]\nname = "r"\nbounds.rms.min = 1',
        ":5:",
        "on line 2 too",
    ),
    "empty selector": (rule("layer = []\nbounds.rms.min = 1"), ":3:", "selects nothing"),
    "selector of numbers": (rule("layer = [1]\nbounds.rms.min = 1"), ":3:", "pattern"),
    "after without a measurement": (
        rule('after = "mbs"\nbounds.recoverable.max = 1'),
        ":3:",
        "not known after",
    ),
    "energy of what has none": (
        rule('aggregate = "energy"\nbounds.delta_mean.max = 1'),
        ":3:",
        "energies",
    ),
    "not a list of tables": ('rule = "x"', ":1:", "[[rule]]"),
    "unknown coverage": ("[coverage]\nallow = []", ":2:", "unknown key 'allow'"),
    "fraction of parameters": ("[coverage]\nmin_parameter_fraction = 90", ":2:", "0 to 1"),
    "empty": ("# nothing\n", ":1:", "bounds nothing"),
    "change without direction": ('[[change]]\nname = "c"\nbounds.rms = {}', ":3:", "fall nor rise"),
    "negative allowance": (
        '[[change]]\nname = "c"\nbounds.rms.fall.absolute = -1',
        ":3:",
        "0 and above",
    ),
    "empty allowance": ('[[change]]\nname = "c"\nbounds.rms.fall = {}', ":3:", "nor relative"),
    "impact without pass": ('[[impact]]\nname = "i"\nbounds.loss.max = 1', ":1:", "lacks 'pass'"),
    "impact metric of another pass": (
        '[[impact]]\nname = "i"\npass = "forward"\nbounds.cosine_mean.min = 1',
        ":4:",
        "unknown metric",
    ),
    "forward pass per layer": (
        '[[impact]]\nname = "i"\npass = "forward"\nlayer = "*"\nbounds.loss.max = 1',
        ":4:",
        "per layer",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_budget_is_refused_at_its_line(tmp_path: Path, name: str) -> None:
    text, place, words = BAD[name]
    with pytest.raises(BudgetError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert place in message
    assert words.lower() in message.lower()
    assert "budget.toml" in message


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="no budget here"):
        load_budget(tmp_path / "none.toml")
    (tmp_path / "b.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(BudgetError, match="UTF-8"):
        load_budget(tmp_path / "b.toml")
    with pytest.raises(BudgetError, match="not readable"):
        load_budget(tmp_path)


def test_every_metric_can_be_bounded(tmp_path: Path) -> None:
    assert set(METRIC_RANGES) == set(METRICS)
    bounds = "\n".join(f"bounds.{name}.min = 0.5" for name in METRICS)
    assert {limit.metric for limit in load(tmp_path, rule(bounds)).rules[0].limits} == set(METRICS)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("budget-*.toml")), ids=lambda p: p.stem)
def test_ready_made_budgets_judge_a_run(path: Path) -> None:
    verdict = evaluate(plain_run(), load_budget(path))
    assert verdict.passed, [finding.message for finding in verdict.findings]
    assert len(verdict.checks) > 4


def test_there_are_three_ready_made_budgets() -> None:
    names = {path.stem for path in CONFIGS.glob("budget-*.toml")}
    assert names == {"budget-strict", "budget-rl-training", "budget-weight-only-serving"}


# Lines

_KEYS = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
_LEAVES = st.one_of(
    st.integers(-5, 5),
    st.booleans(),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
    st.lists(st.integers(0, 9), max_size=3),
    st.lists(st.text('ab"\\#]}[{=,\n', max_size=4), max_size=3),
)
_TABLES = st.recursive(
    st.dictionaries(_KEYS, _LEAVES, max_size=3),
    lambda inner: st.dictionaries(
        _KEYS, st.one_of(_LEAVES, inner, st.lists(inner, min_size=1, max_size=3)), max_size=3
    ),
    max_leaves=12,
)


def _leaves(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [leaf for i, item in enumerate(value) for leaf in _leaves(item, (*path, i))]
    return [path]


@given(_TABLES, st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_key_has_its_line(content: dict[str, object], multiline: bool) -> None:
    text = tomli_w.dumps(content, multiline_strings=multiline)
    lines = text.split("\n")
    found = line_numbers(text)
    for path in _leaves(tomllib.loads(text)):
        assert path in found
        key = path[-1]
        # The writer spells a key bare or as a basic string; either stands on the line it names.
        spelled = tomli_w.dumps({str(key): 0}).removesuffix(" = 0\n")
        assert spelled in lines[found[path] - 1]


def test_lines_of_what_a_writer_would_not_write() -> None:
    text = (
        "a . 'b c' = 1 # [x]\n"
        "[[rule]]\n"
        'name = """\n[[rule]]\nname = "no" """""\n'
        "[rule.'bounds' . rms]\n"
        "min = 1\n"
        "[[rule]]\n"
        "x = { y = [1,\n  { z = ']' }, # }\n], w.v = 2 }\n"
        "d = 1979-05-27 07:32:00\n"
    )
    lines = line_numbers(text)
    assert lines["a", "b c"] == 1
    assert lines["rule", 0, "name"] == 3
    assert lines["rule", 0, "bounds", "rms", "min"] == 7
    assert lines["rule", 1, "x", "y", 1, "z"] == 10
    assert lines["rule", 1, "x", "w", "v"] == 11
    assert lines["rule", 1, "d"] == 12
    assert line_of(lines, ("rule", 1, "x", "unheard", "of")) == 9


def test_many_rules_are_read_in_linear_time(tmp_path: Path) -> None:
    text = "".join(rule('layer = "a"\nbounds.rms.min = 1', name=f"r{i}") for i in range(5000))
    assert load(tmp_path, text).rules[-1].line == 4 * 4999 + 1


# Patterns


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*.q_proj", "model.layers.0.q_proj", True),
        ("*.q_proj", "model.layers.0.q_proj.x", False),
        ("model.layers.[0-3].*", "model.layers.2.q", True),
        ("experts.down_proj[5]", "experts.down_proj[5]", True),  # an index, not a class
        ("experts.down_proj[5]", "experts.down_proj5", False),
        ("experts.*[*].gate", "experts.up[12].gate", True),
        ("Q_PROJ", "q_proj", False),
        ("*", None, False),
        ("*", "a\nb", True),
    ],
)
def test_patterns(pattern: str, name: str | None, matches: bool) -> None:
    assert Globs((pattern,)).match(name) is matches


@pytest.mark.parametrize("name", [*HOSTILE, "a[5].b", "a[[5]", "*", "?", "[*]", "[!a]", "]["])
def test_an_escaped_name_matches_itself_alone(name: str) -> None:
    globs = Globs((Globs.escape(name),))
    others = [*HOSTILE, "a5.b", "x", "a", "ab", name + "x", "x" + name]
    assert globs.match(name)
    assert not any(globs.match(other) for other in others if other != name)


# Suggesting


def _odd_run() -> Run:
    return make_run(
        [
            *(row(name, "outliers", role="r", seed=i) for i, name in enumerate(HOSTILE)),
            row("exact", "exact"),
            row("zero", "zero"),
            row("experts.down_proj[5]", operand="A"),
            row("experts.down_proj[6]", "unseen", operand="A"),
        ]
    )


@pytest.mark.parametrize("granularity", ["row", "role"])
@pytest.mark.parametrize("make", [plain_run, hostile_run, _odd_run])
@pytest.mark.parametrize("margin", [0.0, 0.25])
def test_a_run_meets_its_own_suggestion(
    tmp_path: Path, granularity: str, make: object, margin: float
) -> None:
    run = make()  # type: ignore[operator]
    run.data["coverage"]["unsupported"] = [{"layer": "odd[x]*", "reason": "?"}]
    text = suggest_budget(run, sqnr_margin=margin, frac_margin=margin / 5, granularity=granularity)
    verdict = judge(tmp_path, run, text)
    assert verdict.findings == []
    assert sum(check.judged for check in verdict.checks) > len(run.tensors)


def test_a_suggestion_holds_the_margins_per_row(tmp_path: Path) -> None:
    run = plain_run()
    budget = load(tmp_path, suggest_budget(run))
    assert len(budget.rules) == len(run.tensors)
    for made, measured in zip(budget.rules, run.tensors, strict=True):
        bounds = {limit.metric: limit.value for limit in made.limits}
        # Two decimals of a dB and four of a fraction, rounded outwards.
        assert 0 <= measured["sqnr_db"] - 0.25 - bounds["sqnr_db"] < 0.0101
        for name in ("recoverable", "deadzone_frac"):
            assert 0 <= bounds[name] - measured[name] - 0.05 < 0.000101


def test_a_worse_run_fails_the_suggestion(tmp_path: Path) -> None:
    text = suggest_budget(make_run([row("a", seed=1), row("b", seed=2)]))
    verdict = judge(tmp_path, make_run([row("a", seed=1), row("b", "outliers", seed=2)]), text)
    assert {finding.layer for finding in verdict.findings} == {"b"}


def test_an_exact_row_must_stay_exact(tmp_path: Path) -> None:
    text = suggest_budget(make_run([row("a", "exact")]))
    assert not judge(tmp_path, make_run([row("a")]), text).passed


def test_large_runs_get_a_rule_per_role(tmp_path: Path) -> None:
    base = row("x", role="r")
    rows = [
        {**base, "layer": f"layers.{i}", "role": f"r{i % 7}", "sqnr_db": 15 + i / 1000}
        for i in range(2500)
    ]
    run = make_run([base])
    run.data["tensors"] = rows
    run.data["coverage"]["not_observed"] = [
        {"layer": f"e.{i}.w", "operand": "A", "gemm": "fprop"} for i in range(500)
    ]
    text = suggest_budget(run)
    assert len(text.splitlines()) < 100
    budget = load(tmp_path, text)
    assert {made.limits[0].value for made in budget.rules} == {14.75}  # the worst, 15.00x
    assert evaluate(run, budget).passed


def test_no_suggestion_where_nothing_can_pass() -> None:
    with pytest.raises(BudgetError, match="'bad' holds a NaN"):
        suggest_budget(make_run([row("a"), row("bad", "nan")]))
    with pytest.raises(BudgetError, match="nothing was measured"):
        suggest_budget(make_run([row("a", "unseen")]))
    for margin in (-1.0, math.nan, math.inf):
        with pytest.raises(UsageError):
            suggest_budget(plain_run(), sqnr_margin=margin)
    with pytest.raises(UsageError, match="granularity"):
        suggest_budget(plain_run(), granularity="layer")
