"""Where each tensor of a model's checkpoint lies in the parameters of the live model.

transformers 5 renames, splits and stacks weights when it loads them. Its own reverse conversion,
fed with tensors that know where they come from, tells for each checkpoint name which parameter,
offset and strides hold it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of the checkpoint, as an affine view of a live parameter (a row-major array)."""

    name: str
    parameter: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def stored_tensors(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> list[Stored]:
    """Say what the checkpoint calls each parameter, and where it lies.

    Parameters
    ----------
    model
        Any torch module; transformers models inside wrappers are found.
    shapes
        Names of its parameters (without `torch.compile`'s prefixes) and their shapes.

    A parameter whose stored form is no affine view of it (rows permuted, several parameters joined)
    keeps its live name and form.
    """
    found: list[Stored] = []
    rest = dict(shapes)
    for prefix, inner in transformers_models(model):
        own = {n: s for n, s in rest.items() if n.startswith(prefix) and not _is_adapter(n)}
        for name in own:
            del rest[name]
        plain = {user_name(n[len(prefix) :]): n for n in own}
        positions = _positions(inner, {p: own[n] for p, n in plain.items()})
        keep = user_name(prefix)
        found += [_renamed(s, keep + s.name, plain[s.parameter]) for s in positions]
    return found + [_whole(user_name(name), name, shape) for name, shape in rest.items()]


def user_name(name: str) -> str:
    """Drop what wrappers add: `base_model.model.`, `.base_layer`, the default adapter's name."""
    name = name.replace("_orig_mod.", "").replace("_fsdp_wrapped_module.", "")
    name = re.sub(r"^base_model\.model\.", "", name).replace(".base_layer.", ".")
    return re.sub(r"\.(lora_(?:A|B|embedding_A|embedding_B))\.default(?=\.|$)", r".\1", name)


def _is_adapter(name: str) -> bool:
    return (
        re.search(r"\.(lora_|vera_|ia3_|hada_|lokr_|oft_|boft_|modules_to_save\.)", name)
        is not None
    )


def transformers_models(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the outermost transformers models, with the prefix of their parameters' names."""
    if hasattr(type(module), "get_experts_implementation") and hasattr(module, "config"):
        yield prefix, module
        return
    for name, child in module.named_children():
        step = "" if name == "_orig_mod" else f"{name}."
        yield from transformers_models(child, prefix + step)


class _KeepViews(TorchFunctionMode):
    """Lets `contiguous` and `clone` return their argument, so that views stay views."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (Tensor.contiguous, Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def _positions(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[Stored]:
    metas = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {t.untyped_storage()._cdata: name for name, t in metas.items()}
    with _KeepViews():
        stored = _reverted(model, metas)
    found, seen = [], set()
    for name, t in (stored or {}).items():
        owner = owners.get(t.untyped_storage()._cdata)
        if owner is not None:
            seen.add(owner)
            found.append(Stored(name, owner, int(t.storage_offset()), tuple(t.shape), t.stride()))
    return found + [_whole(name, name, shape) for name, shape in shapes.items() if name not in seen]


def _reverted(model: Any, metas: dict[str, Tensor]) -> dict[str, Tensor] | None:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers before 5: live names are the checkpoint's
        return None
    try:
        return revert_weight_conversion(model, dict(metas))
    except (RuntimeError, ValueError, KeyError, AttributeError, NotImplementedError):
        return None  # a conversion that needs values, or one that has no reverse


def _whole(name: str, parameter: str, shape: tuple[int, ...]) -> Stored:
    stride = torch.empty(shape, device="meta").stride()
    return Stored(name, parameter, 0, tuple(shape), stride)


def _renamed(stored: Stored, name: str, parameter: str) -> Stored:
    return Stored(name, parameter, stored.offset, stored.shape, stored.stride)


def within(
    stored: Stored, offset: int, shape: tuple[int, int], stride: tuple[int, int]
) -> tuple[int, tuple[int, int]]:
    """Turn a view of the stored (row-major) tensor into offset and strides in the parameter."""
    steps = torch.empty(stored.shape, device="meta").stride()

    def moved(distance: int) -> int:
        total = 0
        for own, step in zip(stored.stride, steps, strict=True):
            count, distance = divmod(distance, step)
            total += count * own
        return total

    inner = (moved(stride[0]) if shape[0] > 1 else 0, moved(stride[1]) if shape[1] > 1 else 0)
    return stored.offset + moved(offset), inner
