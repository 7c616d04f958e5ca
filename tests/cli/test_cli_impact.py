"""`mxdiag impact` as a user runs it: on a sample by name, and on a checkpoint by its path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mxdiag.run.run import Run
from mxdiag.samples import sample_path

SMALL = ("--samples", "1", "--seq-len", "32", "--repeats", "1", "--configs", "all")
SMALL += ("--passes", "forward", "--rollout-tokens", "0", "--corrections", "none")
SMALL += ("--operand-sets", "WA")


def impact(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mxdiag", "impact", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
    )


@pytest.mark.parametrize("source", ["sample:dense", "path"])
def test_impact_makes_a_run_and_prints_what_it_measured(tmp_path, source):
    model = str(sample_path("sample:dense")) if source == "path" else source
    result = impact(tmp_path, model, *SMALL)
    assert result.returncode == 0, result.stderr
    run = Run.load(tmp_path / "reports/dense")
    assert run.data["model"]["source"] == model
    assert {row["operand"] for row in run.tensors} == {"W", "A", "G"}
    entries = run.data["impact"]["forward"]
    assert {(entry["config"], entry["operands"]) for entry in entries} >= {("all", "WA")}
    assert all(entry["kl_mean"] > 0 for entry in entries if entry["config"] == "all")
    assert "run written to reports/dense" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("./nowhere",), "no such file or folder"),
        (("sample:dense", "--configs", "magic"), "magic"),
        (("sample:dense", "--repeats", "0"), "--repeats must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, arguments, message):
    result = impact(tmp_path, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error:")
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
