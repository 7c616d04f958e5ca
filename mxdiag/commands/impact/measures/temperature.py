"""Which temperature of the reference is nearest to a quantized model.

The T that minimises the mean KL(q || softmax(z / T)), z the reference's logits, makes the mean of z
under softmax(z / T) equal to its mean under q (the derivative in 1/T vanishes there). The left side
depends on the reference alone: it is tabulated once, and each configuration needs one number a
token. The T of equal entropy is found in the same table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from mxdiag.commands.impact.measures.forward import Reference, chunks

#: Temperatures of the table, closest around 1; the answer outside of them is "none".
TEMPERATURES = (
    *(0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 2.0, 2.8, 4.0, 5.6, 8.0, 16.0),
)
#: Pieces of the interpolant between two of them, as it is inverted.
_POINTS = 200


@dataclass(frozen=True, slots=True)
class TemperatureTable:
    """Sums over tokens at each of TEMPERATURES, additive over records; each [..., temperatures].

    `cross` of the mean of the reference's log-probability, `entropy` of the entropy in nats,
    `variance` of the variance of the log-probability, which is minus the slope of the mean in 1/T.
    """

    cross: np.ndarray
    entropy: np.ndarray
    variance: np.ndarray

    @classmethod
    def of(cls, reference: Reference) -> TemperatureTable:
        """Tabulate one record: a softmax for every temperature."""
        sums = np.zeros((3, len(TEMPERATURES)))
        for rows in chunks(reference.log_p):
            log_p = reference.log_p[rows]
            top = log_p.argmax(-1, keepdim=True)
            peak = log_p.gather(1, top).squeeze(1)
            for column, temperature in enumerate(TEMPERATURES):
                p = torch.softmax(log_p / temperature, -1)
                weighted = p * log_p
                mean = weighted.sum(-1)
                square = (weighted * log_p).sum(-1)
                # log Z from the likeliest token: its p is the largest, so the least rounded
                log_z = peak / temperature - p.gather(1, top).squeeze(1).log()
                entropy = log_z - mean / temperature
                stacked = torch.stack([mean, entropy, square - mean.square()])
                sums[:, column] += stacked.double().sum(1).cpu().numpy()
        return cls(*sums)

    def anchored(self, cross: float, entropy: float) -> TemperatureTable:
        """The same with the reference's own sums at T = 1, so that no change gives T = 1."""
        one = TEMPERATURES.index(1.0)
        crosses, entropies = self.cross.copy(), self.entropy.copy()
        crosses[one], entropies[one] = cross, entropy
        return TemperatureTable(crosses, entropies, self.variance)

    def __add__(self, other: TemperatureTable) -> TemperatureTable:
        return TemperatureTable(
            self.cross + other.cross,
            self.entropy + other.entropy,
            self.variance + other.variance,
        )

    def times(self, weight: float) -> TemperatureTable:
        """So many copies of the records."""
        return TemperatureTable(self.cross * weight, self.entropy * weight, self.variance * weight)

    def temperature_of_cross(self, target: float) -> float:
        """T of least KL from the summed `cross` of a configuration; NaN outside the table."""
        beta = 1 / np.asarray(TEMPERATURES)
        return _inverted(-self.cross, beta * self.variance, -target)

    def temperature_of_entropy(self, target: float) -> float:
        """T of equal entropy from the summed entropy of a configuration; NaN outside the table."""
        beta = 1 / np.asarray(TEMPERATURES)
        return _inverted(self.entropy, beta**2 * self.variance, target)


def _inverted(values: np.ndarray, slopes: np.ndarray, target: float) -> float:
    """Where the rising function with these values and slopes in log T meets the target.

    The cubic through values and slopes at the two neighbouring temperatures stands for it.
    """
    if not (math.isfinite(target) and values[0] <= target <= values[-1]):
        return math.nan
    log_t = np.log(TEMPERATURES)
    k = int(np.clip(np.searchsorted(values, target, side="right") - 1, 0, len(log_t) - 2))
    step = log_t[k + 1] - log_t[k]
    u = np.linspace(0.0, 1.0, _POINTS + 1)
    left, right = u**2 * (2 * u - 3) + 1, u**2 * (3 - 2 * u)
    heights = values[k] * left + values[k + 1] * right
    heights += step * u * (u - 1) * (slopes[k] * (u - 1) + slopes[k + 1] * u)
    heights[-1] = values[k + 1]
    place = np.interp(target, np.maximum.accumulate(heights), u)
    return float(np.exp(log_t[k] + step * place))


def predicted(error_variance: float, logit_variance: float) -> float:
    """The paper's effective temperature.

    sqrt(1 + 2 s / Var(dl)), s the mean over tokens of the variance over the vocabulary of the logit
    error and Var(dl) = 2 Var of the reference's logits over the vocabulary. Source: arXiv
    2605.20402.
    """
    if not logit_variance > 0:
        return math.nan
    return math.sqrt(1 + 2 * error_variance / (2 * logit_variance))
