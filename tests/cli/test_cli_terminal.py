"""The command line's surroundings: a terminal of any width, Ctrl-C at the first moment."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paths import ROOT


def on_a_terminal(*arguments: object, **environment: str) -> tuple[int, str]:
    """Exit code and output of a command whose streams are a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mxdiag", *map(str, arguments)],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", **environment},
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux's end of a terminal's output
            break
        if not chunk:
            break
        output += chunk
    os.close(ours)
    return process.wait(timeout=60), output.decode()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("terminal")
    x = np.random.default_rng(0).standard_normal((64, 96), np.float32)
    save_file({"model.layers.0.mlp.up_proj.weight": x}, folder / "small.safetensors")
    command = ["scan", str(folder / "small.safetensors"), "--quiet", "--out", str(folder / "run")]
    subprocess.run([sys.executable, "-m", "mxdiag", *command], check=True)
    return folder / "run"


@pytest.mark.parametrize("columns", ["0", "-1", "wide", "²", "99999999999"])
def test_a_width_that_is_none_is_ignored(run_folder, columns):
    code, output = on_a_terminal("recommend", run_folder, COLUMNS=columns)
    assert code == 0, output
    assert "model.layers.0.mlp.up_proj" in output.replace("\r\n", "")
    assert "Traceback" not in output


def test_any_other_width_is_kept(run_folder):
    code, output = on_a_terminal("recommend", run_folder, COLUMNS="60")
    assert code == 0
    table, _, _ = re.sub(r"\x1b\[[0-9;]*m", "", output).partition("\r\n\r\n")
    assert max(map(len, table.splitlines())) == 60


def test_an_empty_model_name_is_one_clear_line(tmp_path):
    for command, name in (("scan", ""), ("impact", "  ")):
        result = subprocess.run(
            [sys.executable, "-m", "mxdiag", command, name],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert result.returncode == 2
        assert result.stderr.startswith("error: the model's name is empty. Give a local folder")
        assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


#: Sends Ctrl-C to itself at the import of a module, as the console command starts.
INTERRUPTED = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["mxdiag", "env"]
from mxdiag.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["mxdiag.cli", "typer", "mxdiag.cli.impact", "torch"])
def test_ctrl_c_during_the_imports_is_one_line_and_130(module):
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(module=module)], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_the_console_command_is_the_module():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"mxdiag": "mxdiag.__main__:main"}
