"""Injections against hand-written arithmetic: values, places, axes, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hand_mx
from injection_inputs import ALL, numbers
from mxdiag.commands.impact.inject.configurations import COMPONENT_SETS, configurations
from mxdiag.commands.impact.inject.injector import Injector
from mxdiag.commands.impact.inject.plan import (
    PLAIN_MXFP4,
    Components,
    Corrected,
    InjectionPlan,
    Noisy,
    uniform,
)
from mxdiag.commands.impact.inject.values import corrected, injected
from mxdiag.commands.impact.measures import backward
from mxdiag.commands.impact.settings import ImpactSettings
from mxdiag.commands.scan.settings import ScanSettings
from mxdiag.errors import UsageError
from mxdiag.layers.linears import Linear
from mxdiag.model.inventory import model_inventory
from mxdiag.model.live import LiveLinear, Part
from mxdiag.quantize import reference
from mxdiag.quantize.corrections.registry import parse_corrections
from mxdiag.tap.layouts import WeightView
from mxdiag.tap.observers import Product
from mxdiag.tap.tap import Tap

CELLS = [
    ("W", "fprop"),
    ("A", "fprop"),
    ("G", "dgrad"),
    ("W", "dgrad"),
    ("G", "wgrad"),
    ("A", "wgrad"),
]


def tiny(seed: int = 0, **changes: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 61}
    config = LlamaConfig(
        **{**sizes, **changes}, num_attention_heads=2, num_key_value_heads=1, use_cache=False
    )
    return LlamaForCausalLM(config).eval()


def run_with(model: nn.Module, plan: InjectionPlan | None, call: Callable[[], Tensor]) -> Tensor:
    injector = Injector(model_inventory(model))
    with Tap(model, substitute=injector), injector.using(plan):
        return call()


# ---- exactness ---------------------------------------------------------------------------------


class PlainQ:
    """Q of both operands of fprop by the reference, in every layer but the head."""

    def fprop(self, product: Product, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        if product.parameter in ("lm_head.weight", "model.embed_tokens.weight"):
            return x, w
        return reference.quantize_dequantize(x), reference.quantize_dequantize(w)

    def dgrad(self, product: Product, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return g, w

    wgrad = dgrad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_components_are_plain_q_bit_for_bit(dtype: torch.dtype) -> None:
    model, ids = tiny().to(dtype), torch.arange(23).unsqueeze(0)
    plan = uniform(dict.fromkeys(CELLS[:2], Components(ALL)))
    with torch.no_grad():
        plain = model(ids).logits
        found = run_with(model, plan, lambda: model(ids).logits)
        with Tap(model, substitute=PlainQ()):
            wanted = model(ids).logits
    assert torch.equal(found, wanted)
    assert not torch.equal(found, plain)


@pytest.mark.parametrize(
    "plan",
    [None, uniform({}), uniform(dict.fromkeys(CELLS, Components(frozenset())))],
    ids=["no plan", "empty plan", "no components"],
)
def test_injecting_nothing_is_the_model_itself(plan: InjectionPlan | None) -> None:
    model, ids = tiny(), torch.arange(23).unsqueeze(0)
    bare = model(ids, labels=ids)
    wanted = torch.autograd.grad(bare.loss, list(model.parameters()))
    injector = Injector(model_inventory(model))
    layers = model_inventory(model).measured
    names = dict.fromkeys(live.view.parameter for live in layers)
    taken = backward.Gradients(model, layers)
    with Tap(model, substitute=injector), injector.using(plan):
        output = model(ids, labels=ids)
        found = taken.of(output.loss, keep_graph=False)
    assert torch.equal(output.logits, bare.logits)
    by_name = dict(zip((n for n, _ in model.named_parameters()), wanted, strict=True))
    assert all(torch.equal(found[name], by_name[name]) for name in names)


# ---- one layer, by hand ------------------------------------------------------------------------


def layer_case() -> tuple[nn.Linear, Tensor, Tensor]:
    layer = nn.Linear(40, 24, bias=False)  # ragged blocks on every axis
    layer.weight.data.copy_(numbers(24, 40, seed=1))
    return layer, numbers(37, 40, seed=2), numbers(37, 24, seed=3)


def three(layer: nn.Linear, x: Tensor, g: Tensor, plan: InjectionPlan) -> tuple[np.ndarray, ...]:
    """Y, dX and dW under a plan."""
    x = x.clone().requires_grad_()
    injector = Injector(model_inventory(layer))
    with Tap(layer, substitute=injector), injector.using(plan):
        y = layer(x)
        y.backward(g)
    dw, layer.weight.grad = layer.weight.grad, None
    return tuple(t.detach().numpy() for t in (y, x.grad, dw))


@pytest.mark.parametrize("cells", [*[[cell] for cell in CELLS], CELLS], ids=str)
@pytest.mark.parametrize("name", COMPONENT_SETS)
def test_a_linear_layer_is_what_float64_gives(name: str, cells: list[tuple[str, str]]) -> None:
    layer, x, g = layer_case()
    components = COMPONENT_SETS[name]
    found = three(layer, x, g, uniform(dict.fromkeys(cells, Components(components))))

    def hand(t: Tensor, operand: str, gemm: str, axis: int) -> np.ndarray:
        values = t.detach().numpy()
        if (operand, gemm) in cells:
            values = hand_mx.injected(values, components, axis)
        return values.astype(np.float64)

    w = layer.weight
    wanted = (
        hand(x, "A", "fprop", 1) @ hand(w, "W", "fprop", 1).T,
        hand(g, "G", "dgrad", 1) @ hand(w, "W", "dgrad", 0),
        hand(g, "G", "wgrad", 0).T @ hand(x, "A", "wgrad", 0),
    )
    for one, other in zip(found, wanted, strict=True):
        # float32 products of up to 40 terms: 40 * 2^-24 of the sum of magnitudes, here below 100
        np.testing.assert_allclose(one, other, rtol=0, atol=2.5e-4)


def test_a_layer_under_w4a8() -> None:
    layer, x, g = layer_case()
    (configuration,) = configurations(ImpactSettings(configs=("w4a8",), passes=("forward",)))
    y, _, _ = three(layer, x, g, configuration.plan)
    blocks = np.pad(x.numpy().astype(np.float64), ((0, 0), (0, 24))).reshape(37, 2, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(np.where(amax == 0, 1, amax) / 448))
    eight = (blocks / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    wanted = eight.reshape(37, 64)[:, :40] @ hand_mx.q(layer.weight.detach().numpy(), 1).T
    np.testing.assert_allclose(y, wanted, rtol=0, atol=2.5e-4)  # as above


def test_a_layer_under_a_correction() -> None:
    layer, x, g = layer_case()
    (of,) = parse_corrections("of:0.5")
    found = three(layer, x, g, uniform(dict.fromkeys(CELLS, Corrected(of))))

    def hand(t: Tensor, axis: int) -> np.ndarray:
        values = t.detach().numpy()
        first = hand_mx.q(values, axis)
        return first + 0.5 * hand_mx.q(values - first, axis)

    w = layer.weight
    wanted = (hand(x, 1) @ hand(w, 1).T, hand(g, 1) @ hand(w, 0), hand(g, 0).T @ hand(x, 0))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2.5e-4)  # as above


def test_two_layers_straight_through() -> None:
    """The second layer's dX feeds the first one's G: only the GEMM asked for is touched."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24, bias=False), nn.Tanh(), nn.Linear(24, 33, bias=False))
    x = numbers(37, 40, seed=2)
    w1, w2 = (p.detach().numpy().astype(np.float64) for p in model.parameters())
    h = np.tanh(x.numpy().astype(np.float64) @ w1.T)
    g2 = h @ w2.T  # loss: half the squared output
    for cells in [[cell] for cell in CELLS[2:]]:
        ((operand, gemm),) = cells

        def hand(t: np.ndarray, which: str, product: str, axis: int) -> np.ndarray:
            asked = (which, product) == (operand, gemm)  # noqa: B023
            return hand_mx.q(t.astype(np.float32), axis) if asked else t

        dh = hand(g2, "G", "dgrad", 1) @ hand(w2, "W", "dgrad", 0)
        g1 = dh * (1 - h**2)
        wanted = (
            hand(g1, "G", "wgrad", 0).T @ hand(x.numpy(), "A", "wgrad", 0),
            hand(g2, "G", "wgrad", 0).T @ hand(h, "A", "wgrad", 0),
        )
        injector = Injector(model_inventory(model))
        model.zero_grad()
        with Tap(model, substitute=injector):
            y = model(x)
            with injector.using(uniform(dict.fromkeys(cells, PLAIN_MXFP4))):
                (y.square().sum() / 2).backward()
        for parameter, value in zip(model.parameters(), wanted, strict=True):
            difference = np.abs(parameter.grad.numpy() - value)
            # float32 may round an element that lies on a threshold the other way: few do
            assert np.quantile(difference, 0.95) < 1e-4 * np.abs(value).max()


