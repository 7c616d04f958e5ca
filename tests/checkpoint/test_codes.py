"""Codes are numbers only with their scale: known scale names, and codes that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckpt_files as files
import mxdiag
from mxdiag.checkpoint.inventory import checkpoint_inventory
from mxdiag.checkpoint.open import open_checkpoint
from mxdiag.checkpoint.stream import read
from packed_storage import NAME

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
#: A scale's name beside `NAME.weight`, and who stores it so.
KNOWN = {
    "weight_scale": "compressed-tensors, ModelOpt, FBGEMM",
    "weight_scale_inv": "DeepSeek-V3",
    "scale": "DeepSeek's inference format",
    "scale_weight": "ComfyUI",
    "qscale_weight": "Mistral",
}


def quantized(dtype: Any, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and the scale of a weight of rms 0.02."""
    weight = files.normal(*shape)
    top = 127 if dtype == np.int8 else 448
    scale = np.array([np.abs(weight).max() / top], np.float32)
    scaled = weight / scale
    return (np.rint(scaled) if dtype == np.int8 else scaled).astype(dtype), scale


@pytest.mark.parametrize("dtype", [E4M3, np.int8], ids=["fp8", "int8"])
@pytest.mark.parametrize("end", KNOWN)
def test_a_known_scale_multiplies_its_codes(tmp_path: Path, end: str, dtype: Any) -> None:
    codes, scale = quantized(dtype, 64, 128)
    arrays = {f"{NAME}.weight": codes, f"{NAME}.{end}": scale}
    arrays[f"{NAME}.input_scale"] = arrays[f"{NAME}.scale_input"] = np.ones(1, np.float32)
    with open_checkpoint(
        files.write_folder(tmp_path, {"model.safetensors": arrays}, None)
    ) as checkpoint:
        found = checkpoint_inventory(checkpoint)
        got = read(checkpoint, found.measured[0])
        assert list(checkpoint.entries) == [f"{NAME}.weight"]
    np.testing.assert_array_equal(got, codes.astype(np.float32) * scale)


def test_quanto_codes_and_scales_are_one_weight(tmp_path: Path) -> None:
    codes, _ = quantized(np.int8, 64, 128)
    scale = np.linspace(0.5, 2, 64, dtype=np.float32)[:, None]
    arrays = {f"{NAME}.weight._data": codes, f"{NAME}.weight._scale": scale}
    with open_checkpoint(
        files.write_folder(tmp_path, {"model.safetensors": arrays}, None)
    ) as checkpoint:
        got = read(checkpoint, checkpoint_inventory(checkpoint).measured[0])
        assert list(checkpoint.entries) == [f"{NAME}.weight"]
    np.testing.assert_array_equal(got, codes.astype(np.float32) * scale)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "codes without a scale that is known"),
    "an unknown name": ({"weight_multiplier_scale": (1,)}, "beside it is "),
    "two": ({"weight_scale": (1,), "scale_weight": (1,)}, "codes with 2 scales: "),
    "a shape that fits nothing": ({"weight_scale": (5, 7)}, "with scales [5, 7] of F32"),
}


@pytest.mark.parametrize("dtype", [E4M3, np.int8], ids=["fp8", "int8"])
@pytest.mark.parametrize("case", REFUSED)
def test_other_codes_are_unsupported_with_the_reason(tmp_path: Path, case: str, dtype: Any) -> None:
    codes, _ = quantized(dtype, 64, 128)
    scales, reason = REFUSED[case]
    arrays = {f"{NAME}.{end}": np.ones(shape, np.float32) for end, shape in scales.items()}
    arrays |= {f"{NAME}.weight": codes, "model.layers.1.mlp.down_proj.weight": files.normal(64, 32)}
    folder = files.write_folder(tmp_path, {"model.safetensors": arrays}, None)
    run = mxdiag.scan(folder, weights_only=True, corrections="none")
    assert [row["layer"] for row in run.tensors] == ["model.layers.1.mlp.down_proj"]
    (entry,) = run.data["coverage"]["unsupported"]
    assert entry["layer"] == f"{NAME}.weight"
    assert reason in entry["reason"]
    assert entry["parameters"] == 64 * 128
    assert run.data["coverage"]["parameter_fraction"] == pytest.approx(1 / 5)


def test_the_scale_makes_the_number(tmp_path: Path) -> None:
    """Read raw, these codes would have an rms near 115 and the same look of health."""
    codes, scale = quantized(E4M3, 64, 128)
    arrays = {"layers.0.attn.wq.weight": codes, "layers.0.attn.wq.scale_weight": scale}
    folder = files.write_folder(tmp_path, {"model.safetensors": arrays}, None)
    (row,) = mxdiag.scan(folder, weights_only=True, corrections="none").tensors
    exact = codes.astype(np.float64) * float(scale[0])
    assert row["rms"] == pytest.approx(np.sqrt(np.mean(exact**2)), rel=1e-6)  # products in float32
    assert 0.019 < row["rms"] < 0.021
