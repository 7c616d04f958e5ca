"""What follows from a layer's name: its role, its expert, the rule that excludes it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import pairwise

from mxdiag.layers import families

#: Role of an embedding that is the output head as well, and a name that it can be asked for by.
TIED_ROLE = "lm_head"
_WRAPPERS = frozenset({"_orig_mod", "base_layer", "base_model", "_fsdp_wrapped_module", "module"})


def layer_name(name: str) -> str:
    """The name of a layer, from that of its weight."""
    return name.removesuffix(".weight")


def parts_of(layer: str) -> list[str]:
    """The parts of a layer's name between dots, those of wrappers left out."""
    parts = [p for p in layer.split(".") if p not in _WRAPPERS]
    return parts or [layer]


def _is_stack_index(part: str) -> bool:
    return part.endswith("]") and re.fullmatch(r".+\[\d+\]", part) is not None


def _expert_prefix(parts: list[str]) -> str:
    if any(_is_stack_index(p) for p in parts):
        return "expert."
    for part, following in pairwise(parts):
        if part in ("experts", "local_experts") and re.fullmatch(r"(expert_)?\d+", following):
            return "expert."
        if part.startswith(("shared_expert", "shared_mlp")):
            return "shared_expert."
    return ""


def special_role(parts: list[str]) -> str | None:
    """`lm_head`, `embedding` or `router` if the name is one's, else None."""
    last, path = parts[-1], ".".join(parts)
    if last in families.LM_HEADS or path.endswith(families.LM_HEAD_ENDINGS):
        return "lm_head"
    if len(parts) == 1 and last in families.LM_HEAD_TOP:
        return "lm_head"
    if last.isdigit() and len(parts) > 1 and parts[-2] in families.LM_HEADS:
        return "lm_head"
    table = parts[-2] if last.isdigit() and len(parts) > 1 else last
    if re.fullmatch(families.LINEAR_PATTERN, table):
        return None
    if table in families.EMBEDDINGS or path.endswith(families.EMBEDDING_ENDINGS):
        return "embedding"
    if re.fullmatch(families.EMBEDDING_PATTERN, table):
        return "embedding"
    if last in families.ROUTERS and (last != "gate" or _gate_is_router(parts)):
        return "router"
    if (
        len(parts) > 1
        and parts[-2] == "router"
        and last in ("layer", "classifier", "proj", "linear", "weight")
    ):
        return "router"
    return None


def _gate_is_router(parts: list[str]) -> bool:
    parent = parts[-2] if len(parts) > 1 else ""
    return parent in families.ROUTER_PARENTS or parent.endswith("_moe")


def role_of(layer: str) -> str:
    """Role of a layer from its name: the family's own word, `expert.` before an expert's.

    >>> role_of("model.layers.0.mlp.experts.5.gate_proj")
    'expert.gate_proj'
    """
    parts = parts_of(layer)
    special = special_role(parts)
    if special is not None:
        return special
    role = parts[-1]
    if _is_stack_index(role):
        role = role.partition("[")[0]
    depth = 2
    while (role.split(".")[0] in families.GENERIC or role.split(".")[0].isdigit()) and depth <= len(
        parts
    ):
        parent = parts[-depth]
        if parent.isdigit() or parent in ("experts", "model"):
            break
        role = f"{parent}.{role}"
        depth += 1
    prefix = _expert_prefix(parts)
    return prefix + role if prefix and not role.startswith(prefix) else role


def expert_of(layer: str) -> int | None:
    """Index of the expert that a layer belongs to, None if it belongs to none."""
    parts = parts_of(layer)
    for part, following in zip(parts, [*parts[1:], ""], strict=True):
        if _is_stack_index(part):
            return int(part.rpartition("[")[2][:-1])
        if part in ("experts", "local_experts") and re.fullmatch(r"(expert_)?\d+", following):
            return int(following.removeprefix("expert_"))
    return None


def exclusion(
    layer: str, role: str, include: Iterable[str] = (), exclude: Iterable[str] = ()
) -> str | None:
    """Name of the rule that leaves a layer out, None if it is measured.

    `include` brings back what a default rule leaves out; `exclude` has the last word. Both hold
    shell-style globs (`fnmatch`) matched against the whole layer name; a name equal to the glob
    matches too, brackets or not.
    """
    for glob in exclude:
        if _matches(layer, glob):
            return f"--exclude {glob}"
    rule = {"lm_head": "lm_head", "embedding": "embedding", "router": "router"}.get(role)
    if rule is not None and any(_matches(layer, glob) for glob in include):
        return None
    return rule


def exclusion_of_tied(
    names: Iterable[str], role: str, include: Iterable[str] = (), exclude: Iterable[str] = ()
) -> str | None:
    """As `exclusion`, for a weight that goes by several names: any of them may be asked for."""
    rules = [exclusion(name, role, include, exclude) for name in names]
    asked = [rule for rule in rules if rule is not None and rule.startswith("--")]
    return asked[0] if asked else None if None in rules else rules[0]


def _matches(layer: str, glob: str) -> bool:
    return layer == glob or fnmatchcase(layer, glob)
