"""Which correction each row gets, under a target per row or a budget over all weights. No torch.

Rows that must share one format are chosen for together (`mxdiag.layers.fusing`); a weight
has one format in all its GEMMs. A target takes, for each group, the cheapest candidate under which
every row of it meets the target: one that keeps 4-bit elements before a higher-precision one, then
fewer bits, GEMM passes and rotations, then the lower error (for A and G, whose scales are searched
at run time, no correction before a free one). A budget takes the allocation of least total error
(`mxdiag.commands.recommend.allocation`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from mxdiag.commands.recommend import reasons
from mxdiag.commands.recommend.allocation import allocate, lowest_cost
from mxdiag.commands.recommend.reasons import (
    FALLBACK,
    NO_CORRECTION,
    Candidate,
    Choice,
    RecommendRow,
    sqnr_db,
)
from mxdiag.commands.recommend.summary import (
    Schedule,
    noise_schedule,
    stochastic_rounding,
    summarize,
    totals_in_words,
)
from mxdiag.errors import UsageError
from mxdiag.formats import MXFP4
from mxdiag.layers.fusing import fused_group
from mxdiag.quantize.corrections.aqn import AdaptiveNoise
from mxdiag.quantize.corrections.base import Cost
from mxdiag.quantize.corrections.bf16 import Bf16
from mxdiag.quantize.corrections.registry import parse_corrections
from mxdiag.quantize.corrections.sr import StochasticRounding

#: The target where none is given. N(0, 1) has 18.75 dB in MXFP4 and weights of language models 18.6
#: to 18.8: what falls below 18 dB loses to its own shape (deadzone, outliers), not to the format.
DEFAULT_TARGET_SQNR = 18.0


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Choices in the order of the rows given, and what they come to.

    `targets` are the targets used; `totals` holds, by operand, rows, bits and relative squared
    error per element before and after, rows with a second GEMM pass and with a rotation; `gap` is
    the relative distance to the lower bound of a budgeted allocation; `sentences` say it in words.
    """

    choices: tuple[Choice, ...]
    targets: dict[str, float]
    totals: dict[str, dict[str, Any]]
    schedule: Schedule | None
    gap: float | None
    sentences: tuple[str, ...]


@dataclass(slots=True)
class _Group:
    """Rows that share one format, by their index in the input."""

    rows: list[RecommendRow] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)

    def error(self, name: str, weights: Mapping[str, float] | None = None) -> float:
        """Sum of numel * error, or of sensitivity * MSE ratio; infinite if a row lacks it."""
        total = 0.0
        for row in self.rows:
            error = row.error_of(name)
            if error is None:
                return math.inf
            if weights is None:
                total += row.numel * error
            elif row.error > 0:
                total += max(weights[row.layer], 0.0) * error / row.error
        return total

    @property
    def numel(self) -> int:
        """Elements of all rows."""
        return sum(row.numel for row in self.rows)


@dataclass(frozen=True, slots=True)
class _Targets:
    sqnr: float | None
    mse_ratio: float | None

    def met(self, row: RecommendRow, name: str) -> bool:
        """Whether a row meets every target under a candidate that was measured on it."""
        error = row.error_of(name)
        if error is None:
            return False
        if self.sqnr is not None and sqnr_db(error) < self.sqnr:
            return False
        return self.mse_ratio is None or error <= self.mse_ratio * row.error

    @property
    def text(self) -> str:
        parts = [] if self.sqnr is None else [f"{self.sqnr:g} dB"]
        if self.mse_ratio is not None:
            parts.append(f"an MSE ratio of {self.mse_ratio:g}")
        return " and ".join(parts)

    @property
    def values(self) -> dict[str, float]:
        named = {"target_sqnr": self.sqnr, "target_mse_ratio": self.mse_ratio}
        return {name: value for name, value in named.items() if value is not None}


