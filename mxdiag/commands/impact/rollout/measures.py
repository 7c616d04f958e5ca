"""How far rollouts of a quantized policy are from the policy that is trained; numpy alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np


def agreement_length(a: Sequence[int], b: Sequence[int]) -> tuple[int, bool]:
    """Tokens until two sequences first differ, and whether they are the same to the end.

    A sequence that ends where the other goes on differs there.
    """
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index, False
    return min(len(a), len(b)), len(a) == len(b)


def divergence(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> dict[str, float]:
    """Means over pairs of greedy texts.

    Returns
    -------
    dict
        first_divergence_mean: tokens until the first difference, all of them where there is none;
        identical: share of texts without one.
    """
    found = [agreement_length(a, b) for a, b in pairs]
    if not found:
        return {"first_divergence_mean": math.nan, "identical": math.nan}
    return {
        "first_divergence_mean": math.fsum(length for length, _ in found) / len(found),
        "identical": sum(same for _, same in found) / len(found),
    }


def mismatch(log_ratio: np.ndarray, clip: float) -> dict[str, float]:
    """Trainer-rollout mismatch, token by token.

    Parameters
    ----------
    log_ratio
        log pi_trainer(token) - log pi_rollout(token) of tokens that the rollout policy drew: the
        logarithm of the importance ratio w.
    clip
        A token counts as outside if w is not within 1 - clip ... 1 + clip.

    Returns
    -------
    dict
        log_ratio_mean (at temperature 1 it estimates -KL(rollout || trainer)), log_ratio_abs_mean,
        log_ratio_abs_p95, ess: the effective sample size (sum w)^2 / (n sum w^2), a share of the
        tokens, and outside_clip, a share too. NaN without tokens.
    """
    names = ("log_ratio_mean", "log_ratio_abs_mean", "log_ratio_abs_p95", "ess", "outside_clip")
    if not log_ratio.size:
        return dict.fromkeys(names, math.nan)
    log_ratio = log_ratio.astype(np.float64)
    size = np.abs(log_ratio)
    weights = np.exp(log_ratio - log_ratio.max())  # scaled: a common factor drops out
    outside = (log_ratio < math.log1p(-clip)) | (log_ratio > math.log1p(clip))
    ess = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    values = (log_ratio.mean(), size.mean(), np.quantile(size, 0.95), ess, outside.mean())
    return {name: float(value) for name, value in zip(names, values, strict=True)}