def test_wgrad_blocks_run_along_tokens() -> None:
    """One token of 1000 among ones: its block of 32 tokens becomes 1024 and zeros."""
    layer = nn.Linear(32, 1, bias=False)
    x = torch.ones(33, 32)
    x[0] = 1000.0
    ones = torch.ones(33, 1)
    plan = uniform({("A", "wgrad"): PLAIN_MXFP4})
    _, _, dw = three(layer, x, ones, plan)
    assert (dw == 1024 + 1).all()  # the 33rd token starts a block of its own
    _, _, dw = three(layer, x, ones, uniform({}))
    assert (dw == 1000 + 32).all()


# ---- places ------------------------------------------------------------------------------------


class Resolves:
    """An inventory that finds two layers in a product's weight: rows 0..19 and 20..."""

    def resolve(self, view: WeightView) -> tuple[Part, ...]:
        parts = []
        for name, rows in (("first", slice(0, 20, 1)), ("second", slice(20, 44, 1))):
            linear = Linear(name, name, None, "w", 0, (rows.stop - rows.start, 40), (40, 1))
            parts.append(Part(LiveLinear(linear, view), rows))
        return tuple(parts)


def test_layers_in_one_weight_are_injected_one_by_one() -> None:
    w, x, g = numbers(44, 40, seed=1), numbers(9, 40, seed=2), numbers(9, 44, seed=3)
    product = Product(WeightView("w", 0, (44, 40), (40, 1)), 0)
    injector = Injector(Resolves())  # type: ignore[arg-type]

    def only_second(linear: Linear, operand: str, gemm: str) -> Components | None:
        return PLAIN_MXFP4 if linear.layer == "second" else None

    with injector.using(only_second):
        x_new, w_new = injector.fprop(product, x, w)
        g_new, w_back = injector.dgrad(product, g, w)
    assert x_new is x, "X goes by the first layer"
    assert torch.equal(w_new[:20], w[:20])
    assert torch.equal(w_new[20:], reference.quantize_dequantize(w[20:]))
    assert torch.equal(g_new[:, 20:], reference.quantize_dequantize(g[:, 20:]))
    assert torch.equal(w_back[20:], reference.quantize_dequantize(w[20:], 0))
    assert torch.equal(g_new[:, :20], g[:, :20])
    with injector.using(uniform({("G", "dgrad"): PLAIN_MXFP4})):
        g_new, w_back = injector.dgrad(product, g, w)
    assert w_back is w
    # blocks start anew with each layer: 20 columns, then 24
    assert torch.equal(g_new[:, :20], reference.quantize_dequantize(g[:, :20]))
    assert torch.equal(g_new[:, 20:], reference.quantize_dequantize(g[:, 20:]))
    assert not torch.equal(g_new, reference.quantize_dequantize(g))


