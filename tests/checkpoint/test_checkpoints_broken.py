"""Broken checkpoints: each fault gives one error that names the file and says what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import ckpt_files as files
from broken_files import BROKEN_FILES, BROKEN_HEADERS, LAYER
from mxdiag.checkpoint.inventory import checkpoint_inventory
from mxdiag.checkpoint.open import open_checkpoint
from mxdiag.checkpoint.stream import stream
from mxdiag.errors import CheckpointError


@pytest.mark.parametrize("case", BROKEN_HEADERS)
def test_broken_headers(tmp_path: Path, case: str) -> None:
    header, message = BROKEN_HEADERS[case]
    path = files.write_raw(tmp_path / "model.safetensors", header, bytes(24))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_broken_files(tmp_path: Path, case: str) -> None:
    content, message = BROKEN_FILES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_zero_size_tensors_are_legal(tmp_path: Path) -> None:
    arrays = {"empty.weight": np.zeros((0, 8), np.float32), LAYER: files.normal(8, 8)}
    with open_checkpoint(files.write(tmp_path / "m.safetensors", arrays)) as checkpoint:
        found = checkpoint_inventory(checkpoint)
    assert [linear.tensor for linear in found.measured] == [LAYER]
    assert found.excluded[0].rule == "not a linear weight: empty"


def test_missing_and_unusable_paths(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint("x\0y")
    with pytest.raises(CheckpointError, match="empty folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(CheckpointError, match="is no checkpoint file"):
        open_checkpoint(tmp_path / "notes.txt")
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=r"config\.json: is not valid JSON"):
        open_checkpoint(tmp_path)


def test_a_named_pipe_does_not_hang_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path)


def test_a_file_cut_while_it_is_read(tmp_path: Path) -> None:
    path = files.write(tmp_path / "m.safetensors", {LAYER: files.normal(512, 512)})
    with open_checkpoint(path) as checkpoint:
        os.truncate(path, 5000)
        with pytest.raises(CheckpointError, match="cut short"):
            list(stream(checkpoint, checkpoint_inventory(checkpoint).measured))
