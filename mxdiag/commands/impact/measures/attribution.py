"""How much of an effect each component causes, whatever the order in which they are added.

The components interact: scale and grid errors are anti-correlated, so scale bias alone can do worse
than all three. Shapley's value is the mean of a component's marginal effect over all orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from mxdiag.quantize.sums import COMPONENTS


def shapley(value: Callable[[frozenset[str]], float]) -> dict[str, float]:
    """Shares of each component in value(all) - value(none), which is `total`.

    Parameters
    ----------
    value
        The measure under each set of components, the empty one included.

    Returns
    -------
    dict
        COMPONENTS and `total`; the components add up to the total, parts may be negative.
    """
    orders = list(itertools.permutations(COMPONENTS))
    shares = dict.fromkeys(COMPONENTS, 0.0)
    for order in orders:
        present: frozenset[str] = frozenset()
        for component in order:
            wider = present | {component}
            shares[component] += (value(wider) - value(present)) / len(orders)
            present = wider
    shares["total"] = value(frozenset(COMPONENTS)) - value(frozenset())
    return shares
