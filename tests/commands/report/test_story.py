"""The whole story on a shipped sample: scan, suggest a budget, pass; corrupt a layer and fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mxdiag.run.run import Run
from mxdiag.samples import write_sample

CORRUPTED = "model.layers.2.self_attn.o_proj"


def mxdiag(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mxdiag", *map(str, arguments)], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> Path:
    """A folder with two checkpoints, their runs and a budget that the first one meets."""
    folder = tmp_path_factory.mktemp("story")
    write_sample("dense", folder / "model")
    write_sample("dense", folder / "broken")
    file = folder / "broken/model.safetensors"
    with safe_open(file, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        metadata = stored.metadata()
    weight = tensors[f"{CORRUPTED}.weight"]
    spikes = torch.zeros_like(weight)
    spikes[:, ::32] = weight.float().std() * 200  # one outlier in every block
    tensors[f"{CORRUPTED}.weight"] = (weight + spikes).to(weight.dtype)
    save_file(tensors, file, metadata)
    for name in ("model", "broken"):
        options = ("--samples", 2, "--calib", folder / "model/calibration.jsonl")
        result = mxdiag("scan", folder / name, *options, "--out", folder / f"run-{name}", "--quiet")
        assert result.returncode == 0, result.stderr
    result = mxdiag("gate", folder / "run-model", "--suggest", folder / "budget.toml")
    assert result.returncode == 0, result.stderr
    return folder


def test_the_run_meets_the_budget_suggested_from_it(story):
    result = mxdiag("gate", story / "run-model", "--budget", story / "budget.toml")
    assert result.returncode == 0, result.stdout
    assert "within budget" in result.stdout


def test_a_corrupted_layer_fails_by_name(story):
    result = mxdiag("gate", story / "run-broken", "--budget", story / "budget.toml")
    assert result.returncode == 1
    assert CORRUPTED in result.stdout
    rows = {(r["layer"], r["operand"]): r for r in Run.load(story / "run-broken").tensors}
    assert rows[CORRUPTED, "W"]["deadzone_frac"] > 0.9


def test_a_baseline_fails_too_and_the_diff_says_what_moved(story):
    (story / "any.toml").write_text("[[total]]\nname = 'sane'\nbounds.sqnr_db = { min = 1.0 }\n")
    result = mxdiag(
        "gate",
        story / "run-broken",
        "--budget",
        story / "any.toml",
        "--baseline",
        story / "run-model",
    )
    assert result.returncode == 1, result.stdout
    assert CORRUPTED in result.stdout
    result = mxdiag("diff", story / "run-model", story / "run-broken", "--format", "markdown")
    assert result.returncode == 0
    first = next(line for line in result.stdout.splitlines() if "model.layers" in line)
    assert CORRUPTED in first


def test_show_recommend_and_report_read_the_run(story):
    shown = mxdiag("show", story / "run-broken", "layers.2.self_attn.o_proj")
    assert shown.returncode == 0
    assert CORRUPTED in shown.stdout
    recommended = mxdiag("recommend", story / "run-broken", "--target-mse-ratio", 0.5)
    assert recommended.returncode == 0, recommended.stderr
    choices = {(r["layer"], r["operand"]): r for r in Run.load(story / "run-broken").tensors}
    assert choices[CORRUPTED, "W"]["recommended"] not in (None, "mxfp4")
    for flags, name in (((), "html"), (("--csv",), "csv"), (("--markdown",), "md")):
        written = mxdiag("report", story / "run-broken", *flags)
        assert written.returncode == 0, written.stderr
        assert (story / f"run-broken/report.{name}").stat().st_size > 1000
    piped = mxdiag("report", story / "run-broken", "--markdown", "--out", "-")
    assert piped.stdout == (story / "run-broken/report.md").read_text()
