"""What hostile checkpoints are made of: strategies for names, headers, data and configs."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from mxdiag.checkpoint.safetensors import DTYPE_BITS

MODULES = [
    "model.layers.0.mlp.down_proj",
    "model.layers.0.mlp.experts.3.up_proj",
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.0.mlp.experts.down_proj",
    "transformer.blocks.0.ffn.experts.mlp.w1",
    "transformer.blocks.0.ffn.experts.mlp.w2",
    "h.0.attn.c_attn",
    "h.0.mlp.c_proj",
    "model.layers.0.self_attn.qkv_proj",
    "model.layers.0.block_sparse_moe.input_linear",
    "rel_attn.q",
    "lm_head",
    "model.embed_tokens",
    "",
    "\n=,\"'</script>[/bold]",
]
ENDINGS = [
    ".weight",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_packed",
    ".weight_global_scale",
    ".weight_scale_2",
    "_blocks",
    "_scales",
    "_scale",
    "_scale_inv",
    ".qweight",
    ".qzeros",
    ".scales",
    ".weight.absmax",
    ".SCB",
    ".bias",
    "in_proj_weight",
]  # fmt: skip
TYPES = [
    "llama", "gpt2", "gpt_oss", "llama4", "qwen3_moe", "dbrx", "phi3", "falcon", "granitemoe",
    "jetmoe", "qwen3_vl_moe", "xlnet", "gpt_bigcode", "?",
]  # fmt: skip
NAMES = st.builds(
    lambda module, ending: module + ending,
    st.sampled_from(MODULES),
    st.one_of(st.sampled_from(["", ".weight"]), st.sampled_from(ENDINGS)),
)
SIZES = st.sampled_from([1, 2, 3, 4, 8, 16, 31, 32, 33, 48, 64, 128, 0])
WILD = st.one_of(
    st.sampled_from([-1, 0, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, None, True, 1.5, "8", []]),
    st.integers(-5, 300),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=5,
)
CONFIG_KEYS = [
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "n_head",
    "n_embd",
    "multi_query",
    "new_decoder_architecture",
    "tie_word_embeddings",
    "architectures",
    "text_config",
    "vision_config",
    "attn_config",
    "ffn_config",
    "quantization_config",
]  # fmt: skip
NUMBERS = st.one_of(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), WILD)
QUANTIZATION = st.fixed_dictionaries(
    {},
    optional={
        "weight_block_size": st.one_of(st.lists(NUMBERS, min_size=2, max_size=2), JSON),
        "bits": NUMBERS,
        "quant_method": JSON,
        "format": JSON,
        "config_groups": JSON,
    },
)
CONFIGS = st.fixed_dictionaries(
    {"model_type": st.one_of(st.sampled_from(TYPES), JSON)},
    optional={
        **dict.fromkeys(CONFIG_KEYS, st.one_of(NUMBERS, JSON)),
        "ffn_config": st.one_of(st.fixed_dictionaries({"moe_num_experts": NUMBERS}), JSON),
        "quantization_config": st.one_of(QUANTIZATION, JSON),
    },
)


@st.composite
def consistent(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A legal file: any dtype and shape under any name, the data to go with it."""
    header: dict[str, Any] = {}
    total = 0
    for name in draw(st.lists(NAMES, min_size=1, max_size=5, unique=True)):
        dtype = draw(st.one_of(st.sampled_from(["BF16", "F32"]), st.sampled_from(list(DTYPE_BITS))))
        shape = draw(
            st.one_of(st.lists(SIZES, min_size=2, max_size=3), st.lists(SIZES, max_size=4))
        )
        bits = DTYPE_BITS[dtype]
        for n in shape:
            bits *= n
        if bits % 8 or bits > 8 * 300_000:
            continue
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [total, total + bits // 8]}
        total += bits // 8
    return header, noise(draw(st.integers(0, 7)), total)


QUANTIZED = [
    # (ending, dtype, shape as a function of rows and columns)
    [(".weight", "F8_E4M3", "rc"), (".weight_scale_inv", "F32", "bb")],
    [(".weight", "F8_E4M3", "rc"), (".weight_scale", "BF16", "r1")],
    [(".weight", "F8_E5M2", "rc"), (".weight_scale", "F8_E8M0", "rg")],
    [("_blocks", "U8", "erg6"), ("_scales", "U8", "erg")],
    [(".weight_packed", "U8", "rh"), (".weight_scale", "U8", "rg")],
    [
        (".weight_packed", "U8", "rh"),
        (".weight_scale", "F8_E4M3", "rs"),
        (".weight_global_scale", "F32", "1"),
    ],
    [(".weight", "U8", "rh"), (".weight_scale", "F8_E4M3", "rs"), (".weight_scale_2", "F32", "")],
    [("", "BF16", "erc")],
    [(".weight", "F32", "rc")],
]  # fmt: skip


@st.composite
def nearly_right(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A weight as real checkpoints quantize it, now and then with one size or dtype off."""
    module = draw(st.sampled_from(MODULES))
    rows, groups = draw(st.sampled_from([1, 4, 32, 96, 130])), draw(st.sampled_from([1, 2, 3]))
    cols = 32 * groups
    sizes = {"r": rows, "c": cols, "1": 1, "e": 2, "g": groups, "6": 16, "h": cols // 2}
    sizes |= {"s": cols // 16, "b": -(-rows // 128)}
    header: dict[str, Any] = {}
    total = 0
    for ending, dtype, shape_of in draw(st.sampled_from(QUANTIZED)):
        shape = [sizes[c] for c in shape_of]
        if draw(st.integers(0, 5)) == 0 and shape:
            shape[draw(st.integers(0, len(shape) - 1))] = draw(SIZES)
        if draw(st.integers(0, 9)) == 0:
            dtype = draw(
                st.sampled_from(["F32", "U8", "I8", "F8_E4M3", "F8_E8M0", "I32", "F64", "F16"])
            )
        nbytes = int(np.prod(shape, dtype=object)) * DTYPE_BITS[dtype] // 8
        offsets = [total, total + nbytes]
        header[module + ending] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        total += nbytes
    return header, noise(draw(st.integers(0, 7)), total)


def noise(seed: int, count: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8).tobytes()
