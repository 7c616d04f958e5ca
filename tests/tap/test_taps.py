"""What a tap sees, case by case: each case is one that some way of watching a model gets wrong."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from mxdiag.errors import ModelError
from mxdiag.tap.tap import Product, Tap
from tap_tools import Recorder, Wrap, assert_gradients, data, tap


def test_output_modified_in_place_keeps_its_gradient() -> None:
    """The 3-D output of a linear with bias is a view: hooks on it are lost by in-place changes."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y += 1
            y[..., 0].mul_(3)
            return self.b(y.relu_())

    torch.manual_seed(0)
    model = InPlace()
    plain = copy.deepcopy(model)
    plain(data(2, 3, 5)).square().sum().backward()
    seen, _ = tap(model, data(2, 3, 5))
    assert torch.equal(plain.a.weight.grad, model.a.weight.grad)
    assert_gradients(model, seen, "a.weight", "b.weight")
    alone, _ = tap(model, data(2, 3, 5), gradients="activations")
    assert all(torch.equal(g, seen.g[product]) for product, g in alone.g.items())


def test_input_overwritten_after_the_product() -> None:
    """X is seen before the product; a frozen weight needs no X later: overwriting it is legal."""

    def forward(m: Wrap, x: Tensor) -> Tensor:
        h = x * 2
        y = F.linear(h, m.w)
        h.zero_()
        return y

    model = Wrap(forward, w=(6, 5))
    x = data(7, 5).requires_grad_()
    with Tap(model, seen := Recorder(), gradients="activations"):
        model(x).sum().backward()
    (product,) = seen.x
    assert torch.equal(seen.x[product], 2 * x)
    assert torch.equal(seen.g[product], torch.ones(7, 6))


