"""mxdiag X-rays a model's 4-bit error.

`decompose` splits the MXFP4 error of one tensor into scale bias, deadzone truncation and grid
noise; `scan` does it for every linear layer of a model, for weights, activations and gradients.
Names are loaded on first use, so that `import mxdiag` imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing's own, without its import: the command line starts with this file
if TYPE_CHECKING:
    from typing import Any

    from mxdiag.api import (
        diff,
        gate,
        impact,
        merge,
        recommend,
        report,
        scan,
        schema,
        suggest,
        validate,
    )
    from mxdiag.decomposition import Decomposition, decompose
    from mxdiag.errors import MxdiagError
    from mxdiag.quantize.dispatch import quantize_dequantize
    from mxdiag.run.run import Run

__version__ = "0.1.0"

_HOMES = {
    "Decomposition": "mxdiag.decomposition",
    "MxdiagError": "mxdiag.errors",
    "Run": "mxdiag.run.run",
    "decompose": "mxdiag.decomposition",
    "diff": "mxdiag.api",
    "gate": "mxdiag.api",
    "impact": "mxdiag.api",
    "merge": "mxdiag.api",
    "quantize_dequantize": "mxdiag.quantize.dispatch",
    "recommend": "mxdiag.api",
    "report": "mxdiag.api",
    "scan": "mxdiag.api",
    "schema": "mxdiag.api",
    "suggest": "mxdiag.api",
    "validate": "mxdiag.api",
}
__all__ = [
    "Decomposition",
    "MxdiagError",
    "Run",
    "__version__",
    "decompose",
    "diff",
    "gate",
    "impact",
    "merge",
    "quantize_dequantize",
    "recommend",
    "report",
    "scan",
    "schema",
    "suggest",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mxdiag' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
