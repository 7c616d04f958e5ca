"""Every way in which a checkpoint cannot be read, through the command: one line, exit code 2."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ckpt_files as files
from broken_files import BROKEN_FILES, BROKEN_HEADERS, LAYER
from mxdiag.cli import main

SHARD = "model-0000{}-of-00002.safetensors"


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run `mxdiag scan`, which must fail; its one message."""
    with pytest.raises(SystemExit) as caught:
        main(["scan", *map(str, arguments), "--quiet", "--out", "/nowhere"])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("case", BROKEN_HEADERS)
def test_broken_headers(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, message = BROKEN_HEADERS[case]
    path = files.write_raw(tmp_path / "model.safetensors", header, bytes(24))
    told = refused(capsys, path)
    assert message in told
    assert str(path) in told


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_broken_files(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, message = BROKEN_FILES[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    assert message in refused(capsys, tmp_path, "--weights-only")


def shards(folder: Path) -> None:
    """Two shards with an index."""
    each = {SHARD.format(i): {f"l{i}.weight": files.normal(8, 8)} for i in (1, 2)}
    files.write_folder(folder, each)


def no_shard(folder: Path) -> None:
    shards(folder)
    (folder / SHARD.format(2)).unlink()


def no_index(folder: Path) -> None:
    no_shard(folder)
    (folder / "model.safetensors.index.json").unlink()


def escaping(folder: Path) -> None:
    files.write_folder(folder, {}, index={LAYER: "../x.safetensors"})


def no_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def odd_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}')


def elsewhere(folder: Path) -> None:
    shards(folder)
    table = {"l1.weight": SHARD.format(2), "l2.weight": SHARD.format(2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def twice(folder: Path) -> None:
    same = {SHARD.format(i): {LAYER: files.normal(8, 8)} for i in (1, 2)}
    files.write_folder(folder, same)
    (folder / "model.safetensors.index.json").unlink()


def link_out(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("/etc/hostname")


def dead_link(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("nowhere")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "model.safetensors")


def many(folder: Path) -> None:
    for name in ("a", "b"):
        files.write(folder / f"{name}.safetensors", {LAYER: files.normal(8, 8)})


def ggufs(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / f"{name}.gguf").write_bytes(b"GGUF")


def gguf(content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        pytest.importorskip("gguf")
        (folder / "a.gguf").write_bytes(content)

    return write


def adapter(folder: Path) -> None:
    files.write(folder / "adapter_model.safetensors", {"q.lora_A.weight": files.normal(8, 8)})
    (folder / "adapter_config.json").write_text("{}")


def cache(folder: Path) -> None:
    for name in ("snapshots", "blobs", "refs"):
        (folder / name).mkdir()


def pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


def config(folder: Path) -> None:
    files.write(folder / "model.safetensors", {LAYER: files.normal(8, 8)})
    (folder / "config.json").write_text("{")


def no_linear(folder: Path) -> None:
    arrays = {"model.embed_tokens.weight": files.normal(8, 8), "norm.weight": files.normal(8)}
    files.write(folder / "model.safetensors", arrays)


def long_rows(folder: Path) -> None:
    codes = np.zeros((1, 1 << 26), np.uint8).view(files.ml_dtypes.float8_e4m3fn)
    scale = np.ones((1, 1 << 19), np.float32)
    name = LAYER.removesuffix(".weight")
    files.write(folder / "model.safetensors", {LAYER: codes, f"{name}.weight_scale_inv": scale})


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (lambda folder: None, "empty folder"),
    "no weights": (lambda folder: (folder / "x.txt").touch(), "holds no weights"),
    "missing shard": (no_shard, f"names shard {SHARD.format(2)}, which is missing"),
    "missing shard and index": (no_index, f"the first is {SHARD.format(2)}"),
    "path escape": (escaping, "not a safetensors file inside the folder"),
    "no weight_map": (no_map, "no weight_map"),
    "weight_map of numbers": (odd_map, "other than file names"),
    "index and shards disagree": (elsewhere, "lacks 1 tensors that the index places there"),
    "one tensor in two shards": (twice, "is also in"),
    "link out of the folder": (link_out, "leaves the checkpoint's folder"),
    "dead link": (dead_link, "link to nothing"),
    "named pipe": (pipe, "not a regular file"),
    "several files": (many, "2 safetensors files and no index"),
    "several GGUF files": (ggufs, "2 GGUF files"),
    "GGUF cut short": (gguf(b"GGUF\x03\0\0\0"), "damaged or cut GGUF header"),
    "GGUF of another version": (gguf(b"GGUF\x09\0\0\0" + bytes(16)), "GGUF version 9"),
    "no GGUF": (gguf(bytes(64)), "is no GGUF file"),
    "adapter": (adapter, "merge_and_unload"),
    "hub cache": (cache, "hub cache folder"),
    "pickle": (pickle, "--allow-pickle"),
    "broken config": (config, "is not valid JSON"),
    "no linear layer": (no_linear, "no linear weight to measure"),
    "rows beyond any buffer": (long_rows, "too long to decode"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = FOLDERS[case]
    make(tmp_path)
    assert message in refused(capsys, tmp_path, "--weights-only")


def test_a_pickle_that_is_no_pickle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pickle(tmp_path)
    told = refused(capsys, tmp_path, "--weights-only", "--allow-pickle")
    assert "refused by torch.load(weights_only=True)" in told


@pytest.mark.parametrize(
    "name",
    ["a" * 5000, "x/" * 3000, "./nowhere", "model.safetensors"],
    ids=["long name", "long path", "nowhere", "no file"],
)
def test_paths(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, name)
    assert "no such file or folder" in told or "does not exist" in told


def test_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    assert "is an index, not weights" in refused(capsys, index, "--weights-only")
    notes = tmp_path / "notes.txt"
    notes.write_text("text")
    assert "is no checkpoint file" in refused(capsys, notes, "--weights-only")
    assert "is no folder" in refused(capsys, notes)
    for ending in ("bin", "pt", "pth"):
        file = tmp_path / f"weights.{ending}"
        file.write_bytes(b"\x80\x04")
        assert "--allow-pickle" in refused(capsys, file)
