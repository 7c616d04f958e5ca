"""Scans of models as people wrap, place and run them: the same rows with the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import mxdiag
from zoo import batch, build, entry

OPTIONS = {"gemms": "fprop,dgrad,wgrad", "corrections": "none"}
RECORDS = [{"input_ids": [5, 9, 20, 33, 41, 7, 8]}, {"input_ids": [12, 3, 60, 4]}]


def scan(model: nn.Module, calibration: Any = RECORDS, **options: Any) -> mxdiag.Run:
    return mxdiag.scan(model, calibration=calibration, **{**OPTIONS, **options})


def rows(run: mxdiag.Run) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(r["layer"], r["operand"], r["gemm"]): r for r in run.tensors}


def reasons(run: mxdiag.Run) -> dict[tuple[str, str], str]:
    return {(e["layer"], e["operand"]): e["reason"] for e in run.data["coverage"]["not_observed"]}


@pytest.fixture(scope="module")
def llama() -> pd.DataFrame:
    return scan(build(entry("llama"))).frame


# ---- wrappers ----------------------------------------------------------------------------------


def test_a_compiled_model_is_scanned_like_the_plain_one(llama: pd.DataFrame) -> None:
    model = torch.compile(build(entry("llama")), backend="eager")
    run = scan(model)
    assert run.frame.equals(llama)
    assert run.data["model"]["architecture"] == "LlamaForCausalLM"


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_adapters_are_layers_beside_what_they_adapt(llama: pd.DataFrame, task: str | None) -> None:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=4, target_modules=["q_proj"], init_lora_weights=False, task_type=task, lora_dropout=0.5
    )
    torch.manual_seed(0)
    model = get_peft_model(build(entry("llama")), settings)
    run = scan(model)
    assert run.data["model"]["architecture"] == "LlamaForCausalLM"
    assert run.data["coverage"]["parameter_fraction"] == 1.0
    found = rows(run)
    name = "model.layers.0.self_attn.q_proj"
    assert {layer for layer, _, _ in found} == set(llama["layer"]) | {
        f"model.layers.{i}.self_attn.q_proj.lora_{ab}" for i in (0, 1) for ab in "AB"
    }
    assert {row["status"] for row in run.tensors} == {"ok"}, "frozen base layers have gradients"
    # rank 4: blocks of 4 elements, and the adapter sees what its base layer sees
    assert found[f"{name}.lora_A", "W", "fprop"]["shape"] == [4, 32]
    assert found[f"{name}.lora_B", "A", "fprop"]["shape"] == [11, 4]
    ours, base = found[f"{name}.lora_A", "A", "fprop"], found[name, "A", "fprop"]
    assert ours["sqnr_db"] == base["sqnr_db"]
    weights = llama[(llama["operand"] == "W") & (llama["layer"] == name)]
    assert [found[name, "W", g]["sqnr_db"] for g in ("fprop", "dgrad")] == list(weights["sqnr_db"])


class Checkpointed(nn.Module):
    """A block that recomputes its forward in the backward pass, also in evaluation mode."""

    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.checkpointing = checkpointing

    def block(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.checkpointing:
                x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
            else:
                x = self.block(x)
        return x


def test_checkpointing_counts_each_call_once() -> None:
    """And a module called twice is one weight with two calls."""
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    plain, recomputed = (
        scan(Checkpointed(flag), [x], loss=lambda y, _: y.square().mean()) for flag in (False, True)
    )
    assert plain.frame.equals(recomputed.frame)
    assert set(plain.frame["calls"]) == {2}
    assert set(plain.frame["tokens"].dropna()) == {80}
    assert plain.data["coverage"]["measured_parameters"] == 2 * 32 * 48


def test_checkpointing_of_transformers(llama: pd.DataFrame) -> None:
    model = build(entry("llama")).train()
    model.gradient_checkpointing_enable()
    assert scan(model).frame.equals(llama)
    assert model.training
    assert model.is_gradient_checkpointing


def test_autocast_measures_what_the_product_sees() -> None:
    """bfloat16 values of A and G, and the parameter itself, which is float32."""
    model = build(entry("llama"))
    with torch.autocast("cpu", torch.bfloat16):
        found = rows(scan(model))
    assert {(operand, row["dtype"]) for (_, operand, _), row in found.items()} == {
        ("W", "float32"),
        ("A", "bfloat16"),
        ("G", "bfloat16"),
    }


# ---- placement ---------------------------------------------------------------------------------


def on_disk(folder: Path, name: str) -> nn.Module:
    build(entry(name)).save_pretrained(folder)
    places = dict.fromkeys(
        ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0"), "cpu"
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map={**places, "model.layers.1": "disk"}, offload_folder=folder / "offload"
    )


def on_cpu(folder: Path, name: str) -> nn.Module:
    from accelerate import cpu_offload

    return cpu_offload(build(entry(name)), execution_device="cpu")


@pytest.mark.parametrize(
    ("place", "name"),
    [(on_disk, "llama"), (on_cpu, "llama"), (on_cpu, "qwen3_moe"), (on_cpu, "gemma")],
)
def test_offloaded_weights_are_read_from_where_they_are(place, name: str, tmp_path: Path) -> None:
    """Tied weights lose their identity when offloaded; they are one all the same (gemma)."""
    plain = scan(build(entry(name)), include=["lm_head"])
    model = place(tmp_path, name)
    assert any(p.device.type == "meta" for p in model.parameters())
    before = {n: (type(p), p.device, p.requires_grad) for n, p in model.named_parameters()}
    run = scan(model, include=["lm_head"])
    assert run.frame.equals(plain.frame)
    assert run.data["coverage"] == plain.data["coverage"]
    assert before == {n: (type(p), p.device, p.requires_grad) for n, p in model.named_parameters()}
    model(torch.tensor([RECORDS[0]["input_ids"]]))  # its hooks still work


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 8))
    with pytest.raises(mxdiag.MxdiagError, match="no linear layer to measure"):
        mxdiag.scan(model, operands="W", corrections="none")


@contextlib.contextmanager
def one_rank(folder: Path) -> Iterator[Any]:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def test_distributed_weights_are_measured_by_their_full_value(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8))
    plain = mxdiag.scan(model, operands="W", corrections="none")
    with one_rank(tmp_path) as mesh:
        for layer in model:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Shard(0)]))
        run = mxdiag.scan(model, corrections="none")
    weights = run.frame[run.frame["operand"] == "W"].reset_index(drop=True)
    assert weights.equals(plain.frame)
    assert {row["status"] for row in run.tensors if row["operand"] != "W"} == {"not_observed"}


# ---- what a model reads ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_and_decoder_see_source_and_target(name: str) -> None:
    record = {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, 9]}
    found = rows(scan(build(entry(name)), [record]))
    assert {row["status"] for row in found.values()} == {"ok"}
    tokens = {
        layer: row["tokens"] for (layer, operand, gemm), row in found.items() if operand == "A"
    }
    cross = ("EncDecAttention.k", "EncDecAttention.v", "encoder_attn.k_proj", "encoder_attn.v_proj")
    for layer, count in tokens.items():
        source = ".encoder." in f".{layer}" or layer.endswith(cross)
        assert count == (2 if source else 3), layer


@pytest.mark.parametrize(
    ("name", "missing"),
    [("vit", "pixel_values"), ("clip", "pixel_values"), ("siglip", "pixel_values")],
)
@pytest.mark.parametrize("as_file", [False, True])
def test_text_calibration_of_a_model_that_needs_images(
    name: str, missing: str, as_file: bool, tmp_path: Path
) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"input_ids": [5, 6, 7]}\n')
    run = scan(build(entry(name)), file if as_file else RECORDS)
    assert {row["status"] for row in run.tensors if row["operand"] == "W"} == {"ok"}
    assert {row["status"] for row in run.tensors if row["operand"] != "W"} == {"not_observed"}
    assert set(reasons(run).values()) == {
        f"the model reads {missing}, which calibration records do not hold"
    }


def test_a_vision_tower_that_text_does_not_reach() -> None:
    text, images = (scan(build(entry("llava")), c) for c in (RECORDS, [batch(entry("llava"))]))
    tower = {layer for layer in text.frame["layer"] if "vision" in layer or "projector" in layer}
    assert tower
    for (layer, operand, _), row in rows(text).items():
        seen = operand == "W" or layer not in tower
        assert row["status"] == ("ok" if seen else "not_observed"), layer
    assert set(reasons(text).values()) == {"never called"}
    assert {row["status"] for row in images.tensors} == {"ok"}
    weights = [run.frame.query("operand == 'W'").drop(columns="calls") for run in (text, images)]
    assert weights[0].equals(weights[1])


def test_an_encoder_has_no_next_token_loss() -> None:
    run = scan(build(entry("bert")))
    assert {row["status"] for row in run.tensors if row["operand"] == "A"} == {"ok"}
    assert set(reasons(run).values()) == {"the model has no language-model loss"}


def test_records_shorter_than_the_model_are_not_said_to_be_cut() -> None:
    assert scan(build(entry("llama"))).data["warnings"] == []


# ---- tied weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma", "gpt2", "bert", "bart", "modernbert"])
@pytest.mark.parametrize("asked", ["lm_head", "own"])
def test_a_tied_head_is_one_weight_with_one_name_on_both_routes(
    name: str, asked: str, tmp_path: Path
) -> None:
    """The embedding's name, which is what files hold; the head's role, since it is multiplied."""
    model = build(entry(name))
    model.save_pretrained(tmp_path)
    plain = scan(model, operands="W")
    (layer,) = (e["layer"] for e in plain.data["coverage"]["excluded"] if e["rule"] == "lm_head")
    include = [layer if asked == "own" else "lm_head"]
    live = scan(model, [batch(entry(name))], include=include)
    streamed = mxdiag.scan(tmp_path, weights_only=True, include=include, **OPTIONS)
    for run in (live, streamed):
        assert rows(run)[layer, "W", "fprop"]["role"] == "lm_head"
        assert not [e for e in run.data["coverage"]["excluded"] if e["layer"] == layer]
    assert {row["status"] for row in live.tensors if row["layer"] == layer} == {"ok"}
    weights = live.frame.query("operand == 'W'").drop(columns="calls").reset_index(drop=True)
    assert weights.equals(streamed.frame.drop(columns="calls"))
    totals = [run.data["coverage"]["measured_parameters"] for run in (live, streamed)]
    assert totals[0] == totals[1]
    hidden = scan(model, operands="W", include=["*"], exclude=["lm_head"])
    assert {"layer": layer, "rule": "--exclude lm_head"}.items() <= next(
        e for e in hidden.data["coverage"]["excluded"] if e["layer"] == layer
    ).items()
