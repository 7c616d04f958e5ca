"""Layers of live models: their names, their places, and what becomes of every parameter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from mxdiag.checkpoint.inventory import checkpoint_inventory as checkpoint_inventory
from mxdiag.checkpoint.open import open_checkpoint
from mxdiag.checkpoint.stream import read
from mxdiag.errors import ModelError
from mxdiag.model.inventory import LiveLinear, ModelInventory, model_inventory
from mxdiag.tap.tap import Observer, Product, Tap
from zoo import ZOO, Entry, batch, build, entry, loss_of


class Resolver(Observer):
    """Adds up X and G by layer."""

    def __init__(self, inventory: ModelInventory) -> None:
        self.inventory = inventory
        self.tokens: dict[str, int] = {}
        self.gradients: dict[str, Tensor] = {}
        self._x: dict[Product, Tensor] = {}

    def forward(self, product: Product, x: Tensor) -> None:
        self._x[product] = x.clone()
        for part in self.inventory.resolve(product.view):
            self.tokens[part.live.layer] = self.tokens.get(part.live.layer, 0) + len(x)

    def backward(self, product: Product, g: Tensor) -> None:
        for part in self.inventory.resolve(product.view):
            own = part.gradient(g).T @ self._x[product]
            self.gradients[part.live.layer] = self.gradients.get(part.live.layer, 0) + own


def scan(
    model: nn.Module, *inputs: Tensor, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()
) -> tuple[ModelInventory, Resolver, Tap]:
    inventory = model_inventory(model, include, exclude)
    seen = Resolver(inventory)
    with Tap(model, seen) as tap:
        out = model(*inputs)
        out = getattr(out, "logits", out)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    inventory.settle(tap)
    return inventory, seen, tap


def layers(inventory: ModelInventory) -> dict[str, LiveLinear]:
    return {live.layer: live for live in inventory.measured}


def rules(inventory: ModelInventory) -> dict[str, str]:
    return {item.name: item.rule for item in inventory.excluded}


def assert_adds_up(inventory: ModelInventory) -> None:
    rest = [*inventory.excluded, *inventory.unsupported]
    total = inventory.measured_parameters + sum(item.parameters for item in rest)
    assert total == inventory.matrix_parameters


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("item", ZOO, ids=lambda item: item.name)
def test_rows_are_those_of_the_saved_checkpoint(item: Entry, tmp_path) -> None:
    """The same layers, roles, experts and values, streamed from files or read from the model."""
    model = build(item)
    model.save_pretrained(tmp_path)
    live = layers(model_inventory(model))
    with open_checkpoint(tmp_path) as checkpoint:
        stored = {linear.layer: linear for linear in checkpoint_inventory(checkpoint).measured}
        assert live.keys() == stored.keys()
        inventory = model_inventory(model)
        for name, found in live.items():
            a, b = found.linear, stored[name]
            assert (a.role, a.expert, a.shape) == (b.role, b.expert, b.shape)
            values = inventory.weight(found)
            np.testing.assert_array_equal(values.numpy(), np.asarray(read(checkpoint, b)))


def test_one_row_for_each_of_1536_experts_projections() -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        **{**entry("qwen3_moe").config, "num_hidden_layers": 4, "num_experts": 128},
    )
    inventory = model_inventory(AutoModelForCausalLM.from_config(config))
    experts = [live for live in inventory.measured if live.linear.expert is not None]
    assert len(experts) == 4 * 128 * 3
    assert {live.linear.role for live in experts} == {
        "expert.gate_proj",
        "expert.up_proj",
        "expert.down_proj",
    }
    assert len(inventory.measured) == 1536 + 4 * 4
    assert_adds_up(inventory)


def test_expert_rows_have_their_own_tokens_and_gradients() -> None:
    """Each row's GᵀX is its own slice of the fused parameter's gradient."""
    item = entry("gpt_oss")  # [in, out], gate and up interleaved
    model = build(item)
    inventory = model_inventory(model)
    with Tap(model, seen := Resolver(inventory)):
        loss_of(model, item, batch(item)).backward()
    for live in inventory.measured:
        if live.layer in seen.gradients:
            gradient = model.get_parameter(live.view.parameter).grad
            own = gradient.as_strided(live.view.size, live.view.stride, live.view.offset)
            torch.testing.assert_close(seen.gradients[live.layer], own, rtol=1e-4, atol=1e-6)
    down = [n for name, n in seen.tokens.items() if "layers.0.mlp.experts.down_proj[" in name]
    assert sum(down) == 2 * 12 * 2, "two experts for each of 2 x 12 tokens"


def test_expert_without_tokens_is_not_observed() -> None:
    item = entry("qwen3_moe")
    model = build(item)
    inventory = model_inventory(model)
    with torch.no_grad():
        for layer in model.model.layers:  # all logits equal: the same two experts for any token
            layer.mlp.gate.weight.zero_()
    with Tap(model, Resolver(inventory)) as tap:
        model(torch.tensor([[5]]))
    inventory.settle(tap)
    experts = [live for live in inventory.measured if live.linear.expert is not None]
    reasons = [inventory.why_not_observed(live, "A", tap) for live in experts]
    assert reasons.count(None) == 2 * 2 * 3, "one token, two experts, three projections, two layers"
    assert set(reasons) == {None, "no token was routed to it"}
    assert inventory.weight(experts[-1]).shape == experts[-1].linear.shape


def test_fused_projections_are_rows_by_segment() -> None:
    item = entry("phi3")
    model = build(item)
    inventory = model_inventory(model)
    with Tap(model, seen := Resolver(inventory)):
        loss_of(model, item, batch(item)).backward()
    fused = model.model.layers[0].self_attn.qkv_proj.weight
    parts = [seen.gradients[f"model.layers.0.self_attn.qkv_proj.{p}_proj"] for p in "qkv"]
    assert [len(p) for p in parts] == [32, 16, 16]
    torch.testing.assert_close(torch.cat(parts), fused.grad, rtol=1e-4, atol=1e-6)


def test_multihead_attention_segments_are_rows() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    model.forward = lambda x: model.attention(x, x, x)
    inventory, seen, _ = scan(model, data(3, 2, 8))
    assert list(layers(inventory)) == [
        "attention.in_proj_weight.q_proj",
        "attention.in_proj_weight.k_proj",
        "attention.in_proj_weight.v_proj",
        "attention.out_proj",
    ]
    together = torch.cat([seen.gradients[n] for n in list(layers(inventory))[:3]])
    torch.testing.assert_close(together, model.attention.in_proj_weight.grad, rtol=1e-4, atol=1e-4)
    assert_adds_up(inventory)


def test_tied_head_and_embedding_are_one_weight() -> None:
    item = entry("gemma")
    model = build(item)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    inventory = model_inventory(model)
    assert rules(inventory)["model.embed_tokens"] == "lm_head"
    assert_adds_up(inventory)
    included = model_inventory(model, include=["lm_head"])
    assert layers(included)["model.embed_tokens"].linear.role == "lm_head"
    assert_adds_up(included)
    assert included.parameters == sum(p.numel() for p in model.parameters())


def test_include_and_exclude() -> None:
    item = entry("mixtral")
    model = build(item)
    inventory = model_inventory(model, include=["*.gate"], exclude=["*.experts.*"])
    roles = {live.linear.role for live in inventory.measured}
    assert "router" in roles
    assert not any(role.startswith("expert.") for role in roles)
    assert "--exclude *.experts.*" in rules(inventory).values()
    assert_adds_up(inventory)


def test_compiled_and_wrapped_names_are_the_users() -> None:
    inner = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5))
    model = torch.compile(inner, backend="eager")
    assert list(layers(model_inventory(model))) == ["0", "1"]
    inner[0] = torch.compile(inner[0], backend="eager")
    inventory, seen, _ = scan(inner, data(7, 5))
    assert list(layers(inventory)) == list(seen.tokens) == ["0", "1"]


def test_adapters_have_the_names_of_what_they_adapt() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build(entry("llama")), LoraConfig(r=4, target_modules=["q_proj"]))
    inventory = model_inventory(model)
    seen = Resolver(inventory)
    with Tap(model, seen, gradients="activations") as tap:
        model(**batch(entry("llama"))).loss.backward()
    inventory.settle(tap)
    found = layers(inventory)
    name = "model.layers.0.self_attn.q_proj"
    assert {name, f"{name}.lora_A", f"{name}.lora_B", "model.layers.1.mlp.down_proj"} <= set(found)
    assert found[f"{name}.lora_A"].linear.shape == (4, 32)
    assert set(seen.gradients) == set(found), "base weights are frozen, and yet have gradients"
    assert_adds_up(inventory)


def test_adapters_on_fused_experts_keep_the_checkpoint_names() -> None:
    from peft import LoraConfig, get_peft_model

    plain = build(entry("mixtral"))
    names = set(layers(model_inventory(plain)))
    model = get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj"]))
    found = layers(model_inventory(model))
    assert names == {name for name in found if "lora_" not in name}
    assert "model.layers.0.block_sparse_moe.experts.3.w1" in found


def test_weights_that_are_nowhere_are_said_to_be_not_loaded() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    model[2].to("meta")
    inventory = model_inventory(model)
    with Tap(model, Resolver(inventory)) as tap:
        model[0](data(7, 5))
    inventory.settle(tap)
    assert list(layers(inventory)) == ["0"]
    assert [(item.name, item.rule) for item in inventory.unsupported] == [
        ("2.weight", "not loaded: offloaded, or never materialized")
    ]
    assert_adds_up(inventory)


def test_offloaded_weights_are_read_from_where_they_are_kept() -> None:
    from accelerate import cpu_offload

    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    weights = [model[0].weight.detach().clone(), model[2].weight.detach().clone()]
    cpu_offload(model, execution_device=torch.device("cpu"))
    inventory, seen, tap = scan(model, data(7, 5))
    assert not inventory.unsupported
    for live, weight in zip(inventory.measured, weights, strict=True):
        assert torch.equal(inventory.weight(live), weight)
        assert inventory.why_not_observed(live, "G", tap) is None
    assert seen.tokens == {"0": 7, "2": 7}
    assert_adds_up(inventory)


def test_codes_of_8_bit_floats_are_no_values() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4))
    codes = model[1].weight.detach().to(torch.float8_e4m3fn)
    model[1].weight = nn.Parameter(codes, requires_grad=False)
    inventory = model_inventory(model)
    assert list(layers(inventory)) == ["0"]
    assert [(item.name, item.rule) for item in inventory.unsupported] == [
        ("1.weight", "float8_e4m3fn codes, not values")
    ]
    assert_adds_up(inventory)


def test_quantized_parameters_are_unsupported_by_name() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda m, name: name == "0")
    inventory, _, _ = scan(model, data(7, 32))
    assert list(layers(inventory)) == ["1"]
    (item,) = inventory.unsupported
    assert item.name == "0.weight"
    assert type(model[0].weight).__name__ in item.rule
    assert_adds_up(inventory)


def test_weights_packed_in_buffers_are_unsupported_by_name() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("qweight", torch.zeros(4, 8, dtype=torch.int32))

    inventory = model_inventory(nn.ModuleDict({"proj": Packed(), "other": nn.Linear(4, 4)}))
    assert [(item.name, item.rule) for item in inventory.unsupported] == [
        ("proj.qweight", "weights packed in a buffer")
    ]


def test_distributed_weights_are_measured_by_their_full_value(tmp_path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Linear(5, 6)
        plain = model.weight.detach().clone()
        model.weight = nn.Parameter(distribute_tensor(plain, mesh, [Shard(0)]))
        inventory = model_inventory(model)
        (live,) = inventory.measured
        weight = inventory.weight(live)
        assert type(weight) is Tensor
        assert torch.equal(weight, plain)
        with Tap(model) as tap:
            pass
        reason = inventory.why_not_observed(live, "A", tap)
        assert reason is not None
        assert "DTensor" in reason
    finally:
        distributed.destroy_process_group()


def test_weights_that_the_checkpoint_lacks_are_not_measured() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5))
    inventory = model_inventory(model, absent=["1.weight"])
    assert list(layers(inventory)) == ["0"]
    assert [(item.name, item.rule) for item in inventory.unsupported] == [
        ("1.weight", "not in the checkpoint: its values are random")
    ]
    assert_adds_up(inventory)


class Custom(nn.Module):
    """Parameters whose use no name tells."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixing = nn.Parameter(torch.randn(5, 6))
        self.blocks = nn.Parameter(torch.randn(3, 6, 6))
        self.shift = nn.Parameter(torch.randn(3, 1, 6))
        self.idle = nn.Parameter(torch.randn(4, 4))
        self.table = nn.Linear(6, 9)

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.mixing
        h = h + F.embedding(torch.zeros(7, dtype=torch.long), self.table.weight)
        return F.linear(h, self.blocks[1]) * self.shift.sum()


