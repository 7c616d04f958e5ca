"""Checkpoints as stored: quantized, pickled, incomplete. Both routes to W agree, or one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import mxdiag
from mxdiag.errors import MxdiagError
from zoo import Entry, build, entry

OPTIONS: dict[str, Any] = {"corrections": "none", "gemms": "fprop,dgrad,wgrad"}
RECORDS = [{"input_ids": [5, 9, 20, 33, 41, 7, 8]}, {"input_ids": [12, 3, 60, 4]}]
WEIGHTS = "model.safetensors"


def saved(folder: Path, item: Entry | str) -> Path:
    build(entry(item) if isinstance(item, str) else item).save_pretrained(folder)
    return folder


def rewrite(
    folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]], **config: Any
) -> Path:
    """Replace each stored tensor by those that `change` makes of it, and keys of the config."""
    stored = load_file(folder / WEIGHTS)
    tensors = {n: t for name, value in stored.items() for n, t in change(name, value).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def both(folder: Path, **options: Any) -> tuple[mxdiag.Run, mxdiag.Run]:
    """The streamed run, and the loaded one with W, A and G."""
    streamed = mxdiag.scan(folder, weights_only=True, **OPTIONS)
    return streamed, mxdiag.scan(folder, calibration=RECORDS, **options, **OPTIONS)


def assert_same_weights(streamed: mxdiag.Run, loaded: mxdiag.Run) -> None:
    """Same rows and numbers; dtype tells how a file stores what the model holds decoded."""
    weights = loaded.frame.query("operand == 'W'").reset_index(drop=True)
    columns = ["calls", "dtype"]
    # a stack may lie [in, out] in one and [out, in] in the other: float32 sums in another order
    pd.testing.assert_frame_equal(
        streamed.frame.drop(columns=columns), weights.drop(columns=columns), rtol=1e-6, atol=1e-9
    )
    for run in (streamed, loaded):
        assert run.data["coverage"]["parameter_fraction"] == 1.0
    others = loaded.frame.query("operand != 'W'")
    assert set(others["status"]) == {"ok"}


# ---- quantized ---------------------------------------------------------------------------------

EDGE = 16


def block_fp8(name: str, value: Tensor) -> dict[str, Tensor]:
    """DeepSeek-V3's layout with small blocks; the last one of a row or column may be cut."""
    if value.dim() != 2 or "proj" not in name:
        return {name: value}
    rows, cols = value.shape
    down, across = -(-rows // EDGE), -(-cols // EDGE)
    whole = torch.zeros(down * EDGE, across * EDGE)
    whole[:rows, :cols] = value
    blocks = whole.view(down, EDGE, across, EDGE)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    codes = codes.view(down * EDGE, -1)[:rows, :cols].contiguous()
    return {name: codes, f"{name}_scale_inv": scale}


FP8 = {
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [EDGE, EDGE],
        "activation_scheme": "dynamic",
    }
}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_fp8_with_block_scales(name: str, tmp_path: Path) -> None:
    rewrite(saved(tmp_path, name), block_fp8, **FP8)
    streamed, loaded = both(tmp_path, dtype="float32")
    assert_same_weights(streamed, loaded)
    assert {row["dtype"] for row in streamed.tensors} == {"fp8_e4m3+block16"}
    assert any("stored as fp8" in warning for warning in loaded.data["warnings"])


def test_fp8_blocks_that_transformers_misplaces(tmp_path: Path) -> None:
    """24 rows in blocks of 16 have two scales; transformers takes them as two blocks of 12."""
    rewrite(saved(tmp_path, "deepseek_v3"), block_fp8, **FP8)
    with pytest.raises(MxdiagError, match=r"kv_a_proj_with_mqa.*--weights-only"):
        mxdiag.scan(tmp_path, calibration=RECORDS, **OPTIONS)
    streamed = mxdiag.scan(tmp_path, weights_only=True, **OPTIONS)
    weight = load_file(tmp_path / WEIGHTS)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa"
    codes = weight[f"{name}.weight"].float()
    scale = weight[f"{name}.weight_scale_inv"].repeat_interleave(EDGE, 0).repeat_interleave(EDGE, 1)
    expected = mxdiag.decompose(codes * scale[:24])
    row = next(r for r in streamed.tensors if r["layer"] == name and r["gemm"] == "fprop")
    assert row["sqnr_db"] == pytest.approx(expected.sqnr_db, rel=1e-9)


