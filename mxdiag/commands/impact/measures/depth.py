"""How gradients change from the last block to the first, beside what the paper predicts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mxdiag.commands.impact.measures.noise import summarized
from mxdiag.decomposition import decompose
from mxdiag.model.inventory import ModelInventory
from mxdiag.model.live import LiveLinear

_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")


def depth_of(layer: str) -> int | None:
    """Index of the block that a layer is in, from its name; None outside of blocks."""
    found = _BLOCK.search(layer)
    return int(found.group(1)) if found else None


def _blocks(names: Sequence[str]) -> dict[int, list[int]]:
    """Depth -> places of its layers, first block to last."""
    blocks: dict[int, list[int]] = {}
    for place, name in enumerate(names):
        depth = depth_of(name)
        if depth is not None:
            blocks.setdefault(depth, []).append(place)
    return dict(sorted(blocks.items()))


def _finite_mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def depth_points(
    names: Sequence[str], derived: dict[str, list[np.ndarray]]
) -> list[dict[str, Any]]:
    """Means over the layers of each block, from the last block to the first, as gradients flow."""
    points = []
    for depth, places in reversed(_blocks(names).items()):
        point: dict[str, Any] = {"depth": depth}
        for name, repeats in derived.items():
            point |= summarized(name, [_finite_mean(values[places]) for values in repeats])
        points.append(point)
    return points


def log2_norm_ratio(names: Sequence[str], ratios: np.ndarray) -> float:
    """log2 of the norm ratio in the first block over that in the last: what L blocks add up to."""
    blocks = list(_blocks(names).values())
    if len(blocks) < 2:
        return math.nan
    first, last = _finite_mean(ratios[blocks[0]]), _finite_mean(ratios[blocks[-1]])
    return math.log2(first / last) if first > 0 and last > 0 else math.nan


def predictor(
    layers: Sequence[LiveLinear], inventory: ModelInventory, rule: str, backend: str
) -> dict[str, Any] | None:
    """The paper's prediction: over L blocks the gradient's norm grows by 2^(sum of delta).

    delta is log2 of the block scale over the ideal one, averaged over the weights of each block as
    dgrad blocks them; its sum has the standard deviation sqrt(L / 12) if delta is uniform. Source:
    arXiv 2605.20402.

    Returns
    -------
    dict or None
        `blocks`, `delta_mean`, `log2_norm_ratio`, `log2_spread`, and `depths` from the last block
        to the first with the sum so far; None without numbered blocks.
    """
    blocks = _blocks([live.layer for live in layers])
    if not blocks:
        return None
    total, depths = 0.0, []
    for depth, places in reversed(blocks.items()):
        found = [
            decompose(inventory.weight(layers[place]), 0, rule, backend=backend).delta_mean
            for place in places
        ]
        deltas = [delta for delta in found if delta is not None and math.isfinite(delta)]
        delta = math.fsum(deltas) / len(deltas) if deltas else 0.0
        total += delta
        depths.append({"depth": depth, "delta_mean": delta, "log2_norm_ratio": total})
    return {
        "blocks": len(depths),
        "delta_mean": total / len(depths),
        "log2_norm_ratio": total,
        "log2_spread": math.sqrt(len(depths) / 12),
        "depths": depths,
    }
