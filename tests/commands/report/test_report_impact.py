"""The page's section on impact, and what it shares with the terminal: names, noise, validation."""

from __future__ import annotations

import copy
import math
import re

import pytest
from rich.console import Console

from mxdiag.commands.recommend.validation_plan import comparison_in_words
from mxdiag.commands.report import impact_columns
from mxdiag.commands.report.html import impact
from mxdiag.commands.report.html.page import render_html
from mxdiag.commands.report.impact_columns import IMPACT_COLUMNS, is_noise, named
from mxdiag.commands.report.text.impact import impact_summary
from mxdiag.commands.report.text.tables import recommendation_lines, targets_in_words
from mxdiag.run.run import Run
from report_fixtures import HOSTILE, dense_run, with_impact

COMPARISON = [
    {
        "pass": "forward",
        "operands": "W",
        "measure": "kl_mean",
        "plain": 0.2,
        "recommended": 0.24,
        "measured_ratio": 1.2,
        "measured_ratio_sd": 0.03,
        "predicted_ratio": 0.91,
        "predicted_by_sensitivity": 0.87,
    },
    {
        "pass": "backward",
        "operands": "GWA",
        "measure": "noise_to_signal",
        "plain": 0.0508,
        "recommended": 0.0498,
        "measured_ratio": 0.98,
        "measured_ratio_sd": 0.02,
        "predicted_ratio": 0.644,
        "predicted_by_sensitivity": None,
    },
]


@pytest.fixture(scope="module")
def plain() -> Run:
    """A run whose impact holds no more than the contract's fields."""
    return with_impact(dense_run(layers=4), layers=4)


@pytest.fixture
def full(plain: Run) -> Run:
    """The run with everything that an impact can hold."""
    data = copy.deepcopy(plain.data)
    found = data["impact"]
    for entry in found["forward"]:
        entry["splits"] = {
            name: {"tokens": tokens, "kl_mean": kl, "agreement": 0.9, "entropy": 2.0}
            for name, tokens, kl in (
                ("prompt", 312, 0.111),
                ("response", 374, 0.222),
                ("advantage_positive", 92, 0.333),
                ("advantage_negative", 282, 0.444),
            )
        }
        config = entry["config"] == "all" and entry["operands"] == "WA"
        kl = 7.125 if config else 1.5
        entry["worst"] = [{"record": 3, "position": 121, "token": 19, "kl": kl}]
    all_gradients = next(e for e in found["backward"] if e["config"] == "all")
    all_gradients |= {"log2_norm_ratio": -0.09, "log2_norm_ratio_sd": 0.02}
    depths = [{"depth": d, "delta_mean": 0.5, "log2_norm_ratio": 0.5 * (4 - d)} for d in range(4)]
    found["predictor"] = {
        "blocks": 4,
        "delta_mean": 0.5,
        "log2_norm_ratio": 2.0,
        "log2_spread": math.sqrt(4 / 12),
        "depths": depths[::-1],
    }
    data["recommendation"] = {
        "targets": {"target_sqnr": 18.0},
        "sentences": ["W: mbs on 4 of 4 rows"],
        "validation": {
            "comparison": COMPARISON,
            "sentences": comparison_in_words(COMPARISON),
            "notes": ["3 layers' W·dgrad ran in plain MXFP4"],
        },
    }
    return Run(data)


def table_of(run: Run, title: str) -> impact.ImpactTable | None:
    tables = impact.section(run)["tables"]
    return next((table for table in tables if table.title.startswith(title)), None)


def heads(table: impact.ImpactTable) -> list[str]:
    return [head for head, _ in table.heads]


# ---- what the run holds is shown, and nothing is where it does not


def test_splits_stand_under_the_forward_table(full: Run, plain: Run) -> None:
    titles = [table.title for table in impact.section(full)["tables"]]
    assert titles[:2] == ["Forward: components and corrections", "Forward by part of the records"]
    table = table_of(full, "Forward by part")
    assert heads(table)[1:] == ["part", "operands", "positions", "KL", "agreement", "entropy"]
    shown = {
        texts[1]: [cell.text for cell in cells[:2]]
        for texts, cells in table.rows
        if texts[::2] == ["all", "WA"]
    }
    assert shown == {
        "prompt": ["312", "0.1110"],
        "response": ["374", "0.2220"],
        "advantage > 0": ["92", "0.3330"],
        "advantage < 0": ["282", "0.4440"],
    }
    assert len(table.rows) == 4 * len(full.data["impact"]["forward"])
    assert table_of(plain, "Forward by part") is None


def test_worst_positions_are_those_of_plain_mxfp4_on_all_operands(full: Run, plain: Run) -> None:
    table = table_of(full, "Positions moved most")
    assert table.title.endswith("all on WA")
    ((texts, cells),) = table.rows
    assert texts == ["3", "121", "19"]
    assert cells[0].text == "7.1250"
    assert table_of(plain, "Positions") is None