def test_excluded_layers_compute_as_before() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"lm_head": nn.Linear(32, 8, bias=False)})
    x = numbers(5, 32)
    plan = uniform(dict.fromkeys(CELLS, PLAIN_MXFP4))
    wanted = model["lm_head"](x)
    assert torch.equal(run_with(model, plan, lambda: model["lm_head"](x)), wanted)


def test_kept_weights_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from mxdiag.commands.impact.inject import injector as module

    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        module, "injected", lambda x, *args: made.append(tuple(x.shape)) or injected(x, *args)
    )
    layer, x = nn.Linear(32, 8), numbers(5, 32)
    plan, injector = uniform({("W", "fprop"): PLAIN_MXFP4}), Injector(model_inventory(layer))
    with Tap(layer, substitute=injector):
        with injector.using(plan, keep_weights=True):
            assert torch.equal(layer(x), layer(x))
        assert len(made) == 1
        with injector.using(plan):
            layer(x), layer(x)
    assert len(made) == 3


def test_layers_that_share_an_input_share_its_injection(monkeypatch: pytest.MonkeyPatch) -> None:
    from mxdiag.commands.impact.inject import injector as module

    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        module, "injected", lambda x, *args: made.append(tuple(x.shape)) or injected(x, *args)
    )
    model = nn.ModuleList(nn.Linear(32, 8) for _ in range(3))
    x, injector = numbers(5, 32), Injector(model_inventory(model))
    with Tap(model, substitute=injector), injector.using(uniform({("A", "fprop"): PLAIN_MXFP4})):
        first = [layer(x) for layer in model]
        x += 1  # in place: the same memory holds another input
        second = [layer(x) for layer in model]
    assert len(made) == 2
    assert not torch.equal(first[0], second[0])


# ---- values ------------------------------------------------------------------------------------


COMPOSED = [
    *("mbs", "mbs:32", "of", "of:0.3", "of:1", "mbs+of", "mbs:256+of:0.7", "nvfp4", "mxfp8"),
    *("bf16", "scale:mse"),
]


