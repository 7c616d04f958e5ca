"""What every backend returns for one tensor: raw additive sums, in one fixed order.

x is the tensor, Q its MXFP4 value, Q* its value under the ideal scale amax / max_normal, and
e = Q - x = e_scale + e_dz + e_grid (see `mxdiag.decomposition`). Blocks that hold a NaN or an
infinity are counted in `nonfinite_blocks` and enter nothing else but `numel`; padding enters
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

#: Float64 sums over the elements of finite blocks; `delta*` over those that are not all zero.
SUM_FIELDS = (
    "x2",  # ||x||^2
    "e2",  # ||Q - x||^2, accumulated independently of the parts
    "scale2",  # ||e_scale||^2
    "deadzone2",  # ||e_dz||^2
    "grid2",  # ||e_grid||^2
    "scale_grid",  # <e_scale, e_grid>
    "scale_deadzone",  # <e_scale, e_dz>
    "qx",  # <Q, x>
    "e",  # sum of Q - x
    "delta",  # sum of log2(s_b / s*_b)
    "delta2",  # sum of its squares
)
COUNT_FIELDS = (
    "numel",  # every element, those of non-finite blocks included
    "counted",  # elements of finite blocks: the denominator of every fraction
    "zero",  # x = 0
    "deadzone",  # x != 0 and Q*(x) = 0
    "underflow",  # x != 0 and Q(x) = 0
    "saturated",  # |x| > max_normal * s_b
    "blocks",  # finite blocks that are not all zero: the denominator of delta
    "zero_blocks",  # all-zero blocks
    "nonfinite_blocks",  # blocks that hold a NaN or an infinity
)
DELTA_BINS = 32
#: The components that the error splits into; all three together are e = Q(x) - x.
COMPONENTS = ("scale", "deadzone", "grid")

#: Columns of `Sums.tokens`, one row per token.
TOKEN_FIELDS = ("x2", "e2", "deadzone2")
#: Columns of `Sums.corrections`, one row per evaluated correction.
CORRECTION_FIELDS = ("e2", "qx", "e", "underflow")


@dataclass(slots=True)
class Sums:
    """Raw sums of one tensor. `sums[i]` is `SUM_FIELDS[i]`, `counts[i]` is `COUNT_FIELDS[i]`.

    `delta_hist` counts delta in 32 bins of 1/32 octave from the rule's `delta_low`; the end bins
    also take what a clamped scale pushes outside. `tokens` is [n_tokens, len(TOKEN_FIELDS)], or
    None if it was not asked for. `corrections` maps a correction's name to its CORRECTION_FIELDS.
    """

    sums: np.ndarray
    counts: np.ndarray
    amax: float
    delta_hist: np.ndarray
    tokens: np.ndarray | None = None
    corrections: dict[str, np.ndarray] = field(default_factory=dict)
