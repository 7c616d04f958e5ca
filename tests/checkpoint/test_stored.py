"""Weights that are stored quantized: decoded with their scales, labelled, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckpt_files as files
from mxdiag.checkpoint import stream as weights
from mxdiag.checkpoint.inventory import checkpoint_inventory
from mxdiag.checkpoint.open import Checkpoint, open_checkpoint
from mxdiag.checkpoint.stored import stored_statistics
from mxdiag.checkpoint.stream import read
from mxdiag.errors import CheckpointError
from packed_storage import BF16, BNB4, BNB8, GPTQ, INT4, NAME

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
GRID = np.array(E2M1 + [-value for value in E2M1], np.float32)


def opened(
    folder: Path, arrays: dict[str, np.ndarray], config: dict[str, Any] | None = None
) -> Checkpoint:
    return open_checkpoint(files.write_folder(folder, {"model.safetensors": arrays}, config))


def only(checkpoint: Checkpoint) -> np.ndarray:
    """The one measured weight, with nothing left over."""
    found = checkpoint_inventory(checkpoint)
    assert not found.unsupported
    assert len(found.measured) == 1
    return read(checkpoint, found.measured[0])


def packed(codes: np.ndarray) -> np.ndarray:
    """Two 4-bit codes to a byte, the first in the low half."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def codes_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 16, shape, dtype=np.uint8)