@pytest.mark.parametrize("name", [*COMPOSED, "mbs:search", "hadamard", "scale:m3"])
@pytest.mark.parametrize("axis", [0, 1])
def test_corrected_values_are_the_reference_s(
    name: str, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, by composition where there is one, in every dtype, ragged ends included."""
    from mxdiag.commands.impact.inject import values as module
    from mxdiag.quantize.corrections.evaluate import correct

    monkeypatch.setattr(module, "_CHUNK", 4096)
    (correction,) = parse_corrections([name])
    shape = (96, 128) if name == "hadamard" else (150, 170)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = numbers(*shape).to(dtype)
        x[:, :40] *= 2.0**-10
        wanted = correct(x, correction, axis).to(dtype)
        assert torch.equal(corrected(x, correction, axis, "rceil", "auto", 0), wanted)


@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
@pytest.mark.parametrize("name", COMPOSED)
def test_compositions_under_other_scale_rules(name: str, rule: str) -> None:
    from mxdiag.quantize.corrections.evaluate import correct

    (correction,) = parse_corrections([name])
    x = numbers(150, 170)
    wanted = correct(x, correction, 1, rule).to(x.dtype)
    assert torch.equal(corrected(x, correction, 1, rule, "auto", 0), wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-40, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("name", COMPOSED)
def test_extreme_values_are_left_to_the_reference(name: str, value: float) -> None:
    from mxdiag.quantize.corrections.evaluate import correct

    (correction,) = parse_corrections([name])
    x = numbers(8, 96)
    x[3] = 0.0
    x[3, 40:60] = value
    wanted = correct(x, correction, 1).to(x.dtype)
    found = corrected(x, correction, 1, "rceil", "auto", 0)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


def test_stochastic_rounding_draws_by_seed_and_is_unbiased() -> None:
    (sr,) = parse_corrections(["sr"])
    x = numbers(64, 64)
    draws = [injected(x, Corrected(sr), 1, "rceil", "auto", seed) for seed in range(200)]
    assert torch.equal(draws[3], injected(x, Corrected(sr), 1, "rceil", "auto", 3))
    assert not torch.equal(draws[0], draws[1])
    mean = torch.stack(draws).mean(0)
    # a step is at most amax / 3; its mean of 200 deviates by sqrt(1/4/200) of it, here at 6 sigma
    assert float((mean - x).abs().max()) < 6 * 0.0354 * float(x.abs().max()) / 3


def test_noise_is_of_the_asked_size_and_seeded() -> None:
    w = numbers(256, 256)
    noisy = Noisy(0.5)
    one, same, other = (injected(w, noisy, 1, "rceil", "auto", seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    plain = injected(w, PLAIN_MXFP4, 1, "rceil", "auto", 0)
    added = float((one - w).square().mean() - (plain - w).square().mean())
    # the quantizer's own error grows with the noisy amplitude, by some percent of a percent
    assert added == pytest.approx(0.25 * float(w.square().mean()), rel=0.1)


# ---- configurations ----------------------------------------------------------------------------


def test_the_default_list() -> None:
    found = configurations(ImpactSettings(scan=ScanSettings(corrections=("mbs", "of"))))
    forward_sets = [(c.name, c.operands) for c in found if c.which == "forward"]
    assert forward_sets[:3] == [("all", "W"), ("all", "A"), ("all", "WA")]
    assert len(forward_sets) == 7 * 3 + 2 + 3 + 1
    assert [c.operands for c in found if c.which == "backward"] == ["G", "GWA"] * 7 + ["GWA"] * 2
    assert [c.operands for c in found if c.which == "both"] == ["GWA"] * 9
    assert len({(c.which, c.name, c.operands) for c in found}) == len(found)


def test_the_gemms_of_each_pass() -> None:
    linear = Linear("a", "a", None, "a", 0, (1, 1), (1, 1))
    for which, operands, wanted in (
        ("forward", "WA", {("W", "fprop"), ("A", "fprop")}),
        ("backward", "G", {("G", "dgrad"), ("G", "wgrad")}),
        ("backward", "GWA", {("G", "dgrad"), ("G", "wgrad"), ("W", "dgrad"), ("A", "wgrad")}),
        ("both", "GWA", set(CELLS)),
    ):
        settings = ImpactSettings(configs=("grid",), passes=(which,), operands=(operands,))
        (found,) = configurations(settings)
        assert {cell for cell in CELLS if found.plan(linear, *cell)} == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"configs": ("scael",)}, "scael"),
        ({"configs": ()}, "names nothing"),
        ({"passes": ("sideways",)}, "sideways"),
        ({"operands": ("GW",)}, "GW"),
        ({"repeats": 0}, "at least 1"),
        ({"configs": ("w4a8",), "passes": ("backward",)}, "take no part"),
        ({"aqn_sigmas": (float("nan"),)}, "out of range"),
        ({"jitter": -1.0}, "out of range"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        configurations(ImpactSettings(**options))
