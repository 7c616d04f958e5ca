"""Replaced operands: each of the three GEMMs on its own, straight-through, all else unchanged."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxdiag.tap.tap import Product, Tap
from product_calls import PRODUCTS
from tap_tools import Recorder, Wrap, data
from zoo import batch, build, entry, loss_of


class Nothing:
    """Returns every operand as it came."""

    def fprop(self, product: Product, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x, w

    def dgrad(self, product: Product, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return g, w

    def wgrad(self, product: Product, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return g, x


class Copies(Nothing):
    """Returns copies, row-major whatever they were."""

    def fprop(self, product: Product, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(memory_format=torch.contiguous_format), w.contiguous() + 0

    def dgrad(self, product: Product, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return self.fprop(product, g, w)

    def wgrad(self, product: Product, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fprop(product, g, x)


class Marked(Nothing):
    """Changes every operand of every GEMM in its own way."""

    def fprop(self, product: Product, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x.round(), w.round()

    def dgrad(self, product: Product, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return g.sign(), w + 1

    def wgrad(self, product: Product, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return g * 3, x.abs()


def backward(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return out.detach(), x.grad, [p.grad for p in model.parameters()]


def assert_same(a: tuple[Tensor, Tensor, list[Tensor]], b: tuple[Tensor, Tensor, list]) -> None:
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert all(torch.equal(p, q) for p, q in zip(a[2], b[2], strict=True))


@pytest.mark.parametrize("substitute", [Nothing(), Copies()], ids=["as they came", "copies"])
@pytest.mark.parametrize("case", PRODUCTS)
def test_unchanged_operands_change_no_bit(case: str, substitute: Nothing) -> None:
    forward, weight, shape, _ = PRODUCTS[case]
    model = Wrap(forward, w=weight)
    plain = backward(model, data(*shape))
    with Tap(model, substitute=substitute):
        substituted = backward(model, data(*shape))
    assert_same(plain, substituted)


def test_each_gemm_has_its_own_operands() -> None:
    """Two layers against the same computed by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    x = 2 * data(2, 7, 5)
    with Tap(model, substitute=Marked()):
        out, dx, gradients = backward(model, x)

    (w1, b1, w2, b2), x2 = [p.detach() for p in model.parameters()], x.flatten(0, 1)
    h = (x2.round() @ w1.round().T + b1).tanh()
    y = h.round() @ w2.round().T + b2
    torch.testing.assert_close(out.flatten(0, 1), y)
    g2 = 2 * y
    g1 = (g2.sign() @ (w2 + 1)) * (1 - h**2)
    wanted = [(3 * g1).T @ x2.abs(), g1.sum(0), (3 * g2).T @ h.abs(), g2.sum(0)]
    for found, value in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dx.flatten(0, 1), g1.sign() @ (w1 + 1), rtol=1e-4, atol=1e-4)


def test_conv1d_is_substituted_as_out_in() -> None:
    from transformers.pytorch_utils import Conv1D

    class Shapes(Marked):
        def fprop(self, product: Product, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            assert (x.shape, w.shape) == ((14, 5), (6, 5))
            return super().fprop(product, x, w)

    torch.manual_seed(0)
    conv, linear = Conv1D(6, 5), nn.Linear(5, 6)
    linear.weight.data.copy_(conv.weight.detach().t())
    linear.bias.data.copy_(conv.bias.detach())
    with Tap(conv, substitute=Shapes()):
        a = backward(conv, data(2, 7, 5))
    with Tap(linear, substitute=Shapes()):
        b = backward(linear, data(2, 7, 5))
    for found, wanted in zip((*a[:2], a[2][0].T), (*b[:2], b[2][0]), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_are_substituted_with_their_own_tokens(implementation: str) -> None:
    """Each expert's operands are replaced apart, whichever kernel multiplies them."""

    class ByExpert(Nothing):
        def __init__(self) -> None:
            self.tokens: dict[tuple[str, int], int] = {}

        def fprop(self, product: Product, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            if product.expert is None:
                return x, w
            self.tokens[product.parameter, product.expert] = len(x)
            return x * (1 + product.expert), w * 2

        def dgrad(self, product: Product, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return (g, w) if product.expert is None else (g * (2 + product.expert), w)

        def wgrad(self, product: Product, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return (g, x) if product.expert is None else (g, x * (3 + product.expert))

    item = entry("mixtral")
    found = []
    for kind in ("eager", implementation):
        model, substitute = build(item, experts_implementation=kind), ByExpert()
        with Tap(model, substitute=substitute, experts="as_is"):
            loss_of(model, item, batch(item)).backward()
        found.append((substitute.tokens, [p.grad for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    for a, b in zip(found[0][1], found[1][1], strict=True):
        # other kernels and summation orders in float32, through two layers
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * a.abs().max().item())


def test_frozen_weights_need_no_input_later() -> None:
    """With W frozen, X may be overwritten after the product; dX is still substituted."""

    def forward(m: Wrap, x: Tensor) -> Tensor:
        h = x * 2
        y = F.linear(h, m.w)
        h.zero_()
        return y

    model = Wrap(forward, w=(6, 5))
    x = data(7, 5).requires_grad_()
    with Tap(model, seen := Recorder(), substitute=Marked(), gradients="activations"):
        model(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.ones(7, 6) @ (model.w.detach() + 1))
    assert len(seen.x) == len(seen.g) == 1
    assert model.w.grad is None


def test_substituted_output_can_be_modified_in_place() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 6)
    model = Wrap(lambda m, x: layer(x).add_(1).relu_())
    model.layer = layer
    plain = backward(model, data(2, 7, 5))
    with Tap(model, substitute=Nothing()):
        assert_same(plain, backward(model, data(2, 7, 5)))


def test_observer_sees_the_operands_as_the_model_made_them() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 6)
    with Tap(model, seen := Recorder(), substitute=Marked()):
        backward(model, data(7, 5))
    (x,), (g,) = seen.x.values(), seen.g.values()
    assert torch.equal(x, data(7, 5))
    out = F.linear(data(7, 5).round(), model.weight.detach().round(), model.bias.detach())
    torch.testing.assert_close(g, 2 * out)


def test_checkpointing_substitutes_the_rerun_too() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
    model = Wrap(lambda m, x: checkpoint(m.block, x, use_reentrant=False))
    model.block = block
    with Tap(block, substitute=Marked()):
        plain = backward(block, data(7, 5))
    with Tap(model, substitute=Marked()):
        assert_same(plain, backward(model, data(7, 5)))


@pytest.mark.parametrize("gradients", ["model", "activations"])
def test_autocast_substitutes_what_the_product_sees(gradients: str) -> None:
    class Dtypes(Nothing):
        def fprop(self, product: Product, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            assert x.dtype is w.dtype is torch.bfloat16
            return x.float(), w.double()  # cast back to bfloat16

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4))
    twin = copy.deepcopy(model)
    with Tap(model, substitute=Dtypes(), gradients=gradients), torch.autocast("cpu"):
        out = model(data(7, 5))
        out.float().sum().backward()
    with torch.autocast("cpu"):
        wanted = twin(data(7, 5))
        wanted.float().sum().backward()
    assert torch.equal(out, wanted)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) if gradients == "activations" else torch.equal(p.grad, q.grad)


def test_a_substitute_of_another_shape_is_refused() -> None:
    class Wrong(Nothing):
        def fprop(self, product: Product, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return x[:1], w

    model = nn.Linear(5, 6)
    with Tap(model, substitute=Wrong()), pytest.raises(ValueError, match=r"\(1, 5\) of \(7, 5\)"):
        model(data(7, 5))
