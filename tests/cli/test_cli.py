"""The command line as a user meets it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxdiag.commands.scan.source import run_name
from mxdiag.run.run import Run
from paths import ROOT


def mxdiag(*arguments: object, cwd: Path | None = None, **environment: str):
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "mxdiag", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=300,
    )


def checkpoint(path: Path, **tensors: np.ndarray) -> Path:
    rng = np.random.default_rng(0)
    weights = tensors or {
        f"model.layers.{i}.mlp.{name}.weight": rng.standard_normal((64, 96), np.float32)
        for i in range(2)
        for name in ("gate_proj", "down_proj")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, path)
    return path


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    weights = checkpoint(folder / "small.safetensors")
    result = mxdiag("scan", weights, "--out", folder / "run")
    assert result.returncode == 0, result.stderr
    return folder / "run"


def test_a_scan_prints_a_table_and_writes_a_run(tmp_path):
    weights = checkpoint(tmp_path / "small.safetensors")
    result = mxdiag("scan", weights, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "model.layers.1.mlp.down_proj" in result.stdout
    assert "coverage: 4 layers measured (100.0 %" in result.stdout
    run = Run.load(tmp_path / "reports/small")
    assert len(run.tensors) == 4
    assert (tmp_path / "reports/small/tensors.csv").exists()
    assert "recommended for SQNR of at least 18 dB" in result.stdout


def test_piped_output_is_plain(run_folder):
    for arguments in (("gate", run_folder, "--suggest", run_folder / "b.toml"), ("env",)):
        result = mxdiag(*arguments)
        assert "\x1b" not in result.stdout + result.stderr
        assert "\r" not in result.stdout + result.stderr


def test_quiet_prints_nothing(tmp_path):
    weights = checkpoint(tmp_path / "small.safetensors")
    result = mxdiag("scan", weights, "--quiet", "--out", tmp_path / "run")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scan", "./nowhere"], "no such file or folder"),
        (["scan", "sample:huge"], "no such sample"),
        (["scan", "{empty}"], "config.json"),
        (["scan", "{empty}", "--weights-only"], "empty folder"),
        (["scan", "{cut}"], "{cut}"),
        (["scan", "{good}", "--scale-rule", "up"], "--scale-rule 'up' is not known"),
        (["scan", "{good}", "--operands", "W,B"], "unknown operand 'B'"),
        (["scan", "{good}", "--corrections", "magic"], "unknown correction 'magic'"),
        (["scan", "{good}", "--samples", "0"], "--samples must be at least 1"),
        (["scan", "{good}", "--config", "{empty}/none.toml"], "cannot read"),
        (["scan", "{good}", "--include", "*"], ""),
        (["scan", "{good}", "--out", "{good}"], "{good}: is no folder"),
        (["scan", "{good}", "--out", "{good}/run"], "{good}: is no folder"),
        (["recommend", "{empty}"], "no run here"),
        (["report", "{empty}"], "no run here"),
        (["gate", "{empty}"], "needs a budget"),
        (["diff", "{empty}", "{empty}"], "no run here"),
        (["show", "{empty}", "x"], "no run here"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path, arguments, message):
    names = {"empty": tmp_path / "empty", "cut": tmp_path / "cut.safetensors"}
    names["empty"].mkdir()
    names["good"] = checkpoint(tmp_path / "good.safetensors")
    names["cut"].write_bytes(names["good"].read_bytes()[:-10])
    filled = [argument.format(**names) for argument in arguments]
    if filled[0] == "scan" and "--out" not in filled:
        filled += ["--out", tmp_path / "run"]
    result = mxdiag(*filled)
    if not message:
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode == 2
    assert message.format(**names) in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error:") == 1
    assert result.stderr.splitlines()[-1].startswith("error:")
    assert not (tmp_path / "run").exists()


def test_debug_shows_the_traceback_wherever_it_stands():
    for arguments in (["--debug", "scan", "./nowhere"], ["scan", "./nowhere", "--debug"]):
        result = mxdiag(*arguments)
        assert result.returncode != 0
        assert "Traceback" in result.stderr


def test_help_answers_without_torch_or_pandas():
    code = (
        "import sys; from mxdiag.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print('loaded', [m for m in ('torch', 'numba', 'pandas') "
        "if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "loaded []" in result.stdout


def test_a_closed_pipe_is_quiet(run_folder):
    command = f"{sys.executable} -m mxdiag show {run_folder} model.layers.0.mlp.gate_proj"
    result = subprocess.run(
        ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0
    assert result.stderr == ""


@pytest.mark.parametrize("reader", ["head -c 0", "true"])
def test_the_gates_exit_code_survives_a_closed_pipe(run_folder, tmp_path, reader):
    budget = tmp_path / "budget.toml"
    budget.write_text('[[rule]]\nname = "high"\nbounds = { sqnr_db = { min = 60.0 } }\n')
    command = f"{sys.executable} -m mxdiag gate {run_folder} --budget {budget}"
    result = subprocess.run(
        ["bash", "-c", f"{command} | {reader}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stderr


def test_ctrl_c_exits_130_and_keeps_the_old_run(tmp_path):
    rng = np.random.default_rng(0)
    big = {f"l{i}.weight": rng.standard_normal((2048, 2048), np.float32) for i in range(30)}
    weights = checkpoint(tmp_path / "big.safetensors", **big)
    out = tmp_path / "run"
    out.mkdir()
    (out / "run.json").write_text("old")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mxdiag", "scan", str(weights), "--out", str(out)),
            *("--backend", "reference", "--corrections", "none"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("weights:")  # it has begun
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert [path.name for path in out.iterdir()] == ["run.json"]
    assert (out / "run.json").read_text() == "old"


@pytest.mark.parametrize(
    "config", sorted(ROOT.glob("sample_configs/scan-*.toml")), ids=lambda p: p.stem
)
def test_sample_configs_scan_the_sample(config, tmp_path):
    result = mxdiag("scan", "sample:dense", "--config", config, "--samples", 1, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert Run.load(tmp_path).tensors


def test_config_files_are_checked(tmp_path):
    weights = checkpoint(tmp_path / "good.safetensors")
    for text, message in (
        ("operand = 'W'", "unknown option 'operand'"),
        ("seq-len = 'long'", "option 'seq-len' cannot be 'long'"),
        ("operands = [", "not valid TOML"),
    ):
        (tmp_path / "c.toml").write_text(text)
        result = mxdiag("scan", weights, "--config", tmp_path / "c.toml")
        assert result.returncode == 2
        assert message in result.stderr


def test_an_option_overrules_the_config(tmp_path):
    weights = checkpoint(tmp_path / "good.safetensors")
    (tmp_path / "c.toml").write_text("scale-rule = 'floor'\ncorrections = 'none'")
    mxdiag("scan", weights, "--config", tmp_path / "c.toml", "--out", tmp_path / "a")
    mxdiag(
        "scan",
        weights,
        "--config",
        tmp_path / "c.toml",
        "--scale-rule",
        "even",
        "--out",
        tmp_path / "b",
    )
    settings = [json.loads((tmp_path / n / "run.json").read_text())["settings"] for n in "ab"]
    assert [s["scale_rule"] for s in settings] == ["floor", "even"]
    assert [s["corrections"] for s in settings] == [["none"], ["none"]]


def test_names_of_runs():
    assert run_name("Qwen/Qwen3-8B") == "Qwen3-8B"
    assert run_name("sample:moe") == "moe"
    assert run_name("/models/x y/model.safetensors") == "model"
    assert run_name("../..") == "model"


def test_sample_and_env(tmp_path):
    result = mxdiag("sample", "dense", tmp_path / "dense")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "dense/model.safetensors").exists()
    again = mxdiag("sample", "dense", tmp_path / "dense")
    assert again.returncode == 2
    described = mxdiag("env")
    assert "backends:" in described.stdout
    assert "torch:" in described.stdout


@pytest.mark.parametrize("ending", [">&-", ">/dev/full", "2>&-"])
def test_streams_that_cannot_be_written_to_change_no_verdict(run_folder, tmp_path, ending):
    budget = tmp_path / "budget.toml"
    for least, code in ((1.0, 0), (60.0, 1)):
        budget.write_text(f'[[rule]]\nname = "r"\nbounds = {{ sqnr_db = {{ min = {least} }} }}\n')
        command = f"{sys.executable} -m mxdiag gate {run_folder} --budget {budget} {ending}"
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr


def test_output_in_ascii_is_escaped_not_fatal(run_folder):
    shown = mxdiag("show", run_folder, "layers.0.mlp.gate_proj", PYTHONIOENCODING="ascii")
    assert shown.returncode == 0, shown.stderr
    assert "\\u" in shown.stdout


def test_a_fault_of_its_own_is_never_exit_1(tmp_path):
    code = (
        "import sys, mxdiag.cli as cli\n"
        "import mxdiag.run.run\n"
        "def broken(path): raise RuntimeError('surprise')\n"
        "mxdiag.run.run.Run.load = broken\n"
        "cli.main(['show', 'x', 'y'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert "mxdiag failed: RuntimeError: surprise" in result.stderr
