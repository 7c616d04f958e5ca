"""The built-in samples: two small trained checkpoints, with calibration text in their domain.

`sample:dense` is a Qwen3 decoder, `sample:moe` a Qwen3 mixture of experts. `tools.samples.train`
makes them again. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import shutil
import uuid
from importlib import resources
from pathlib import Path

from mxdiag.errors import MxdiagError, UsageError

#: Names of the samples, without the `sample:` prefix that the command line uses.
SAMPLES = ("dense", "moe")
PREFIX = "sample:"
#: File names of the texts that go with them.
CALIBRATION = "calibration.jsonl"
ROLLOUTS = "rollouts.jsonl"


def _shipped(name: str) -> Path:
    return Path(str(resources.files(__name__).joinpath(name)))


def sample_path(name: str) -> Path:
    """Folder of a shipped checkpoint: config, weights, tokenizer, model card.

    Parameters
    ----------
    name
        `dense` or `moe`, with or without the prefix `sample:`.

    Raises
    ------
    UsageError
        For any other name.
    """
    short = name.removeprefix(PREFIX)
    if short not in SAMPLES:
        known = ", ".join(PREFIX + sample for sample in SAMPLES)
        raise UsageError("there is no such sample", where=name, advice=f"The samples are {known}")
    return _shipped(short)


def calibration_path() -> Path:
    """JSONL of `{"text"}` records in the domain of the samples, held out from their training."""
    return _shipped(CALIBRATION)


def rollouts_path() -> Path:
    """JSONL of `{"prompt", "response", "advantage"}` records: answers to word problems.

    Groups of four answers to one problem; the advantage is (reward - mean) / std over the group.
    """
    return _shipped(ROLLOUTS)


def write_sample(name: str, directory: Path | str) -> list[Path]:
    """Copy a sample and its texts into a new or empty directory.

    The files are copied to a hidden folder first and then renamed, so that a failed or interrupted
    copy leaves no half-written file under a final name.

    Parameters
    ----------
    name
        As for `sample_path`.
    directory
        Where to write; parents are made.

    Returns
    -------
    list[Path]
        The files written, sorted.

    Raises
    ------
    UsageError
        For an unknown name.
    MxdiagError
        If the directory holds anything, is a file, or cannot be written.
    """
    files = [*sample_path(name).iterdir(), calibration_path(), rollouts_path()]
    target = Path(directory).expanduser()
    try:
        _refuse_occupied(target)
        _copy_then_rename(files, target)
    except OSError as error:
        raise MxdiagError(
            f"the sample could not be written ({error.strerror or error})", where=target
        ) from error
    return sorted(target / file.name for file in files)


def _refuse_occupied(target: Path) -> None:
    advice = "Name a new or an empty directory"
    if target.exists() and not target.is_dir():
        raise MxdiagError("this is a file", where=target, advice=advice)
    if target.is_dir() and any(target.iterdir()):
        raise MxdiagError("this directory is not empty", where=target, advice=advice)


def _copy_then_rename(files: list[Path], target: Path) -> None:
    exists = target.is_dir()
    if not exists:
        target.parent.mkdir(parents=True, exist_ok=True)
    # Within an existing directory: it may be a mount point, or someone's working directory.
    staging = (target if exists else target.parent) / f".mxdiag-{uuid.uuid4().hex}"
    staging.mkdir()
    try:
        for file in files:
            shutil.copyfile(file, staging / file.name)
        if not exists:
            staging.rename(target)
            return
        for file in files:
            (staging / file.name).rename(target / file.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
