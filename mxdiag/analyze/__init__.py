"""The Python API: what each command calls. Nothing here prints."""

from mxdiag.analyze.impact import impact, impact_settings, validate
from mxdiag.analyze.runs import diff, gate, recommend, suggest
from mxdiag.analyze.scanning import assemble, run_name, scan, scan_settings
from mxdiag.injection.sensitivity_results import sensitivities

__all__ = [
    "assemble",
    "diff",
    "gate",
    "impact",
    "impact_settings",
    "recommend",
    "run_name",
    "scan",
    "scan_settings",
    "sensitivities",
    "suggest",
    "validate",
]
