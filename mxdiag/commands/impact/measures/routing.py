"""Which experts the tokens were sent to: the indices that reach a mixture's experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mxdiag.layers.roles import role_of
from mxdiag.tap.parameters import parameter_names

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Routing:
    """Records the experts chosen for each token in one run of the model.

    Modules that own a stack of experts take the chosen indices as an argument, routers return them:
    an integer tensor [tokens, choices]. Where no module shows one, nothing is recorded.
    """

    def __init__(self, experts: Iterable[str], routers: Iterable[str]) -> None:
        self._experts, self._routers = sorted(set(experts)), sorted(set(routers))
        self._seen: dict[str, dict[str, list[Tensor]]] = {"experts": {}, "routers": {}}

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Watch the model for the length of a block."""
        modules, handles = dict(model.named_modules()), []
        try:
            for name in self._experts:
                if name in modules:
                    handles.append(self._watch("experts", name, modules[name]))
            for name in self._routers:
                if name in modules:
                    handles.append(self._watch("routers", name, modules[name]))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.begin()

    def _watch(self, kind: str, name: str, module: nn.Module) -> Any:
        def note(values: Iterable[Any]) -> None:
            for value in values:
                if isinstance(value, Tensor) and value.dtype in _INTEGERS and value.dim() >= 2:
                    choices = value.detach().reshape(-1, value.shape[-1])
                    self._seen[kind].setdefault(name, []).append(choices)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            note([*args, *kwargs.values()])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            note(output if isinstance(output, (tuple, list)) else [output])

        if kind == "experts":
            return module.register_forward_pre_hook(before, with_kwargs=True)
        return module.register_forward_hook(after)

    def begin(self) -> None:
        """Forget what was seen."""
        for seen in self._seen.values():
            seen.clear()

    def taken(self) -> dict[str, list[Tensor]]:
        """The choices since `begin`, by module: those that reached experts, else the routers'."""
        found = dict(self._seen["experts"] or self._seen["routers"])
        self.begin()
        return found


def changed(
    reference: dict[str, list[Tensor]], quantized: dict[str, list[Tensor]]
) -> tuple[float, float]:
    """Expert choices that are not among the reference's for the same token, and all choices."""
    other, whole = 0.0, 0.0
    for name, choices in reference.items():
        for before, after in zip(choices, quantized.get(name, ()), strict=False):
            if before.shape != after.shape:
                continue
            kept = (after.unsqueeze(2) == before.unsqueeze(1)).any(2)
            other += float((~kept).sum())
            whole += kept.numel()
    return other, whole


def mixture_modules(model: nn.Module, stacks: Iterable[str]) -> tuple[list[str], list[str]]:
    """Modules to watch: owners of the parameters that stack experts, and routers by their name."""
    owners = [name.rpartition(".")[0] for name in stacks]
    routers = [
        name.rpartition(".")[0]
        for name in parameter_names(model)
        if role_of(name.removesuffix(".weight")) == "router"
    ]
    return owners, routers
