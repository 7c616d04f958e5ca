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
from mxdiag.run.rows import Measured, not_observed, row_warnings, totals
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
    sums = {(m.linear.layer, m.cell.operand, m.cell.gemm): m.decomposition for m in measurements}
    reasons = {(m.linear.layer, m.cell.operand, m.cell.gemm): m.reason for m in measurements}
    coverage = {
        **measured.coverage.as_dict(),
        "not_observed": not_observed(sums, reasons),
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
        "calibration": measured.calibration,
        "coverage": coverage,
        "tensors": [measurement.as_row() for measurement in measurements],
        "totals": totals(
            [(m.cell, m.linear.role, m.decomposition) for m in measurements], settings.scale_rule
        ),
        "corrections": {c.name: dataclasses.asdict(c.cost) for c in corrections},
        "impact": None,
        "warnings": measured.warnings + row_warnings(sums),
    }
    return Run(strict(data), _sums=sums)


def _backend(device: str, backend: str) -> str:
    """The backend that `auto` stands for on a device."""
    if backend != "auto":
        return backend
    return "triton" if device.startswith("cuda") else "cpu"


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sorts `layers.10` behind `layers.9`."""
    pieces = re.split(r"(\d+)", name)
    return [(0, int(piece)) if piece.isdecimal() else (1, piece) for piece in pieces]
