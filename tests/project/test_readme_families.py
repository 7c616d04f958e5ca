"""The README's tables of families and formats are those that the tests scan."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

import ckpt_files as files
import mxdiag
from gguf_files import write_gguf
from mxdiag.errors import MxdiagError
from packed_storage import BNB4, BNB8, GPTQ, INT4
from paths import README
from zoo import ZOO, Entry

LAYER = "model.layers.0.mlp.up_proj"
STACK = "model.layers.0.mlp.experts.down_proj"
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16

# ---- families ----------------------------------------------------------------------------------


def family(item: Entry) -> str:
    """Heading in the table, from what the architecture's config and head say."""
    heads = {
        "masked": "encoders",
        "seq2seq": "encoder-decoders",
        "image": "vision",
        "features": "vision",
        "pair": "vision and language",
        "image_text": "vision and language",
    }
    config = {**item.config, **item.config.get("ffn_config", {})}
    if any("expert" in key for key in config):
        return "mixtures of experts"
    if "state_size" in config:
        return "state space"
    return heads.get(item.head, "decoders")


def family_table() -> list[str]:
    groups: dict[str, list[str]] = {}
    for item in ZOO:
        names = groups.setdefault(family(item), [])
        if item.model_type not in names:
            names.append(item.model_type)
    order = ("decoders", "mixtures of experts", "state space", "encoders", "encoder-decoders")
    rows = [*order, *(name for name in groups if name not in order)]
    table = ["| family | architectures (`model_type`), each scanned in the tests |", "|---|---|"]
    return table + [f"| {name} | {', '.join(groups[name])} |" for name in rows]


# ---- formats -----------------------------------------------------------------------------------


class Format(NamedTuple):
    """A row of the table, and a checkpoint of the kind: arrays, config, or what writes it."""

    name: str
    streamed: str
    loaded: str
    arrays: Mapping[str, np.ndarray] | Callable[[Path], None]
    config: Mapping[str, Any] | None = None


def pickled(folder: Path) -> None:
    torch.save({f"{LAYER}.weight": torch.randn(8, 32)}, folder / "pytorch_model.bin")


def gguf(folder: Path) -> None:
    kind = pytest.importorskip("gguf").GGMLQuantizationType.Q8_0
    tensors = {"blk.0.ffn_up.weight": (files.normal(8, 64), kind)}
    write_gguf(folder / "model.gguf", "qwen3", tensors, embedding_length=64, block_count=1)


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    files.write(folder / "adapter_model.safetensors", {"q.lora_A.weight": files.normal(4, 32)})


def shards(folder: Path) -> None:
    each = {
        f"model-0000{i}-of-00002.safetensors": {f"l.{i}.up_proj.weight": files.normal(8, 32)}
        for i in (1, 2)
    }
    files.write_folder(folder, each)


def codes(*shape: int, dtype: Any = np.uint8) -> np.ndarray:
    return np.full(shape, 34, np.uint8).view(dtype)


