"""What a run must look like before anything is concluded from it, and the schema that says so.

A damaged run is refused whole: a gate that skips what it cannot read would let it pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mxdiag.gemms import CELLS
from mxdiag.run.columns import (
    CORRECTION_COLUMNS,
    REQUIRED,
    ROW_COLUMNS,
    STATUSES,
    Column,
    column_of,
)

_TEXTS = tuple(column.name for column in ROW_COLUMNS if column.kind == "text")
_CELLS = {(cell.operand, cell.gemm) for cell in CELLS}
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
        found = _fields_fault(total, {}) if isinstance(total, dict) else "no object"
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
    checked: dict[str, str | None] = {}
    for index, row in enumerate(rows):
        found = _row_fault(row, checked)
        if found is not None:
            return f"row {index} ({row.get('layer')!r}): {found}"
    return None


def _row_fault(row: Mapping[str, Any], checked: dict[str, str | None]) -> str | None:
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
    return _fields_fault(row, checked)


#: Numbers of a total beside those of a row.
_COUNTS = ("rows", "measured")


def _fields_fault(row: Mapping[str, Any], checked: dict[str, str | None]) -> str | None:
    """Every number of a row or total: null or finite, fractions between 0 and 1.

    `checked` remembers the kind of each key that holds a number, None of the others.
    """
    for key, value in row.items():
        if value is None:
            continue
        if key not in checked:
            column = column_of(key)
            own = "integer" if key in _COUNTS else column.kind if column else "text"
            checked[key] = own if own in ("integer", "number", "fraction") else None
        kind = checked[key]
        if kind is None:
            continue
        if not is_number(value):
            return f"{key} is {str(value)[:40]!r}, no number"
        if kind == "fraction" and not 0 <= value <= 1:
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


# ---- the published schema ------------------------------------------------------------------------

_KINDS: dict[str, dict[str, Any]] = {
    "text": {"type": ["string", "null"]},
    "integer": {"type": ["integer", "null"]},
    "number": {"type": ["number", "null"]},
    "fraction": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
    "sizes": {"type": ["array", "string", "null"], "items": {"type": "integer"}},
    "counts": {"type": "array", "items": {"type": "integer"}},
}


def _of_column(column: Column) -> dict[str, Any]:
    """The schema of one column, with what it means."""
    words = f"{column.meaning} {column.formula}".strip()
    return {"title": column.title, "description": words, **_KINDS[column.kind]}


def _values(columns: Iterable[Column]) -> dict[str, Any]:
    return {column.name: _of_column(column) for column in columns}


def _of_corrections() -> dict[str, Any]:
    return {f"^{column.name}:.": _of_column(column) for column in CORRECTION_COLUMNS}


def _list_of(kind: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": kind}


def json_schema(version: int) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of `run.json`, made from the list of columns.

    Keys that it does not name are allowed: later versions add some.
    """
    row = {
        "type": "object",
        "required": list(REQUIRED),
        "properties": {
            **_values(ROW_COLUMNS),
            "layer": {**_values(ROW_COLUMNS)["layer"], "type": "string", "minLength": 1},
            "operand": {"enum": ["W", "A", "G"]},
            "gemm": {"enum": ["fprop", "dgrad", "wgrad"]},
            "status": {"enum": list(STATUSES)},
        },
        "patternProperties": _of_corrections(),
    }
    derived = [column for column in ROW_COLUMNS if column.of == "sums" or column.name == "numel"]
    total = {
        "type": "object",
        "required": ["operand", "gemm"],
        "properties": {
            "role": {"type": ["string", "null"], "description": "null: over all roles"},
            "rows": {"type": "integer"},
            "measured": {"type": "integer"},
            **_values(derived),
        },
        "patternProperties": _of_corrections(),
    }
    unmeasured = _list_of({"type": "object", "properties": {"parameters": {"type": "integer"}}})
    numbers = {
        key: {"type": "number"}
        for key in ("measured", "measured_parameters", "parameters", "parameter_fraction")
    }
    part = {"type": ["object", "null"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "run.json of mxdiag",
        "type": "object",
        "required": ["schema_version", "model", "settings", "coverage", "tensors", "totals"],
        "properties": {
            "schema_version": {"const": version},
            "mxdiag_version": {"type": "string"},
            "created": {"type": "string", "format": "date-time"},
            "model": {"type": "object"},
            "settings": {"type": "object"},
            "environment": {"type": "object"},
            "calibration": {**part, "properties": {"records": {"type": "integer"}}},
            "coverage": {
                "type": "object",
                "required": [*numbers, *_COVERAGE_LISTS],
                "properties": {**numbers, **dict.fromkeys(_COVERAGE_LISTS, unmeasured)},
            },
            "tensors": _list_of(row),
            "totals": _list_of(total),
            "corrections": {
                "type": ["object", "null"],
                "additionalProperties": {
                    "type": "object",
                    "additionalProperties": {"type": "number"},
                },
            },
            "impact": {
                **part,
                "properties": {key: _list_of({"type": "object"}) for key in _IMPACT_LISTS},
            },
            "recommendation": part,
            "sums": {"type": ["string", "null"], "description": "SHA-256 of sums.npz"},
            "warnings": _list_of({"type": "string"}),
        },
    }
