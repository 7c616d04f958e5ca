"""What a recommendation is made from, one row at a time, and the sentence that gives its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mxdiag.quantize.corrections.base import Correction, Cost
from mxdiag.quantize.corrections.bf16 import Bf16
from mxdiag.run.columns import correction_of

#: Name of "no correction", and of what is left where none helps.
NO_CORRECTION, FALLBACK = "mxfp4", "bf16"
#: A smaller share of the error is no reason for a correction; the largest share is named instead.
MENTIONED_SHARE = 0.1
#: How far in dB the mean over tokens lies below the whole when a few tokens hide the others.
HIDDEN_DB = 1.0
_SHARES = {
    "reducible": "reducible scale bias",
    "recoverable": "recoverable deadzone",
    "irreducible": "irreducible grid noise",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice for a row: a correction, or none (`mxfp4`)."""

    name: str
    correction: Correction | None
    cost: Cost

    @property
    def four_bit(self) -> bool:
        """Whether elements stay in 4 bits."""
        return self.correction is None or self.correction.four_bit


@dataclass(frozen=True, slots=True)
class Choice:
    """What one row gets. `recommended` is a correction's name, `mxfp4` for none, or None where
    nothing can be recommended; `mse_ratio` and `sqnr_db` are what was measured under it.
    """

    layer: str
    operand: str
    gemm: str
    recommended: str | None
    reason: str
    mse_ratio: float | None = None
    sqnr_db: float | None = None
    cost: Cost | None = None


@dataclass(frozen=True, slots=True)
class RecommendRow:
    """One row of a run, as far as a recommendation needs it.

    `error` is ||e||^2 / ||x||^2 of plain MXFP4, `ratios` the measured MSE ratio by correction,
    `token_sqnr` the mean over tokens in dB where it was measured.
    """

    layer: str
    expert: int | None
    operand: str
    gemm: str
    status: str
    numel: int
    error: float
    ratios: dict[str, float]
    shares: dict[str, float]
    token_sqnr: float | None = None

    @property
    def title(self) -> str:
        """Operand and GEMM, as in `A·fprop`."""
        return f"{self.operand}·{self.gemm}"

    @property
    def usable(self) -> bool:
        """Whether anything can be recommended for it."""
        return self.status in ("ok", "exact", "zero")

    def error_of(self, name: str) -> float | None:
        """Relative squared error under a candidate; None where it was not measured.

        `bf16` counts as exact where it was not measured: it is the tensor left as it is.
        """
        if name == NO_CORRECTION or self.error == 0:
            known = name in (NO_CORRECTION, FALLBACK) or self.status == "zero"
            return self.error if known else None
        if name in self.ratios:
            return self.error * self.ratios[name]
        return 0.0 if name == FALLBACK else None

    def sqnr_of(self, name: str) -> float:
        """SQNR in dB under a candidate; infinite without error, NaN where it was not measured."""
        return sqnr_db(self.error_of(name))


def sqnr_db(error: float | None) -> float:
    """-10 log10 of a relative squared error."""
    if error is None:
        return math.nan
    return -10 * math.log10(error) if error > 0 else math.inf


def as_number(value: Any) -> float | None:
    """A finite float, or None for what a row leaves empty."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        try:
            value = float(value)
        except (TypeError, ValueError):
            return None
    return float(value) if math.isfinite(value) else None


def read_row(source: Mapping[str, Any]) -> RecommendRow:
    """A row of `run.json` or of the run's frame."""
    named = ((correction_of(key), value) for key, value in source.items())
    ratios = {name: as_number(value) for name, value in named if name is not None}
    shares = {name: as_number(source.get(name)) for name in _SHARES}
    error, expert = as_number(source.get("rel_mse")), as_number(source.get("expert"))
    status = source["status"]
    if status == "ok" and error is None:
        status = "unknown"
    return RecommendRow(
        source["layer"],
        None if expert is None else int(expert),
        source["operand"],
        source["gemm"],
        status,
        int(as_number(source.get("numel")) or 0),
        error if status == "ok" and error is not None else 0.0,
        {name: ratio for name, ratio in ratios.items() if ratio is not None},
        {name: share for name, share in shares.items() if share is not None},
        as_number(source.get("sqnr_db_token")),
    )


