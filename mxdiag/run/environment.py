"""What this machine offers: versions, devices, backends, cache. Nothing is probed at import."""

from __future__ import annotations

import functools
import platform
from importlib import metadata
from typing import Any

from mxdiag.quantize.cpu.threads import cpu_count

_PACKAGES = (
    "numpy",
    "numba",
    "ml_dtypes",
    "torch",
    "transformers",
    "triton",
    "gguf",
    "pyarrow",
)


@functools.cache
def versions() -> dict[str, str | None]:
    """Installed version of every package that matters to a result, None if it is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def run_environment(device: str, backend: str) -> dict[str, Any]:
    """The `environment` of a run."""
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": cpu_count(),
        "device": device,
        "backend": backend,
    }
