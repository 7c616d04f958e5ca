"""The pages for contributors name what there is, and the site builds without a broken link."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "README.md")
#: What looks like a path of the repository: in backticks or a link, with a folder or a suffix.
_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|toml|js|j2))`|\]\(([\w./-]+)\)")
#: Where shortened names are looked for.
_BELOW = ("", "mxdiag", "mxdiag/quantize", "mxdiag/commands/report", "mxdiag/commands/report/html")
_BELOW += ("mxdiag/quantize/corrections", "mxdiag/checkpoint", "mxdiag/commands/report/html/assets")
#: Names of what users have or commands write.
_NOT_HERE = re.compile(r"reports/(?!sample-moe)|(report|run|budget)\.|.*\.npz|tensors\.csv|build/")


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_path_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = {a or b for a, b in _PATH.findall(text)}
    assert len(named) > 15
    missing = [
        name
        for name in sorted(named)
        if not _NOT_HERE.match(name) and not any((ROOT / at / name).exists() for at in _BELOW)
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / target).exists(), target


def test_the_tree_names_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    package = ROOT / "mxdiag"
    names = [p.name for p in package.iterdir() if p.is_dir() and (p / "__init__.py").exists()]
    names += [p.name for p in (package / "commands").iterdir() if (p / "__init__.py").exists()]
    names += [p.name for p in package.glob("*.py") if not p.name.startswith("__")]
    for name in names:
        assert name in text, name


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for page in tmp_path.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r'(?:src|href)="(https?://[^"]+)"[^>]*(?:rel="(?:stylesheet|pre))', text
        )
        assert not loaded, "the pages load nothing from elsewhere"
