"""The rows of a run as compact columns for the page.

A page of 60,000 rows must stay small and open at once, so columns travel as base64 of
little-endian arrays: float32 for measurements (7 digits; the page shows at most 6), a dictionary
with an index for texts and counts. The page decodes them in `assets/store.js`; `decode` mirrors it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mxdiag.decomposition import METRICS
from mxdiag.run.columns import CHOICE_COLUMNS, correction_of
from mxdiag.run.run import Run

_TEXTS = ("role", "operand", "gemm", "status", "block_axis", "shape", "dtype", *CHOICE_COLUMNS)
_COUNTS = ("expert", "numel", "calls", "tokens", "nonfinite")
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_BINS = 32
#: First number of a dotted name, with what stands before it.
_DEPTH = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.|$)")


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def encode_numbers(values: Sequence[float | None]) -> dict[str, Any]:
    """Numbers or None as `{"kind": "float", "bytes": 4 or 8, "data"}`; None travels as NaN.

    float32 unless a value lies beyond its range. A column of one value is `{"kind": "constant"}`.
    """
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    finite = array[np.isfinite(array)]
    if array.size and (finite.size == 0 or (finite.size == array.size and np.ptp(array) == 0)):
        return {"kind": "constant", "value": float(array[0]) if finite.size else None}
    wide = bool(finite.size) and float(np.abs(finite).max()) > _FLOAT32_MAX
    array = np.where(np.isfinite(array), array, np.nan)
    return {
        "kind": "float",
        "bytes": 8 if wide else 4,
        "data": _base64(array.astype("<f8" if wide else "<f4")),
    }


def encode_items(values: Sequence[Any]) -> dict[str, Any]:
    """Texts, counts or None as a dictionary of distinct values and an index into it."""
    places: dict[Any, int] = {}
    index = np.array([places.setdefault(value, len(places)) for value in values], dtype="<u4")
    width = 1 if len(places) <= 1 << 8 else 2 if len(places) <= 1 << 16 else 4
    return {
        "kind": "items",
        "values": list(places),
        "bytes": width,
        "data": _base64(index.astype(f"<u{width}")),
    }


def encode_names(values: Sequence[str]) -> dict[str, Any]:
    """Like `encode_items`, with each distinct name as the length it shares with the one before and
    the rest: names of one model differ at their end.
    """
    encoded = encode_items(values)
    names, before = encoded.pop("values"), ""
    shared, rest = [], []
    for name in names:
        pairs = zip(before, name, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(name)))
        # JavaScript counts UTF-16 units, so only an ASCII start has the same length there.
        while common and not name[:common].isascii():
            common -= 1
        shared.append(common)
        rest.append(name[common:])
        before = name
    return {**encoded, "kind": "names", "shared": shared, "rest": rest}


def decode_column(column: dict[str, Any], rows: int) -> list[Any]:
    """The values of one encoded column; floats come back as float32 held them."""
    if column["kind"] == "constant":
        return [column["value"]] * rows
    raw = base64.b64decode(column["data"])
    if column["kind"] == "float":
        array = np.frombuffer(raw, dtype=f"<f{column['bytes']}").astype(np.float64)
        return [None if np.isnan(value) else float(value) for value in array]
    if column["kind"] == "names":
        values: list[Any] = []
        for shared, rest in zip(column["shared"], column["rest"], strict=True):
            values.append((values[-1][:shared] if values else "") + rest)
    else:
        values = column["values"]
    return [values[place] for place in np.frombuffer(raw, dtype=f"<u{column['bytes']}")]


def place_of(layer: str) -> tuple[str, int] | None:
    """(stack, depth) of a layer: the dotted name before its first number, and that number.

    >>> place_of("model.layers.12.mlp.down_proj")
    ('model.layers', 12)
    """
    found = _DEPTH.search(layer)
    return None if found is None else (layer[: found.start()].rstrip("."), int(found[1]))


def _places(layers: Sequence[str]) -> tuple[list[dict[str, Any]], list[int | None]]:
    """Places in the order of stacks' first appearance, then depth; and each layer's place."""
    found = [place_of(layer) for layer in layers]
    stacks: dict[str, int] = {}
    for place in found:
        if place is not None:
            stacks.setdefault(place[0], len(stacks))
    order = sorted({place for place in found if place}, key=lambda p: (stacks[p[0]], p[1]))
    number = {place: index for index, place in enumerate(order)}
    described = [{"stack": stack, "depth": depth} for stack, depth in order]
    return described, [number[place] if place else None for place in found]


def _histograms(run: Run) -> str | None:
    """Each row's δ histogram as 32 bytes, 255 for its largest bin; None if no row has one."""
    if not any(row.get("delta_hist") for row in run.tensors):
        return None
    counts = np.zeros((len(run.tensors), _BINS))
    for index, row in enumerate(run.tensors):
        bins = row.get("delta_hist")
        if bins and len(bins) == _BINS:
            counts[index] = bins
    largest = np.maximum(counts.max(axis=1, keepdims=True), 1)
    return _base64(np.rint(255 * counts / largest).astype(np.uint8))


def _delta_totals(run: Run) -> list[dict[str, Any]]:
    """δ histograms added up per operand, GEMM and role."""
    groups: dict[tuple[str, str, str | None], np.ndarray] = {}
    for row in run.tensors:
        bins = row.get("delta_hist")
        if bins and len(bins) == _BINS:
            key = (row["operand"], row["gemm"], row.get("role"))
            groups.setdefault(key, np.zeros(_BINS, dtype=np.int64))
            groups[key] += np.asarray(bins, dtype=np.int64)
    return [
        {"operand": operand, "gemm": gemm, "role": role, "bins": bins.tolist()}
        for (operand, gemm, role), bins in groups.items()
    ]


def encode_rows(run: Run) -> dict[str, Any]:
    """Everything that the page needs of the rows: columns, places along depth, δ histograms.

    Row order is the run's. `place` holds each row's index into `places`, None for a layer whose
    name has no number.
    """
    rows = run.tensors
    layers = [row["layer"] for row in rows]
    columns: dict[str, dict[str, Any]] = {"layer": encode_names(layers)}
    names = run.columns
    for name in names[1:]:
        values = [row.get(name) for row in rows]
        if name == "shape":
            values = ["x".join(map(str, v)) if isinstance(v, (list, tuple)) else v for v in values]
        if name in _TEXTS or name in _COUNTS:
            columns[name] = encode_items(values)
        else:
            columns[name] = encode_numbers(values)
    for name, twin in (("deadzone_energy", "recoverable"), ("grid_energy", "irreducible")):
        if columns[name] == columns[twin]:
            columns[name] = {"kind": "same", "as": twin}
    places, place = _places(layers)
    return {
        "count": len(rows),
        "columns": columns,
        "places": places,
        "place": encode_items(place),
        "hist": _histograms(run),
        "delta": _delta_totals(run),
        "measures": [*METRICS, *(name for name in names if correction_of(name))],
    }


def script_json(value: Any) -> str:
    """Strict JSON that cannot end the script element it stands in, nor a line of JavaScript."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
