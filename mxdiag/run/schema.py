"""What a run must look like before anything is concluded from it: types, names, ranges.

A damaged run is refused whole: a gate that skips what it cannot read would let it pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mxdiag.decomposition import METRICS
from mxdiag.gemms import CELLS

STATUSES = ("ok", "exact", "zero", "nonfinite", "not_observed")
_CELLS = {(cell.operand, cell.gemm) for cell in CELLS}
_NUMBERS = {*METRICS, "numel", "expert", "calls", "tokens", "rows", "measured"}
_PREFIXES = (
    "mse_ratio:",
    "sqnr_db:",
    "underflow_frac:",
    "gain:",
    "error_sum:",
    "reducible:",
    "recoverable:",
    "irreducible:",
)
_TEXTS = ("role", "dtype", "block_axis", "recommended", "reason", "not_observed_reason")
_COVERAGE_LISTS = ("excluded", "unsupported", "not_observed")
_IMPACT_LISTS = ("forward", "backward", "both", "attribution", "rollout", "per_layer")


def is_number(value: object) -> bool:
    """A finite real number that a float can hold; booleans are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def fault(data: Mapping[str, Any]) -> str | None:
    """The first thing wrong with the content of `run.json`, in words; None if it is sound."""
    for key, kind in (("model", dict), ("settings", dict), ("coverage", dict), ("totals", list)):
        if not isinstance(data[key], kind):
            return f"{key} is no {'object' if kind is dict else 'list'}"
    found = _coverage_fault(data["coverage"]) or _rows_fault(data["tensors"])
    if found is not None:
        return found
    for index, total in enumerate(data["totals"]):
        found = _fields_fault(total) if isinstance(total, dict) else "no object"
        if found is not None:
            return f"total {index}: {found}"
    return _optional_fault(data)


def _coverage_fault(coverage: Mapping[str, Any]) -> str | None:
    for key in _COVERAGE_LISTS:
        entries = coverage.get(key)
        if not _is_list_of(entries, lambda entry: isinstance(entry, dict)):
            return f"coverage.{key} is no list of objects"
        for entry in entries or ():
            if not is_number(entry.get("parameters", 0)):
                return f"coverage.{key}: parameters of {entry.get('layer')!r} are no number"
    for key in ("measured", "measured_parameters", "parameters", "parameter_fraction"):
        if not is_number(coverage.get(key)):
            return f"coverage.{key} is no number"
    return None


def _rows_fault(rows: Any) -> str | None:
    if not _is_list_of(rows, lambda row: isinstance(row, dict)):
        return "tensors is no list of rows"
    for index, row in enumerate(rows):
        found = _row_fault(row)
        if found is not None:
            return f"row {index} ({row.get('layer')!r}): {found}"
    return None


def _row_fault(row: Mapping[str, Any]) -> str | None:
    if not isinstance(row.get("layer"), str) or not row["layer"]:
        return "a row lacks its layer"
    if (row.get("operand"), row.get("gemm")) not in _CELLS:
        return f"{row.get('operand')!r} in {row.get('gemm')!r} is no operand of a GEMM"
    if row.get("status") not in STATUSES:
        return f"unknown status {row.get('status')!r}"
    for key in _TEXTS:
        if not isinstance(row.get(key), (str, type(None))):
            return f"{key} is no text"
    shape = row.get("shape")
    if not isinstance(shape, (str, type(None))) and not _is_list_of(shape, is_number):
        return "shape is no list of numbers"
    if not _is_list_of(row.get("delta_hist", []), is_number):
        return "delta_hist is no list of numbers"
    return _fields_fault(row)


def _fields_fault(row: Mapping[str, Any]) -> str | None:
    """Every number of a row or total: null or finite, fractions between 0 and 1."""
    for key, value in row.items():
        if value is None or not (key in _NUMBERS or key.startswith(_PREFIXES)):
            continue
        if not is_number(value):
            return f"{key} is {str(value)[:40]!r}, no number"
        if "_frac" in key and not 0 <= value <= 1:
            return f"{key} is {value}, no fraction"
    return None


def _optional_fault(data: Mapping[str, Any]) -> str | None:
    costs = data.get("corrections")
    if not isinstance(costs, (dict, type(None))):
        return "corrections is no object"
    for name, cost in (costs or {}).items():
        if not isinstance(cost, dict) or not all(is_number(value) for value in cost.values()):
            return f"corrections.{name} holds no costs"
    if not isinstance(data.get("sums"), (str, type(None))):
        return "sums is no digest"
    for key in ("impact", "recommendation", "calibration"):
        if not isinstance(data.get(key), (dict, type(None))):
            return f"{key} is no object"
    for key in _IMPACT_LISTS:
        entries = (data.get("impact") or {}).get(key)
        if not _is_list_of([] if entries is None else entries, lambda e: isinstance(e, dict)):
            return f"impact.{key} is no list of objects"
    sentences = (data.get("recommendation") or {}).get("sentences", [])
    for key, texts in (("warnings", data.get("warnings", [])), ("sentences", sentences)):
        if not _is_list_of(texts, lambda text: isinstance(text, str)):
            return f"{key} is no list of texts"
    return None


def _is_list_of(value: Any, good: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(good(item) for item in value)