def choose(
    rows: Iterable[Mapping[str, Any]] | Any,
    *,
    target_sqnr: float | None = None,
    target_mse_ratio: float | None = None,
    max_bits: float | None = None,
    allow: str | Sequence[str] | None = None,
    fuse: str = "serving",
    sensitivities: Mapping[str, float] | None = None,
    impact: Mapping[str, Any] | None = None,
) -> Recommendation:
    """Recommend one correction per row of a run.

    Parameters
    ----------
    rows
        Rows of `run.json`, or a DataFrame with the columns of `tensors.csv`.
    target_sqnr
        Each row's SQNR in dB after its correction; `DEFAULT_TARGET_SQNR` if no target is given.
    target_mse_ratio
        Each row's error after over before. Given both, both must be met.
    max_bits
        Mean bits per weight element. The W rows then get the allocation of least total error,
        sum of numel * rel_mse; the targets hold for A and G alone, whose costs are totalled apart.
    allow
        Names of the corrections to choose from; all that were evaluated if None. `mxfp4` (none) is
        always among them, and `bf16` too unless `max_bits` is given with a list that lacks it.
    fuse
        `serving`: layers that serving stacks fuse get one format; `none`: each by itself.
    sensitivities
        Layer -> what plain MXFP4 on its weight costs the model (a loss or KL difference), in place
        of numel * rel_mse with `max_bits`; below 0 (noise) counts as 0.
    impact
        The run's `impact`: stochastic rounding is recommended only on what it measured.

    Raises
    ------
    UsageError
        On a target that is no positive number, a budget below the cheapest allocation, a correction
        that the run did not evaluate, a layer without sensitivity.
    """
    parsed = [reasons.read_row(row) for row in _records(rows)]
    _check_numbers(target_sqnr=target_sqnr, target_mse_ratio=target_mse_ratio, max_bits=max_bits)
    if sensitivities is not None and max_bits is None:
        raise UsageError("sensitivities weigh a budget", advice="Give --max-bits with them")
    if target_sqnr is None and target_mse_ratio is None:
        target_sqnr = DEFAULT_TARGET_SQNR
    targets = _Targets(target_sqnr, target_mse_ratio)
    names = _allowed(parsed, allow)
    candidates = [c for c in names if c.correction is None or c.correction.judged_by_error]
    groups = _groups(parsed, fuse)
    choices: dict[int, Choice] = {}
    gap = None
    if max_bits is not None:
        weights = [group for group in groups if group.rows[0].operand == "W"]
        groups = [group for group in groups if group.rows[0].operand != "W"]
        gap = _choose_within(weights, candidates, max_bits, sensitivities, choices)
    for group in groups:
        _choose_for_target(group, candidates, targets, choices)
    for index, row in enumerate(parsed):
        if not row.usable:
            reason = reasons.without_choice(row)
            choices[index] = Choice(row.layer, row.operand, row.gemm, None, reason)
    ordered = tuple(choices[index] for index in range(len(parsed)))
    totals = summarize(parsed, ordered)
    wanted = {c.correction.kind for c in names if c.correction is not None} if allow else None
    schedule = None
    if wanted is None or AdaptiveNoise.kind in wanted:
        schedule = noise_schedule(parsed, ordered)
    sentences = totals_in_words(totals, ordered, gap)
    if schedule is not None:
        sentences.append(schedule.sentence)
    if impact is not None and (wanted is None or StochasticRounding.kind in wanted):
        sentences += stochastic_rounding(impact)
    used = targets.values | ({} if max_bits is None else {"max_bits": max_bits})
    return Recommendation(ordered, used, totals, schedule, gap, tuple(sentences))


def _records(rows: Any) -> Iterable[Mapping[str, Any]]:
    return rows.to_dict("records") if hasattr(rows, "to_dict") else rows


