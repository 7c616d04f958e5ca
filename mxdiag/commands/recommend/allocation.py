"""One choice per group under a total budget: the multiple-choice knapsack, solved to a stated gap.

minimise sum_g error[g, c_g]   subject to   sum_g cost[g, c_g] <= budget.

1. The Lagrangian sum_g min_c (error + lambda cost) - lambda budget bounds the optimum from below
   for every lambda >= 0; bisection finds the best one, whose choices are feasible just above it.
2. What is left of the budget is filled greedily. With many groups that all but reaches the bound.
3. If not: a choice whose reduced cost exceeds the distance between the feasible solution and the
   bound cannot be part of a better one. What is left is a small core, which HiGHS
   (`scipy.optimize.milp`) solves.

Source: Kellerer, Pferschy, Pisinger, Knapsack Problems (2004), chapter 11.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Seconds that the integer programme may take; what it has not proved by then is in the gap.
TIME_LIMIT = 5.0
#: Relative distance to the lower bound below which a solution is taken as it is.
GAP_TOLERANCE = 1e-5
_BISECTIONS = 200
_GREEDY_STEPS = 200
#: Relative slack for sums of float64 costs.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Allocation:
    """`choice[g]` is the column chosen for group g; `gap` is (error - lower bound) / error."""

    choice: np.ndarray
    error: float
    gap: float


def lowest_cost(cost: np.ndarray, error: np.ndarray) -> float:
    """The least total cost of any allocation."""
    return float(np.where(np.isfinite(error), cost, np.inf).min(1).sum())


def allocate(cost: np.ndarray, error: np.ndarray, budget: float) -> Allocation:
    """Choose one column per row of `cost` and `error` [groups, candidates].

    `error` is infinite where a candidate is not available; a budget below `lowest_cost` has no
    solution and is the caller's to refuse.
    """
    cost = np.where(np.isfinite(error), cost, np.inf)
    slack = _ROUNDING * max(abs(budget), float(np.abs(cost.min(1)).sum()))
    limit = budget + slack
    choice, bound, multiplier = _lagrangian(cost, error, limit)
    choice = _fill(cost, error, choice, limit)
    total = _picked(error, choice)
    if total - bound > GAP_TOLERANCE * total:
        choice, bound = _solve_core(cost, error, choice, limit, bound, multiplier)
        total = _picked(error, choice)
    gap = max(0.0, total - bound) / total if total > 0 else 0.0
    return Allocation(choice, total, gap)


def _picked(matrix: np.ndarray, choice: np.ndarray) -> float:
    return float(matrix[np.arange(len(choice)), choice].sum())


def _weighed(cost: np.ndarray, error: np.ndarray, multiplier: float) -> np.ndarray:
    """Error + multiplier * cost, infinite where a candidate is not available."""
    return error + multiplier * np.where(np.isfinite(cost), cost, 0.0)


def _lagrangian(
    cost: np.ndarray, error: np.ndarray, limit: float
) -> tuple[np.ndarray, float, float]:
    """A feasible choice, the best lower bound and its multiplier."""
    by_cost = np.argsort(cost, axis=1, kind="stable")
    ordered_cost = np.take_along_axis(cost, by_cost, 1)
    ordered_error = np.take_along_axis(error, by_cost, 1)

    def at(multiplier: float) -> tuple[np.ndarray, float, float]:
        weighed = _weighed(ordered_cost, ordered_error, multiplier)
        choice = weighed.argmin(1)  # the cheapest of equals
        value = float(weighed.min(1).sum()) - multiplier * limit
        return choice, value, _picked(ordered_cost, choice)

    low, high = 0.0, 1.0
    choice, bound, spent = at(low)
    best = low
    if spent > limit:
        scale = float(ordered_error[np.isfinite(ordered_error)].max()) or 1.0
        high = scale / max(float(np.ptp(cost[np.isfinite(cost)])), _ROUNDING)
        while True:
            choice, value, spent = at(high)
            bound, best = max((bound, best), (value, high))
            if spent <= limit or high > 1e300:
                break
            low, high = high, high * 4
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if not low < middle < high:
                break
            candidate, value, spent = at(middle)
            bound, best = max((bound, best), (value, middle))
            if spent <= limit:
                choice, high = candidate, middle
            else:
                low = middle
    return np.take_along_axis(by_cost, choice[:, None], 1)[:, 0], bound, best


def _fill(cost: np.ndarray, error: np.ndarray, choice: np.ndarray, limit: float) -> np.ndarray:
    """Spend what is left of the budget, the largest gain that fits first."""
    choice, rows = choice.copy(), np.arange(len(choice))
    for _ in range(_GREEDY_STEPS):
        left = limit - _picked(cost, choice)
        gain = error[rows, choice][:, None] - error
        gain = np.where(cost - cost[rows, choice][:, None] <= left, gain, 0.0)
        group, candidate = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[group, candidate] <= 0:
            break
        choice[group] = candidate
    return choice


def _solve_core(
    cost: np.ndarray,
    error: np.ndarray,
    choice: np.ndarray,
    limit: float,
    bound: float,
    multiplier: float,
) -> tuple[np.ndarray, float]:
    """Improve a feasible choice to the optimum over what reduced costs leave open; a new bound."""
    weighed = _weighed(cost, error, multiplier)
    reduced = weighed - weighed.min(1, keepdims=True)
    total = _picked(error, choice)
    keep = np.isfinite(error) & (reduced <= (total - bound) * (1 + 1e-9))
    # Nothing better holds a choice outside the core: other groups keep their best reduced cost.
    core = np.flatnonzero(keep.sum(1) > 1)
    fixed = np.where(keep, reduced, np.inf).argmin(1)
    outside = np.setdiff1d(np.arange(len(choice)), core, assume_unique=True)
    spent = float(cost[outside, fixed[outside]].sum())
    lost = float(error[outside, fixed[outside]].sum())
    if not len(core):
        return choice, total
    picked, core_bound = _integer_programme(cost[core], error[core], keep[core], limit - spent)
    if picked is not None:
        improved = fixed.copy()
        improved[core] = picked
        if _picked(cost, improved) <= limit and _picked(error, improved) <= total:
            choice = improved
    return choice, max(bound, min(lost + core_bound, _picked(error, choice)))


def _integer_programme(
    cost: np.ndarray, error: np.ndarray, keep: np.ndarray, limit: float
) -> tuple[np.ndarray | None, float]:
    """HiGHS on the kept choices: column per group (None if it found none) and its dual bound."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    groups, columns = np.nonzero(keep)
    base_cost = np.where(keep, cost, np.inf).min(1)
    base_error = np.where(keep, error, np.inf).min(1)
    extra_cost = cost[groups, columns] - base_cost[groups]
    extra_error = error[groups, columns] - base_error[groups]
    # Both rows are scaled to order one, since the solver's tolerances are absolute.
    cost_unit = float(extra_cost.max()) or 1.0
    error_unit = float(extra_error.max()) or 1.0
    variables = np.arange(len(groups))
    left = float(limit - base_cost.sum()) / cost_unit
    once = csr_array((np.ones(len(groups)), (groups, variables)), shape=(len(keep), len(groups)))
    result = milp(
        extra_error / error_unit,
        integrality=np.ones(len(groups)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(once, 1, 1),
            LinearConstraint(extra_cost[None] / cost_unit, -np.inf, left),
        ],
        options={"time_limit": TIME_LIMIT, "mip_rel_gap": 0.0},
    )
    dual = result.mip_dual_bound if result.mip_dual_bound is not None else 0.0
    bound = float(base_error.sum() + dual * error_unit)
    if result.x is None:
        return None, bound
    picked = np.full(keep.shape, -1.0)
    picked[groups, columns] = result.x
    return picked.argmax(1), bound