def test_use_decides_where_names_are_silent_or_wrong() -> None:
    model = Custom()
    before = model_inventory(model)
    assert list(layers(before)) == ["table"]
    inventory, seen, tap = scan(model, data(7, 5))
    found = layers(inventory)
    assert list(found) == ["mixing", "blocks[0]", "blocks[1]", "blocks[2]"]
    assert found["mixing"].linear.shape == (6, 5)
    torch.testing.assert_close(seen.gradients["mixing"].T, model.mixing.grad)
    torch.testing.assert_close(seen.gradients["blocks[1]"], model.blocks.grad[1])
    assert inventory.why_not_observed(found["blocks[2]"], "A", tap) == "no token was routed to it"
    assert rules(inventory) == {
        "table.weight": "embedding",
        "shift": "not a linear weight: used by sum",
    }
    assert [item.name for item in inventory.unsupported] == ["idle"]
    assert_adds_up(inventory)


def test_a_part_of_a_weight_that_is_never_multiplied_is_named() -> None:
    model = nn.Linear(5, 6, bias=False)
    model.forward = lambda x: F.linear(x, model.weight[:4])
    inventory, _, _ = scan(model, data(7, 5))
    assert list(layers(inventory)) == ["weight[0:4]"]
    assert [(item.rule, item.parameters) for item in inventory.unsupported] == [
        ("only a part of it was multiplied", 10)
    ]
    assert_adds_up(inventory)