def compressed(kind: str) -> tuple[dict[str, Any], Callable[[str, Tensor], dict[str, Tensor]], str]:
    """The scheme in the config, what makes a weight's tensors, and the dtype of its row."""
    generator = torch.Generator().manual_seed(0)

    def bytes_(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def per_tensor(name: str, value: Tensor) -> dict[str, Tensor]:
        scale = value.abs().max() / 448
        return {name: (value / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale.view(1)}

    def mxfp4(name: str, value: Tensor) -> dict[str, Tensor]:
        rows, cols = value.shape
        scale = 118 + bytes_(rows, cols // 32) % 6
        return {f"{name}_packed": bytes_(rows, cols // 2), f"{name}_scale": scale}

    def nvfp4(name: str, value: Tensor) -> dict[str, Tensor]:
        rows, cols = value.shape
        scale = (torch.rand(rows, cols // 16, generator=generator) + 0.5).to(torch.float8_e4m3fn)
        parts = {f"{name}_packed": bytes_(rows, cols // 2), f"{name}_scale": scale}
        return {**parts, f"{name}_global_scale": torch.tensor([8.0])}

    four_bits = {"num_bits": 4, "type": "float"}
    return {
        "float-quantized": (
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            per_tensor,
            "fp8_e4m3+tensor",
        ),
        "mxfp4-pack-quantized": (
            {**four_bits, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
            mxfp4,
            "mxfp4",
        ),
        "nvfp4-pack-quantized": (
            {**four_bits, "strategy": "tensor_group", "group_size": 16}
            | {"scale_dtype": "torch.float8_e4m3fn"},
            nvfp4,
            "nvfp4",
        ),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["float-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized"]
)
def test_compressed_tensors(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    scheme, pack, dtype = compressed(kind)
    scheme |= {"symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "format": kind}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    item = entry("llama")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    rewrite(
        saved(tmp_path, replace(item, config={**item.config, **sizes})),
        lambda n, t: pack(n, t) if t.dim() == 2 and "proj" in n else {n: t.bfloat16()},
        quantization_config=quantization,
        dtype="bfloat16",
    )
    streamed, loaded = both(tmp_path, dtype="float32" if kind == "float-quantized" else "auto")
    assert_same_weights(streamed, loaded)
    assert {row["dtype"] for row in streamed.tensors} == {dtype}
    along = {row["status"] for row in streamed.tensors if row["gemm"] == "fprop"}
    assert along == ({"exact"} if dtype == "mxfp4" else {"ok"})


def test_bitsandbytes_is_dequantized_where_it_is_installed(tmp_path: Path) -> None:
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="bitsandbytes is not installed"
    )
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    plain = saved(tmp_path / "plain", "llama")
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=settings)
    model.save_pretrained(tmp_path / "quantized")
    run = mxdiag.scan(tmp_path / "quantized", calibration=RECORDS, **OPTIONS)
    assert run.data["coverage"]["parameter_fraction"] == 1.0
    assert {row["status"] for row in run.tensors} == {"ok"}
    weight = model.model.layers[0].mlp.up_proj.weight
    values = functional.dequantize_4bit(weight.data, weight.quant_state)
    expected = mxdiag.decompose(values.float().contiguous())
    row = next(r for r in run.tensors if r["layer"] == "model.layers.0.mlp.up_proj")
    assert (row["operand"], row["gemm"]) == ("W", "fprop")
    assert row["sqnr_db"] == pytest.approx(expected.sqnr_db, rel=1e-9)
    with pytest.raises(MxdiagError, match=r"14 weights are unsupported.*Params4bit"):
        mxdiag.scan(model, operands="W", corrections="none")


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """What is MXFP4 already has no error along its own blocks, and tells of itself."""
    item = entry("gpt_oss")
    item = replace(item, config={**item.config, "hidden_size": 64, "intermediate_size": 32})
    generator = torch.Generator().manual_seed(0)

    def pack(name: str, value: Tensor) -> dict[str, Tensor]:
        if value.dim() != 3:
            return {name: value.bfloat16()}
        experts, columns, rows = value.shape  # [in, out]; packed, it is [out, in / 32, 16]
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    rewrite(saved(tmp_path, item), pack, quantization_config=quantization, dtype="bfloat16")
    streamed, loaded = both(tmp_path)
    assert_same_weights(streamed, loaded)
    experts = [row for row in streamed.tensors if row["expert"] is not None]
    assert {row["dtype"] for row in experts} == {"mxfp4"}
    assert {(row["gemm"], row["status"]) for row in experts} == {
        ("fprop", "exact"),
        ("dgrad", "ok"),
    }
    for row in experts:
        assert row["stored"]["scale_min"] >= 118
        assert 0 < row["stored"]["zero_code_frac"] < 0.25
    assert not any("stored" in row for row in streamed.tensors if row["expert"] is None)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_integer_formats_are_unsupported_by_name(method: str, tmp_path: Path) -> None:
    """Streamed: listed with their share. Loaded: by the library that reads them, or refused."""

    def pack(name: str, value: Tensor) -> dict[str, Tensor]:
        if "mlp" not in name or value.dim() != 2:
            return {name: value}
        module, (rows, cols) = name.removesuffix(".weight"), value.shape
        if method == "bitsandbytes":
            packed = torch.zeros(rows * cols // 2, 1, dtype=torch.uint8)
            return {name: packed, f"{name}.absmax": torch.ones(rows * cols // 64)}
        return {
            f"{module}.qweight": torch.zeros(cols // 8, rows, dtype=torch.int32),
            f"{module}.qzeros": torch.zeros(1, rows // 8, dtype=torch.int32),
            f"{module}.scales": torch.ones(1, rows, dtype=torch.float16),
        }

    quantization = {"quant_method": method, "bits": 4, "group_size": 32, "load_in_4bit": True}
    rewrite(saved(tmp_path, "llama"), pack, quantization_config=quantization)
    coverage = mxdiag.scan(tmp_path, weights_only=True, **OPTIONS).data["coverage"]
    assert {entry["reason"].split()[0] for entry in coverage["unsupported"]} == {method}
    lost = sum(entry["parameters"] for entry in coverage["unsupported"])
    assert lost == 2 * 3 * 32 * 48
    assert coverage["parameter_fraction"] == pytest.approx(1 - lost / coverage["parameters"])
    if find_spec({"bitsandbytes": "bitsandbytes"}.get(method, "gptqmodel")) is None:
        with pytest.raises(MxdiagError, match=r"(?i)requires.*--weights-only"):
            mxdiag.scan(tmp_path, calibration=RECORDS, **OPTIONS)


# ---- pickles, adapters, incomplete -------------------------------------------------------------


@pytest.mark.parametrize("weights_only", [False, True])
def test_pickles_are_read_where_allowed_and_it_is_said(weights_only: bool, tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    options = {**OPTIONS, "weights_only": weights_only, "operands": "W"}
    plain = mxdiag.scan(tmp_path, **options)
    torch.save(load_file(tmp_path / WEIGHTS), tmp_path / "pytorch_model.bin")
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(MxdiagError, match="--allow-pickle"):
        mxdiag.scan(tmp_path, **options)
    run = mxdiag.scan(tmp_path, allow_pickle=True, **options)
    assert run.frame.equals(plain.frame)
    assert any("weights_only=True" in warning for warning in run.data["warnings"])
    assert [file["name"] for file in run.data["model"]["files"]] == ["pytorch_model.bin"]


def test_an_adapter_alone_is_refused_on_both_routes(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(build(entry("llama")), LoraConfig(r=4, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path)
    for weights_only in (False, True):
        with pytest.raises(MxdiagError, match="merge_and_unload"):
            mxdiag.scan(tmp_path, weights_only=weights_only, **OPTIONS)


def test_weights_that_are_missing_are_not_measured(tmp_path: Path) -> None:
    """transformers gives them random values; the file has no such tensor."""
    lost = "model.layers.1.mlp.down_proj.weight"
    folder = rewrite(saved(tmp_path, "llama"), lambda n, t: {} if n == lost else {n: t})
    run = mxdiag.scan(folder, calibration=RECORDS, **OPTIONS)
    (entry_,) = run.data["coverage"]["unsupported"]
    assert entry_ == {
        "layer": lost,
        "reason": "not in the checkpoint: its values are random",
        "parameters": 32 * 48,
    }
    assert run.data["coverage"]["parameter_fraction"] < 1
    assert lost.removesuffix(".weight") not in set(run.frame["layer"])
    assert any(lost in warning for warning in run.data["warnings"])


def test_records_of_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    ids, text = tmp_path / "ids.jsonl", tmp_path / "text.jsonl"
    ids.write_text(json.dumps(RECORDS[0]))
    text.write_text('{"text": "words"}')
    run = mxdiag.scan(tmp_path, calibration=ids, **OPTIONS)
    assert {row["status"] for row in run.tensors} == {"ok"}
    with pytest.raises(MxdiagError, match=r"cannot load the tokenizer.*input_ids"):
        mxdiag.scan(tmp_path, calibration=text, **OPTIONS)
