"""Tiny random models of many architectures, with a batch and a loss for each.

`ZOO` is a table: a name, the transformers `model_type`, the head, and what the config needs to be
small. Used by the zoo test and by whatever wants a model of each family.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM
from transformers.models import auto

VOCABULARY = 64
LENGTH = 12

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {**_TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA = {
    **_TEXT,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
_BERT = {k: v for k, v in _TEXT.items() if k != "num_key_value_heads"}
_GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


@dataclass(frozen=True)
class Entry:
    """One architecture: `head` says which auto class builds it and what its batch looks like."""

    name: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    head: str = "causal"


def _text(model_type: str, **changes: Any) -> Entry:
    return Entry(model_type, model_type, {**_TEXT, **changes})


def _experts(model_type: str, **changes: Any) -> Entry:
    return Entry(model_type, model_type, {**_MOE, **changes})


ZOO: tuple[Entry, ...] = (
    # dense decoders
    _text("llama"),
    _text("mistral"),
    _text("qwen2"),
    _text("qwen3", head_dim=8),
    _text("gemma", head_dim=8),
    _text("gemma2", head_dim=8),
    _text("gemma3_text", head_dim=8),
    _text("phi"),
    _text("phi3"),
    _text("olmo2"),
    _text("cohere"),
    _text("granite"),
    _text("glm", head_dim=8),
    _text("glm4", head_dim=8),
    _text("stablelm"),
    _text("starcoder2"),
    _text("smollm3"),
    _text("nemotron"),
    _text("falcon", new_decoder_architecture=False, multi_query=True),
    Entry("falcon-new", "falcon", {**_TEXT, "new_decoder_architecture": True, "num_kv_heads": 2}),
    _text("gpt_neox"),
    Entry("gpt2", "gpt2", _GPT),
    Entry("gptj", "gptj", {**_GPT, "rotary_dim": 4}),
    Entry(
        "gpt_neo",
        "gpt_neo",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
        },
    ),
    Entry("gpt_bigcode", "gpt_bigcode", _GPT),
    Entry(
        "bloom", "bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    ),
    Entry(
        "mpt",
        "mpt",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    ),
    Entry("opt", "opt", {**_BERT, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    Entry(
        "xlnet",
        "xlnet",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    ),
    # mixtures of experts
    _experts("qwen3_moe", head_dim=8),
    _experts("qwen2_moe", shared_expert_intermediate_size=16),
    _experts("mixtral", num_local_experts=4),
    _experts("olmoe"),
    _experts("phimoe", num_local_experts=4),
    _experts("granitemoe", num_local_experts=4),
    _experts("jetmoe", num_local_experts=4, kv_channels=8),
    _experts("gpt_oss", num_local_experts=4, head_dim=8),
    _experts(
        "llama4_text", num_local_experts=4, head_dim=8, intermediate_size_mlp=48, moe_layers=[1]
    ),
    _experts("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_layer_start_index=1),
    Entry("deepseek_v2", "deepseek_v2", {**_MLA, "topk_method": "greedy"}),
    Entry("deepseek_v3", "deepseek_v3", _MLA),
    Entry("glm4_moe", "glm4_moe", {**_MLA, "head_dim": 8}),
    Entry(
        "dbrx",
        "dbrx",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 48,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": 32,
            },
        },
    ),
    # state-space and hybrid
    Entry("mamba", "mamba", {**_TEXT, "state_size": 4, "time_step_rank": 4}),
    Entry(
        "mamba2",
        "mamba2",
        {
            **_TEXT,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "expand": 2,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    # encoders
    Entry("bert", "bert", _BERT, "masked"),
    Entry("roberta", "roberta", {**_BERT, "max_position_embeddings": 66}, "masked"),
    Entry(
        "distilbert",
        "distilbert",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
        "masked",
    ),
    Entry("electra", "electra", {**_BERT, "embedding_size": 16}, "masked"),
    Entry("modernbert", "modernbert", {**_BERT, "cls_token_id": 1, "sep_token_id": 2}, "masked"),
    Entry("albert", "albert", {**_BERT, "embedding_size": 16}, "masked"),
    # encoder-decoders
    Entry(
        "t5",
        "t5",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        "seq2seq",
    ),
    Entry(
        "bart",
        "bart",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
        },
        "seq2seq",
    ),
    # vision, vision and language
    Entry("vit", "vit", _VISION, "image"),
    Entry("siglip_vision", "siglip_vision_model", _VISION, "features"),
    Entry(
        "swin",
        "swin",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 2,
        },
        "image",
    ),
    Entry(
        "clip",
        "clip",
        {
            "projection_dim": 16,
            "text_config": {**_BERT, "eos_token_id": 2},
            "vision_config": _VISION,
        },
        "pair",
    ),
    Entry("siglip", "siglip", {"text_config": _BERT, "vision_config": _VISION}, "pair"),
    Entry(
        "llava",
        "llava",
        {
            "image_token_index": 3,
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {"model_type": "clip_vision_model", **_VISION, "projection_dim": 16},
            "vision_feature_layer": -1,
        },
        "image_text",
    ),
)

_HEADS = {
    "causal": auto.AutoModelForCausalLM,
    "masked": auto.AutoModelForMaskedLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "image": auto.AutoModelForImageClassification,
    "features": auto.AutoModel,
    "pair": auto.AutoModel,
    "image_text": auto.AutoModelForImageTextToText,
}


def entry(name: str) -> Entry:
    """Look up one architecture."""
    return next(e for e in ZOO if e.name == name)


def build(item: Entry, seed: int = 0, **settings: Any) -> nn.Module:
    """Make the model, with random weights, in eval mode."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(item.model_type, **item.config)
    model = _HEADS[item.head].from_config(config, **settings)
    with torch.no_grad():  # some families start at zero, where no gradient would flow
        for parameter in model.parameters():
            if parameter.dim() >= 2 and not parameter.any():
                parameter.normal_(std=0.05)
    return model.eval()


def batch(item: Entry, seed: int = 1) -> dict[str, Tensor]:
    """Make two sequences (or images) without padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (2, LENGTH), generator=generator)
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    if item.head in ("causal", "masked"):
        return {"input_ids": ids, "labels": ids}
    if item.head == "seq2seq":
        return {"input_ids": ids, "labels": ids.flip(1)}
    if item.head == "image":
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    if item.head == "features":
        return {"pixel_values": pixels}
    ids[:, -1] = 2
    if item.head == "pair":
        return {"input_ids": ids, "pixel_values": pixels, "return_loss": True}  # type: ignore[dict-item]
    ids[:, 1:5] = 3  # one placeholder a patch
    return {"input_ids": ids, "labels": ids, "pixel_values": pixels}


def loss_of(model: nn.Module, item: Entry, inputs: dict[str, Tensor]) -> Tensor:
    """Run the model; its own loss, or the energy of its output where it has none."""
    outputs = model(**inputs)
    if item.head == "features":
        return outputs.last_hidden_state.square().mean()
    return outputs.loss
