"""Recommended corrections on the model: the right thing in each place, predicted and measured."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch

from mxdiag import api as analyze
from mxdiag.commands.impact.inject.plan import PLAIN_MXFP4, Corrected
from mxdiag.commands.impact.settings import ImpactSettings
from mxdiag.commands.recommend.validation import validate_recommendation, validation_settings
from mxdiag.commands.recommend.validation_plan import (
    Recommended,
    comparison,
    comparison_in_words,
    injection_of,
    predicted_by_sensitivity,
    predicted_ratios,
)
from mxdiag.commands.scan.settings import ScanSettings
from mxdiag.errors import ModelError, UsageError
from mxdiag.layers.linears import Linear
from mxdiag.quantize import dispatch
from mxdiag.quantize.corrections.evaluate import correct
from mxdiag.quantize.corrections.registry import parse_corrections
from mxdiag.run.run import Run
from small_models import RECORDS, llama

SCAN = {"corrections": ("scale:mse", "mxfp8"), "seed": 3}


@pytest.fixture(scope="module")
def scanned() -> Run:
    return analyze.scan(llama(), calibration=RECORDS, settings=ScanSettings(**SCAN))


@pytest.fixture
def run(scanned) -> Run:
    return Run(copy.deepcopy(scanned.data))


def quick(**options: object) -> ImpactSettings:
    return ImpactSettings(scan=ScanSettings(**SCAN), repeats=2, **options)


def choose(run: Run, name: str | None) -> None:
    for row in run.tensors:
        row["recommended"] = name


def linear(layer: str) -> Linear:
    return Linear(layer, "up_proj", None, layer + ".weight", 0, (96, 64), (64, 1))


def find(entries, config, operands):
    (found,) = [e for e in entries if (e["config"], e["operands"]) == (config, operands)]
    return found


# ---- the plan ----------------------------------------------------------------------------------


def rows(**choices: str | None) -> Run:
    """Rows of one layer by `W_fprop=...`."""
    return Run(
        {
            "tensors": [
                {
                    "layer": "a",
                    "operand": cell.split("_")[0],
                    "gemm": cell.split("_")[1],
                    "recommended": name,
                }
                for cell, name in choices.items()
            ]
        }
    )


def test_each_cell_gets_its_row():
    plan = Recommended(rows(W_fprop="scale:mse", W_dgrad="mxfp4", A_fprop="bf16", G_dgrad="mxfp8"))
    assert plan(linear("a"), "W", "fprop") == Corrected(parse_corrections("scale:mse")[0])
    assert plan(linear("a"), "W", "dgrad") == PLAIN_MXFP4
    assert plan(linear("a"), "A", "fprop") is None
    assert plan.notes == []


def test_cells_without_a_row_follow_their_operand_or_stay_plain():
    plan = Recommended(rows(W_fprop="scale:mse", A_fprop="mxfp8", G_dgrad=None))
    assert plan(linear("a"), "W", "dgrad") == injection_of("scale:mse")
    assert plan(linear("a"), "A", "wgrad") == injection_of("mxfp8")
    assert plan(linear("a"), "G", "dgrad") == PLAIN_MXFP4
    assert plan(linear("b"), "W", "fprop") == PLAIN_MXFP4
    assert plan.notes == [
        "1 layers' W·dgrad without a row of their own took their operand's other choice",
        "1 layers' A·wgrad without a row of their own took their operand's other choice",
        "1 layers' G·dgrad without any choice ran in plain MXFP4",
        "1 layers' W·fprop without any choice ran in plain MXFP4",
    ]


def test_a_configuration_leaves_other_operands_alone():
    plan = Recommended(rows(W_fprop="mxfp8", A_fprop="mxfp8")).configuration("forward", "W").plan
    assert plan(linear("a"), "A", "fprop") is None
    assert plan(linear("a"), "W", "fprop") == injection_of("mxfp8")
    assert plan(linear("a"), "W", "dgrad") is None


def test_a_run_without_a_recommendation():
    with pytest.raises(UsageError, match="holds no recommendation"):
        Recommended(rows(W_fprop=None))


# ---- on the model ------------------------------------------------------------------------------


def test_recommending_nothing_is_plain_mxfp4(run):
    choose(run, "mxfp4")
    found = validate_recommendation(run, llama(), calibration=RECORDS, settings=quick())
    for which, places in (("forward", ("W", "WA")), ("backward", ("GWA",)), ("both", ("GWA",))):
        for operands in places:
            plain, better = (find(found[which], c, operands) for c in ("all", "recommended"))
            assert {**better, "config": "all"} == plain
    assert [row["measured_ratio"] for row in found["comparison"]] == [1.0] * 3
    assert [row["predicted_ratio"] for row in found["comparison"]] == [1.0] * 3


def test_recommending_bf16_is_the_reference(run):
    choose(run, "bf16")
    found = validate_recommendation(run, llama(), calibration=RECORDS, settings=quick())
    for operands in ("W", "WA"):
        assert find(found["forward"], "recommended", operands)["kl_mean"] == 0
    backward = find(found["backward"], "recommended", "GWA")
    assert backward["norm_ratio_mean"] == 1
    assert backward["cosine_mean"] == pytest.approx(1, abs=1e-12)  # a float64 square root
    assert [row["predicted_ratio"] for row in found["comparison"]] == [0.0] * 3


def test_each_layer_runs_with_its_own_correction(run):
    """W alone against a copy of the model whose weights were corrected beforehand."""
    choose(run, "mxfp4")
    names = {"q_proj": "bf16", "up_proj": "scale:mse", "down_proj": "mxfp8"}
    for row in run.tensors:
        row["recommended"] = names.get(row["role"], "mxfp4")
    model, corrected = llama(), llama()
    with torch.no_grad():
        for name, p in corrected.named_parameters():
            role = name.split(".")[-2]
            if not role.endswith("_proj") or role == "q_proj":
                continue
            if role in names:
                correction = parse_corrections(names[role])[0]
                p.copy_(correct(p.detach(), correction, 1, "rceil"))
            else:
                p.copy_(dispatch.quantize_dequantize(p.detach(), 1, "rceil"))
        kl = []
        for record in RECORDS:
            ids = torch.tensor([record["input_ids"]])
            log_p, log_q = (
                torch.log_softmax(m(ids).logits[0, :-1].double(), -1) for m in (model, corrected)
            )
            kl.append((log_p.exp() * (log_p - log_q)).sum(-1).numpy())
    found = validate_recommendation(
        run, model, calibration=RECORDS, settings=quick(passes=("forward",), jitter=0.0)
    )
    entry = find(found["forward"], "recommended", "W")
    # float32 log-probabilities against float64 ones
    assert entry["kl_mean"] == pytest.approx(np.concatenate(kl).mean(), rel=1e-3)
    assert entry["kl_mean"] < find(found["forward"], "all", "W")["kl_mean"]
    assert found["backward"] == []


def test_the_model_in_mxfp8_is_nearer_as_predicted(run):
    choose(run, "mxfp8")
    found = validate_recommendation(run, llama(), calibration=RECORDS, settings=quick())
    for row in found["comparison"]:
        assert row["recommended"] < row["plain"]
        # first order: within a factor of 3 of what the tensors' error says
        assert row["predicted_ratio"] / 3 < row["measured_ratio"] < 3 * row["predicted_ratio"]
        assert row["predicted_ratio"] < 0.1
    assert len(found["sentences"]) == 3
    assert found["sentences"][1].startswith("Forward on WA, the recommended corrections take KL")


# ---- predictions -------------------------------------------------------------------------------


def test_predicted_ratios_by_hand():
    def row(layer, operand, gemm, numel, rel_mse, ratio):
        return {
            "layer": layer,
            "operand": operand,
            "gemm": gemm,
            "status": "ok",
            "numel": numel,
            "rel_mse": rel_mse,
            "mse_ratio:mxfp8": ratio,
            "recommended": "mxfp8" if ratio else "mxfp4",
        }

    run = Run(
        {
            "tensors": [
                row("a", "W", "fprop", 100, 0.01, 0.5),
                row("a", "A", "fprop", 7, 0.02, None),
                row("b", "W", "fprop", 300, 0.02, None),
                row("b", "A", "fprop", 7, 0.04, 0.25),
                row("b", "G", "dgrad", 9, 0.04, 0.5),
            ]
        }
    )
    found = predicted_ratios(run)
    assert found["forward", "W"] == pytest.approx(
        (100 * 0.005 + 300 * 0.02) / (100 * 0.01 + 300 * 0.02)
    )
    before = 100 * 0.03 + 300 * 0.06
    after = 100 * 0.025 + 300 * 0.03
    assert found["forward", "WA"] == pytest.approx(after / before)
    assert found["backward", "GWA"] == 0.5  # no W·dgrad row: of G alone
    assert set(found) == {
        *(("forward", operands) for operands in ("W", "A", "WA")),
        *(("backward", operands) for operands in ("G", "GWA")),
    }


def test_layers_that_the_model_feels_count_more():
    """KL 0.3 and 0.1; MSE ratios 0.5 and 1: (0.15 + 0.1) / 0.4."""
    base = {"operand": "W", "gemm": "fprop", "status": "ok", "numel": 1, "rel_mse": 0.01}
    tensors = [
        {**base, "layer": "a", "mse_ratio:mxfp8": 0.5, "recommended": "mxfp8"},
        {**base, "layer": "b", "mse_ratio:mxfp8": 0.5, "recommended": "mxfp4"},
    ]
    assert predicted_by_sensitivity(Run({"tensors": tensors, "impact": None})) is None
    units = [
        {"operands": "W", "kl_mean": kl, "layers": [{"layer": layer, "share": 1.0}]}
        for layer, kl in (("a", 0.3), ("b", 0.1))
    ]
    run = Run({"tensors": tensors, "impact": {"per_layer": units}})
    assert predicted_by_sensitivity(run) == pytest.approx(0.625)
    entries = [{"config": c, "operands": "W", "kl_mean": 0.4} for c in ("all", "recommended")]
    (row,) = comparison({"forward": entries}, {}, 0.625)
    assert row["predicted_by_sensitivity"] == 0.625
    assert comparison_in_words([row])[0].endswith("1.000 of it, 0.625 from the KL of single layers")


def test_comparison_by_hand():
    forward = [
        {"config": "all", "operands": "WA", "kl_mean": 0.4, "kl_mean_sd": 0.04},
        {"config": "recommended", "operands": "WA", "kl_mean": 0.1, "kl_mean_sd": 0.01},
    ]
    backward = [
        {"config": "all", "operands": "GWA", "snr_db_mean": 10.0, "snr_db_mean_sd": 0.0},
        {"config": "recommended", "operands": "GWA", "snr_db_mean": 20.0, "snr_db_mean_sd": 0.1},
    ]
    first, second = comparison({"forward": forward, "backward": backward}, {("forward", "WA"): 0.3})
    assert first["measured_ratio"] == pytest.approx(0.25)
    assert first["measured_ratio_sd"] == pytest.approx(0.25 * math.sqrt(0.1**2 + 0.1**2))
    assert first["predicted_ratio"] == 0.3
    assert second["measured_ratio"] == pytest.approx(0.1)
    assert second["measured_ratio_sd"] == pytest.approx(0.1 * 0.1 * math.log(10) / 10)
    assert second["predicted_ratio"] is None
    assert comparison_in_words([first, second]) == [
        "Forward on WA, the recommended corrections take KL from 0.4 to 0.1: 0.250 of it ± 0.04, "
        "0.300 expected from the error of the tensors",
        "Backward on GWA, the recommended corrections take the gradients' noise-to-signal ratio "
        "from 0.1 to 0.01: 0.100 of it ± 0.002",
    ]


# ---- into the run ------------------------------------------------------------------------------


def test_the_run_keeps_it(run, tmp_path):
    before = copy.deepcopy(run.data["recommendation"])
    found = validate_recommendation(
        run, llama(), calibration=RECORDS, settings=quick(passes=("forward",))
    )
    run.write(tmp_path)
    read = Run.load(tmp_path).data
    assert read["recommendation"] == {**before, "validation": json.loads(json.dumps(found))}
    configs = [(e["config"], e["operands"]) for e in read["impact"]["forward"]]
    assert configs == [("all", "W"), ("recommended", "W"), ("all", "WA"), ("recommended", "WA")]
    # again with the settings that the run remembers: replaced, not added
    assert validation_settings(run) == quick(passes=("forward",))
    choose(run, "bf16")
    validate_recommendation(run, llama(), calibration=RECORDS)
    again = run.data["impact"]["forward"]
    assert sorted((e["config"], e["operands"]) for e in again) == sorted(configs)
    assert find(again, "recommended", "WA")["kl_mean"] == 0


def test_tables_of_other_settings_stay_as_they_are(run):
    run.data["impact"] = {"forward": [], "settings": quick(jitter=1e-4).as_dict()}
    found = validate_recommendation(
        run, llama(), calibration=RECORDS, settings=quick(passes=("forward",))
    )
    assert run.data["impact"]["forward"] == []
    assert found["notes"][-1] == (
        "the tables of `impact` were measured with other settings and stay as they are"
    )
    assert len(run.data["recommendation"]["validation"]["forward"]) == 4


def test_settings_come_from_the_scan(run):
    found = validation_settings(run)
    assert found.scan == ScanSettings(**SCAN, samples=4)
    assert found.passes == ("forward", "backward", "both")
    assert validation_settings(run, repeats=5, device="cpu").repeats == 5
    assert validation_settings(run, device="cpu").scan.device == "cpu"
    run.data["tensors"] = [row for row in run.tensors if row["operand"] != "G"]
    assert validation_settings(run).passes == ("forward",)


def test_a_model_in_memory_must_be_given(run):
    with pytest.raises(UsageError, match="in memory"):
        validate_recommendation(run)
    run.data["model"] = {"source": "/no/such/model", "kind": "checkpoint"}
    with pytest.raises(ModelError):
        validate_recommendation(run)


def test_the_sample_is_loaded_again():
    options = {"operands": "W", "corrections": "scale:mse", "seq_len": 32, "samples": 1}
    run = analyze.scan("sample:dense", **options)
    analyze.recommend(run, target_mse_ratio=0.97, allow="scale:mse")
    found = validate_recommendation(run, settings=validation_settings(run, repeats=1))
    assert {e["operands"] for e in found["forward"]} == {"W", "WA"}
    assert found["comparison"][0]["predicted_ratio"] < 1
