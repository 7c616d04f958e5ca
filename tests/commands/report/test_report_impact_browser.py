"""The section on impact in a real browser: its menus, the predicted growth, narrow screens."""

from __future__ import annotations

import copy
import math

import pytest

from mxdiag.run.run import Run
from report_fixtures import HOSTILE, dense_run, with_impact

pytest_plugins = ["browser_fixtures"]


@pytest.fixture
def run() -> Run:
    found = copy.deepcopy(with_impact(dense_run(layers=3), layers=3).data)
    impact = found["impact"]
    base = {"operands": "WA", "records": 4, "tokens": 64}
    impact["rollout"] = [
        base | {"config": "all", "mode": "greedy", "identical": 0.5, "identical_sd": 0.1},
        base | {"config": "all", "mode": "sampled", "ess": 0.98, "outside_clip": 0.02},
    ]
    depths = [{"depth": d, "delta_mean": -0.5, "log2_norm_ratio": 0.5 * (d - 3)} for d in (2, 1, 0)]
    impact["predictor"] = {
        "blocks": 3,
        "delta_mean": -0.5,
        "log2_norm_ratio": -1.5,
        "log2_spread": 0.5,
        "depths": depths,
    }
    for entry in impact["forward"]:
        entry["worst"] = [{"record": 0, "position": 5, "token": 7, "kl": 2.0}]
        entry["splits"] = {"prompt": {"tokens": 9, "kl_mean": 1.0}, HOSTILE: {"kl_mean": 1.0}}
        entry["kl_mean_boot_sd"] = 0.1
    found["recommendation"] = {
        "targets": {},
        "sentences": [],
        "validation": {
            "sentences": [HOSTILE * 4],
            "comparison": [{"pass": HOSTILE, "operands": "W", "measure": "x", "plain": 1.0}],
        },
    }
    return Run(found)


@pytest.mark.browser
def test_menus_have_names_and_the_charts_follow(visit, run: Run) -> None:
    page = visit(run)
    page.evaluate("drawAll()")
    offered = page.locator("#rollout-measure option").all_text_contents()
    assert offered == ["identical", "effective samples", "outside clip"]
    page.locator("#rollout-measure").select_option(label="effective samples")
    option = "charts.get('rollout-chart').instance.getOption()"
    assert page.evaluate(f"{option}.xAxis[0].name") == "effective samples"
    assert page.evaluate(f"{option}.series[0].data.map((d) => d.value)") == [0.98]
    labels = page.evaluate("charts.get('attribution-chart').instance.getOption().yAxis[0].data")
    assert labels[0] == "KL · WA · forward"


@pytest.mark.browser
def test_predicted_growth_is_drawn_beside_the_measured(visit, run: Run) -> None:
    page = visit(run)
    page.evaluate("drawAll()")
    page.locator("#gradient-measure").select_option(label="norm ratio, predicted and measured")
    series = {
        item["name"]: item["data"]
        for item in page.evaluate(
            "charts.get('gradient-chart').instance.getOption().series"
            ".map((s) => ({ name: s.name, data: s.data }))"
        )
    }
    # Depths 0, 1, 2; the gradient reaches the last block first.
    assert series["Σδ ± √(L/12), predicted"] == [-1.5, -1.0, -0.5]
    assert series["low"] == pytest.approx(
        [-1.5 - math.sqrt(n / 12) + (3 - n) / 2 for n in (3, 2, 1)]
    )
    ratios = [1 + 0.01 * math.sin(depth) for depth in range(3)]
    assert series["all"] == pytest.approx([math.log2(ratio) for ratio in ratios], abs=1e-9)


@pytest.mark.browser
def test_a_run_without_a_prediction_does_not_offer_it(visit, run: Run) -> None:
    del run.data["impact"]["predictor"]
    offered = visit(run).locator("#gradient-measure option").all_text_contents()
    assert offered == ["cosine", "norm ratio", "SNR, dB"]


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_wider_than_the_screen(visit, run: Run, width: int) -> None:
    page = visit(run)
    page.set_viewport_size({"width": width, "height": 844})
    page.evaluate("document.querySelectorAll('#impact details').forEach((d) => { d.open = true; })")
    page.evaluate("drawAll()")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("window.pwned") is None
    page.locator("#gradient-measure").select_option("log2_norm")
    # The names above the chart end where the plot begins.
    room = page.evaluate("charts.get('gradient-chart').instance.getOption().grid[0].top")
    needed = page.evaluate(
        "(() => { const c = charts.get('gradient-chart').instance;"
        " const view = c.getViewOfComponentModel(c.getModel().getComponent('legend'));"
        " return view.group.getBoundingRect().height; })()"
    )
    assert 0 < needed <= room
