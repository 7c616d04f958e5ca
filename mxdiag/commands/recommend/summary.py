"""What a recommendation comes to: totals, the noise schedule, and both in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxdiag.commands.recommend.reasons import NO_CORRECTION, Choice, RecommendRow, in_db, sqnr_db
from mxdiag.formats import MXFP4
from mxdiag.quantize.corrections.aqn import AdaptiveNoise
from mxdiag.quantize.corrections.sr import StochasticRounding


@dataclass(frozen=True, slots=True)
class Schedule:
    """Adaptive quantization noise: sigma as a fraction of a weight's rms, decaying exponentially.

    `residual` is the rollout weights' rms error after corrections, as a fraction of their rms.
    """

    sigma_start: float
    sigma_end: float
    residual: float
    sentence: str


def summarize(rows: Sequence[RecommendRow], choices: Sequence[Choice]) -> dict[str, dict[str, Any]]:
    """Bits and errors per element by operand, before and after, over rows that got a choice."""
    totals: dict[str, dict[str, Any]] = {}
    for operand in ("W", "A", "G"):
        pairs = [
            (row, choice, choice.recommended, choice.cost)
            for row, choice in zip(rows, choices, strict=True)
            if row.operand == operand and choice.recommended is not None and choice.cost is not None
        ]
        if not pairs:
            continue
        numel = sum(row.numel for row, *_ in pairs)
        extra = sum(row.numel * cost.bits for row, _, _, cost in pairs)
        # A fused row without a measurement counts as plain: exact tensors among others.
        after = sum(
            row.numel
            * (row.error if (error := row.error_of(name or NO_CORRECTION)) is None else error)
            for row, _, name, _ in pairs
        )
        totals[operand] = {
            "rows": len(pairs),
            "bits_before": MXFP4.bits_per_element,
            "bits_after": MXFP4.bits_per_element + (extra / numel if numel else 0.0),
            "error_before": sum(row.numel * row.error for row, *_ in pairs) / max(numel, 1),
            "error_after": after / max(numel, 1),
            "second_pass_rows": sum(cost.gemm_passes > 0 for *_, cost in pairs),
            "rotated_rows": sum(cost.transforms > 0 for *_, cost in pairs),
            "chosen": dict(_tally(name for _, _, name, _ in pairs)),
        }
    return totals


def _tally(names: Iterable[str | None]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name or NO_CORRECTION] = counts.get(name or NO_CORRECTION, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])


def noise_schedule(rows: Sequence[RecommendRow], choices: Sequence[Choice]) -> Schedule | None:
    """Noise in the paper's proportion to the rollout weights' residual error.

    The paper's 1 % to 0.1 % goes with plain MXFP4; corrections shrink the residual, and sigma with
    it: sigma_start = 1 % * residual / plain residual, sigma_end = sigma_start / 10.
    """
    pairs = [
        (row, row.error_of(choice.recommended))
        for row, choice in zip(rows, choices, strict=True)
        if row.title == "W·fprop" and row.status == "ok" and choice.recommended is not None
    ]
    numel = sum(row.numel for row, _ in pairs)
    if not numel:
        return None
    plain = math.sqrt(sum(row.numel * row.error for row, _ in pairs) / numel)
    residual = math.sqrt(sum(row.numel * (error or 0.0) for row, error in pairs) / numel)
    ratio = min(1.0, residual / plain) if plain else 0.0
    start, end = AdaptiveNoise.START * ratio, AdaptiveNoise.END * ratio
    if residual == 0:
        text = "aqn: the weights keep no quantization noise, so there is none to schedule"
    else:
        text = (
            f"aqn (entropy, not the error): sigma from {100 * start:.2g} % to {100 * end:.2g} % of "
            f"each weight's rms, decaying exponentially; the weights' residual noise is "
            f"{100 * residual:.1f} % of rms, {100 * plain:.1f} % in plain MXFP4"
        )
    return Schedule(start, end, residual, text)


def totals_in_words(
    totals: Mapping[str, Mapping[str, Any]], choices: Sequence[Choice], gap: float | None
) -> list[str]:
    """One sentence per operand, then what was left out and how near the optimum is."""
    sentences = []
    for operand, total in totals.items():
        before, after = (in_db(sqnr_db(total[key])) for key in ("error_before", "error_after"))
        chosen = ", ".join(f"{name} on {count}" for name, count in total["chosen"].items())
        sentences.append(
            f"{operand}: {chosen} of {total['rows']} rows; bits per element "
            f"{total['bits_before']:.4g} → {total['bits_after']:.4g}, "
            f"mean relative error {before} → {after}"
        )
    skipped = sum(choice.recommended is None for choice in choices)
    if skipped:
        sentences.append(f"nothing is recommended for {skipped} rows (no error is known)")
    if gap is not None:
        sentences.append(f"the allocation is within {100 * gap:.2g} % of the best possible error")
    return sentences


def stochastic_rounding(impact: Mapping[str, Any]) -> list[str]:
    """Recommended where the measured gradient cosine beats plain rounding by two deviations."""
    by_key = {
        (entry.get("config"), entry.get("operands")): entry
        for entry in impact.get("backward") or ()
    }
    sentences = []
    for (config, operands), entry in by_key.items():
        plain = by_key.get(("all", operands))
        if str(config).split(":")[0] != StochasticRounding.kind or plain is None:
            continue
        gain = entry["cosine_mean"] - plain["cosine_mean"]
        noise = math.hypot(entry.get("cosine_mean_sd") or 0, plain.get("cosine_mean_sd") or 0)
        verdict = "recommended" if gain > 2 * noise else "not recommended"
        sentences.append(
            f"{config} on {operands}: {verdict}; it moves the mean gradient cosine by {gain:+.4f} "
            f"(noise {noise:.4f})"
        )
    return sentences