def test_a_weight_used_both_ways_round_counts_once() -> None:
    model = nn.ModuleDict({"up": nn.Linear(5, 6, bias=False)})
    model.forward = lambda x: F.linear(x, model.up.weight) @ model.up.weight
    inventory, seen, _ = scan(model, data(7, 5))
    assert {name: live.linear.shape for name, live in layers(inventory).items()} == {
        "up": (6, 5),
        "up.T": (5, 6),
    }
    total = seen.gradients["up"] + seen.gradients["up.T"].T
    torch.testing.assert_close(total, model.up.weight.grad, rtol=1e-4, atol=1e-4)
    assert_adds_up(inventory)


def test_layers_that_are_never_called_are_not_observed() -> None:
    model = nn.ModuleDict({"used": nn.Linear(5, 6), "idle": nn.Linear(5, 6)})
    model.forward = lambda x: model.used(x)
    inventory, _, tap = scan(model, data(7, 5))
    found = layers(inventory)
    assert inventory.why_not_observed(found["idle"], "A", tap) == "never called"
    assert inventory.why_not_observed(found["used"], "G", tap) is None


def test_weight_is_a_view_of_the_parameter() -> None:
    model = nn.Linear(5, 6)
    inventory = model_inventory(model)
    (live,) = inventory.measured
    assert inventory.weight(live).data_ptr() == model.weight.data_ptr()
    assert not inventory.weight(live).requires_grad
    assert inventory.dtype(live) == "float32"
    model.to("meta")
    with pytest.raises(ModelError, match="not loaded"):
        ModelInventory(model, (), (), ()).weight(live)
