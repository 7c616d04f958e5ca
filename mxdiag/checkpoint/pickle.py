"""Reading `.bin` and `.pt` checkpoints with torch's restricted unpickler, where allowed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from mxdiag.checkpoint.decode import Buffers, Files
from mxdiag.checkpoint.encodings import Entry
from mxdiag.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
#: Keys under which training scripts put the model's tensors.
_INNER = ("state_dict", "model_state_dict", "model", "module")


def read_pickles(files: Sequence[Path]) -> dict[str, Entry]:
    """The tensors of pickle checkpoints, memory-mapped where the files allow it.

    Tensors that share storage with an earlier one, and all of it, are listed once.

    Raises
    ------
    CheckpointError
        torch is missing, or refuses to load a file with `weights_only=True`.
    """
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            "needs torch to be read", where=files[0], advice="Install torch"
        ) from None
    entries: dict[str, Entry] = {}
    seen: set[tuple[Any, ...]] = set()
    for path in files:
        for name, tensor in _state(_load(path, torch), path, torch).items():
            identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype))
            if tensor.numel() and identity in seen:
                continue
            seen.add(identity)
            entries[name] = _entry(name, tensor)
    return entries


def _load(path: Path, torch: Any) -> Any:
    for mmap in (True, False):  # files of torch < 1.6 cannot be mapped
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:  # the unpickler raises whatever a damaged file makes it raise
            reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
    raise CheckpointError(
        f"is refused by torch.load(weights_only=True): {reason}",
        where=path,
        advice="Convert it to safetensors where you trust it",
    )


def _state(loaded: Any, path: Path, torch: Any) -> dict[str, torch.Tensor]:
    for key in _INNER:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"holds a {type(loaded).__name__}, not named tensors", where=path)
    found = {k: v for k, v in loaded.items() if isinstance(k, str) and isinstance(v, torch.Tensor)}
    if not found:
        raise CheckpointError("holds no named tensors", where=path)
    return found


def _entry(name: str, tensor: torch.Tensor) -> Entry:
    label = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    if label in ("bool", "int64") or (label == "uint8" and name.endswith("bias")):
        return Entry(name, shape, label, integer=True)  # indices and masks
    if tensor.is_meta or tensor.is_sparse or label not in _DTYPES:
        return Entry(name, shape, label, unsupported=f"{label} in a pickle checkpoint")
    return Entry(name, shape, label, lambda files: TorchValues(tensor, files))


class TorchValues:
    """A (memory-mapped) torch tensor as `Values`."""

    granule = 1

    def __init__(self, tensor: torch.Tensor, files: Files) -> None:
        label = str(tensor.dtype).removeprefix("torch.")
        self.dtype = _DTYPES[label]
        flat = tensor.detach().reshape(-1)
        if label == "bfloat16":
            import torch

            flat = flat.view(torch.uint16)
        self._flat = flat.numpy().view(self.dtype)

    def read(self, start: int, count: int, buffers: Buffers) -> np.ndarray:
        """See `Values.read`."""
        return self._flat[start : start + count]
