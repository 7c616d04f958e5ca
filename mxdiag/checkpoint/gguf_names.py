"""GGUF tensor names and metadata in Hugging Face's words, for the families where that is certain.

Source: the tensor tables of the gguf package and of llama.cpp's converter. Other architectures keep
their GGUF names; roles are then told from those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: GGUF architecture -> model_type.
_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
_TOP = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}


def config_from(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What `mxdiag.layers.linears` needs of a config.json, from GGUF metadata."""
    arch = metadata.get("general.architecture")
    arch = arch if isinstance(arch, str) else "unknown"
    experts = metadata.get(f"{arch}.expert_count")
    family = _FAMILIES.get(arch)
    if arch == "llama" and isinstance(experts, int) and experts > 0:
        family = "mixtral"
    config: dict[str, Any] = {
        "model_type": family or arch,
        "gguf_architecture": arch,
        "huggingface_names": family is not None,
        # The converter of this architecture stores q and k with their rotary halves interleaved.
        "rotary_interleaved": arch == "llama",
    }
    keys = {
        "hidden_size": "embedding_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "num_hidden_layers": "block_count",
    }
    for ours, theirs in keys.items():
        value = metadata.get(f"{arch}.{theirs}")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            config[ours] = value
    return config


def huggingface_name(name: str, config: Mapping[str, Any]) -> str:
    """The Hugging Face name of a GGUF tensor, or `name` where the family is not known."""
    if not config["huggingface_names"]:
        return name
    base, dot, end = name.rpartition(".")
    if base in _TOP:
        return f"{_TOP[base]}{dot}{end}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
    if match is None:
        return name
    table = _BLOCK
    if config["model_type"] == "mixtral":
        table = {**_BLOCK, **_MIXTRAL}
    elif config["model_type"] == "phi3":
        table = {**_BLOCK, "ffn_up": "mlp.gate_up_proj"}
    short = table.get(match[2])
    return name if short is None else f"model.layers.{match[1]}.{short}{dot}{end}"


def expert_names(name: str, count: int, config: Mapping[str, Any]) -> list[str]:
    """Names of the experts in a stack, [] if `name` is no stack of experts."""
    if config["huggingface_names"]:
        head, dot, tail = name.partition(".experts.")
        return [f"{head}.experts.{i}.{tail}" for i in range(count)] if dot else []
    base, dot, end = name.rpartition(".")
    return (
        [f"{base}[{i}].{end}" for i in range(count)] if base.endswith(("_exps", "_chexps")) else []
    )