def test_an_unknown_token_is_not_called_minus_one(full: Run) -> None:
    for entry in full.data["impact"]["forward"]:
        entry["worst"][0]["token"] = -1
    ((texts, _),) = table_of(full, "Positions").rows
    assert texts == ["3", "121", "n/a"]


def test_predicted_growth_stands_beside_the_measured(full: Run, plain: Run) -> None:
    note = impact.section(full)["depth"]
    assert "2^2.00" in note
    assert "√(4/12) = 0.58 octaves" in note
    assert "all on GWA: 2^-0.09 (± 0.02 octaves)" in note
    assert note in render_html(full)
    points = impact.curves(full.data["impact"])["predictor"]
    assert [point["depth"] for point in points] == [3, 2, 1, 0]
    assert [point["log2_norm_ratio"] for point in points] == [0.5, 1.0, 1.5, 2.0]
    assert points[2]["spread"] == pytest.approx(math.sqrt(3 / 12))
    assert impact.section(plain)["depth"] is None
    assert impact.curves(plain.data["impact"])["predictor"] == []


def test_validation_shows_expected_beside_measured(full: Run, plain: Run) -> None:
    found = impact.section(full)["validation"]
    table = found["table"]
    first, second = (
        dict(zip(heads(table), [*texts, *cells], strict=True)) for texts, cells in table.rows
    )
    assert first["measure"] == "KL"
    assert second["measure"] == "gradients' noise to signal"
    assert first["ratio expected"].text == "0.910"
    assert first["expected from single layers"].text == "0.870"
    assert first["ratio measured"].text == "1.200"
    assert first["ratio measured"].sd == "0.03"
    assert not first["ratio measured"].noise
    assert second["ratio measured"].noise  # 0.98 ± 0.02 is no change
    page = render_html(full)
    assert "expected and measured" in page
    assert "ran in plain MXFP4" in page
    assert impact.section(plain)["validation"] is None
    assert "expected and measured" not in render_html(plain)


def test_validation_has_the_terminal_s_words(full: Run) -> None:
    lines = [line.plain.strip() for line in recommendation_lines(full)]
    sentences = comparison_in_words(COMPARISON)
    assert lines[-2:] == sentences
    assert impact.section(full)["validation"]["sentences"] == sentences


def test_validation_without_an_impact_is_shown_alone(full: Run) -> None:
    run = Run({**full.data, "impact": None})
    page = render_html(run)
    assert "expected and measured" in page
    assert 'id="impact"' in page
    assert impact.section(Run({**run.data, "recommendation": None})) is None


def test_rollouts_come_by_mode_with_the_terminal_s_titles(full: Run) -> None:
    base = {"operands": "WA", "records": 4, "tokens": 64}
    full.data["impact"]["rollout"] = [
        base | {"config": "all", "mode": "greedy", "identical": 0.5},
        base
        | {"config": "all", "mode": "sampled", "ess": 0.98, "ess_sd": 0.001}
        | {"splits": {"advantage_positive": {"records": 1, "tokens": 16, "ess": 0.97}}},
    ]
    greedy = table_of(full, impact_columns.ROLLOUT_TITLES["greedy"])
    assert heads(greedy) == ["configuration", "operands", "identical"]
    sampled = table_of(full, impact_columns.ROLLOUT_TITLES["sampled"])
    assert heads(sampled)[2:] == ["effective samples"]
    parts = table_of(full, f"{sampled.title}, by advantage")
    assert parts.rows[0][0] == ["all", "advantage > 0", "WA"]
    assert [cell.text for cell in parts.rows[0][1]] == ["16", "0.970"]
    measures = impact.curves(full.data["impact"])["rolloutMeasures"]
    assert measures == [["identical", "identical"], ["ess", "effective samples"]]


def test_units_are_ranked_and_the_rest_is_counted(full: Run) -> None:
    full.data["impact"]["per_layer"] = [
        {"unit": f"u{i}", "config": "all", "operands": "W", "kl_mean": i / 100, "fisher": 1.0}
        for i in range(43)
    ]
    table = table_of(full, "One layer")
    assert heads(table) == ["unit", "operands", "KL", "Fisher-weighted error"]
    assert [texts[0] for texts, _ in table.rows[:2]] == ["u42", "u41"]
    assert len(table.rows) == 40
    assert "3 more" in table.note


# ---- noise


