"""A hub model's weight files, for reading without building the model."""

from __future__ import annotations

from pathlib import Path

from mxdiag.errors import CheckpointError

_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json")


def hub_folder(name: str, revision: str | None = None) -> Path:
    """Folder with the safetensors files of a hub model: from the local cache, or downloaded to it.

    Raises
    ------
    CheckpointError
        If huggingface_hub is missing, or cannot bring them.
    """
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise CheckpointError(
            "is no file or folder, and hub models need the huggingface_hub package",
            where=name,
            advice="Install it, or give a local folder or file",
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except Exception as error:  # it raises errors of many libraries
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"is no file or folder, and the hub does not bring it: {lines[0]}",
            where=name,
            advice="Check the name and the network, or give a local folder or file",
        ) from error
