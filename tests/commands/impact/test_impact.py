"""The whole measurement on a tiny model: the tables' shape and sense, and what they say."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from rich.console import Console

from impact_fixtures import RECORDS, dense, entry, options
from mxdiag.commands.impact.inject.configurations import COMPONENT_SETS
from mxdiag.commands.impact.table import measure_impact
from mxdiag.commands.impact.verdict import verdict
from mxdiag.commands.report.text.impact import impact_summary
from mxdiag.run.run import strict


@pytest.fixture(scope="module")
def impact() -> dict[str, Any]:
    return measure_impact(dense(), None, RECORDS, options())


# ---- the object --------------------------------------------------------------------------------


def test_the_contract_s_keys(impact: dict[str, Any]) -> None:
    wanted = ["reference", "forward", "backward", "both", "attribution", "rollout", "per_layer"]
    assert list(impact)[:7] == wanted
    assert {"loss", "entropy", "perplexity", "tokens"} <= set(impact["reference"])
    forward = {"loss", "kl_mean", "kl_p95", "agreement", "entropy"}
    forward |= {"t_eff_measured", "t_eff_predicted"}
    for which, names in (
        ("forward", forward),
        ("backward", {"cosine_mean"}),
        ("both", forward | {"cosine_mean"}),
    ):
        for found in impact[which]:
            assert names | {f"{name}_sd" for name in names} <= set(found), found["config"]
            assert names & {k.removesuffix("_boot_sd") for k in found if "_boot_sd" in k}
            if which != "forward":
                assert all(
                    {"layer", "cosine", "norm_ratio", "snr_db"} <= set(layer)
                    for layer in found["layers"]
                )
    assert len(impact["forward"]) == 27
    json.dumps(strict(impact), allow_nan=False)


def test_resampled_changes_are_paired(impact: dict[str, Any]) -> None:
    """A record's change is its own loss before and after: that records differ in their loss (here
    in the sign of their advantage) does not make the change uncertain."""
    found = entry(impact, "forward", "all", "WA")
    assert 0 < found["loss_change_boot_sd"] < 0.1 * found["loss_boot_sd"]
    assert found["entropy_change_boot_sd"] > 0


def test_the_reference_is_the_model_s_own_loss(impact: dict[str, Any]) -> None:
    model, nll, labelled = dense().eval(), 0.0, 0
    wanted = 0.0
    for record in RECORDS:
        ids = torch.tensor([record["input_ids"]])
        labels = torch.tensor([record.get("labels", record["input_ids"])])
        with torch.no_grad():
            mean = float(model(ids, labels=labels).loss)
        count = int((labels[0, 1:] != -100).sum())
        wanted += record.get("advantage", 1.0) * mean * count
        nll, labelled = nll + mean * count, labelled + count
    reference = impact["reference"]
    # jittered by 1e-6, in float32
    assert reference["loss"] == pytest.approx(wanted / labelled, abs=1e-5)
    assert reference["perplexity"] == pytest.approx(math.exp(nll / labelled), rel=1e-5)
    assert (reference["tokens"], reference["labelled_tokens"]) == (20 + 29, 20 + 20)


def test_attributions_add_up(impact: dict[str, Any]) -> None:
    assert len(impact["attribution"]) == 3 * 5 + 2 * 2 + 7
    for a in impact["attribution"]:
        assert a["scale"] + a["deadzone"] + a["grid"] == pytest.approx(a["total"], abs=1e-9)
    for measure, before in (("kl_mean", 0.0), ("loss", None), ("cosine_mean", 1.0)):
        which, operands = ("backward", "G") if measure == "cosine_mean" else ("forward", "W")
        (found,) = [
            a
            for a in impact["attribution"]
            if (a["measure"], a["pass"], a["operands"]) == (measure, which, operands)
        ]
        before = impact["reference"]["loss"] if before is None else before
        after = entry(impact, which, "all", operands)[measure]
        assert found["total"] == pytest.approx(after - before, abs=1e-9)


def test_the_numbers_make_sense(impact: dict[str, Any]) -> None:
    of, plain = (entry(impact, "forward", c, "WA")["kl_mean"] for c in ("of", "all"))
    assert 0 < of < plain
    ideal = entry(impact, "forward", "ideal", "WA")
    assert ideal["kl_mean"] < plain
    better = entry(impact, "backward", "of", "GWA")["cosine_mean"]
    assert entry(impact, "backward", "all", "GWA")["cosine_mean"] < better < 1
    # the same forward pass, with gradients recorded or not
    both = entry(impact, "both", "all", "GWA")
    assert both["kl_mean"] == pytest.approx(plain, rel=1e-3)
    assert both["loss"] == pytest.approx(entry(impact, "forward", "all", "WA")["loss"], rel=1e-4)
    for e in impact["forward"]:
        assert e["kl_mean"] > 0
        assert 0 <= e["agreement"] <= 1
        assert e["kl_p95"] > e["kl_mean"]
        assert e["entropy_change"] == pytest.approx(
            e["entropy"] - impact["reference"]["entropy"], abs=1e-9
        )


def test_splits_and_worst_positions(impact: dict[str, Any]) -> None:
    found = entry(impact, "forward", "all", "WA")
    splits = found["splits"]
    # record 2: the prompt's positions predict tokens 1..9, the response's tokens 10..29
    assert {name: split["tokens"] for name, split in splits.items()} == {
        "prompt": 9,
        "response": 20,
        "advantage_positive": 20,
        "advantage_negative": 20,
    }
    worst = found["worst"]
    assert [w["kl"] for w in worst] == sorted((w["kl"] for w in worst), reverse=True)
    assert all(RECORDS[w["record"]]["input_ids"][w["position"]] == w["token"] for w in worst)
    assert worst[0]["kl"] >= found["kl_p95"]


def test_layers_go_by_depth(impact: dict[str, Any]) -> None:
    found = entry(impact, "backward", "all", "GWA")
    assert len(found["layers"]) == 14
    assert found["layers"][0]["layer"] == "model.layers.0.self_attn.q_proj"
    assert [point["depth"] for point in found["depths"]] == [1, 0]
    predictor = impact["predictor"]
    assert predictor["blocks"] == 2
    assert predictor["log2_spread"] == pytest.approx(math.sqrt(2 / 12))
    assert predictor["log2_norm_ratio"] == pytest.approx(2 * predictor["delta_mean"])
    assert 0 < predictor["delta_mean"] < 1


def test_the_verdict_names_cause_and_fix(impact: dict[str, Any]) -> None:
    text = " ".join(impact["verdict"])
    assert "scale bias causes" in text
    assert "Apply `of` first" in text or "Apply `mbs` first" in text
    assert verdict({"forward": [], "backward": []}) == []


def test_noise_is_no_finding() -> None:
    def kl(config: str, value: float, sd: float) -> dict[str, Any]:
        return {"config": config, "operands": "WA", "kl_mean": value, "kl_mean_sd": sd}

    quiet = verdict({"forward": [kl("all", 1.0, 0.01), kl("mbs", 0.7, 0.01)]})
    assert any("Apply `mbs` first" in sentence for sentence in quiet)
    loud = verdict({"forward": [kl("all", 1.0, 0.2), kl("mbs", 0.7, 0.01)]})
    assert not any("first" in sentence for sentence in loud[1:])


def test_sentences_give_the_larger_spread() -> None:
    plain = {"config": "all", "operands": "WA", "kl_mean": 1.0, "kl_mean_sd": 0.01}
    (sentence,) = verdict({"forward": [plain | {"kl_mean_boot_sd": 0.2}]})
    assert "KL 1 ± 0.2" in sentence
    (sentence,) = verdict({"forward": [plain | {"kl_mean_boot_sd": 0.001}]})
    assert "KL 1 ± 0.01" in sentence


def test_the_cheapest_sufficient_fix_comes_first() -> None:
    table = {"all": 1.0, "mbs": 0.75, "of": 0.2, "mbs+of": 0.1, "mxfp8": 0.01}
    forward = [
        {"config": name, "operands": "WA", "kl_mean": value} for name, value in table.items()
    ]
    (sentence,) = [s for s in verdict({"forward": forward}) if s.startswith("Apply")]
    assert sentence.startswith(
        "Apply `mbs` first"
    )  # over a quarter of what mbs+of does, at 1/16 bit
    assert "`mbs+of` goes furthest" in sentence
    forward[1]["kl_mean"] = 0.8
    (sentence,) = [s for s in verdict({"forward": forward}) if s.startswith("Apply")]
    assert sentence.startswith("Apply `of` first")


# ---- the terminal ------------------------------------------------------------------------------


def test_the_summary_marks_noise(impact: dict[str, Any]) -> None:
    noisy = copy.deepcopy(impact)
    target = entry(noisy, "forward", "deadzone", "WA")
    target["kl_mean"], target["kl_mean_sd"] = 0.5, 0.3
    noisy["warnings"] = ["a [bold]warning[/bold]"]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(impact_summary(noisy))
    text = console.export_text()
    assert "~0.5000 ± 0.3000" in text
    assert "a [bold]warning[/bold]" in text
    assert all(sentence.split()[0] in text for sentence in noisy["verdict"])
    for name in COMPONENT_SETS:
        assert name in text
    assert text.count("cosine_mean") == 2  # backward, and both
    assert text.count("kl_mean") == 1


def test_the_terminal_shows_rollouts_by_mode():
    entry = {"operands": "WA", "ess": 0.98, "ess_sd": 0.001, "outside_clip": 0.0625}
    rollout = [{**entry, "config": "all", "mode": "sampled"}]
    rollout.append({"operands": "WA", "config": "mbs", "mode": "greedy", "identical": 0.5})
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(impact_summary({"reference": {}, "rollout": rollout}))
    text = captured.get()
    assert "trainer–rollout mismatch" in text
    assert "0.980" in text
    assert "0.062" in text
    assert "Rollouts, greedy" in text
    assert "own responses" not in text
