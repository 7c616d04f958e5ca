"""Runs of one model over other records, added up: equal to one run over all of them.

Every number of a row is derived from sums, and the sums of the runs are added. W is the same in
each run and is taken once. Gradients depend on the number that the loss is divided by, so their
rows merge only where the runs used the same.
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mxdiag.decomposition import Decomposition
from mxdiag.errors import RunError
from mxdiag.gemms import CELLS
from mxdiag.run.columns import Key, key_of
from mxdiag.run.rows import derived, not_observed, row_warnings, totals
from mxdiag.run.run import SCHEMA_VERSION, Run, strict

#: Settings that may differ between runs that merge: they choose the records.
_FREE = frozenset({"calib", "samples", "loss_tokens"})
_CELL = {(cell.operand, cell.gemm): cell for cell in CELLS}
#: What tells that two runs are of the same model.
_IDENTITY = ("source", "kind", "architecture", "parameters", "revision")


def merge_runs(runs: Sequence[Run], version: str) -> Run:
    """One run of the records of all.

    Parameters
    ----------
    runs
        At least two, of the same model and settings, with their sums.
    version
        Of the mxdiag that merges.

    Returns
    -------
    Run
        Without the parts `impact` and `recommendation`, which are not sums over records.

    Raises
    ------
    RunError
        If they cannot be added up: what differs, where, and what to do.
    """
    if len(runs) < 2:
        raise RunError("merging takes two runs or more", advice="Name the folders of the runs")
    first = runs[0]
    for other in runs[1:]:
        _check_same(first, other)
    _check_denominators(runs)
    sums = [run.sums for run in runs]
    rule = first.data["settings"]["scale_rule"]
    rows, seen = [], []
    merged: dict[Key, Decomposition] = {}
    for number, row in enumerate(first.tensors):
        key = key_of(row)
        parts = [found[key] for found in sums]
        if key[1] == "W":
            _check_weight(runs, key, parts)
            parts = parts[:1]
        whole = merged[key] = sum(parts[1:], parts[0])
        rows.append(_row([run.tensors[number] for run in runs], whole))
        seen.append((_CELL[key[1], key[2]], row["role"], whole))
    reasons = {key_of(row): row.get("not_observed_reason") for row in rows}
    own = {text for run in runs for text in row_warnings(run.sums)}
    told = dict.fromkeys(w for run in runs for w in run.data.get("warnings", ()) if w not in own)
    if any(run.data.get("impact") for run in runs):
        told["impact measurements are no sums over records, and are not merged"] = None
    data = copy.deepcopy({k: v for k, v in first.data.items() if k not in ("tensors", *_PARTS)})
    data |= {
        "schema_version": SCHEMA_VERSION,
        "mxdiag_version": version,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "calibration": _calibration(runs),
        "coverage": {
            **data["coverage"],
            "not_observed": not_observed(merged, reasons),
        },
        "tensors": rows,
        "totals": totals(seen, rule),
        "impact": None,
        "warnings": [*told, *row_warnings(merged)],
    }
    return Run(strict(data), _sums=merged)


_PARTS = ("impact", "recommendation")


def _where(run: Run) -> str | None:
    return None if run.folder is None else str(run.folder)


def _check_same(first: Run, other: Run) -> None:
    for key in _IDENTITY:
        a, b = first.data["model"].get(key), other.data["model"].get(key)
        if a != b:
            raise RunError(
                f"is a run of another model: its {key} is {b!r}, not {a!r}",
                where=_where(other),
                advice="Merge runs of one model",
            )
    settings, others = first.data["settings"], other.data["settings"]
    for key in dict.fromkeys([*settings, *others]):
        if key not in _FREE and settings.get(key) != others.get(key):
            raise RunError(
                f"was scanned with {key} {others.get(key)!r}, the first run with "
                f"{settings.get(key)!r}",
                where=_where(other),
                advice=f"Scan with the same --{key.replace('_', '-')}",
            )
    if [key_of(row) for row in first.tensors] != [key_of(row) for row in other.tensors]:
        raise RunError(
            "does not hold the same rows as the first run",
            where=_where(other),
            advice="Merge runs of one model",
        )


def _check_denominators(runs: Sequence[Run]) -> None:
    """One loss over all records has one denominator: somebody must have chosen it for each run."""
    if not any(row["operand"] == "G" and row["numel"] for run in runs for row in run.tensors):
        return
    parts = [run.data.get("calibration") or {} for run in runs]
    used = [part.get("loss_tokens") for part in parts]
    own = [part.get("labelled_tokens") for part in parts]
    by_default = used[0] is not None and used == own
    if len(set(used)) == 1 and not by_default:
        return
    raise RunError(
        f"gradients of losses that are divided by {', '.join(map(str, used))} tokens do not add up "
        "to those of one loss over all records",
        advice=f"Scan each with --loss-tokens {sum(n or 0 for n in own)}, the labelled tokens of "
        "all of them",
    )


def _check_weight(runs: Sequence[Run], key: Key, parts: Sequence[Decomposition]) -> None:
    packed = parts[0].pack()
    for run, part in zip(runs[1:], parts[1:], strict=True):
        other = part.pack()
        if len(other) != len(packed) or not np.array_equal(packed, other, equal_nan=True):
            raise RunError(
                f"is a run of another model: the weight of {key[0]} ({key[2]}) differs",
                where=_where(run),
                advice="Merge runs of one model",
            )


def _row(rows: Sequence[Mapping[str, Any]], whole: Decomposition) -> dict[str, Any]:
    """The row of all runs, in the order of columns that `scan` gives it."""
    row = {key: value for key, value in rows[0].items() if key not in ("recommended", "reason")}
    calls = [r["calls"] for r in rows if r["calls"] is not None]
    tokens = [r["tokens"] for r in rows if r["tokens"] is not None]
    shape = next((r["shape"] for r in rows if r["shape"] is not None), None)
    total = sum(tokens) if tokens else None
    observed = derived(whole)
    row |= {
        "shape": shape if row["operand"] == "W" or shape is None else [total, shape[1]],
        "dtype": next((r["dtype"] for r in rows if r["dtype"] is not None), None),
        "calls": sum(calls) if calls else None,
        "tokens": total,
        **{key: value for key, value in observed.items() if key in row},
    }
    rest = {key: value for key, value in observed.items() if key not in row}
    if rest:  # the first run did not observe it, and so lacks the columns of corrections
        histogram = row.pop("delta_hist")
        row |= {**rest, "delta_hist": histogram}
    if whole.status != "not_observed":
        row.pop("not_observed_reason", None)
    return row


def _calibration(runs: Sequence[Run]) -> dict[str, Any] | None:
    parts = [run.data.get("calibration") for run in runs]
    known = [part for part in parts if part]
    if not known:
        return None
    return {
        "records": sum(part["records"] for part in known),
        "labelled_tokens": sum(part["labelled_tokens"] or 0 for part in known) or None,
        "loss_tokens": known[0]["loss_tokens"],
    }
