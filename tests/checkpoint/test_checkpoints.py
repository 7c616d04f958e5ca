"""Opening and streaming checkpoints: every form users have, and every way one can be broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ckpt_files as files
from mxdiag.checkpoint import stream as weights
from mxdiag.checkpoint.inventory import checkpoint_inventory
from mxdiag.checkpoint.open import open_checkpoint
from mxdiag.checkpoint.stream import read, stream
from mxdiag.errors import CheckpointError
from mxdiag.layers.linears import Linear

BF16 = ml_dtypes.bfloat16
LAYER = "model.layers.0.mlp.down_proj.weight"


def whole(path: Path, linear: Linear | None = None) -> np.ndarray:
    """The first measured layer of a checkpoint, read whole."""
    with open_checkpoint(path) as checkpoint:
        return read(checkpoint, linear or checkpoint_inventory(checkpoint).measured[0])


# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (33, 1), (33, 65), (300, 31), (129, 257)])
def test_plain_values_are_bit_for_bit(tmp_path: Path, dtype: type, shape: tuple[int, int]) -> None:
    array = files.normal(*shape, dtype=dtype)
    got = whole(files.write(tmp_path / "model.safetensors", {LAYER: array}))
    assert got.dtype == array.dtype
    assert got.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2], ids=["e4m3", "e5m2"]
)
def test_every_code_of_an_8_bit_float(tmp_path: Path, dtype: type) -> None:
    codes = np.arange(256, dtype=np.uint8).view(dtype).reshape(4, 64)
    one = {LAYER: codes, f"{LAYER}_scale": np.ones(1, np.float32)}
    got = whole(files.write(tmp_path / "m.safetensors", one))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.astype(np.float32), codes.astype(np.float32))


def test_the_reader_agrees_with_the_reference_library(tmp_path: Path) -> None:
    numpy_io = pytest.importorskip("safetensors.numpy")
    arrays = {f"layers.{i}.fc1.weight": files.normal(40 + i, 70, seed=i) for i in range(5)}
    numpy_io.save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with open_checkpoint(tmp_path) as checkpoint:
        for linear in checkpoint_inventory(checkpoint).measured:
            np.testing.assert_array_equal(read(checkpoint, linear), arrays[linear.tensor])


@pytest.mark.parametrize("ahead", [True, False])
def test_chunks_hold_whole_blocks_and_cover_each_weight_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", 1 << 16)
    arrays = {f"layers.{i}.fc1.weight": files.normal(700, 90 + i, seed=i) for i in range(3)}
    files.write(tmp_path / "model.safetensors", arrays)
    with open_checkpoint(tmp_path) as checkpoint:
        found = checkpoint_inventory(checkpoint).measured
        seen = {linear: np.full(linear.shape, np.nan, np.float32) for linear in found}
        finished = []
        for chunk in stream(checkpoint, found, ahead=ahead):
            rows, cols = chunk.data.shape
            end = (chunk.row + rows, chunk.col + cols)
            assert chunk.row % 128 == chunk.col % 128 == 0
            assert all(n % 128 == 0 or n == m for n, m in zip(end, chunk.linear.shape, strict=True))
            target = seen[chunk.linear][chunk.row : end[0], chunk.col : end[1]]
            assert np.isnan(target).all()
            target[...] = chunk.data
            if chunk.last:
                finished.append(chunk.linear)
    assert finished == found
    for linear, array in seen.items():
        np.testing.assert_array_equal(array, arrays[linear.tensor])


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_too_long_for_a_buffer_are_read_in_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transposed: bool
) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(weights, "MAX_CHUNK_BYTES", 1 << 17)
    array = files.normal(200, 1000)
    name, config = ("h.0.mlp.c_fc.weight", {"model_type": "gpt2"}) if transposed else (LAYER, {})
    folder = files.write_folder(tmp_path, {"model.safetensors": {name: array}}, config)
    with open_checkpoint(folder) as checkpoint:
        found = checkpoint_inventory(checkpoint).measured
        pieces = [(c.row, c.col, c.data.shape) for c in stream(checkpoint, found)]
    assert len(pieces) > 4
    np.testing.assert_array_equal(whole(folder), array.T if transposed else array)


def test_gpt2_weights_come_out_as_out_in(tmp_path: Path) -> None:
    fused = files.normal(48, 144)  # [in, q | k | v]
    folder = files.write_folder(
        tmp_path, {"model.safetensors": {"h.0.attn.c_attn.weight": fused}}, {"model_type": "gpt2"}
    )
    with open_checkpoint(folder) as checkpoint:
        got = {
            linear.role: read(checkpoint, linear)
            for linear in checkpoint_inventory(checkpoint).measured
        }
        layers = [
            c.linear.role for c in stream(checkpoint, checkpoint_inventory(checkpoint).measured)
        ]
    assert layers == ["q_proj", "k_proj", "v_proj"]
    for i, role in enumerate(layers):
        np.testing.assert_array_equal(got[role], fused[:, 48 * i : 48 * (i + 1)].T)


def test_gpt_oss_experts_are_transposed_and_interleaved(tmp_path: Path) -> None:
    fused = files.normal(3, 64, 96)  # [experts, in, 2 * out], columns gate, up, gate, up ...
    name = "model.layers.0.mlp.experts.gate_up_proj"
    folder = files.write_folder(
        tmp_path, {"model.safetensors": {name: fused}}, {"model_type": "gpt_oss"}
    )
    with open_checkpoint(folder) as checkpoint:
        for linear in checkpoint_inventory(checkpoint).measured:
            first = 0 if linear.role == "expert.gate_proj" else 1
            expected = fused[linear.expert][:, first::2].T
            np.testing.assert_array_equal(read(checkpoint, linear), expected)


# ---- folders -----------------------------------------------------------------------------------


def shards() -> dict[str, dict[str, np.ndarray]]:
    return {
        f"model-0000{i}-of-00002.safetensors": {
            f"model.layers.{i}.mlp.up_proj.weight": files.normal(32, 64, seed=i)
        }
        for i in (1, 2)
    }


def test_sharded_folder(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    with open_checkpoint(files.write_folder(tmp_path, shards(), config)) as checkpoint:
        assert len(checkpoint_inventory(checkpoint).measured) == len(checkpoint.files) == 2
        assert checkpoint.architecture == "LlamaForCausalLM"
        assert checkpoint.warnings == []


def test_missing_shard_is_named(tmp_path: Path) -> None:
    files.write_folder(tmp_path, shards())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00002\.safetensors, which is missing"
    ):
        open_checkpoint(tmp_path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    files.write_folder(tmp_path, shards())
    (tmp_path / "model.safetensors.index.json").unlink()
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.entries) == 2
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="the first is model-00001-of-00002"):
        open_checkpoint(tmp_path)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    files.write_folder(tmp_path, shards())
    (tmp_path / "consolidated.safetensors").write_bytes(b"garbage that would fail to parse")
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.entries) == 2
        assert "consolidated.safetensors" in checkpoint.warnings[0]


def test_tensor_that_is_not_where_the_index_says(tmp_path: Path) -> None:
    index = {
        "model.layers.1.mlp.up_proj.weight": "model-00002-of-00002.safetensors",
        "model.layers.2.mlp.up_proj.weight": "model-00001-of-00002.safetensors",
    }
    files.write_folder(tmp_path, shards(), index=index)
    with pytest.raises(CheckpointError, match="lacks 1 tensors that the index places there"):
        open_checkpoint(tmp_path)


def test_tensors_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    one = {
        "model-00001-of-00001.safetensors": {
            LAYER: files.normal(8, 8),
            "x.weight": files.normal(4, 4),
        }
    }
    files.write_folder(tmp_path, one, index={LAYER: "model-00001-of-00001.safetensors"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.entries) == [LAYER]
        assert "does not name" in checkpoint.warnings[0]


@pytest.mark.parametrize(
    "target",
    ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "C:\\x.safetensors",
     "..\\outside.safetensors", "", ".", "config.json", "x\0.safetensors"],
)  # fmt: skip
def test_weight_map_cannot_leave_the_folder(tmp_path: Path, target: str) -> None:
    files.write(tmp_path / "outside.safetensors", {LAYER: files.normal(8, 8)})
    folder = files.write_folder(tmp_path / "model", {}, index={LAYER: target})
    with pytest.raises(CheckpointError, match="inside the folder"):
        open_checkpoint(folder)


def test_links_may_not_leave_the_folder(tmp_path: Path) -> None:
    outside = files.write(tmp_path / "outside.safetensors", {LAYER: files.normal(8, 8)})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(CheckpointError, match="leaves the checkpoint's folder"):
        open_checkpoint(folder)
    assert whole(outside).shape == (8, 8)
    link = tmp_path / "link.safetensors"
    link.symlink_to(outside)  # a link that the user names is the user's own choice
    assert whole(link).shape == (8, 8)


def test_hub_cache_layout(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    blob = files.write(repo / "blobs" / "0123abcd", {LAYER: files.normal(8, 8)})
    snapshot = repo / "snapshots" / "4567cdef"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(blob, snapshot))
    assert whole(snapshot).shape == (8, 8)
    assert whole(snapshot / "model.safetensors").shape == (8, 8)
    with pytest.raises(CheckpointError, match="hub cache folder"):
        open_checkpoint(_with_refs(repo))
    other = files.write(
        tmp_path / "models--org--other" / "blobs" / "99", {LAYER: files.normal(8, 8)}
    )
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(other, snapshot))
    with pytest.raises(CheckpointError, match="leaves the checkpoint's folder"):
        open_checkpoint(snapshot)


def _with_refs(repo: Path) -> Path:
    (repo / "refs").mkdir()
    return repo


def test_single_file_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    files.write_folder(tmp_path, shards())
    files.write(tmp_path / "model.safetensors", {LAYER: files.normal(8, 8)})
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.entries) == [LAYER]
        assert "model.safetensors is read" in checkpoint.warnings[0]


def test_adapters_alone_are_refused_with_advice(tmp_path: Path) -> None:
    lora = {"base_model.model.q_proj.lora_A.weight": files.normal(8, 8)}
    files.write(tmp_path / "adapter_model.safetensors", lora)
    (tmp_path / "adapter_config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        with pytest.raises(CheckpointError, match="merge_and_unload"):
            open_checkpoint(path)
    renamed = files.write(tmp_path / "other" / "weights.safetensors", lora)
    with pytest.raises(CheckpointError, match="merge_and_unload"):
        open_checkpoint(renamed)


def test_pickle_needs_permission(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {LAYER: torch.randn(40, 70).bfloat16(), "lm_head.weight": torch.randn(9, 8)}
    state["model.embed_tokens.weight"] = state["lm_head.weight"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="--allow-pickle"):
        open_checkpoint(tmp_path)
    with open_checkpoint(tmp_path, allow_pickle=True) as checkpoint:
        found = checkpoint_inventory(checkpoint)
        got = read(checkpoint, found.measured[0])
        assert "weights_only=True" in checkpoint.warnings[0]
        assert found.matrix_parameters == 40 * 70 + 9 * 8  # tied tensors count once
    expected = state[LAYER].view(torch.uint16).numpy()
    np.testing.assert_array_equal(got.view(np.uint16), expected)


class Harmful:
    """Would create a file if its pickle ever ran."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.path, "w")


