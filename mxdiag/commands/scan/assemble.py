"""From what a scan saw to a run: rows, totals, coverage, settings and environment."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterable

from mxdiag import __version__
from mxdiag.commands.scan.settings import ScanSettings
from mxdiag.quantize.corrections.base import Correction
from mxdiag.run.environment import run_environment
from mxdiag.run.rows import Measured, Measurement, not_observed, totals
from mxdiag.run.run import SCHEMA_VERSION, Run, strict

UNMEASURED_BY_DESIGN = (
    "attention score and value products",
    "KV cache",
    "convolutions",
)


def assemble(measured: Measured, settings: ScanSettings, corrections: Iterable[Correction]) -> Run:
    """The run: rows, totals, coverage, settings and environment in the contract's form."""
    # Files and modules hold layers in different orders: rows go by name, numbers by value.
    measurements = sorted(measured.measurements, key=lambda m: natural_key(m.linear.layer))
    coverage = {
        **measured.coverage.as_dict(),
        "not_observed": not_observed(measurements),
        "unmeasured_by_design": list(UNMEASURED_BY_DESIGN),
    }
    data = {
        "schema_version": SCHEMA_VERSION,
        "mxdiag_version": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": measured.model,
        "settings": settings.as_dict(),
        "environment": run_environment(
            measured.device, _backend(measured.device, settings.backend)
        ),
        "coverage": coverage,
        "tensors": [measurement.as_row() for measurement in measurements],
        "totals": totals(measurements, settings.scale_rule),
        "corrections": {c.name: dataclasses.asdict(c.cost) for c in corrections},
        "impact": None,
        "warnings": measured.warnings + _warnings(measurements),
    }
    return Run(strict(data))


def _backend(device: str, backend: str) -> str:
    """The backend that `auto` stands for on a device."""
    if backend != "auto":
        return backend
    return "triton" if device.startswith("cuda") else "cpu"


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sorts `layers.10` behind `layers.9`."""
    pieces = re.split(r"(\d+)", name)
    return [(0, int(piece)) if piece.isdecimal() else (1, piece) for piece in pieces]


def _warnings(measurements: Iterable[Measurement]) -> list[str]:
    """What a reader must know before trusting a row."""
    measurements = list(measurements)
    notes = {
        "hold NaN or infinite values": (
            [m for m in measurements if m.decomposition.status == "nonfinite"],
            "their numbers leave those blocks out",
        ),
        "hold float64 values whose squares underflow": (
            [m for m in measurements if m.decomposition.underflows],
            "their energies and shares are unknown",
        ),
    }
    return [
        f"{len(rows)} rows {what}, the first is {rows[0].linear.layer} "
        f"({rows[0].cell.operand}·{rows[0].cell.gemm}): {so}"
        for what, (rows, so) in notes.items()
        if rows
    ]
