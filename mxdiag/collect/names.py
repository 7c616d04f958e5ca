"""Names of a live model's parameters, as users and checkpoints write them."""

from __future__ import annotations

from torch import nn

_WRAPPER = "_orig_mod."  # put there by torch.compile


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter once (a tied one by its first name), without `torch.compile`'s prefixes."""
    return {name.replace(_WRAPPER, ""): p for name, p in model.named_parameters()}


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """First name of each tied parameter -> its further names."""
    first: dict[int, str] = {}
    tied: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = name.replace(_WRAPPER, "")
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied.setdefault(known, []).append(name)
    return tied
