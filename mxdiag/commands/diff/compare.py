"""What moved between two runs, sorted by how much it matters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mxdiag.decomposition import METRICS
from mxdiag.run.columns import Key, Row, correction_of, finite, key_of
from mxdiag.run.run import Run, strict

#: Relative difference below which a number has not moved: the fast paths agree with the reference
#: to about this much.
MOVED_TOLERANCE = 1e-6
#: The same, absolutely, for numbers around zero.
_FLOOR = 1e-9
#: Settings that change how long a scan takes or where it goes, but not what it measures.
_IRRELEVANT = {"out", "quiet", "config", "device", "backend", "corrections", "sweep"}
_IRRELEVANT |= {"allow_pickle", "trust_remote_code", "revision"}
_IMPACT_FIELDS = (
    "loss",
    "kl_mean",
    "kl_p95",
    "agreement",
    "entropy",
    "t_eff_measured",
    "t_eff_predicted",
    "cosine_mean",
)
#: What comes first, whatever its error: nothing else can be trusted or compared.
_KINDS = ("nonfinite", "vanished", "appeared", "status", "moved")

Pair = tuple[float | None, float | None]


def settings_changes(before: Run, after: Run) -> list[tuple[str, str, str]]:
    """(name, before, after) of the architecture and each setting that changes what is measured."""
    old, new = (strict(run.data.get("settings") or {}) for run in (before, after))
    changes = [
        (name, repr(old.get(name)), repr(new.get(name)))
        for name in sorted({*old, *new} - _IRRELEVANT)
        if old.get(name) != new.get(name)
    ]
    models = [(run.data.get("model") or {}).get("architecture") for run in (before, after)]
    if models[0] != models[1]:
        changes.append(("architecture", repr(models[0]), repr(models[1])))
    return changes


@dataclass(frozen=True, slots=True)
class Change:
    """One row of either run that is not what it was.

    `error_change` is what the row adds to the error of its operand and GEMM, as a fraction of all
    of it in the first run; each row weighs by its share of the elements. Positive is worse.
    `metrics` holds what moved, as (before, after).
    """

    layer: str
    role: str | None
    operand: str
    gemm: str
    kind: str
    status: tuple[str | None, str | None]
    error_change: float
    metrics: Mapping[str, Pair]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "layer": self.layer,
            "role": self.role,
            "operand": self.operand,
            "gemm": self.gemm,
            "kind": self.kind,
            "status": list(self.status),
            "error_change": self.error_change,
            "metrics": {name: list(pair) for name, pair in self.metrics.items()},
        }


@dataclass(frozen=True, slots=True)
class ImpactChange:
    """One impact number that moved. `noise` tells that it moved by less than two standard
    deviations of the difference; None if no deviation was measured.
    """

    entry: str
    metric: str
    values: Pair
    noise: bool | None


@dataclass(slots=True)
class Diff:
    """The difference between two runs."""

    before: str
    after: str
    changes: list[Change] = field(default_factory=list)
    unchanged: int = 0
    settings: list[tuple[str, str, str]] = field(default_factory=list)
    #: (operand, gemm) to the metrics of its total that moved
    totals: dict[tuple[str, str], dict[str, Pair]] = field(default_factory=dict)
    impact: list[ImpactChange] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema_version": 1,
            "before": self.before,
            "after": self.after,
            "unchanged": self.unchanged,
            "settings": [
                {"name": name, "before": old, "after": new} for name, old, new in self.settings
            ],
            "totals": [
                {"operand": operand, "gemm": gemm, "metrics": metrics}
                for (operand, gemm), metrics in self.totals.items()
            ],
            "changes": [change.as_dict() for change in self.changes],
            "impact": [
                {
                    "entry": change.entry,
                    "metric": change.metric,
                    "values": list(change.values),
                    "noise": change.noise,
                }
                for change in self.impact
            ],
        }


def diff_runs(before: Run, after: Run, *, tolerance: float = MOVED_TOLERANCE) -> Diff:
    """Compare two runs row by row.

    Parameters
    ----------
    before, after
        The runs; rows are matched by (layer, operand, gemm).
    tolerance
        Relative difference below which a number has not moved.

    Returns
    -------
    Diff
        Rows that became non-finite first, then those that vanished, then all others by the size of
        their `error_change`.
    """
    diff = Diff(_label(before), _label(after), settings=settings_changes(before, after))
    old, new = ({key_of(row): row for row in run.tensors} for run in (before, after))
    shares = _ErrorShares(old, new)
    for key in {**old, **new}:
        change = _change(old.get(key), new.get(key), shares, tolerance)
        if change is None:
            diff.unchanged += 1
        else:
            diff.changes.append(change)
    diff.changes.sort(
        key=lambda change: (min(_KINDS.index(change.kind), 2), -abs(change.error_change))
    )
    diff.totals = _total_changes(before, after, tolerance)
    diff.impact = _impact_changes(before, after, tolerance)
    return diff


def _label(run: Run) -> str:
    source = (run.data.get("model") or {}).get("source")
    return str(run.folder if run.folder is not None else source or "run")


def _elements(row: Row | None) -> float:
    return 0.0 if row is None else finite(row.get("numel")) or 0.0


class _ErrorShares:
    """Each row's relative error, weighed by its share of the elements of its operand and GEMM.

    The share is taken of the elements that both runs measured, so that neither more tokens nor a
    row that vanished moves the weight of another.
    """

    def __init__(self, old: Mapping[Key, Row], new: Mapping[Key, Row]) -> None:
        both = {key for key in old if _elements(old[key]) and _elements(new.get(key))}
        groups = {key[1:] for key in both}
        self._whole: list[dict[tuple[str, str], float]] = [{}, {}]
        self._error: list[dict[tuple[str, str], float]] = [{}, {}]
        for side, rows in enumerate((old, new)):
            whole = self._whole[side]
            for key, row in rows.items():
                if key in both or key[1:] not in groups:
                    whole[key[1:]] = whole.get(key[1:], 0.0) + _elements(row)
            error = self._error[side]
            for key, row in rows.items():
                error[key[1:]] = error.get(key[1:], 0.0) + self._weighed(row, side)

    def _weighed(self, row: Row | None, side: int) -> float:
        if row is None:
            return 0.0
        whole = self._whole[side].get((row["operand"], row["gemm"]))
        return _elements(row) / whole * (finite(row.get("rel_mse")) or 0.0) if whole else 0.0

    def change(self, old: Row | None, new: Row | None) -> float:
        row = new or old
        assert row is not None
        group = row["operand"], row["gemm"]
        # Where the first run has no error at all, the second one's is the measure.
        total = self._error[0].get(group) or self._error[1].get(group)
        moved = self._weighed(new, 1) - self._weighed(old, 0)
        return moved / total if total else 0.0


def _kind(old: str | None, new: str | None) -> str:
    absent = (None, "not_observed")
    if new == "nonfinite" != old:
        return "nonfinite"
    if new in absent and old not in absent:
        return "vanished"
    if old in absent and new not in absent:
        return "appeared"
    return "moved" if old == new else "status"


def _change(
    old: Row | None, new: Row | None, shares: _ErrorShares, tolerance: float
) -> Change | None:
    status = (old["status"] if old else None, new["status"] if new else None)
    kind = _kind(*status)
    metrics = _moved(old or {}, new or {}, tolerance)
    if kind == "moved" and not metrics:
        return None
    row = new or old
    assert row is not None
    return Change(
        layer=row["layer"],
        role=row.get("role"),
        operand=row["operand"],
        gemm=row["gemm"],
        kind=kind,
        status=status,
        error_change=shares.change(old, new),
        metrics=metrics,
    )


def _moved(old: Row, new: Row, tolerance: float) -> dict[str, Pair]:
    """The metrics that differ. The closure residual is rounding, so that it always does."""
    names = [name for name in METRICS if name != "closure_residual"]
    ratios = [name for name in {**old, **new} if correction_of(name)]
    # A correction that only one of the runs evaluated has not moved.
    names += [name for name in ratios if name in old and name in new]
    pairs = {
        name: (finite(old.get(name)), finite(new.get(name)))
        for name in names
        if old.get(name) != new.get(name)
    }
    return {name: pair for name, pair in pairs.items() if not _same(*pair, tolerance)}


def _same(old: float | None, new: float | None, tolerance: float) -> bool:
    if old is None or new is None:
        return old is new
    return math.isclose(old, new, rel_tol=tolerance, abs_tol=min(_FLOOR, tolerance))


def _total_changes(
    before: Run, after: Run, tolerance: float
) -> dict[tuple[str, str], dict[str, Pair]]:
    old, new = (
        {(t["operand"], t["gemm"]): t for t in run.data["totals"] if t.get("role") is None}
        for run in (before, after)
    )
    moved = {key: _moved(old.get(key, {}), new.get(key, {}), tolerance) for key in {**old, **new}}
    return {key: metrics for key, metrics in moved.items() if metrics}


def _impact_entries(run: Run) -> dict[str, Row]:
    impact = run.data.get("impact") or {}
    return {
        f"{name} {entry.get('config')} {entry.get('operands')}": entry
        for name in ("forward", "backward", "both")
        for entry in impact.get(name) or []
    }


def _impact_changes(before: Run, after: Run, tolerance: float) -> list[ImpactChange]:
    old, new = _impact_entries(before), _impact_entries(after)
    changes = []
    for name, entry in new.items():
        for metric in _IMPACT_FIELDS:
            values = (finite(old.get(name, {}).get(metric)), finite(entry.get(metric)))
            if name not in old or _same(*values, tolerance):
                continue
            spreads = [finite(side.get(f"{metric}_sd")) for side in (old[name], entry)]
            noise = None
            if None not in (*values, *spreads):
                noise = abs(values[1] - values[0]) < 2 * math.hypot(*spreads)  # type: ignore[operator,arg-type]
            changes.append(ImpactChange(name, metric, values, noise))
    return changes
