"""Tiny models, records and settings for measuring impact."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mxdiag.commands.impact.settings import ImpactSettings
from mxdiag.commands.scan.settings import ScanSettings

RECORDS = [
    {"input_ids": [(7 * i) % 61 for i in range(21)]},
    {
        "input_ids": list(range(30)),
        "labels": [-100] * 10 + list(range(10, 30)),
        "advantage": -0.5,
    },
]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 61}


def dense(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1)
    return LlamaForCausalLM(config)


def mixture() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config)


def options(**changes: Any) -> ImpactSettings:
    scan = ScanSettings(corrections=("of", "mbs"), samples=4, seed=changes.pop("seed", 0))
    return ImpactSettings(scan=scan, **{"repeats": 2, **changes})


FEW = {"configs": ("all", "aqn:0.01"), "repeats": 2}


def entry(impact: dict[str, Any], which: str, config: str, operands: str) -> dict[str, Any]:
    (found,) = [e for e in impact[which] if (e["config"], e["operands"]) == (config, operands)]
    return found
