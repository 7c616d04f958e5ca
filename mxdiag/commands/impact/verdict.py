"""The tables in a few sentences: how much is lost, why, and which fix to apply first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mxdiag.errors import UsageError
from mxdiag.quantize.corrections.base import Correction
from mxdiag.quantize.corrections.registry import parse_corrections

ImpactEntry = Mapping[str, Any]

#: A difference below so many standard deviations is called noise.
NOISE_SDS = 2.0
#: The first fix is the cheapest that does at least so much of what the best 4-bit one does.
ENOUGH = 0.25
#: A smaller share of a number is not said as its deviation.
_VISIBLE = 0.002
_NAMES = {"kl_mean": "KL", "cosine_mean": "the cosine"}
_WORDS = {"scale": "scale bias", "deadzone": "the deadzone", "grid": "grid noise"}


def verdict(impact: Mapping[str, Any]) -> list[str]:
    """Sentences on an impact object; none where the configurations they need were not run."""
    sentences = [*_forward(impact), *_backward(impact), *_growth(impact)]
    return [sentence for sentence in sentences if sentence]


def _find(entries: Iterable[ImpactEntry], config: str, operands: str) -> ImpactEntry | None:
    return next(
        (e for e in entries if e["config"] == config and e["operands"] == operands),
        None,
    )


def _with_noise(entry: ImpactEntry, name: str, digits: int = 3) -> str:
    """The value and the larger of its spreads, over repeats and over resampled records."""
    value = entry.get(name)
    if value is None:
        return "n/a"
    sd = max(entry.get(f"{name}_sd") or 0.0, entry.get(f"{name}_boot_sd") or 0.0)
    shown = sd > 0 and sd >= _VISIBLE * abs(value)
    return f"{value:.{digits}g}" + (f" ± {sd:.1g}" if shown else "")


def clear(difference: float, *entries: ImpactEntry, name: str) -> bool:
    """Whether a difference of a measure exceeds NOISE_SDS deviations of each entry's repeats."""
    deviations = [entry.get(f"{name}_sd") or 0.0 for entry in entries]
    return abs(difference) > NOISE_SDS * max(deviations, default=0.0)


# ---- forward -----------------------------------------------------------------------------------


def _forward(impact: Mapping[str, Any]) -> Iterable[str | None]:
    entries = impact.get("forward") or []
    plain = _find(entries, "all", "WA")
    if plain is None or plain.get("kl_mean") is None:
        return
    kl = _with_noise(plain, "kl_mean")
    words = f"Forward, MXFP4 weights and activations move the model by KL {kl}"
    if plain.get("agreement") is not None:
        words += f" per token and keep its first choice at {100 * plain['agreement']:.0f} % of them"
    yield words + _operand_clause(entries) + "."
    yield _cause(impact, "forward", "WA", "kl_mean", "Of that KL")
    yield _first_fix(entries, plain, "WA", "kl_mean", lambda value: value, 0.0)


def _operand_clause(entries: Iterable[ImpactEntry]) -> str:
    alone = {op: _find(entries, "all", op) for op in ("W", "A")}
    shown = {op: e for op, e in alone.items() if e is not None and e.get("kl_mean") is not None}
    if len(shown) < 2:
        return ""
    return (
        f" (weights alone {_with_noise(shown['W'], 'kl_mean')}, "
        f"activations alone {_with_noise(shown['A'], 'kl_mean')})"
    )


def _cause(
    impact: Mapping[str, Any], which: str, operands: str, measure: str, lead: str
) -> str | None:
    found = [
        a
        for a in impact.get("attribution") or []
        if (a["measure"], a["pass"], a["operands"]) == (measure, which, operands)
    ]
    if not found or not found[0]["total"]:
        return None
    share = found[0]
    if not clear(share["total"], share, name="total"):
        return f"{lead}, nothing stands out of the noise."
    ranked = sorted(_WORDS, key=lambda name: -share[name] / share["total"])
    parts = [(_WORDS[name], f"{100 * share[name] / share['total']:.0f} %") for name in ranked]
    (first, most), second, third = parts
    return f"{lead}, {first} causes {most}, {' '.join(second)} and {' '.join(third)}."