def failure_mode(row: RecommendRow) -> str:
    """What the row's error harms (arXiv 2605.20402)."""
    backward = row.operand == "G" or row.gemm in ("dgrad", "wgrad")
    return "gradient accuracy" if backward else "rollout quality"


def cost_text(cost: Cost) -> str:
    """A cost in words: bits per element, GEMM passes, rotations."""
    parts = []
    if cost.bits > 0:
        parts.append(f"{cost.bits:.4g} bits")
    if cost.gemm_passes:
        parts.append("a second GEMM pass")
    if cost.transforms:
        parts.append("a rotation of both operands")
    text = "for " + " and ".join(parts) if parts else "at no cost in bits"
    return f"and saves {-cost.bits:.2f} bits" if cost.bits < 0 else text


def in_db(value: float) -> str:
    """An SQNR in words."""
    return "no error" if value == math.inf else f"{value:.1f} dB"


def _share(row: RecommendRow, name: str | None) -> str:
    """The share that a correction goes for, or the largest, in words."""
    if not row.shares:
        return "its error"
    if name is None or row.shares.get(name, 0.0) < MENTIONED_SHARE:
        name = max(row.shares, key=lambda share: row.shares[share])
    return f"{100 * row.shares[name]:.0f} % of the error is {_SHARES[name]}"


def without_choice(row: RecommendRow) -> str:
    """The reason of a row for which nothing is recommended."""
    if row.status == "nonfinite":
        return f"{row.title}: holds NaN or infinities; no correction helps, repair the values first"
    if row.status == "unknown":
        return f"{row.title}: its error is too small for float64, so nothing is recommended"
    return f"{row.title}: not observed, so nothing is recommended"


def plain_reason(row: RecommendRow, context: str) -> str:
    """The reason of a row that stays plain MXFP4."""
    if row.status == "exact":
        return f"{row.title}: MXFP4 holds it exactly"
    if row.status == "zero":
        return f"{row.title}: all zeros"
    before = row.sqnr_of(NO_CORRECTION)
    hidden = row.token_sqnr is not None and row.token_sqnr < before - HIDDEN_DB
    tokens = f" ({row.token_sqnr:.1f} dB per token)" if hidden else ""
    left = f"{100 * row.shares['irreducible']:.0f} % grid noise" if row.shares else "grid noise"
    return (
        f"{row.title}: plain MXFP4 has {in_db(before)}{tokens}, {context}; "
        f"what is left ({left}) acts on entropy"
    )


def correction_reason(row: RecommendRow, candidate: Candidate) -> str:
    """The reason of a row that gets a correction: share, effect, cost, failure mode."""
    if row.status != "ok":
        return f"{plain_reason(row, '')}; {candidate.name} because of the rows it is fused with"
    acts_on = candidate.correction.acts_on if candidate.correction else None
    before, after = row.sqnr_of(NO_CORRECTION), row.sqnr_of(candidate.name)
    verb = "takes" if after < before else "brings"
    effect = f"{candidate.name} {verb} it from {before:.1f} to {in_db(after)}"
    if after == math.inf:
        effect = f"{candidate.name} leaves it as it is instead of at {before:.1f} dB"
    cost = cost_text(candidate.cost)
    return f"{row.title}: {_share(row, acts_on)}; {effect} {cost} ({failure_mode(row)})"


def fallback_reason(row: RecommendRow, target: str, best: str | None, reached: float) -> str:
    """The reason of a row of a group that no candidate brings to the target."""
    tried = f"the best, {best}, leaves {in_db(reached)}" if best else "none was evaluated"
    return (
        f"{row.title}: no correction reaches {target} ({tried}); {FALLBACK} "
        f"{cost_text(Bf16(FALLBACK).cost)} ({failure_mode(row)})"
    )
