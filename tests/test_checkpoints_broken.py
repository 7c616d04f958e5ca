"""Broken checkpoints: each fault gives one error that names the file and says what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import ckpt_files as files
import numpy as np
import pytest

from mxdiag.collect.checkpoint import open_checkpoint
from mxdiag.collect.weights import inventory, stream
from mxdiag.errors import CheckpointError

LAYER = "model.layers.0.mlp.down_proj.weight"


def entry(
    dtype: object = "F32", shape: object = (2, 2), offsets: object = (0, 16)
) -> dict[str, object]:
    return {LAYER: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


TWO = {
    "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]},
}
BROKEN_HEADERS = {
    "not JSON": (b"{]", "damaged header"),
    "not UTF-8": (b'{"\xff": 1}', "damaged header"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "damaged header"),
    "not an object": (b"[1, 2]", "not an object"),
    "NaN": (b'{"a": NaN}', "NaN is not JSON"),
    "huge number": (b'{"a": ' + b"9" * 5000 + b"}", "damaged header"),
    "deep nesting": (b'{"a":' + b"[" * 200_000, "nested too deeply"),
    "duplicate key": (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
    "lone surrogate": (b'{"\\ud800": {"dtype":"U8","shape":[],"data_offsets":[0,1]}}', "malformed"),
    "entry is no object": ({LAYER: 3}, "malformed"),
    "no dtype": ({LAYER: {"shape": [2], "data_offsets": [0, 8]}}, "malformed"),
    "unknown dtype": (entry(dtype="F3"), "unknown dtype 'F3'"),
    "dtype is a list": (entry(dtype=["F32"]), "unknown dtype"),
    "negative size": (entry(shape=(-2, -2)), "not a list of sizes"),
    "boolean size": (entry(shape=(True, 4)), "not a list of sizes"),
    "float size": (entry(shape=(2.0, 2)), "not a list of sizes"),
    "too many axes": (entry(shape=[1] * 100), "not a list of sizes"),
    "three offsets": (entry(offsets=(0, 8, 16)), "malformed"),
    "reversed offsets": (entry(offsets=(16, 0)), "not a range"),
    "shape beyond its bytes": (entry(shape=(4, 4)), "do not hold shape"),
    "astronomic shape": (entry(shape=(2**62, 2**62)), "do not hold shape"),
    "odd number of 4-bit elements": (entry("F4", (1, 31), (0, 15)), "do not hold shape"),
    "beyond the file": (entry(shape=(2, 2000), offsets=(0, 16_000)), "was cut short"),
    "a hole": (entry(offsets=(8, 24)), "leaves a hole"),
    "an overlap": (TWO, "overlaps another tensor"),
    "metadata is no object": ({"__metadata__": 3}, "__metadata__"),
}


@pytest.mark.parametrize("case", BROKEN_HEADERS)
def test_broken_headers(tmp_path: Path, case: str) -> None:
    header, message = BROKEN_HEADERS[case]
    path = files.write_raw(tmp_path / "model.safetensors", header, bytes(24))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


BROKEN_FILES = {
    "empty": (b"", "is empty"),
    "short": (b"\x01\x00\x00", "3 bytes: no safetensors"),
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "git lfs pull",
    ),
    "header beyond the file": ((2**63).to_bytes(8, "little") + b"{}", "cut short"),
    "a gigabyte of header": ((10**9).to_bytes(8, "little") + b"{}", "cut short"),
    "trailing bytes": ((2).to_bytes(8, "little") + b"{}junk", "does not describe"),
    "an archive": (b"PK\x03\x04" + bytes(40), "no safetensors"),
}


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
        found = inventory(checkpoint)
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
            list(stream(checkpoint, inventory(checkpoint).measured))