def _correction(name: str) -> Correction | None:
    try:
        return parse_corrections([name])[0]
    except (UsageError, IndexError):
        return None


def _price(correction: Correction) -> tuple[int, int, float]:
    cost = correction.cost
    return cost.gemm_passes, cost.transforms, cost.bits


def _price_words(correction: Correction) -> str:
    cost = correction.cost
    words = f"{cost.bits:g} more bits an element" if cost.bits else "no bits"
    if cost.gemm_passes:
        words += " and a second product"
    if cost.transforms:
        words += " and a rotation"
    return words


def _first_fix(
    entries: Iterable[ImpactEntry],
    plain: ImpactEntry,
    operands: str,
    measure: str,
    loss_of: Callable[[float], float],
    floor: float,
) -> str | None:
    """The cheapest correction that does a fair part of what the best does, and the best."""
    before = loss_of(plain[measure])
    gains: dict[str, tuple[float, Correction, ImpactEntry]] = {}
    for entry in entries:
        correction = _correction(entry["config"])
        value = entry.get(measure)
        if correction is None or entry["operands"] != operands or value is None:
            continue
        gain = before - loss_of(value)
        if correction.four_bit and clear(gain, entry, plain, name=measure) and gain > 0:
            gains[entry["config"]] = gain, correction, entry
    if not gains or before <= floor:
        return None
    best = max(gains, key=lambda name: gains[name][0])
    enough = [n for n in gains if gains[n][0] >= ENOUGH * gains[best][0]]
    first = min(enough, key=lambda name: _price(gains[name][1]))
    gain, correction, entry = gains[first]
    words = (
        f"Apply `{first}` first: for {_price_words(correction)} it brings {_NAMES[measure]} to "
        f"{_with_noise(entry, measure)} and undoes {100 * gain / before:.0f} % of the damage"
    )
    if first != best:
        gain, correction, entry = gains[best]
        words += (
            f"; of the corrections of 4-bit elements `{best}` goes furthest, to "
            f"{_with_noise(entry, measure)}, for {_price_words(correction)}"
        )
    ideal = _find(entries, "ideal", operands)
    if ideal is not None and ideal.get(measure) is not None:
        words += f" (ideal block scales: {_with_noise(ideal, measure)})"
    return words + "."


# ---- backward ----------------------------------------------------------------------------------


def _backward(impact: Mapping[str, Any]) -> Iterable[str | None]:
    entries = impact.get("backward") or []
    plain = _find(entries, "all", "GWA")
    if plain is None or plain.get("cosine_mean") is None:
        return
    yield (
        f"Backward, MXFP4 gradients keep a cosine of {_with_noise(plain, 'cosine_mean')} to the "
        f"true ones at {_with_noise(plain, 'norm_ratio_mean')} times their norm."
    )
    yield _cause(impact, "backward", "GWA", "cosine_mean", "Of the cosine lost")
    yield _first_fix(entries, plain, "GWA", "cosine_mean", lambda value: 1 - value, 0.0)


def _growth(impact: Mapping[str, Any]) -> Iterable[str]:
    predictor, entries = impact.get("predictor"), impact.get("backward") or []
    plain = _find(entries, "all", "GWA")
    measured = None if plain is None else plain.get("log2_norm_ratio")
    if not predictor or plain is None or measured is None:
        return
    said, spread = predictor["log2_norm_ratio"], predictor["log2_spread"]
    agrees = abs(measured - said) <= NOISE_SDS * spread
    yield (
        f"Scale bias is predicted to multiply the gradient's norm by 2^{said:.1f} (± {spread:.1f}) "
        f"over {predictor['blocks']} blocks; measured is 2^{measured:.2f}"
        + (", as predicted." if agrees else ": the prediction does not hold here.")
    )