@pytest.mark.parametrize("kind", [nn.Linear, lambda n_in, n_out: Conv1D(n_out, n_in)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_counts_each_call_once(
    reentrant: bool, kind: Callable[[int, int], nn.Module]
) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(kind(5, 6), nn.Tanh(), kind(6, 5))
    plain = copy.deepcopy(block)
    model = Wrap(lambda m, x: checkpoint(m.block, x, use_reentrant=reentrant))
    model.block = block
    x = data(7, 5).requires_grad_()
    plain(x).square().sum().backward()
    seen, tapped = tap(model, x)
    assert seen.forwards == seen.backwards == 2
    assert list(tapped.calls.values()) == list(tapped.gradients.values()) == [1, 1]
    for name, p in plain.named_parameters():
        assert torch.equal(p.grad, dict(block.named_parameters())[name].grad)
    wanted, _ = tap(plain, data(7, 5))
    assert {p.size: g.sum() for p, g in seen.g.items()} == {
        p.size: g.sum() for p, g in wanted.g.items()
    }


def test_reentrant_checkpoint_above_a_frozen_embedding_has_gradients() -> None:
    """It passes none back unless its input requires grad: gradients start behind the embedding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 6))
    model.forward = lambda ids: checkpoint(model[1], model[0](ids), use_reentrant=True)
    seen, _ = tap(model, torch.arange(7), gradients="activations")
    assert seen.forwards == seen.backwards == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_a_transformers_model(reentrant: bool) -> None:
    """With no weight gradients: a reentrant checkpoint needs an input that requires grad."""
    from zoo import batch, build, entry, loss_of

    item = entry("llama")
    found = []
    for checkpointing in (False, True):
        model = build(item).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with Tap(model, seen := Recorder(), gradients="activations"):
            loss_of(model, item, batch(item)).backward()
        found.append(seen)
    assert found[0].forwards == found[1].forwards == found[1].backwards
    again = {product.view: g for product, g in found[1].g.items()}
    for product, g in found[0].g.items():
        assert torch.equal(g, again[product.view]), product


def test_backward_of_a_custom_function_is_no_product() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w, g.t() @ x

    model = Wrap(lambda m, x: Scaled.apply(x, m.w), w=(6, 5))
    seen, tapped = tap(model, data(7, 5).requires_grad_())
    assert seen.forwards == 1
    assert [p.size for p in seen.x] == [(6, 5)]
    assert sum(tapped.calls.values()) == 1
    assert not seen.g, "inside the function nothing requires grad: X alone is seen"

    class Forward:
        def fprop(self, product: Product, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            assert product.call == 0
            return x, w * 2

    x = data(7, 5).requires_grad_()
    with Tap(model, substitute=Forward()):
        out = model(x)
        out.backward(torch.ones_like(out))
    assert torch.equal(out, data(7, 5) @ (2 * model.w).t())
    assert torch.equal(x.grad, torch.ones(7, 6) @ model.w), "the function's own backward"


@pytest.mark.parametrize("same", [True, False])
def test_multihead_attention_shows_all_four_projections(same: bool) -> None:
    torch.manual_seed(0)
    size = {} if same else {"kdim": 6, "vdim": 10}
    attention = nn.MultiheadAttention(8, 2, batch_first=True, **size)
    query = data(2, 3, 8)
    inputs = (query, query, query) if same else (query, data(2, 4, 6), data(2, 4, 10))
    plain = copy.deepcopy(attention)
    plain(*inputs)[0].square().sum().backward()
    seen, _ = tap(attention, *inputs)
    names = ["in_proj_weight"] if same else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    assert_gradients(attention, seen, *names, "out_proj.weight")
    for a, b in zip(plain.parameters(), attention.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_attention_over_other_keys_multiplies_parts_of_the_fused_weight() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    keys = data(2, 4, 8)
    seen, tapped = tap(attention, data(2, 3, 8), keys, keys)
    assert {view.size for view in tapped.calls} == {(8, 8), (16, 8)}
    assert_gradients(attention, seen, "in_proj_weight", "out_proj.weight")


def test_compiled_model_runs_eagerly_and_is_not_compiled_again() -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable:
        compilations.append(graph)
        return graph.forward

    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
    model = torch.compile(inner, backend=backend)
    before = model(data(7, 5))
    count = len(compilations)
    seen, _ = tap(model, data(7, 5))
    assert {p.parameter for p in seen.x} == {"0.weight", "2.weight"}
    assert_gradients(inner, seen, "0.weight", "2.weight")
    assert torch.equal(before, model(data(7, 5)))
    assert len(compilations) == count


def test_copies_made_under_the_tap_are_plain() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 6)
    buffer = io.BytesIO()
    with Tap(model):
        state, twin = model.state_dict(), copy.deepcopy(model)
        torch.save(model.state_dict(), buffer)
        pickled = pickle.loads(pickle.dumps(model.weight))
        tied = copy.deepcopy([model.weight, model.weight])
    buffer.seek(0)
    for value in (state["weight"], torch.load(buffer)["weight"]):
        assert type(value) is Tensor
    for value in (twin.weight, pickled, tied[0]):
        assert type(value) is nn.Parameter
        assert not hasattr(value, "_mxdiag_tag")
        assert torch.equal(value, model.weight)
    assert tied[0] is tied[1]


def test_views_that_outlive_the_tap_work_as_plain_tensors() -> None:
    model = Wrap(lambda m, x: x, w=(6, 5))
    with Tap(model, seen := Recorder()):
        kept = model.w[:3]
    F.linear(data(7, 5), kept).sum().backward()
    assert not seen.x
    assert model.w.grad is not None


def test_rows_of_zeros_are_no_tokens_of_an_expert() -> None:
    """Llama-4 gives every token to every expert, zeroed where it was not routed."""
    model = Wrap(lambda m, x: torch.bmm(x, m.w), w=(2, 5, 6))
    x = data(2, 7, 5)
    x[0, 2:] = 0
    x[1, :3] = 0
    seen, _ = tap(model, x)
    assert {p.expert: tuple(v.shape) for p, v in seen.x.items()} == {0: (2, 5), 1: (4, 5)}
    assert {p.expert: tuple(v.shape) for p, v in seen.g.items()} == {0: (2, 6), 1: (4, 6)}
    assert_gradients(model, seen, "w")


def test_expert_without_tokens_is_not_seen() -> None:
    model = Wrap(lambda m, x: torch.bmm(x, m.w), w=(2, 5, 6))
    x = data(2, 7, 5)
    x[1] = 0
    seen, _ = tap(model, x)
    assert {p.expert for p in seen.x} == {0}


def test_a_module_called_twice_is_one_weight_with_two_calls() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    model = Wrap(lambda m, x: m.layer(m.layer(x).tanh()))
    model.layer = layer
    seen, tapped = tap(model, data(7, 5))
    (view,) = tapped.calls
    assert tapped.calls[view] == tapped.gradients[view] == 2
    assert {p.call for p in seen.x} == {p.call for p in seen.g} == {0, 1}
    assert_gradients(model, seen, "layer.weight")


def test_frozen_layers_have_no_gradient_unless_asked_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    wanted, _ = tap(model, data(7, 5))
    for layer in model[:3]:
        layer.requires_grad_(False)
    seen, _ = tap(model, data(7, 5))
    assert {p.parameter for p in seen.x} == {"0.weight", "2.weight", "4.weight"}
    assert {p.parameter for p in seen.g} == {"4.weight"}
    alone, _ = tap(model, data(7, 5), gradients="activations")
    assert {p: g.tolist() for p, g in alone.g.items()} == {
        p: g.tolist() for p, g in wanted.g.items()
    }
    assert [p.requires_grad for p in model.parameters()] == [False] * 4 + [True] * 2


def test_no_gradient_at_all_without_grad_mode() -> None:
    model = nn.Linear(5, 6)
    with Tap(model, seen := Recorder(), gradients="activations"), torch.no_grad():
        assert not model(data(7, 5)).requires_grad
    assert len(seen.x) == 1
    assert not seen.g


def test_autocast_shows_what_the_product_sees() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 6)
    plain = copy.deepcopy(model)
    seen = Recorder()
    x = data(7, 5)
    with Tap(model, seen), torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    out.float().sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain(x).float().sum().backward()
    (product,) = seen.x
    assert seen.x[product].dtype is torch.bfloat16
    assert torch.equal(seen.x[product], x.bfloat16())
    assert torch.equal(plain.weight.grad, model.weight.grad)


def test_conv1d_is_the_transposed_linear() -> None:
    torch.manual_seed(0)
    conv = Conv1D(6, 5)
    linear = nn.Linear(5, 6)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    a, _ = tap(conv, data(2, 3, 5))
    b, _ = tap(linear, data(2, 3, 5))
    (p,), (q,) = a.x, b.x
    assert p.size == q.size == (6, 5)
    assert p.stride == (1, 6)
    assert torch.equal(a.x[p], b.x[q])
    torch.testing.assert_close(a.g[p], b.g[q])


def test_effective_weights_count_for_the_parameter_they_come_from() -> None:
    """A weight norm multiplies by a weight that is computed from two parameters."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 6))
    seen, _ = tap(layer, data(7, 5))
    (product,) = seen.x
    assert product.parameter == "parametrizations.weight.original1"
    assert product.view.derived
    assert product.size == (6, 5)


def test_activation_like_parameters_are_inputs_not_weights() -> None:
    """Learned queries go through a projection as X."""
    model = Wrap(
        lambda m, x: F.linear(m.latents.expand(2, -1, -1), m.w), latents=(1, 3, 5), w=(6, 5)
    )
    seen, _ = tap(model, data(1))
    assert {p.parameter for p in seen.x} == {"w"}
    assert_gradients(model, seen, "w")


def test_model_is_left_as_found_when_it_raises() -> None:
    from zoo import build, entry

    model = build(entry("qwen3_moe"), experts_implementation="grouped_mm")
    model.model.embed_tokens.weight.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]

    def fail(*_: object) -> None:
        raise ValueError("broken")

    handle = model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="broken"), Tap(model, gradients="activations"):
        model(torch.tensor([[1, 2, 3]]))
    handle.remove()
    assert flags == [p.requires_grad for p in model.parameters()]
    assert all(type(p) is nn.Parameter and not vars(p) for p in model.parameters())
    assert model.get_experts_implementation()[""] == "grouped_mm"


def test_one_tap_at_a_time() -> None:
    model = nn.Linear(5, 6)
    with Tap(model), pytest.raises(ModelError, match="already tapped"), Tap(model):
        pass
    assert type(model.weight) is nn.Parameter


def test_parameters_that_cannot_be_tapped_are_named() -> None:
    class Own(nn.Parameter):
        pass

    model = nn.Linear(5, 6, device="meta")
    other = nn.Linear(5, 6)
    other.weight = Own(other.weight.detach())
    both = nn.ModuleList([model, other])
    with Tap(both) as tapped:
        pass
    assert "not loaded" in tapped.untapped["0.weight"]
    assert "Own" in tapped.untapped["1.weight"]
    assert type(other.weight) is Own