READ, DEQUANTIZED = "read", "dequantized by transformers"
CT = "dequantized by compressed-tensors"
LISTED = "listed as unsupported"
PACKED = "needs its library; what stays packed is listed as unsupported"
BNB = "dequantized by bitsandbytes"
ALLOWED = "with `--allow-pickle`"
REFUSED = "refused: merge it first"
NOT_LOADED = "if transformers loads it"
FORMATS = (
    Format("safetensors", READ, READ, {f"{LAYER}.weight": files.normal(8, 32, dtype=BF16)}),
    Format("sharded safetensors, hub cache folders", READ, READ, shards),
    Format("GGUF (`pip install '.[gguf]'`)", READ, "always streamed", gguf),
    Format("pickle (`.bin`, `.pt`)", ALLOWED, ALLOWED, pickled),
    Format(
        "FP8, block scales (`weight_scale_inv`)",
        READ,
        DEQUANTIZED,
        {
            f"{LAYER}.weight": codes(256, 128, dtype=E4M3),
            f"{LAYER}.weight_scale_inv": files.normal(2, 1),
        },
    ),
    Format(
        "FP8, scale per tensor or channel (`weight_scale`)",
        READ,
        CT,
        {
            f"{LAYER}.weight": codes(8, 32, dtype=E4M3),
            f"{LAYER}.weight_scale": files.normal(8, 1),
        },
    ),
    Format(
        "MXFP8",
        READ,
        NOT_LOADED,
        {f"{LAYER}.weight": codes(8, 64, dtype=E4M3), f"{LAYER}.weight_scale": codes(8, 2)},
    ),
    Format(
        "MXFP4, gpt-oss (`_blocks`, `_scales`)",
        READ,
        DEQUANTIZED,
        {f"{STACK}_blocks": codes(2, 64, 2, 16), f"{STACK}_scales": codes(2, 64, 2)},
        {"model_type": "gpt_oss"},
    ),
    Format(
        "MXFP4, compressed-tensors (`mxfp4-pack-quantized`)",
        READ,
        CT,
        {f"{LAYER}.weight_packed": codes(8, 32), f"{LAYER}.weight_scale": codes(8, 2)},
    ),
    Format(
        "NVFP4, compressed-tensors (`nvfp4-pack-quantized`)",
        READ,
        CT,
        {
            f"{LAYER}.weight_packed": codes(8, 32),
            f"{LAYER}.weight_scale": codes(8, 4, dtype=E4M3),
            f"{LAYER}.weight_global_scale": np.ones(1, np.float32),
        },
    ),
    Format(
        "NVFP4, ModelOpt",
        READ,
        NOT_LOADED,
        {
            f"{LAYER}.weight": codes(8, 32),
            f"{LAYER}.weight_scale": codes(8, 4, dtype=E4M3),
            f"{LAYER}.weight_scale_2": np.ones((), np.float32),
        },
    ),
    Format("GPTQ", LISTED, PACKED, GPTQ, {"quantization_config": {"quant_method": "gptq"}}),
    Format("AWQ", LISTED, PACKED, GPTQ, {"quantization_config": {"quant_method": "awq"}}),
    Format("bitsandbytes 4-bit", LISTED, BNB, BNB4),
    Format("bitsandbytes 8-bit", LISTED, BNB, BNB8),
    Format("packed integers, compressed-tensors", LISTED, CT, INT4),
    Format("LoRA adapter without its base model", REFUSED, REFUSED, adapter),
)


def format_table() -> list[str]:
    table = ["| checkpoint | `--weights-only` | loaded |", "|---|---|---|"]
    return table + [f"| {f.name} | {f.streamed} | {f.loaded} |" for f in FORMATS]


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_each_format_is_what_the_table_says_of_it(kind: Format, tmp_path: Path) -> None:
    if callable(kind.arrays):
        kind.arrays(tmp_path)
    else:
        files.write_folder(tmp_path, {"model.safetensors": kind.arrays}, kind.config)
    if kind.streamed == LISTED:  # beside a layer that can be read
        files.write(tmp_path / "extra.safetensors", {"x.up_proj.weight": files.normal(8, 32)})
        (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
        table = dict.fromkeys(kind.arrays, "a.safetensors")
        table["x.up_proj.weight"] = "extra.safetensors"
        files.write_folder(tmp_path, {}, index=table)

    def scan(**options: Any) -> mxdiag.Run:
        return mxdiag.scan(tmp_path, weights_only=True, corrections="none", **options)

    if kind.streamed in (ALLOWED, REFUSED):
        with pytest.raises(MxdiagError, match=r"--allow-pickle|merge_and_unload"):
            scan()
    if kind.streamed == REFUSED:
        return
    run = scan(allow_pickle=kind.streamed == ALLOWED)
    assert run.tensors
    unsupported = run.data["coverage"]["unsupported"]
    assert bool(unsupported) == (kind.streamed == LISTED)
    if unsupported:
        word = re.split(r"[ ,]", kind.name)[0] if "integers" not in kind.name else "compressed"
        assert word.lower() in unsupported[0]["reason"].lower()


# ---- README ------------------------------------------------------------------------------------


def test_the_readme_holds_these_tables() -> None:
    wanted = "\n".join([*family_table(), "", *format_table()])
    text = README.read_text(encoding="utf-8")
    found = re.search(r"<!-- families -->\n(.*?)\n<!-- /families -->", text, re.DOTALL)
    assert found is not None, f"README.md lacks the markers; put between them:\n\n{wanted}"
    assert found[1].strip() == wanted, f"README.md should say between the markers:\n\n{wanted}"
