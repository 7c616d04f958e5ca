"""What the numbers of an impact are called, and when one is noise: on the page and the terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mxdiag.commands.impact.verdict import NOISE_SDS, ImpactEntry
from mxdiag.run.columns import finite


@dataclass(frozen=True, slots=True)
class ImpactColumn:
    """One number of an entry.

    Attributes
    ----------
    name
        Its field in `run.json`.
    head
        What it is called.
    digits
        Decimal places.
    neutral
        The value that "no effect" has, a name if it is the reference's, None if there is none.
    term
        Its explanation in the glossary.
    """

    name: str
    head: str
    digits: int
    neutral: float | str | None
    term: str | None = None


_COLUMNS = (
    ImpactColumn("loss", "loss", 4, "loss"),
    ImpactColumn("loss_change", "Δ loss", 4, 0.0),
    ImpactColumn("kl_mean", "KL", 4, 0.0, "kl_mean"),
    ImpactColumn("kl_p95", "KL p95", 3, 0.0, "kl_mean"),
    ImpactColumn("agreement", "agreement", 3, 1.0, "agreement"),
    ImpactColumn("entropy", "entropy", 4, "entropy", "entropy"),
    ImpactColumn("entropy_change", "Δ entropy", 4, 0.0, "entropy"),
    ImpactColumn("t_eff_measured", "T", 3, 1.0, "t_eff"),
    ImpactColumn("t_eff_predicted", "T predicted", 3, 1.0, "t_eff"),
    ImpactColumn("routing_changed", "rerouted", 3, 0.0, "routing"),
    ImpactColumn("cosine_mean", "cosine", 4, 1.0, "cosine"),
    ImpactColumn("norm_ratio_mean", "norm ratio", 4, 1.0, "cosine"),
    ImpactColumn("snr_db_mean", "SNR dB", 2, math.inf, "gradient_snr"),
    ImpactColumn("first_divergence_mean", "tokens before first difference", 1, math.inf),
    ImpactColumn("identical", "identical", 3, 1.0),
    ImpactColumn("log_ratio_abs_mean", "|log ratio|", 4, 0.0, "log_ratio"),
    ImpactColumn("log_ratio_abs_p95", "|log ratio| p95", 4, 0.0, "log_ratio"),
    ImpactColumn("log_ratio_mean", "mean log ratio", 4, 0.0, "log_ratio"),
    ImpactColumn("ess", "effective samples", 3, 1.0, "ess"),
    ImpactColumn("outside_clip", "outside clip", 3, 0.0, "log_ratio"),
)
IMPACT_COLUMNS = {column.name: column for column in _COLUMNS}
#: Fields that are no column of a fixed table.
_NAMES = {
    "config": "configuration",
    "tokens": "positions",
    "labelled_tokens": "positions with a label",
    "advantage_positive": "advantage > 0",
    "advantage_negative": "advantage < 0",
    "noise_to_signal": "gradients' noise to signal",
    "fisher": "Fisher-weighted error",
    "first_order": "first-order Δ loss",
    "error_energy": "‖e‖²",
    "relative_error": "relative error × elements",
    "spearman": "rank correlation",
    "p_value": "p",
    "low": "95 % from",
    "high": "95 % to",
}
ROLLOUT_TITLES = {
    "greedy": "Rollouts, greedy: against the reference's text",
    "sampled": "Rollouts, sampled from the quantized policy: trainer–rollout mismatch",
    "recorded": "Rollouts, the records' own responses under both policies",
}


def columns_of(*names: str) -> tuple[ImpactColumn, ...]:
    """The columns of these fields."""
    return tuple(IMPACT_COLUMNS[name] for name in names)


BACKWARD = columns_of("cosine_mean", "norm_ratio_mean", "snr_db_mean")


def named(field: str) -> str:
    """What a field is called; one that is not known by its own name, in words."""
    if field in IMPACT_COLUMNS:
        return IMPACT_COLUMNS[field].head
    return _NAMES.get(field, field.replace("_", " "))


def order(entry: ImpactEntry) -> tuple[int, str]:
    """Tables go from all operands to single ones."""
    operands = str(entry.get("operands", ""))
    return -len(operands), operands


def deviations(entry: ImpactEntry, name: str) -> tuple[float | None, float | None]:
    """Standard deviations of a field: over jittered repeats, and over resampled records."""
    return finite(entry.get(f"{name}_sd")), finite(entry.get(f"{name}_boot_sd"))


def is_noise(
    entry: ImpactEntry, column: ImpactColumn, reference: ImpactEntry | None = None
) -> bool:
    """Whether a number lies within NOISE_SDS of its larger deviation of no effect.

    A measure that the reference has too moves with the records and the jitter as the reference's
    does, so that its own deviation says nothing of the difference: the change is judged where the
    entry holds it, by the change's deviations.
    """
    name, neutral = column.name, column.neutral
    found = deviations(entry, name)
    if isinstance(neutral, str):
        if finite(entry.get(f"{name}_change")) is not None:
            name, neutral = f"{name}_change", 0.0
            found = deviations(entry, name)
        else:
            neutral, found = finite((reference or {}).get(neutral)), (found[0], None)
    value, known = finite(entry.get(name)), [sd for sd in found if sd is not None]
    if value is None or neutral is None or not known:
        return False
    return abs(value - neutral) < NOISE_SDS * max(known)