@pytest.mark.parametrize(
    ("field", "entry", "noise"),
    [
        pytest.param("kl_mean", {"kl_mean": 0.1, "kl_mean_sd": 0.01}, False, id="clear"),
        pytest.param("kl_mean", {"kl_mean": 0.1, "kl_mean_sd": 0.051}, True, id="jitter"),
        pytest.param(
            "kl_mean",
            {"kl_mean": 0.1, "kl_mean_sd": 0.01, "kl_mean_boot_sd": 0.051},
            True,
            id="records, where larger",
        ),
        pytest.param(
            "kl_mean",
            {"kl_mean": 0.1, "kl_mean_sd": 0.051, "kl_mean_boot_sd": 0.01},
            True,
            id="records, where smaller",
        ),
        pytest.param("kl_mean", {"kl_mean": 0.1, "kl_mean_boot_sd": 0.051}, True, id="records"),
        pytest.param("kl_mean", {"kl_mean": 0.1}, False, id="neither is known"),
        pytest.param("agreement", {"agreement": 0.9, "agreement_sd": 0.051}, True, id="from 1"),
        # The loss of other records is another loss, with or without quantization: 0.5 is no noise
        # of the change.
        pytest.param(
            "loss",
            {"loss": 3.2, "loss_sd": 0.04, "loss_boot_sd": 0.5},
            False,
            id="records move the reference too",
        ),
        pytest.param(
            "loss",
            {"loss": 3.2, "loss_sd": 0.2, "loss_change": 0.1, "loss_change_sd": 0.001},
            False,
            id="the change is judged, clear",
        ),
        pytest.param(
            "loss",
            {"loss": 3.2, "loss_sd": 0.001, "loss_change": 0.1, "loss_change_sd": 0.2},
            True,
            id="the change is judged, noise",
        ),
        pytest.param("snr_db_mean", {"snr_db_mean": 3.0, "snr_db_mean_sd": 9.0}, False, id="no 0"),
    ],
)
def test_noise_is_judged_by_the_larger_deviation(field: str, entry: dict, noise: bool) -> None:
    assert is_noise(entry, IMPACT_COLUMNS[field], {"loss": 3.1}) is noise


def test_both_deviations_are_shown_and_told_apart(full: Run) -> None:
    entry = next(e for e in full.data["impact"]["forward"] if e["config"] == "mbs")
    assert "after the slash" not in render_html(full)
    entry.update(kl_mean=0.321, kl_mean_sd=0.004, kl_mean_boot_sd=0.2)
    page = render_html(full)
    assert "after the slash over resampled records" in page
    cell = re.search(r'<td class="num noise"[^>]*>0\.3210<small> (.*?)</small>', page)
    assert cell
    assert cell[1] == "±0.004 / 0.2"


def test_the_terminal_marks_noise_of_the_records() -> None:
    entry = {"config": "all", "operands": "WA", "kl_mean": 0.5, "kl_mean_sd": 0.001}
    console = Console(width=200, color_system=None)

    def printed(**more: float) -> str:
        with console.capture() as captured:
            console.print(impact_summary({"forward": [entry | more]}))
        return captured.get()

    assert "~0.5000 ± 0.0010" in printed(kl_mean_boot_sd=0.3)
    assert "~0.5" not in printed(kl_mean_boot_sd=0.2)


# ---- names


def test_no_field_s_raw_name_is_on_the_page(full: Run) -> None:
    found = full.data["impact"]
    found["per_layer_ranking"] = [
        {"predictor": "first_order", "measure": "kl_mean", "units": 7, "spearman": 0.5}
    ]
    found["reference"]["labelled_tokens"] = 374
    page = render_html(full)
    section = page[page.index('<section id="impact"') : page.index('<section id="table"')]
    text = re.sub(r"<[^>]*>", " ", section)
    assert "first-order Δ loss" in text
    assert "positions with a label 374" in text
    assert not re.findall(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", text)
    assert "kl mean" not in text
    assert {entry["measure"] for entry in impact.curves(found)["attribution"]} == {
        "KL",
        "entropy",
        "cosine",
    }
    assert "target sqnr" not in page


def test_names_and_targets_of_other_versions_are_still_words() -> None:
    assert named("some_new_measure") == "some new measure"
    assert targets_in_words({"target_sqnr": 20.0, "max_bits": 4.5}) == (
        "SQNR of at least 20 dB and at most 4.5 bits per weight"
    )
    assert targets_in_words({"target_{0}": 3}) == "target {0} 3"


def test_hostile_texts_are_inert(full: Run) -> None:
    found = full.data["impact"]
    for entry in (found["forward"][0], found["rollout"][0], found["backward"][0]):
        entry["config"] = entry["mode"] = HOSTILE
    found["forward"][0]["splits"][HOSTILE] = {"tokens": 1, "kl_mean": 0.5}
    found["forward"][0]["worst"][0] |= {"token": HOSTILE, "record": HOSTILE}
    found["per_layer"] = [{"unit": HOSTILE, "role": HOSTILE, "operands": "W", "kl_mean": 0.5}]
    found["attribution"][0]["measure"] = HOSTILE
    found["predictor"]["blocks"] = HOSTILE
    validation = full.data["recommendation"]["validation"]
    validation["comparison"] = [COMPARISON[0] | {"measure": HOSTILE, "pass": HOSTILE}]
    validation["sentences"] = validation["notes"] = [HOSTILE]
    page = render_html(full)
    assert "<img" not in page
    assert "&lt;img" in page
    assert page.count("</script") == page.count("<script")