def test_no_code_of_a_pickle_runs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    trap = tmp_path / "ran"
    torch.save({LAYER: Harmful(str(trap))}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"is refused by torch\.load"):
        open_checkpoint(tmp_path, allow_pickle=True)
    assert not trap.exists()


# ---- cost --------------------------------------------------------------------------------------

PROBE = """
import json, re, sys
from mxdiag.checkpoint.inventory import checkpoint_inventory as inventory
from mxdiag.checkpoint.open import open_checkpoint
from mxdiag.checkpoint.stream import stream
with open_checkpoint(sys.argv[1]) as checkpoint:
    read = sum(chunk.data.nbytes for chunk in stream(checkpoint, inventory(checkpoint).measured))
peak = int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])  # kB
print(json.dumps([read, peak, "torch" in sys.modules, "transformers" in sys.modules]))
"""


def sparse_file(path: Path, count: int, rows: int, cols: int) -> Path:
    """A file of `count` float16 weights, all zero, that takes no space on disk."""
    size = rows * cols * 2
    header = {
        f"l.{i}.fc1.weight": {
            "dtype": "F16",
            "shape": [rows, cols],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(count)
    }
    files.write_raw(path, header)
    os.truncate(path, path.stat().st_size + count * size)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_memory_does_not_grow_with_the_file_and_torch_is_not_imported(tmp_path: Path) -> None:
    peaks = {}
    for count in (1, 16):
        path = sparse_file(tmp_path / f"{count}.safetensors", count, 2048, 8192)
        done = subprocess.run(
            [sys.executable, "-c", PROBE, str(path)], capture_output=True, text=True, check=True
        )
        read, peaks[count], torch, transformers = json.loads(done.stdout)
        assert read == count * 2048 * 8192 * 2
        assert not torch
        assert not transformers
    # 512 MB instead of 32 MB of weights: the same buffers. 20 MB is room for the allocator.
    assert peaks[16] - peaks[1] < 20_000
    assert peaks[16] < 150_000
