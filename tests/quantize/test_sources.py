"""A kernel that other sources made is never loaded; an order of fields is written down once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mxdiag
from mxdiag.quantize.sources import digest_of, sources_of

PACKAGE = Path(mxdiag.__file__).parent
SUMS = """
import json, sys
import numpy as np
from mxdiag.formats import RCEIL
from mxdiag.quantize.sums import COUNT_FIELDS, SUM_FIELDS, TOKEN_FIELDS
from mxdiag.quantize.{backend} import launch
x = np.random.default_rng(0).standard_normal((6, 96, 1)).astype(np.float32)
compiles = launch.needs_compiling() if {backend!r} == "cpu" else None
if {backend!r} == "triton":
    import torch
    x = torch.from_numpy(x)
turned = x.reshape(1, 6, 96)
sums = [launch.measure(part, RCEIL, tokens=True) for part in (x, turned)]
print(json.dumps([compiles, [
    [dict(zip(SUM_FIELDS, s.sums.tolist())), dict(zip(COUNT_FIELDS, s.counts.tolist())),
     {{n: s.tokens[:, i].tolist() for i, n in enumerate(TOKEN_FIELDS)}}] for s in sums]]))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A copy of the package, to be edited."""
    ignored = shutil.ignore_patterns("__pycache__", "samples")
    shutil.copytree(PACKAGE, tmp_path / "mxdiag", ignore=ignored)
    return tmp_path


def run(tree: Path, code: str) -> str:
    env = os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_CACHE_DIR": str(tree / "kernels"),
        "TRITON_CACHE_DIR": str(tree / "kernels"),
        "TRITON_INTERPRET": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def edit(tree: Path, file: str, old: str, new: str) -> None:
    path = tree / "mxdiag" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def swap_fields(tree: Path) -> None:
    """Another order of the sums, counts and token sums, and of nothing else."""
    edit(tree, "quantize/sums.py", '    "x2",  # ||x||^2\n', "")
    edit(tree, "quantize/sums.py", '    "qx",  #', '    "x2",\n    "qx",  #')
    edit(tree, "quantize/sums.py", '    "zero",  # x = 0\n', "")
    edit(tree, "quantize/sums.py", '    "blocks",  #', '    "zero",\n    "blocks",  #')
    edit(tree, "quantize/sums.py", '("x2", "e2", "deadzone2")', '("deadzone2", "x2", "e2")')


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_another_order_of_the_fields_gives_the_same_named_sums(tree: Path, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    code = SUMS.format(backend=backend)
    compiles, before = json.loads(run(tree, code))
    warm, again = json.loads(run(tree, code))
    assert again == before
    swap_fields(tree)
    compiles_again, after = json.loads(run(tree, code))
    assert after == before
    if backend == "cpu":
        assert (compiles, warm, compiles_again) == (True, False, True)


DIGEST = "from mxdiag.quantize.cpu.variant import source_digest; print(source_digest())"


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("quantize/sums.py", True),
        ("formats.py", True),
        ("quantize/cpu/lanes.py", True),
        ("quantize/cpu/simd.py", True),
        ("quantize/cpu/corrections.py", True),
        ("quantize/cpu/measure_loops.py", True),
        ("commands/report/glossary.py", False),
        ("quantize/triton/tiles.py", False),
    ],
)
def test_a_kernel_depends_on_the_sources_that_it_imports(
    tree: Path, file: str, counts: bool
) -> None:
    before = run(tree, DIGEST)
    path = tree / "mxdiag" / file
    path.write_text(path.read_text() + "\n# changed\n")
    assert (run(tree, DIGEST) != before) == counts


def test_imports_are_followed_through_parentheses_and_packages() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix() for path in sources_of("mxdiag.quantize.cpu.pack")
    }
    assert {"quantize/cpu/pack.py", "quantize/cpu/lanes.py", "formats.py", "errors.py"} <= found
    assert "quantize/cpu/write.py" not in found
    assert digest_of([PACKAGE / "formats.py"]) != digest_of([PACKAGE / "errors.py"])
