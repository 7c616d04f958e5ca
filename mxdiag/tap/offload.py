"""Weights that accelerate keeps in CPU memory or on disk, and brings in while their module runs.

Between calls such a parameter is on the meta device; `device_map` and `cpu_offload` put an
`AlignDevicesHook` on its module, which has the values and swaps them in around each forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxdiag.tap.parameters import first_names

TapOne = Callable[[str, nn.Parameter, list[tuple[nn.Parameter, type]]], None]
Untap = Callable[[list[tuple[nn.Parameter, type]]], None]


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A module whose weights are swapped in; `names` maps its own names to the model's."""

    module: nn.Module
    hook: Any
    names: dict[str, str]


def offloaded_modules(model: nn.Module) -> list[Offloaded]:
    """The modules whose parameters are not loaded and will be when they run."""
    hooks = [(module, _offloading_hook(module)) for module in model.modules()]
    hooked = [(module, hook) for module, hook in hooks if hook and hasattr(module, "_old_forward")]
    known = first_names(model) if hooked else {}
    found = []
    for module, hook in hooked:
        own = dict(module.named_parameters(recurse=bool(hook.place_submodules)))
        names = {
            local: known[id(p)]
            for local, p in own.items()
            if id(p) in known and p.device.type == "meta"
        }
        if names:
            found.append(Offloaded(module, hook, names))
    return found


def _offloading_hook(module: nn.Module) -> Any:
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "offload", False) and getattr(one, "weights_map", None) is not None:
            return one
    return None


def offloaded_values(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Name of each offloaded parameter -> what reads its values from where they are kept."""
    return {
        name: lambda hook=each.hook, local=local: hook.weights_map[local].detach()  # type: ignore[misc]
        for each in offloaded_modules(model)
        for local, name in each.names.items()
    }


@contextmanager
def tapped_while_loaded(model: nn.Module, tap: TapOne, untap: Untap) -> Iterator[set[str]]:
    """Tap each offloaded parameter for as long as it is swapped in; yields their names.

    `tap` and `untap` change a parameter's class and back: after the hook brought the values, and
    before it takes them away.
    """
    modules = offloaded_modules(model)
    try:
        for each in modules:
            each.module._old_forward = _around(each, each.module._old_forward, tap, untap)
        yield {name for each in modules for name in each.names.values()}
    finally:
        for each in modules:
            inner = getattr(each.module._old_forward, "untapped", None)
            if inner is not None:
                each.module._old_forward = inner


def _around(each: Offloaded, forward: Any, tap: TapOne, untap: Untap) -> Any:
    def tapped_forward(*args: Any, **kwargs: Any) -> Any:
        tapped: list[tuple[nn.Parameter, type]] = []
        try:
            for local, name in each.names.items():
                tap(name, each.module.get_parameter(local), tapped)
            return forward(*args, **kwargs)
        finally:
            untap(tapped)

    tapped_forward.untapped = forward  # type: ignore[attr-defined]
    return tapped_forward


def input_device(model: nn.Module) -> torch.device:
    """Where a model takes its inputs: its hook says, or else the first parameter that is loaded."""
    for module in (model, *model.modules()):
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(f"cuda:{device}" if isinstance(device, int) else device)
    loaded = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(loaded, torch.device("cpu"))