# ---- FP8 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (1, 128), (300, 129)])
@pytest.mark.parametrize("told", [True, False])
def test_deepseek_block_scales(tmp_path: Path, shape: tuple[int, int], told: bool) -> None:
    codes = files.normal(*shape).astype(E4M3)
    grid = tuple(-(-n // 128) for n in shape)
    scale = np.random.default_rng(1).uniform(0.5, 2.0, grid).astype(np.float32)
    config = {"quantization_config": {"weight_block_size": [128, 128]}} if told else None
    arrays = {f"{NAME}.weight": codes, f"{NAME}.weight_scale_inv": scale}
    with opened(tmp_path, arrays, config) as checkpoint:
        got = only(checkpoint)
        label = checkpoint.entries[f"{NAME}.weight"].dtype
    spread = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: shape[0], : shape[1]]
    np.testing.assert_array_equal(got, codes.astype(np.float32) * spread)
    if min(grid) > 1:
        assert label == "fp8_e4m3+block128"


SCALES = {
    "tensor, 0-D": ((), "tensor"),
    "tensor, 1-D": ((1,), "tensor"),
    "tensor, 2-D": ((1, 1), "tensor"),
    "channel, 1-D": ((48,), "channel"),
    "channel, 2-D": ((48, 1), "channel"),
    "column": ((1, 96), "block48x1"),
    "group of 32": ((48, 3), "block1x32"),
}


@pytest.mark.parametrize("case", SCALES)
@pytest.mark.parametrize("scale_dtype", [np.float32, BF16])
def test_fp8_scale_layouts(tmp_path: Path, case: str, scale_dtype: Any) -> None:
    shape, label = SCALES[case]
    codes = files.normal(48, 96).astype(E4M3)
    scale = np.random.default_rng(2).uniform(0.5, 2.0, shape).astype(scale_dtype)
    arrays = {f"{NAME}.weight": codes, f"{NAME}.weight_scale": scale}
    arrays[f"{NAME}.input_scale"] = np.ones(1, np.float32)
    with opened(tmp_path, arrays) as checkpoint:
        got = only(checkpoint)
        assert checkpoint.entries[f"{NAME}.weight"].dtype == f"fp8_e4m3+{label}"
        assert len(checkpoint.entries) == 1
    full = scale.astype(np.float32)
    full = full.reshape(48, 1) if shape == (48,) else full
    full = np.repeat(full, 32, 1) if shape == (48, 3) else full
    np.testing.assert_array_equal(got, codes.astype(np.float32) * full)


def test_mxfp8_scale_bytes_are_exponents(tmp_path: Path) -> None:
    codes = files.normal(4, 64).astype(E4M3)
    exponents = np.array([[120, 127], [128, 0], [1, 130], [127, 127]], np.uint8)
    arrays = {f"{NAME}.weight": codes, f"{NAME}.weight_scale": exponents}
    with opened(tmp_path, arrays) as checkpoint:
        got = only(checkpoint)
    spread = np.repeat(np.ldexp(np.float32(1), exponents.astype(int) - 127), 32, 1)
    np.testing.assert_array_equal(got, codes.astype(np.float32) * spread)


def test_fp8_stack_of_experts_with_one_scale_each(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    codes = files.normal(3, 32, 64).astype(E4M3)
    scale = np.array([0.5, 1.0, 3.0], np.float32)
    arrays = {name: codes, f"{name}_scale": scale}
    with opened(tmp_path, arrays, {"model_type": "qwen3_moe"}) as checkpoint:
        for linear in checkpoint_inventory(checkpoint).measured:
            expected = codes[linear.expert].astype(np.float32) * scale[linear.expert]
            np.testing.assert_array_equal(read(checkpoint, linear), expected)


def test_fp8_scales_that_fit_nothing_are_refused_by_name(tmp_path: Path) -> None:
    arrays = {
        f"{NAME}.weight": files.normal(48, 96).astype(E4M3),
        f"{NAME}.weight_scale": np.ones((5, 7), np.float32),
    }
    with opened(tmp_path, arrays) as checkpoint:
        found = checkpoint_inventory(checkpoint)
        assert not found.measured
        assert found.unsupported[0].parameters == 48 * 96
        assert "scales [5, 7] of F32" in found.unsupported[0].rule
        with pytest.raises(CheckpointError, match="is not read"):
            checkpoint.values(f"{NAME}.weight")


def test_against_compressed_tensors_fp8(tmp_path: Path) -> None:
    state, expected = compressed("float-quantized", tmp_path, 64, 96)
    with opened(tmp_path / "model", state) as checkpoint:
        np.testing.assert_allclose(only(checkpoint), expected, rtol=2**-8)  # theirs is in bfloat16


# ---- 4-bit blocks ------------------------------------------------------------------------------


def test_mxfp4_bytes_by_hand(tmp_path: Path) -> None:
    blocks = np.zeros((1, 2, 2, 16), np.uint8)
    blocks[0, 0, 0, :2] = [0x21, 0xF7]  # codes 1, 2, 7, 15: 0.5, 1, 6, -6
    blocks[0, 1, 1, 15] = 0x80  # codes 0, 8: 0, -0
    scales = np.array([[[128, 127], [0, 255]]], np.uint8)  # 2, 1, 2^-127, NaN
    name = "model.layers.0.mlp.experts.down_proj"
    arrays = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    with opened(tmp_path, arrays, {"model_type": "gpt_oss"}) as checkpoint:
        got = only(checkpoint)
        assert checkpoint.entries[name].dtype == "mxfp4"
    assert got.dtype == BF16
    assert got.shape == (2, 64)
    np.testing.assert_array_equal(got[0, :5].astype(float), [1.0, 2.0, 12.0, -12.0, 0.0])
    assert (got[1, :32] == 0).all()
    assert np.isnan(got[1, 32:].astype(np.float32)).all()


def test_every_scale_byte_is_exact_in_bfloat16(tmp_path: Path) -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)
    blocks = np.tile(packed(codes), (1, 254, 1, 1))
    scales = np.arange(254, dtype=np.uint8).reshape(1, 254, 1)
    name = "model.layers.0.mlp.experts.down_proj"
    arrays = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    with opened(tmp_path, arrays, {"model_type": "gpt_oss"}) as checkpoint:
        got = only(checkpoint).astype(np.float64)
    exact = np.ldexp(GRID[codes].astype(np.float64), np.arange(254)[:, None] - 127)
    fits = np.abs(exact) < 2.0**128  # 4 and 6 times the largest scales are beyond bfloat16
    np.testing.assert_array_equal(got[fits], exact[fits])
    assert np.isinf(got[~fits]).all()


def gpt_oss_arrays(experts: int, rows: int, cols: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    arrays = {}
    for name, out in (("gate_up_proj", rows), ("down_proj", cols)):
        base = f"model.layers.0.mlp.experts.{name}"
        inner = cols if name == "gate_up_proj" else rows // 2
        shape = (experts, out, inner // 32, 16)
        arrays[f"{base}_blocks"] = rng.integers(0, 256, shape, dtype=np.uint8)
        arrays[f"{base}_scales"] = rng.integers(110, 130, shape[:-1], dtype=np.uint8)
    return arrays


def test_gpt_oss_equals_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    arrays = gpt_oss_arrays(3, 128, 96)
    with opened(tmp_path, arrays, {"model_type": "gpt_oss"}) as checkpoint:
        found = checkpoint_inventory(checkpoint)
        assert len(found.measured) == 9
        assert found.matrix_parameters == found.measured_parameters == 3 * (128 * 96 + 96 * 64)
        for linear in found.measured:
            base = linear.tensor
            theirs = mxfp4.convert_moe_packed_tensors(
                torch.from_numpy(arrays[f"{base}_blocks"]),
                torch.from_numpy(arrays[f"{base}_scales"]),
            )[linear.expert]  # [in, out]
            if linear.role == "expert.gate_proj":
                theirs = theirs[:, 0::2]
            elif linear.role == "expert.up_proj":
                theirs = theirs[:, 1::2]
            expected = theirs.T.contiguous().view(torch.uint16).numpy()
            np.testing.assert_array_equal(read(checkpoint, linear).view(np.uint16), expected)


def test_stored_mxfp4_describes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", 1 << 12)  # several reads
    arrays = gpt_oss_arrays(2, 128, 96)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    arrays[f"{name}_scales"][1, 0, 0] = 255
    with opened(tmp_path, arrays, {"model_type": "gpt_oss"}) as checkpoint:
        linear = next(
            x
            for x in checkpoint_inventory(checkpoint).measured
            if x.layer == f"{name}[1].gate_proj"
        )
        told = stored_statistics(checkpoint, linear)
    blocks = arrays[f"{name}_blocks"][1, 0::2]
    magnitudes = np.concatenate([blocks & 7, blocks >> 4 & 7], axis=-1)  # per block, any order
    scales = arrays[f"{name}_scales"][1, 0::2]
    assert told is not None
    assert told.pop("zero_code_frac") == pytest.approx((magnitudes == 0).mean(), abs=1e-12)
    assert told == {
        "top_code_frac": (magnitudes.max(-1) == 7).mean(),
        "zero_block_frac": (magnitudes.max(-1) == 0).mean(),
        "scale_min": scales.min(),
        "scale_max": 255,
        "scales_used": len(np.unique(scales)),
        "nan_scales": 1,
    }


def test_other_weights_have_no_stored_statistics(tmp_path: Path) -> None:
    with opened(tmp_path, {f"{NAME}.weight": files.normal(8, 8)}) as checkpoint:
        assert stored_statistics(checkpoint, checkpoint_inventory(checkpoint).measured[0]) is None


def compressed(form: str, folder: Path, rows: int, cols: int) -> tuple[dict[str, np.ndarray], Any]:
    """One weight as compressed-tensors stores it, and as it decompresses it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    four_bit = {"num_bits": 4, "type": "float", "symmetric": True}
    args = {
        "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "mxfp4-pack-quantized": {**four_bit, "strategy": "group", "group_size": 32},
        "nvfp4-pack-quantized": {**four_bit, "strategy": "tensor_group", "group_size": 16},
    }[form]
    torch.manual_seed(0)
    weight = torch.randn(rows, cols, dtype=torch.bfloat16) * 0.02
    blocks = weight.float().reshape(rows, -1, args.get("group_size", cols)).abs().amax(-1)
    state = {"weight": weight}
    if form == "mxfp4-pack-quantized":
        state["weight_scale"] = torch.exp2(torch.ceil(torch.log2(blocks / 6))).bfloat16()
    elif form == "nvfp4-pack-quantized":
        state["weight_global_scale"] = (448 * 6 / blocks.max()).reshape(1)
        scale = (blocks / 6 * state["weight_global_scale"]).to(torch.float8_e4m3fn)
        state["weight_scale"] = scale.float()
    else:
        state["weight_scale"] = (blocks / 448).bfloat16()
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    kind = BaseCompressor.get_value_from_registry(form)
    stored = kind.compress(state, scheme)
    stored_copy = {key: value.clone() for key, value in stored.items()}
    expected = kind.decompress(stored, scheme)["weight"].float().numpy()
    save = pytest.importorskip("safetensors.torch").save_file
    named = {f"{NAME}.{key}": value.contiguous() for key, value in stored_copy.items()}
    save(named, folder / "stored.safetensors")
    return read_back(folder / "stored.safetensors"), expected


def read_back(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file as raw NumPy arrays."""
    from mxdiag.checkpoint.safetensors import read_header

    kinds = {label: dtype for dtype, label in files.DTYPES.items()}
    raw = path.read_bytes()
    return {
        t.name: np.frombuffer(raw, np.uint8, t.nbytes, t.begin)
        .view(kinds[t.dtype])
        .reshape(t.shape)
        for t in read_header(path)
    }


def test_against_compressed_tensors_mxfp4(tmp_path: Path) -> None:
    state, expected = compressed("mxfp4-pack-quantized", tmp_path, 48, 96)
    with opened(tmp_path / "model", state) as checkpoint:
        assert checkpoint.entries[f"{NAME}.weight"].dtype == "mxfp4"
        np.testing.assert_array_equal(only(checkpoint).astype(np.float32), expected)


def test_against_compressed_tensors_nvfp4(tmp_path: Path) -> None:
    state, expected = compressed("nvfp4-pack-quantized", tmp_path, 48, 96)
    with opened(tmp_path / "model", state) as checkpoint:
        assert checkpoint.entries[f"{NAME}.weight"].dtype == "nvfp4"
        got = only(checkpoint)
    assert got.dtype == np.float32
    # Two roundings of scale / tensor scale in float32 may fall in another order than theirs.
    np.testing.assert_allclose(got, expected, rtol=2**-22)
    assert not np.array_equal(got, np.zeros_like(got))


def test_modelopt_nvfp4_multiplies_its_second_scale(tmp_path: Path) -> None:
    codes = codes_of(8, 32)
    scale = np.random.default_rng(5).uniform(1, 400, (8, 2)).astype(E4M3)
    second = np.array(0.0123, np.float32)
    arrays = {
        f"{NAME}.weight": packed(codes),
        f"{NAME}.weight_scale": scale,
        f"{NAME}.weight_scale_2": second,
    }
    with opened(tmp_path, arrays) as checkpoint:
        got = only(checkpoint)
    spread = np.repeat(scale.astype(np.float32) * second, 16, 1)
    np.testing.assert_array_equal(got, GRID[codes] * spread)


# ---- refused by name ---------------------------------------------------------------------------

REFUSED = {
    "GPTQ": (GPTQ, {"quant_method": "gptq", "bits": 4}, "gptq weights", 128 * 64),
    "AWQ": (GPTQ, {"quant_method": "awq", "bits": 4}, "awq weights", 128 * 64),
    "GPTQ 8 bit": (GPTQ, {"quant_method": "gptq", "bits": 8}, "gptq weights", 64 * 64),
    "no config": (GPTQ, None, "GPTQ or AWQ weights", 128 * 64),
    "bitsandbytes 4": (BNB4, None, "bitsandbytes 4-bit weights", 1024),
    "bitsandbytes 8": (BNB8, None, "bitsandbytes int8 weights", 1024),
    "compressed int4": (
        INT4,
        {"format": "pack-quantized", "config_groups": {"g": {"weights": {"num_bits": 4}}}},
        "compressed-tensors pack-quantized weights",
        32 * 128,
    ),
    "int8": ({f"{NAME}.weight": np.zeros((8, 8), np.int8)}, None, "int8 codes without", 64),
    "orphan blocks": (
        {"x.down_proj_blocks": np.zeros((2, 8, 1, 16), np.uint8)},
        None,
        "u8 numbers in no known",
        256,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_encodings_that_are_refused_by_name(tmp_path: Path, case: str) -> None:
    arrays, quantization, reason, parameters = REFUSED[case]
    config = None if quantization is None else {"quantization_config": quantization}
    plain = {"model.layers.1.mlp.up_proj.weight": files.normal(32, 32)}
    with opened(tmp_path, {**arrays, **plain}, config) as checkpoint:
        found = checkpoint_inventory(checkpoint)
    assert [linear.tensor for linear in found.measured] == list(plain)
    assert len(found.unsupported) == 1
    assert reason in found.unsupported[0].rule
    assert found.unsupported[0].parameters == parameters
    assert found.parameter_fraction == pytest.approx(1024 / (1024 + parameters))
