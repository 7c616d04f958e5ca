"""Which layers a serving stack keeps in one format because it fuses them into one parameter.

vLLM and others load q, k, v as one `qkv_proj`, gate and up as one `gate_up_proj`, and all experts
of a layer as one pair of stacked parameters: one quantization scheme each. Source: vLLM's
`packed_modules_mapping` of its model classes and its `FusedMoE` layer.
"""

from __future__ import annotations

import re

from mxdiag.errors import UsageError

FUSE_MODES = ("serving", "none")

#: Last names of projections that are loaded as one parameter.
FUSED_NAMES: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        "q_proj k_proj v_proj",
        "query key value",
        "q_lin k_lin v_lin",
        "wq wk wv",
        "q k v",
        "q_a_proj kv_a_proj_with_mqa",
        "gate_proj up_proj",
        "w1 w3",
        "wi_0 wi_1",
        "in_proj_qkv in_proj_z",
        "in_proj_b in_proj_a",
    )
)
_GROUP_OF = {name: index for index, names in enumerate(FUSED_NAMES) for name in names}


def fused_group(layer: str, expert: int | None, fuse: str = "serving") -> str:
    """Name of the group of layers that must share one format; the layer itself where it is alone.

    Parameters
    ----------
    layer
        Name of the weight in the checkpoint, without `.weight`.
    expert
        Index of the expert, None outside mixtures of experts.
    fuse
        `serving`: as serving stacks fuse; `none`: every layer by itself.

    Raises
    ------
    UsageError
        If `fuse` is unknown.
    """
    if fuse not in FUSE_MODES:
        raise UsageError(
            f"unknown fusing {fuse!r}", where="--fuse", advice=f"Use {' or '.join(FUSE_MODES)}"
        )
    if fuse == "none":
        return layer
    if expert is not None:
        stack = re.match(r"(.*?\w*experts)(?=[.\[]|$)", layer) or re.match(r"(.*?)\.[^.]*\[", layer)
        return f"{stack[1] if stack else layer} (all experts)"
    parent, _, name = layer.rpartition(".")
    if name not in _GROUP_OF:
        return layer
    return f"{parent}.({'|'.join(sorted(FUSED_NAMES[_GROUP_OF[name]]))})"
