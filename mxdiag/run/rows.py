"""From measurements to the rows, totals and coverage of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mxdiag.decomposition import Decomposition, total
from mxdiag.gemms import CELLS, Cell
from mxdiag.layers.linears import Linear
from mxdiag.quantize.corrections.registry import parse_corrections
from mxdiag.quantize.sums import CORRECTION_FIELDS
from mxdiag.run.columns import Key, corrected_column

#: Statuses whose numbers enter a total.
MEASURED = ("ok", "exact", "zero", "nonfinite")


@dataclass(slots=True)
class Measurement:
    """One row to be: a layer's operand in one GEMM, and what was seen of it.

    `reason` says why nothing was observed. `calls` is None where no model was run.
    """

    linear: Linear
    cell: Cell
    decomposition: Decomposition
    dtype: str | None = None
    calls: int | None = None
    tokens: int | None = None
    reason: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> list[int] | None:
        """[out, in] of W; [tokens, features] of A and G over all calls."""
        out_features, in_features = self.linear.shape
        if self.cell.operand == "W":
            return [out_features, in_features]
        if self.tokens is None:
            return None
        return [self.tokens, in_features if self.cell.operand == "A" else out_features]

    def as_row(self) -> dict[str, Any]:
        """The row of `run.json`."""
        decomposition = self.decomposition
        row: dict[str, Any] = {
            "layer": self.linear.layer,
            "role": self.linear.role,
            "expert": self.linear.expert,
            "operand": self.cell.operand,
            "gemm": self.cell.gemm,
            "status": decomposition.status,
            "block_axis": self.cell.block_axis,
            "shape": self.shape,
            "numel": decomposition.numel,
            "dtype": self.dtype,
            "calls": self.calls,
            "tokens": self.tokens,
            **derived(decomposition),
        }
        if self.reason is not None:
            row["not_observed_reason"] = self.reason
        return {**row, **self.facts}


def derived(decomposition: Decomposition) -> dict[str, Any]:
    """The columns of a row that follow from its sums."""
    return {
        "status": decomposition.status,
        "numel": decomposition.numel,
        **decomposition.metrics(),
        **correction_columns(decomposition),
        "delta_hist": decomposition.delta_hist.tolist(),
    }


def correction_columns(decomposition: Decomposition) -> dict[str, float | None]:
    """What every evaluated correction makes of the row, as columns `<quantity>:<correction>`.

    `mse_ratio`, `sqnr_db`, `underflow_frac`, `gain` and `error_sum` (of Q_c - x) of each; the
    shares after it where its ideal scale is that of the plain format, so that they are defined.
    """
    columns: dict[str, float | None] = {}
    signal, counted = decomposition.sum("x2"), decomposition.count("counted")
    for correction in parse_corrections(decomposition.corrections):
        name = correction.name
        fields = zip(CORRECTION_FIELDS, decomposition.corrections[name], strict=True)
        values = {field: float(value) for field, value in fields}
        error = values["e2"]
        defined = math.isfinite(error) and not decomposition.underflows
        columns[corrected_column("mse_ratio", name)] = decomposition.mse_ratio(name)
        columns[corrected_column("sqnr_db", name)] = (
            10 * math.log10(signal / error) if defined and error and signal else None
        )
        columns[corrected_column("underflow_frac", name)] = (
            values["underflow"] / counted if counted else None
        )
        columns[corrected_column("gain", name)] = (
            values["qx"] / signal if signal and not decomposition.underflows else None
        )
        columns[corrected_column("error_sum", name)] = values["e"]
        if correction.keeps_ideal and defined and error:
            dead, grid = (decomposition.sum(part) / error for part in ("deadzone2", "grid2"))
            columns[corrected_column("reducible", name)] = 1 - dead - grid
            (
                columns[corrected_column("recoverable", name)],
                columns[corrected_column("irreducible", name)],
            ) = (
                dead,
                grid,
            )
    return columns


#: A row's cell, its role, and what was seen of it.
SeenRow = tuple[Cell, str, Decomposition]


def totals(seen: Sequence[SeenRow], scale_rule: str) -> list[dict[str, Any]]:
    """Sums of rows by operand and GEMM, first over all roles (role None), then by role."""
    result = []
    for cell in CELLS:
        rows = [(role, found) for own, role, found in seen if own == cell]
        if not rows:
            continue
        result.append(_total(cell, None, [found for _, found in rows], scale_rule))
        result += [
            _total(cell, role, [found for own, found in rows if own == role], scale_rule)
            for role in dict.fromkeys(role for role, _ in rows)
        ]
    return result


def _total(
    cell: Cell, role: str | None, rows: Sequence[Decomposition], scale_rule: str
) -> dict[str, Any]:
    decomposition = total(rows, scale_rule)
    return {
        "operand": cell.operand,
        "gemm": cell.gemm,
        "role": role,
        "rows": len(rows),
        "measured": sum(found.status in MEASURED for found in rows),
        "numel": decomposition.numel,
        **decomposition.metrics(),
        **correction_columns(decomposition),
        "delta_hist": decomposition.delta_hist.tolist(),
    }


def not_observed(
    rows: Mapping[Key, Decomposition], reasons: Mapping[Key, str | None]
) -> list[dict[str, Any]]:
    """The rows that nothing was seen of, each with its reason."""
    return [
        {
            "layer": key[0],
            "operand": key[1],
            "gemm": key[2],
            "reason": reasons.get(key) or "never called",
        }
        for key, found in rows.items()
        if found.status == "not_observed"
    ]


def row_warnings(rows: Mapping[Key, Decomposition]) -> list[str]:
    """What a reader must know before trusting a row."""
    notes = {
        "hold NaN or infinite values": (
            [key for key, found in rows.items() if found.status == "nonfinite"],
            "their numbers leave those blocks out",
        ),
        "hold float64 values whose squares underflow": (
            [key for key, found in rows.items() if found.underflows],
            "their energies and shares are unknown",
        ),
    }
    return [
        f"{len(keys)} rows {what}, the first is {keys[0][0]} ({keys[0][1]}·{keys[0][2]}): {so}"
        for what, (keys, so) in notes.items()
        if keys
    ]


@dataclass(slots=True)
class Coverage:
    """Where every parameter of two or more axes went, as {layer, rule or reason, parameters}.

    `parameters` counts all of them: what is measured, excluded and unsupported adds up to it, tied
    weights counted once.
    """

    measured: int
    measured_parameters: int
    parameters: int
    excluded: list[dict[str, Any]] = field(default_factory=list)
    unsupported: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The `coverage` of `run.json`, without what depends on the rows."""
        unsupported = sum(entry["parameters"] for entry in self.unsupported)
        accounted = self.parameters - unsupported
        return {
            "measured": self.measured,
            "measured_parameters": self.measured_parameters,
            "parameters": self.parameters,
            "excluded": self.excluded,
            "unsupported": self.unsupported,
            "parameter_fraction": accounted / self.parameters if self.parameters else 1.0,
        }


@dataclass(slots=True)
class Measured:
    """What a scan saw, before it becomes a run.

    `calibration` is {records, labelled_tokens, loss_tokens}, None where no model was run.
    """

    measurements: list[Measurement]
    coverage: Coverage
    model: dict[str, Any]
    calibration: dict[str, Any] | None = None
    device: str = "cpu"
    warnings: list[str] = field(default_factory=list)
