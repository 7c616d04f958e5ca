"""Every product of every architecture in the zoo is seen, and seeing it changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mxdiag.model.inventory import model_inventory
from mxdiag.tap.tap import Observer, Product, Tap
from zoo import ZOO, Entry, batch, build, loss_of

#: Not reached by the zoo's loss, with the reason that must be given.
WITHOUT_GRADIENT = {"siglip_vision": "no gradient reached it"}
FUSED = {"qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "phimoe", "granitemoe", "gpt_oss"}
FUSED |= {"ernie4_5_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"}

entries = pytest.mark.parametrize("item", ZOO, ids=lambda item: item.name)


class Recorder(Observer):
    """Keeps every X and G in float64."""

    def __init__(self) -> None:
        self.x: dict[Product, Tensor] = {}
        self.g: dict[Product, Tensor] = {}

    def forward(self, product: Product, x: Tensor) -> None:
        assert not x.requires_grad
        assert x.shape[1] == product.size[1]
        assert product not in self.x
        self.x[product] = x.double()

    def backward(self, product: Product, g: Tensor) -> None:
        assert g.shape == (self.x[product].shape[0], product.size[0])
        assert product not in self.g
        self.g[product] = g.double()


class Unchanged:
    """Substitutes every operand by a copy of itself, in another memory layout where it had one."""

    def fprop(self, product: Product, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return _copy(x), _copy(w)

    def dgrad(self, product: Product, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return _copy(g), _copy(w)

    def wgrad(self, product: Product, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return _copy(g), _copy(x)


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def run(model: nn.Module, item: Entry) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, item, batch(item))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same(
    a: tuple[Tensor, dict[str, Tensor | None]], b: tuple[Tensor, dict[str, Tensor | None]]
) -> None:
    assert torch.equal(a[0], b[0])
    for name, wanted in a[1].items():
        found = b[1][name]
        assert (wanted is None) == (found is None), name
        assert wanted is None or torch.equal(wanted, found), name


@entries
def test_tapping_changes_no_bit_and_products_give_the_weight_gradients(item: Entry) -> None:
    model = build(item, experts_implementation="eager")
    plain = run(model, item)
    seen = Recorder()
    with Tap(model, seen) as tap:
        tapped = run(model, item)
    assert_same(plain, tapped)
    assert not tap.unsupported
    assert not tap.untapped
    assert all(type(p) is nn.Parameter for p in model.parameters())

    parameters = dict(model.named_parameters())
    for name in {product.parameter for product in seen.g}:
        if "embedding" in tap.uses.get(name, ()):  # tied: its gradient holds the look-up's too
            continue
        shape, gradient = parameters[name].shape, parameters[name].grad
        total, bound = (torch.zeros(shape.numel(), dtype=torch.float64) for _ in range(2))
        terms = 2
        for product, g in seen.g.items():
            if product.parameter == name:
                x, place = seen.x[product], (product.size, product.stride, product.offset)
                total.as_strided(*place).add_(g.T @ x)
                bound.as_strided(*place).add_(g.abs().T @ x.abs())
                terms += len(x)
        # a float32 sum of n products errs by at most n units of 2^-24 of the sum of magnitudes
        error = (total.view(shape) - gradient).abs()
        assert (error <= bound.view(shape) * terms * 2**-24 + 1e-30).all(), name


@entries
def test_every_parameter_is_accounted_for_and_rows_are_what_was_multiplied(item: Entry) -> None:
    model = build(item)
    inventory = model_inventory(model)
    announced = [live.layer for live in inventory.measured]
    resolved = set()

    class Check(Observer):
        def forward(self, product: Product, x: Tensor) -> None:
            for part in inventory.resolve(product.view):
                assert part.live.linear.shape[1] == x.shape[1]
                resolved.add(part.live)

        def backward(self, product: Product, g: Tensor) -> None:
            for part in inventory.resolve(product.view):
                assert part.gradient(g).shape[1] == part.live.linear.shape[0]

    with Tap(model, Check(), gradients="activations") as tap:
        loss_of(model, item, batch(item)).backward()
    inventory.settle(tap)
    assert [live.layer for live in inventory.measured] == announced, "names and use agree"
    assert resolved == set(inventory.measured)
    assert not inventory.unsupported
    excluded = sum(entry.parameters for entry in inventory.excluded)
    assert inventory.measured_parameters + excluded == inventory.matrix_parameters
    for live in inventory.measured:
        assert inventory.why_not_observed(live, "A", tap) is None
        reason = inventory.why_not_observed(live, "G", tap)
        assert reason in (None, WITHOUT_GRADIENT.get(item.name)), live.layer
        assert inventory.weight(live).shape == live.linear.shape


@entries
def test_without_weight_gradients_every_gradient_is_the_same(item: Entry) -> None:
    model = build(item)
    whole, alone = Recorder(), Recorder()
    with Tap(model, whole):
        loss, _ = run(model, item)
    flags = [p.requires_grad for p in model.parameters()]
    with Tap(model, alone, gradients="activations"):
        again, gradients = run(model, item)
    assert torch.equal(loss, again)
    assert all(gradient is None for gradient in gradients.values())
    assert flags == [p.requires_grad for p in model.parameters()]
    assert set(whole.g) == set(alone.g)
    for product, g in whole.g.items():
        # On some CPUs torch sums an input's gradient in another order where no parameter's is
        # asked for: float32 sums of a few hundred terms then differ by a few units in the last
        # place of the largest.
        close = 1e-6 * float(g.abs().max())
        assert torch.allclose(g, alone.g[product], rtol=0, atol=close), product


@entries
def test_operands_replaced_by_copies_change_no_bit(item: Entry) -> None:
    model = build(item, experts_implementation="eager")
    plain = run(model, item)
    with Tap(model, substitute=Unchanged()):
        substituted = run(model, item)
    assert_same(plain, substituted)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(
    "item", [item for item in ZOO if item.name in FUSED], ids=lambda item: item.name
)
def test_experts_are_seen_one_by_one_whatever_they_run_with(
    item: Entry, implementation: str
) -> None:
    eager = build(item, experts_implementation="eager")
    wanted = Recorder()
    with Tap(eager, wanted):
        reference = run(eager, item)

    model = build(item, experts_implementation=implementation)
    plain = run(model, item)
    switched, as_is = Recorder(), Recorder()
    with Tap(model, switched):
        assert_same(reference, run(model, item))
    assert model.get_experts_implementation()[""] == implementation
    with Tap(model, as_is, experts="as_is"):
        assert_same(plain, run(model, item))
    with Tap(model, substitute=Unchanged(), experts="as_is"):
        assert_same(plain, run(model, item))
    assert set(wanted.x) == set(switched.x) == set(as_is.x)
    for product, x in wanted.x.items():
        assert len(x) == len(as_is.x[product]), "an expert has exactly its tokens"
        a, b = (r.g[product].T @ r.x[product] for r in (wanted, as_is))
        # the same tokens in another order, through two layers of other float32 kernels
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * a.abs().max().item())
