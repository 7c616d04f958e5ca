"""What a user names as the model: a sample, a checkpoint, a hub id, or a module in memory."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mxdiag.errors import MxdiagError, UsageError
from mxdiag.samples import PREFIX, calibration_path, sample_path

WEIGHT_FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")
_MODELS = "Give a local folder, a .safetensors file, a hub id, sample:dense or sample:moe"


def run_name(model: str) -> str:
    """Folder name for a model's run: the last part of its path or id."""
    name = model.removeprefix(PREFIX).rstrip("/\\")
    last = re.split(r"[/\\]", name)[-1]
    for suffix in WEIGHT_FILES:
        last = last.removesuffix(suffix)
    return re.sub(r"[^\w.+-]+", "_", last).strip(".") or "model"


def check_model(model: object) -> None:
    """Refuse what is neither a name nor a torch module.

    Raises
    ------
    UsageError
        If it is anything else.
    """
    torch = sys.modules.get("torch")
    if isinstance(model, (str, Path)) or (torch and isinstance(model, torch.nn.Module)):
        return
    kind = f"of type {type(model).__name__}"
    if isinstance(model, type):
        kind = f"the class {model.__name__}, only an instance"
    raise UsageError(f"the model cannot be {kind}", advice=f"{_MODELS}, or a torch module")


def check_loss(loss: object) -> None:
    """Refuse a loss that cannot be called.

    Raises
    ------
    UsageError
        If it is no function.
    """
    if loss is not None and not callable(loss):
        raise UsageError(
            f"the loss cannot be of type {type(loss).__name__}",
            advice="Pass a function loss(output, batch) -> scalar tensor",
        )


def resolve_source(model: str) -> tuple[str, str]:
    """Path or hub id, and the kind of source."""
    if not model.strip():
        raise UsageError("the model's name is empty", advice=_MODELS)
    if model.startswith(PREFIX):
        return str(sample_path(model)), "sample"
    if _exists(model):
        return model, "checkpoint"
    named = re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", model) and not model.startswith(".")
    if named and not model.endswith(WEIGHT_FILES):
        return model, "hub"
    raise MxdiagError(
        "no such file or folder",
        where=model,
        advice=_MODELS,
    )


def _exists(model: str) -> bool:
    try:
        return Path(model).exists()
    except (OSError, ValueError):  # no file can have such a name
        return False


def own_calibration(kind: str) -> Path | None:
    """The built-in text for a model that is named; None for a module in memory."""
    return calibration_path() if kind in ("sample", "checkpoint", "hub") else None
