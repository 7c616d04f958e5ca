"""Which implementation a mixture of experts runs with, for the length of a tap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from mxdiag.errors import ModelError

_FIELD = "_experts_implementation_internal"


@contextmanager
def eager_experts(model: nn.Module) -> Iterator[None]:
    """Run each expert's products one by one, so that each is seen with exactly its tokens.

    transformers reads `config._experts_implementation` at each forward. Models whose experts
    cannot be switched stay as they are: the parts of a grouped or batched product are told apart by
    its offsets or index.

    Raises
    ------
    ModelError
        If the implementation was fixed when the model was loaded and cannot be left.
    """
    configs = _configs(model)
    before = {key: vars(config)[_FIELD] for key, config in configs.items()}
    try:
        for module in _outermost(model):
            if any(before[key] not in (None, "eager") for key in configs):
                _switch(module)
        yield
    finally:
        for key, config in configs.items():
            setattr(config, _FIELD, before[key])


def _switch(module: Any) -> None:
    try:
        module.set_experts_implementation("eager")
    except RuntimeError as error:
        raise ModelError(
            "the experts' implementation cannot be switched to eager",
            where=type(module).__name__,
            advice='Load it with from_pretrained(..., experts_implementation="eager")',
        ) from error


def _configs(model: nn.Module) -> dict[int, Any]:
    """Every config object that holds an experts implementation, nested ones included."""
    found: dict[int, Any] = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if id(config) in found or _FIELD not in getattr(config, "__dict__", {}):
            continue
        found[id(config)] = config
        waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return found


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the transformers models inside wrappers (compile, peft, a user's own module)."""
    inside = "set_experts_implementation" in dir(type(module))
    if inside:
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)
