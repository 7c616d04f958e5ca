"""Small random language models, and records for them."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

RECORDS = [
    {"input_ids": [(7 * i * i + 3 * i + offset) % 128 for i in range(24)], "advantage": advantage}
    for offset, advantage in ((0, 1.0), (5, -0.5))
]

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, initializer_range=0.1))
    return model.eval()


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    small = {**SMALL, "num_hidden_layers": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**small, initializer_range=0.1)).eval()
