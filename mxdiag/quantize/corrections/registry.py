"""Candidate fixes: which ones to evaluate, and what the measured sums of one say.

Imports no torch. The definitions, with formula, source and cost, are the classes of
`mxdiag.quantize.corrections.specs`; they are measured by `mxdiag.quantize.corrections.reference`
and by the fast paths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mxdiag.errors import UsageError
from mxdiag.quantize.corrections.base import Correction, Cost
from mxdiag.quantize.corrections.specs import (
    AdaptiveNoise,
    Bf16,
    Block2d,
    Fallback,
    Hadamard,
    MacroBlock,
    MacroBlockFallback,
    Mxfp8,
    Nvfp4,
    ScaleMantissa,
    ScaleMse,
    StochasticRounding,
)
from mxdiag.quantize.sums import CORRECTION_FIELDS, COUNT_FIELDS, SUM_FIELDS, Sums

DEFAULT_CORRECTIONS = ("mbs", "of", "mbs+of", "scale:mse", "nvfp4", "mxfp8")
#: Every definition once, with its default parameters; the scale sweep is asked for by itself.
ALL_CORRECTIONS = (
    *DEFAULT_CORRECTIONS,
    "mbs:search",
    "bf16",
    "block2d",
    "hadamard",
    "sr",
    "aqn",
)
#: The paper's sweep of scale precision.
SCALE_SWEEP = tuple(f"scale:m{bits}" for bits in range(9))

_BY_HEAD: dict[str, type[Correction]] = {
    cls.kind: cls
    for cls in (
        MacroBlock,
        Fallback,
        Hadamard,
        Nvfp4,
        Mxfp8,
        Bf16,
        Block2d,
        StochasticRounding,
        AdaptiveNoise,
    )
}


def parse_corrections(names: str | Iterable[str]) -> tuple[Correction, ...]:
    """The corrections of those names, in order, each once.

    Parameters
    ----------
    names
        A list, or text separated by commas, of names with parameters (`mbs`, `mbs:64`,
        `mbs:search`, `of:1.0`, `mbs:64+of:1.0`, `scale:mse`, `scale:m3`, `hadamard:32`, `nvfp4`,
        `mxfp8`, `bf16`, `block2d`, `sr:1`, `aqn`) or of the sets `default`, `all`, `sweep` (the
        scale precisions), `none`.

    Raises
    ------
    UsageError
        On an unknown name or parameter.
    """
    listed = names.split(",") if isinstance(names, str) else list(names)
    parsed: dict[str, Correction] = {}
    for text in listed:
        for name in _NAME_SETS.get(text.strip().lower(), (text,)):
            correction = _parse_one(name.strip().lower())
            parsed[correction.name] = correction
    return tuple(parsed.values())


_NAME_SETS: dict[str, tuple[str, ...]] = {
    "default": DEFAULT_CORRECTIONS,
    "all": ALL_CORRECTIONS,
    "sweep": SCALE_SWEEP,
    "none": (),
}


def _parse_one(name: str) -> Correction:
    first, plus, second = name.partition("+")
    if plus:
        macro, fallback = _parse_one(first), _parse_one(second)
        if isinstance(macro, MacroBlock) and isinstance(fallback, Fallback):
            return MacroBlockFallback(name, macro, fallback)
        raise _unknown(name)
    head, *parameters = name.split(":")
    if head == "scale" and parameters:
        return _parse_scale(name, parameters)
    if head not in _BY_HEAD:
        raise _unknown(name)
    return _BY_HEAD[head].parse(name, tuple(parameters))


def _parse_scale(name: str, parameters: list[str]) -> Correction:
    kind, bits = parameters[0], parameters[0][1:]
    if len(parameters) == 1 and kind == "mse":
        return ScaleMse(name)
    plain = kind[:1] == "m" and bits.isascii() and bits.isdigit()
    if len(parameters) == 1 and plain and int(bits) <= ScaleMantissa.max_bits:
        return ScaleMantissa(name, int(bits))
    raise _unknown(name)


def _unknown(name: str) -> UsageError:
    known = ", ".join([*ALL_CORRECTIONS, "mbs:SIZE", "of:ALPHA", "scale:mBITS", "hadamard:SIZE"])
    return UsageError(f"unknown correction {name!r}", advice=f"Use one of {known}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a correction makes of one tensor, from its raw sums and the plain format's.

    `mse_ratio` is ||x_dq - x||^2 over plain MXFP4's; `error_sum` the sum of x_dq - x; `gain`
    <x_dq, x> / ||x||^2 (1 is unbiased); the shares are of the corrected error, None where the
    decomposition is not defined after the correction; `predicted` is the MSE ratio of theory, None
    where there is none. A quotient by zero is None.
    """

    name: str
    cost: Cost
    mse_ratio: float | None
    sqnr_db: float | None
    underflow_frac: float | None
    gain: float | None
    error_sum: float
    reducible: float | None
    recoverable: float | None
    irreducible: float | None
    predicted: float | None


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def outcome(correction: Correction, fields: np.ndarray, sums: Sums) -> Outcome:
    """Derived numbers of one correction: its CORRECTION_FIELDS beside the tensor's sums."""
    base = dict(zip(SUM_FIELDS, (float(value) for value in sums.sums), strict=True))
    counts = dict(zip(COUNT_FIELDS, (int(value) for value in sums.counts), strict=True))
    after = dict(zip(CORRECTION_FIELDS, (float(value) for value in fields), strict=True))
    e2, deadzone, grid = after["e2"], base["deadzone2"], base["grid2"]
    sqnr_db = 10 * math.log10(base["x2"] / e2) if e2 > 0 and base["x2"] > 0 else None
    recoverable = irreducible = reducible = None
    if correction.keeps_ideal and e2 > 0:
        recoverable, irreducible = deadzone / e2, grid / e2
        reducible = 1 - (deadzone + grid) / e2
    predicted = None
    if base["e2"] > 0:
        predicted = correction.predicted(
            {
                "recoverable": deadzone / base["e2"],
                "irreducible": grid / base["e2"],
                "rel_mse": base["e2"] / base["x2"],
            }
        )
    return Outcome(
        correction.name,
        correction.cost,
        _ratio(e2, base["e2"]),
        sqnr_db,
        _ratio(after["underflow"], counts["counted"]),
        _ratio(after["qx"], base["x2"]),
        after["e"],
        reducible,
        recoverable,
        irreducible,
        predicted,
    )


def joint_mse_ratio(rows: Iterable[Mapping[str, float]], name: str) -> float | None:
    """MSE ratio of a correction over rows together: sum of numel rel_mse, after over before.

    For `block2d` over a weight's fprop and dgrad rows, whose shared scale must serve both.
    """
    before = after = 0.0
    for row in rows:
        error = row["numel"] * row["rel_mse"]
        before, after = before + error, after + error * row[f"mse_ratio:{name}"]
    return _ratio(after, before)
