"""Names of a live model's parameters, as users and checkpoints write them."""

from __future__ import annotations

from torch import nn

_WRAPPER = "_orig_mod."  # put there by torch.compile


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter once (a tied one by its first name), without `torch.compile`'s prefixes."""
    ties = _ties_on_meta(model)
    named = {name.replace(_WRAPPER, ""): p for name, p in model.named_parameters()}
    return {name: p for name, p in named.items() if name not in ties}


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """First name of each tied parameter -> its further names."""
    first = first_names(model)
    tied: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = name.replace(_WRAPPER, "")
        if first[id(parameter)] != name:
            tied.setdefault(first[id(parameter)], []).append(name)
    return tied


def first_names(model: nn.Module) -> dict[int, str]:
    """Identity of each parameter -> its name in `parameter_names`."""
    ties = _ties_on_meta(model)
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = name.replace(_WRAPPER, "")
        first.setdefault(id(parameter), ties.get(name, name))
    return first


def _ties_on_meta(model: nn.Module) -> dict[str, str]:
    """Tied name -> first name, of weights that are not loaded: those are separate objects, and
    transformers' own list tells.
    """
    ties: dict[str, str] = {}
    for prefix, module in model.named_modules():
        listed = getattr(module, "all_tied_weights_keys", None)
        for name, first in listed.items() if isinstance(listed, dict) else ():
            full, other = (f"{prefix}.{n}".lstrip(".").replace(_WRAPPER, "") for n in (name, first))
            ties[full] = other
    if not ties:
        return {}
    meta = {
        name.replace(_WRAPPER, "")
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.device.type == "meta"
    }
    return {name: first for name, first in ties.items() if name in meta and first in meta}
