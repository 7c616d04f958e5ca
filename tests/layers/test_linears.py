"""Which stored tensors are product weights: by name and config, against many live models."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ckpt_files as files
from mxdiag.checkpoint.inventory import CheckpointInventory, checkpoint_inventory
from mxdiag.checkpoint.open import open_checkpoint
from mxdiag.checkpoint.stream import read
from mxdiag.layers.linears import classify, exclusion, expert_of, linears_in, role_of

if TYPE_CHECKING:
    from torch import nn

P = "model.layers.0."

# ---- names -------------------------------------------------------------------------------------

ROLES = {
    P + "self_attn.q_proj": ("q_proj", None),
    P + "mlp.experts.5.gate_proj": ("expert.gate_proj", 5),
    P + "block_sparse_moe.experts.11.w1": ("expert.w1", 11),
    P + "mlp.experts.gate_up_proj[7].up_proj": ("expert.up_proj", 7),
    P + "mlp.experts.down_proj[0]": ("expert.down_proj", 0),
    P + "self_attn.qkv_proj.k_proj": ("k_proj", None),
    P + "mlp.shared_expert.up_proj": ("shared_expert.up_proj", None),
    P + "mlp.shared_experts.up_proj": ("shared_expert.up_proj", None),
    P + "mlp.gate": ("router", None),
    P + "mlp.router": ("router", None),
    P + "block_sparse_moe.gate": ("router", None),
    P + "mlp.shared_expert_gate": ("router", None),
    P + "mlp.gate_proj": ("gate_proj", None),
    "lm_head": ("lm_head", None),
    "output": ("lm_head", None),
    "cls.predictions.decoder": ("lm_head", None),
    "language_model.lm_head": ("lm_head", None),
    "model.embed_tokens": ("embedding", None),
    "transformer.wpe": ("embedding", None),
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": ("embedding", None),
    "bert.encoder.layer.0.attention.output.dense": ("attention.output.dense", None),
    "bert.encoder.layer.0.output.dense": ("output.dense", None),
    "decoder.block.1.layer.0.SelfAttention.q": ("q", None),
    "vision_model.encoder.layers.0.self_attn.out_proj": ("out_proj", None),
    "mm_projector.2": ("mm_projector.2", None),
    "base_model.model.model.layers.0.self_attn.q_proj.base_layer": ("q_proj", None),
    "_orig_mod.model.layers.0.mlp.up_proj": ("up_proj", None),
    "switch_mlp.experts.expert_3.wi": ("expert.wi", 3),
}


@pytest.mark.parametrize("layer", ROLES)
def test_roles_and_experts(layer: str) -> None:
    assert (role_of(layer), expert_of(layer)) == ROLES[layer]


def test_default_exclusions_and_globs() -> None:
    assert exclusion("lm_head", "lm_head") == "lm_head"
    assert exclusion("model.embed_tokens", "embedding") == "embedding"
    assert exclusion(P + "mlp.gate", "router") == "router"
    assert exclusion(P + "mlp.up_proj", "up_proj") is None
    assert exclusion("lm_head", "lm_head", include=["lm_*"]) is None
    assert exclusion(P + "mlp.up_proj", "up_proj", exclude=["*.up_proj"]) == "--exclude *.up_proj"
    assert exclusion("lm_head", "lm_head", ["*"], ["lm_head"]) == "--exclude lm_head"
    bracketed = P + "mlp.experts.down_proj[5]"
    assert exclusion(bracketed, "expert.down_proj", exclude=[bracketed]) is not None


# ---- tensors -----------------------------------------------------------------------------------


def views(name: str, shape: tuple[int, ...], **config: Any) -> dict[str, tuple[Any, ...]]:
    """Layer (without the tensor's name) -> offset, shape and stride."""
    stem = name.removesuffix(".weight")
    return {
        linear.layer.removeprefix(stem): (linear.offset, linear.shape, linear.stride)
        for linear in linears_in(name, shape, config)
    }


def test_fused_projections_split_where_the_config_tells() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    qkv = views(P + "self_attn.qkv_proj.weight", (64, 32), model_type="phi3", **heads)
    assert qkv == {
        ".q_proj": (0, (32, 32), (32, 1)),
        ".k_proj": (32 * 32, (16, 32), (32, 1)),
        ".v_proj": (48 * 32, (16, 32), (32, 1)),
    }
    assert list(views(P + "self_attn.qkv_proj.weight", (65, 32), model_type="phi3", **heads)) == [
        ""
    ]
    halves = views(P + "mlp.gate_up_proj.weight", (96, 32), model_type="phi3")
    assert halves == {
        ".gate_proj": (0, (48, 32), (32, 1)),
        ".up_proj": (48 * 32, (48, 32), (32, 1)),
    }
    thirds = views("encoder.layers.0.self_attn.in_proj_weight", (96, 32))
    assert [view[0] for view in thirds.values()] == [0, 32 * 32, 64 * 32]


@pytest.mark.parametrize("family", ["gpt_neox", "bloom"])
def test_rows_interleaved_per_head_stay_one_layer(family: str) -> None:
    name = "h.0.self_attention.query_key_value.weight"
    config = {"model_type": family, "num_attention_heads": 4, "hidden_size": 32}
    (linear,) = linears_in(name, (96, 32), config)
    assert (linear.role, linear.shape) == ("query_key_value", (96, 32))


def test_falcon_splits_only_where_one_head_is_shared() -> None:
    name = "transformer.h.0.self_attention.query_key_value.weight"
    base = {"model_type": "falcon", "num_attention_heads": 4, "hidden_size": 32}
    shared = views(name, (48, 32), **base, multi_query=True)
    assert [view[1][0] for view in shared.values()] == [32, 8, 8]
    new = {**base, "new_decoder_architecture": True, "num_kv_heads": 2}
    assert list(views(name, (64, 32), **new)) == [""]


def test_conv1d_orientation_needs_the_architecture() -> None:
    name, shape = "h.0.attn.c_proj.weight", (32, 32)
    (gpt2,) = linears_in(name, shape, {"model_type": "gpt2"})
    assert gpt2.stride == (1, 32)
    (bigcode,) = linears_in(name, shape, {"model_type": "gpt_bigcode"})
    assert bigcode.stride == (32, 1)
    unknown = classify(name, shape, None)
    assert not unknown.linears
    assert "config.json" in (unknown.unsupported or "")


def test_square_gpt_oss_experts_are_told_by_architecture() -> None:
    name, shape = P + "mlp.experts.down_proj", (2, 64, 64)
    transposed = linears_in(name, shape, {"model_type": "gpt_oss"})[1]
    assert (transposed.offset, transposed.stride) == (4096, (1, 64))
    plain = linears_in(name, shape, {"model_type": "qwen3_moe"})[1]
    assert (plain.offset, plain.stride) == (4096, (64, 1))
    for config in (None, {"model_type": "somethingnew"}, {"model_type": 3}, {}):
        verdict = classify(name, shape, config)
        assert not verdict.linears
        assert "unknown layout" in (verdict.unsupported or "")


def test_interleaved_and_stacked_gate_and_up() -> None:
    name = P + "mlp.experts.gate_up_proj"
    oss = views(name, (2, 32, 48), model_type="gpt_oss")
    assert oss["[1].gate_proj"] == (32 * 48, (24, 32), (2, 48))
    assert oss["[1].up_proj"] == (32 * 48 + 1, (24, 32), (2, 48))
    llama4 = views(name, (2, 32, 48), model_type="llama4")
    assert llama4["[1].up_proj"] == (32 * 48 + 24, (24, 32), (1, 48))
    qwen = views(name, (2, 48, 32), model_type="qwen3_moe")
    assert qwen["[1].up_proj"] == (48 * 32 + 24 * 32, (24, 32), (32, 1))


def test_qwen3_vl_stacks_are_stored_in_either_order() -> None:
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    config = {
        "model_type": "qwen3_vl_moe",
        "text_config": {"model_type": "qwen3_vl_moe_text", "hidden_size": 32},
    }
    for shape, stride in (((2, 32, 48), (1, 48)), ((2, 48, 32), (32, 1))):
        linear = linears_in(name, shape, config)[0]
        assert (linear.shape, linear.stride) == ((24, 32), stride)


NOT_LINEAR = {
    "conv1.weight": ((8, 3, 3, 3), "convolution"),
    "vision.patch_embedding.weight": ((8, 3, 4, 4), "convolution"),
    "backbone.layers.0.mixer.conv1d.weight": ((8, 1, 4), "convolution"),
    "backbone.layers.0.mixer.A_log": ((8, 4), "state-space parameter"),
    "embeddings.position_embeddings": ((1, 5, 8), "position table"),
    "embeddings.cls_token": ((1, 1, 8), "learned token or table"),
    "attn.relative_position_bias_table": ((9, 2), "bias"),
    P + "mlp.experts.gate_up_proj_bias": ((4, 8), "bias"),
    P + "input_layernorm.weight": ((8,), "fewer than two axes"),
    P + "mlp.up_proj.weight": ((0, 8), "empty"),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_no_product_weight_says_what_it_is(name: str) -> None:
    shape, what = NOT_LINEAR[name]
    verdict = classify(name, shape, {"model_type": "llama"})
    assert not verdict.linears
    assert verdict.rule == f"not a linear weight: {what}"


def test_hostile_sizes_make_no_rows() -> None:
    name = P + "mlp.experts.down_proj"
    assert classify(name, (10**9, 1, 1), {"model_type": "mixtral"}).unsupported is not None
    assert classify(P + "mlp.up_proj.weight", (2**40, 2), None).unsupported is not None


# ---- inventory ---------------------------------------------------------------------------------


def check_partition(found: CheckpointInventory, matrix_parameters: int) -> None:
    """Every parameter of two or more axes is in exactly one group."""
    parts = found.measured_parameters + found.excluded_parameters + found.unsupported_parameters
    assert parts == found.matrix_parameters == matrix_parameters
    names = [linear.layer for linear in found.measured]
    names += [item.name for item in found.excluded + found.unsupported]
    assert len(names) == len(set(names))


def test_inventory_partitions_the_parameters(tmp_path: Path) -> None:
    arrays = {
        "model.embed_tokens.weight": files.normal(10, 8),
        "lm_head.weight": files.normal(10, 8, seed=1),
        P + "mlp.gate.weight": files.normal(4, 8),
        P + "mlp.experts.0.up_proj.weight": files.normal(16, 8),
        P + "self_attn.q_proj.weight": files.normal(8, 8),
        P + "self_attn.q_proj.bias": files.normal(8),
        P + "mystery": files.normal(3, 5),
        P + "stack": files.normal(2, 3, 5),
        "conv.weight": files.normal(4, 2, 3, 3),
        "position_ids": np.arange(6).reshape(1, 6),
        "h.0.attn.bias": np.tril(np.ones((1, 1, 4, 4), np.float32)),
    }
    matrices = sum(a.size for a in arrays.values() if a.ndim > 1) - 6 - 16  # two buffers
    with open_checkpoint(files.write(tmp_path / "m.safetensors", arrays)) as checkpoint:
        found = checkpoint_inventory(checkpoint)
        check_partition(found, matrices)
        assert found.parameters == matrices + 8
        assert {linear.role for linear in found.measured} == {"expert.up_proj", "q_proj"}
        assert {item.name for item in found.unsupported} == {P + "mystery", P + "stack"}
        assert found.parameter_fraction == pytest.approx(1 - 45 / matrices)
        wider = checkpoint_inventory(checkpoint, include=["lm_head", "*.gate"], exclude=["*q_proj"])
        check_partition(wider, matrices)
        assert {linear.role for linear in wider.measured} == {"expert.up_proj", "lm_head", "router"}


def test_a_stored_copy_of_a_tied_head_counts_once(tmp_path: Path) -> None:
    arrays = {
        "model.embed_tokens.weight": files.normal(10, 8),
        "lm_head.weight": files.normal(10, 8),
        P + "mlp.up_proj.weight": files.normal(16, 8),
    }
    for tied, count in ((True, 80 + 128), (False, 160 + 128)):
        folder = tmp_path / str(tied)
        files.write_folder(folder, {"model.safetensors": arrays}, {"tie_word_embeddings": tied})
        with open_checkpoint(folder) as checkpoint:
            check_partition(checkpoint_inventory(checkpoint), count)


@pytest.mark.parametrize(
    ("config", "role"),
    [
        ({"tie_word_embeddings": True, "architectures": ["GemmaForCausalLM"]}, "lm_head"),
        ({"text_config": {"tie_word_embeddings": True, "vocab_size": 10}}, "lm_head"),
        ({"tie_word_embeddings": True, "architectures": ["GemmaModel"]}, "embedding"),
        ({"tie_word_embeddings": True, "vocab_size": 11}, "embedding"),
        ({"tie_word_embeddings": False}, "embedding"),
        ({}, "embedding"),
    ],
)
def test_an_embedding_that_is_the_head_too(tmp_path: Path, config: dict, role: str) -> None:
    arrays = {"model.embed_tokens.weight": files.normal(10, 8), P + "o.weight": files.normal(8, 8)}
    files.write_folder(tmp_path, {"model.safetensors": arrays}, config)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint_inventory(checkpoint).excluded[0].rule == role
        wider = checkpoint_inventory(checkpoint, include=["lm_head"])
        assert len(wider.measured) == (2 if role == "lm_head" else 1)
        check_partition(wider, 80 + 64)


def test_128_experts_in_4_layers(tmp_path: Path) -> None:
    arrays = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": np.zeros((1, 2), np.float16)
        for layer in range(4)
        for expert in range(128)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    with open_checkpoint(files.write(tmp_path / "m.safetensors", arrays)) as checkpoint:
        measured = checkpoint_inventory(checkpoint).measured
    assert len(measured) == 1536
    assert Counter(linear.role for linear in measured)["expert.up_proj"] == 512
    assert {linear.expert for linear in measured} == set(range(128))


# ---- live models -------------------------------------------------------------------------------


def live_rows(model: nn.Module) -> tuple[Counter[bytes], Counter[bytes]]:
    """Output rows of every product weight of a live model, and rows of its embeddings."""
    from torch import nn

    products: Counter[bytes] = Counter()
    tables: Counter[bytes] = Counter()
    table_parameters = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            rows = parameter.detach().numpy()
            if id(parameter) in table_parameters:
                tables.update(row.tobytes() for row in rows)
            else:
                for matrix in product_matrices(module, name, rows):
                    products.update(np.ascontiguousarray(row).tobytes() for row in matrix)
    return products, tables


def product_matrices(module: nn.Module, name: str, value: np.ndarray) -> Iterator[np.ndarray]:
    """A parameter as matrices [out, in], by what its module does with it; nothing if no product."""
    from torch import nn

    kind = type(module).__name__
    if kind == "Conv1D":
        yield value.T
    elif name == "weight" and (isinstance(module, nn.Linear) or re.search("Router|Gate", kind)):
        yield value
    elif kind == "DbrxExpertGLU":
        experts = value.reshape(module.moe_num_experts, -1, value.shape[-1])
        yield from experts.swapaxes(1, 2) if name == "w2" else experts
    elif kind == "XLNetRelativeAttention" and name in "qkvro":
        flat = value.reshape(len(value), -1)
        yield flat if name == "o" else flat.T
    elif value.ndim == 3 and "Experts" in kind:
        transposed = kind in ("GptOssExperts", "Llama4TextExperts")
        yield from value.swapaxes(1, 2) if transposed else value
    elif isinstance(module, nn.MultiheadAttention) and name == "in_proj_weight":
        yield value


def zoo_names() -> list[str]:
    zoo = pytest.importorskip("zoo", exc_type=ImportError)
    return [item.name for item in zoo.ZOO]


@pytest.mark.parametrize("name", zoo_names())
def test_inventory_equals_the_live_model(tmp_path: Path, name: str) -> None:
    """Saved and read back, the layers hold exactly the rows that the live model multiplies by."""
    import zoo

    model = zoo.build(zoo.entry(name))
    products, tables = live_rows(model)
    embeddings = {
        n for n, module in model.named_modules() if type(module).__name__.endswith("Embedding")
    }
    model.save_pretrained(tmp_path)
    got: dict[str, Counter[bytes]] = {"products": Counter(), "tables": Counter()}
    with open_checkpoint(tmp_path) as checkpoint:
        matrices = sum(
            e.numel
            for e in checkpoint.entries.values()
            if len(e.shape) > 1 and e.name != "final_logits_bias"  # a buffer
        )
        check_partition(checkpoint_inventory(checkpoint), matrices)
        found = checkpoint_inventory(checkpoint, include=["*"])
        assert not found.unsupported
        for linear in found.measured:
            tied = linear.role == "lm_head" and linear.layer in embeddings
            group = "tables" if tied or linear.role == "embedding" else "products"
            rows = np.ascontiguousarray(read(checkpoint, linear))
            got[group].update(row.tobytes() for row in rows)
    assert got["products"] == products
    assert got["tables"] == tables
