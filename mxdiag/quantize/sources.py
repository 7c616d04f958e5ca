"""The sources that a compiled kernel depends on: a kernel made from others is never loaded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

#: The folder that holds the package.
_ROOT = Path(__file__).parents[2]
_IMPORT = re.compile(r"^\s*from (mxdiag[\w.]*) import (\([^)]*\)|[^\n(]+)", re.MULTILINE)


def _file_of(module: str) -> Path | None:
    path = _ROOT.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def sources_of(*modules: str) -> list[Path]:
    """Files of these modules of mxdiag and of all that they import from it, in order of name.

    What is imported for type checking alone counts as well: too much is only compiled again.
    """
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        path = None if module in found else _file_of(module)
        if path is None:
            continue
        found[module] = path
        for package, names in _IMPORT.findall(path.read_text(encoding="utf-8")):
            waiting.append(package)
            listed = re.sub(r"#[^\n]*|[()]", "", names).split(",")
            waiting += [f"{package}.{name.split()[0]}" for name in listed if name.split()]
    return [found[module] for module in sorted(found)]


def digest_of(paths: Iterable[Path]) -> str:
    """Digest of the contents of files, in their order."""
    total = hashlib.sha256()
    for path in paths:
        total.update(path.read_bytes() + b"\0")
    return total.hexdigest()[:16]