def _check_numbers(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{value} is no target", where=option, advice="Give a number above 0")


def _allowed(rows: list[RecommendRow], allow: str | Sequence[str] | None) -> list[Candidate]:
    """No correction first, then what may be chosen."""
    evaluated = dict.fromkeys(name for row in rows for name in row.ratios)
    free = (FALLBACK, *(cls.kind for cls in (AdaptiveNoise, StochasticRounding)))
    names = list(dict.fromkeys([*evaluated, FALLBACK]))
    if allow is not None:
        names = [correction.name for correction in parse_corrections(allow)]
        missing = [name for name in names if name not in evaluated and name not in free]
        if missing:
            raise UsageError(
                f"this run did not evaluate {', '.join(missing)}",
                where="--allow",
                advice=f"It evaluated {', '.join(evaluated) or 'none'}; scan with --corrections",
            )
    return [
        Candidate(NO_CORRECTION, None, Cost(0.0)),
        *(Candidate(c.name, c, c.cost) for c in parse_corrections(names)),
    ]


def _groups(rows: list[RecommendRow], fuse: str) -> list[_Group]:
    """Usable rows by fused group and operand; A and G by GEMM as well."""
    groups: dict[tuple[str, ...], _Group] = {}
    for index, row in enumerate(rows):
        name = fused_group(row.layer, row.expert, fuse)
        if row.usable:
            gemm = () if row.operand == "W" else (row.gemm,)
            group = groups.setdefault((name, row.operand, *gemm), _Group())
            group.rows.append(row)
            group.indices.append(index)
    return list(groups.values())


def _offered(group: _Group, candidates: list[Candidate]) -> list[Candidate]:
    """Candidates that apply to the group's operand."""
    operand = group.rows[0].operand
    return [c for c in candidates if c.correction is None or operand in c.correction.operands]


def _choose_for_target(
    group: _Group, candidates: list[Candidate], targets: _Targets, choices: dict[int, Choice]
) -> None:
    offered = _offered(group, candidates)
    chosen = _cheapest(group, offered, targets)
    if chosen is None:
        _fall_back(group, offered, targets, choices)
        return
    worst = min(group.rows, key=lambda row: row.sqnr_of(NO_CORRECTION))
    for row, index in zip(group.rows, group.indices, strict=True):
        if chosen.name == NO_CORRECTION:
            reason = reasons.plain_reason(row, f"which meets {targets.text}")
        else:
            reason = reasons.correction_reason(row, chosen)
            if targets.met(row, NO_CORRECTION) and not targets.met(worst, NO_CORRECTION):
                reason += f"; needed by {worst.layer}, which shares its format"
        choices[index] = _choice(row, chosen, reason)


def _cheapest(group: _Group, offered: list[Candidate], targets: _Targets) -> Candidate | None:
    """The cheapest candidate but the fallback under which every row meets the targets, if any."""
    online = group.rows[0].operand != "W"

    def price(candidate: Candidate) -> tuple[float, ...]:
        cost, extra_work = candidate.cost, online and candidate.name != NO_CORRECTION
        left_4_bit = not candidate.four_bit
        return left_4_bit, cost.bits, cost.gemm_passes, cost.transforms, extra_work

    helping = sorted((c for c in offered if c.name != FALLBACK), key=price)
    for _, equals in groupby(helping, key=price):
        meeting = [c for c in equals if all(targets.met(row, c.name) for row in group.rows)]
        if meeting:
            return min(meeting, key=lambda candidate: group.error(candidate.name))
    return None


def _fall_back(
    group: _Group, offered: list[Candidate], targets: _Targets, choices: dict[int, Choice]
) -> None:
    """bf16 for a group that no candidate brings to the target, said so."""
    fallback = Candidate(FALLBACK, Bf16(FALLBACK), Bf16(FALLBACK).cost)
    tried = [c for c in offered if c.name not in (NO_CORRECTION, FALLBACK)]
    measured = [c for c in tried if math.isfinite(group.error(c.name))]
    best = min(measured, key=lambda c: group.error(c.name), default=None)
    for row, index in zip(group.rows, group.indices, strict=True):
        reached = row.sqnr_of(best.name) if best else math.nan
        name = best.name if best else None
        reason = reasons.fallback_reason(row, targets.text, name, reached)
        if best is not None and targets.met(row, best.name):
            reason += "; this row would reach it, another one that shares its format would not"
        choices[index] = _choice(row, fallback, reason)


def _choice(row: RecommendRow, candidate: Candidate, reason: str) -> Choice:
    error = row.error_of(candidate.name)
    ratio = error / row.error if error is not None and row.error > 0 else None
    after = sqnr_db(error)
    return Choice(
        row.layer,
        row.operand,
        row.gemm,
        candidate.name,
        reason,
        ratio,
        after if math.isfinite(after) else None,
        candidate.cost,
    )


def _choose_within(
    groups: list[_Group],
    candidates: list[Candidate],
    max_bits: float,
    sensitivities: Mapping[str, float] | None,
    choices: dict[int, Choice],
) -> float:
    """The allocation of least error within mean bits per weight element; returns its gap."""
    if not groups:
        raise UsageError("the run has no weight rows to budget", where="--max-bits")
    missing = [] if sensitivities is None else _without(groups, sensitivities)
    if missing:
        raise UsageError(
            f"{len(missing)} layers have no sensitivity, the first is {missing[0]}",
            advice="Measure them with `mxdiag impact --per-layer layer`",
        )
    offered = _offered(groups[0], candidates)
    bits = np.array([MXFP4.bits_per_element + c.cost.bits for c in offered])
    numel = np.array([float(group.numel) for group in groups])
    cost = numel[:, None] * bits
    error = np.array([[group.error(c.name, sensitivities) for c in offered] for group in groups])
    budget = max_bits * float(numel.sum())
    least = lowest_cost(cost, error)
    if least > budget * (1 + 1e-12):
        raise UsageError(
            f"no allocation has {max_bits:g} bits per weight element",
            where="--max-bits",
            advice=f"The least is {least / numel.sum():.4f} with the corrections allowed",
        )
    allocation = allocate(cost, error, budget)
    for group, column in zip(groups, allocation.choice, strict=True):
        chosen = offered[column]
        for row, index in zip(group.rows, group.indices, strict=True):
            if chosen.name == NO_CORRECTION:
                reason = reasons.plain_reason(row, f"and {max_bits:g} bits buy more elsewhere")
            else:
                reason = reasons.correction_reason(row, chosen)
            choices[index] = _choice(row, chosen, reason)
    return allocation.gap


def _without(groups: list[_Group], sensitivities: Mapping[str, float]) -> list[str]:
    """Layers whose sensitivity is missing or not a number."""
    layers = dict.fromkeys(row.layer for group in groups for row in group.rows)
    return [name for name in layers if reasons.as_number(sensitivities.get(name)) is None]
