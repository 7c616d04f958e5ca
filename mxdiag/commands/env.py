"""`mxdiag env`: what this machine offers. Nothing is probed at import."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from mxdiag.quantize.cpu.threads import cpu_count
from mxdiag.run.environment import versions

#: CPU features that decide the kernel's speed.
_CPU_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx2", "fma")


def describe() -> dict[str, Any]:
    """What `mxdiag env` shows; imports torch to ask for devices."""
    import torch

    from mxdiag.quantize.cpu import launch as cpu

    devices = [f"cpu ({cpu_count()} cores)"]
    if torch.cuda.is_available():
        devices += [
            f"cuda:{index} ({torch.cuda.get_device_name(index)})"
            for index in range(torch.cuda.device_count())
        ]
    backends = {
        "reference": "always (float64, slow)",
        "cpu": "first use compiles" if cpu.needs_compiling() else "kernels compiled and cached",
        "triton": _triton_state(torch.cuda.is_available()),
    }
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "cpu": _cpu_features(),
        "devices": devices,
        "backends": backends,
    }


def _triton_state(gpu: bool) -> str:
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "not installed"
    return f"triton {version}" if gpu else f"triton {version}, no GPU"


def _cpu_features() -> list[str]:
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return [name for name in _CPU_FEATURES if features.get(name)]
