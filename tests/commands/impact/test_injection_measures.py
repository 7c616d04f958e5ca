"""The measures of an impact: tokens, temperatures, gradients, causes, noise and routing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from injection_inputs import ALL, numbers
from mxdiag.commands.impact.measures import backward, forward, routing
from mxdiag.commands.impact.measures.attribution import COMPONENTS, shapley
from mxdiag.commands.impact.measures.depth import depth_of
from mxdiag.commands.impact.measures.noise import Jitter, mean_and_sd
from mxdiag.commands.impact.measures.temperature import TEMPERATURES, TemperatureTable, predicted
from mxdiag.model.inventory import model_inventory

# ---- measures ----------------------------------------------------------------------------------


def test_token_statistics_against_float64() -> None:
    torch.manual_seed(0)
    z, other = 3 * torch.randn(700, 900), torch.randn(700, 900)
    labels = torch.randint(0, 900, (700,))
    labels[::7] = -100
    position = forward.Positions(z, labels)
    made = forward.Reference.of(position)
    found = made.compare(z + 0.3 * other)
    p, q = (torch.log_softmax(t.double(), -1) for t in (z, (z + 0.3 * other)))
    error = (z + 0.3 * other).double() - z.double()
    wanted = {
        "kl": (p.exp() * (p - q)).sum(-1),
        "agreement": (p.argmax(-1) == q.argmax(-1)).double(),
        "entropy": -(q.exp() * q).sum(-1),
        "nll": torch.where(labels < 0, torch.nan, -q[range(700), labels.clamp(min=0)]),
        "cross": (q.exp() * p).sum(-1),
        "error_var": error.var(-1, unbiased=False),
    }
    for name, values in wanted.items():
        # float32 sums of 900 terms of magnitude up to 20
        np.testing.assert_allclose(found[:, forward.COLUMN[name]], values, rtol=1e-4, atol=1e-5)
    itself = made.compare(z)
    assert (itself[:, forward.COLUMN["kl"]] == 0).all()
    assert (itself[:, forward.COLUMN["agreement"]] == 1).all()
    assert (itself[:, forward.COLUMN["error_var"]] == 0).all()


def test_temperatures_are_recovered() -> None:
    torch.manual_seed(0)
    z = 4 * torch.randn(500, 300)
    made = forward.Reference.of(forward.Positions(z, torch.full((500,), -100)))
    own = made.compare(z).sum(0)
    cross, entropy = (float(own[forward.COLUMN[name]]) for name in ("cross", "entropy"))
    table = TemperatureTable.of(made).anchored(cross, entropy)
    assert table.temperature_of_cross(cross) == 1.0
    assert table.temperature_of_entropy(entropy) == 1.0
    for temperature in (0.3, 0.55, 0.93, 1.03, 1.17, 1.5, 3.1, 6.0):
        sums = made.compare(z / temperature).sum(0)
        found = [
            table.temperature_of_cross(float(sums[forward.COLUMN["cross"]])),
            table.temperature_of_entropy(float(sums[forward.COLUMN["entropy"]])),
        ]
        # cubic interpolation between neighbouring temperatures
        assert found == pytest.approx([temperature, temperature], rel=2e-3)
    assert np.isnan(table.temperature_of_cross(float(table.cross[0]) + 1.0))
    assert TEMPERATURES[0] < 1 < TEMPERATURES[-1]


def test_the_least_divergence_is_at_the_measured_temperature() -> None:
    """The stationary point against a search over T of the mean KL itself."""
    torch.manual_seed(0)
    z = 2 * torch.randn(300, 200)
    noisy = z / 1.2 + 0.7 * torch.randn(300, 200)
    made = forward.Reference.of(forward.Positions(z, torch.full((300,), -100)))
    sums = made.compare(noisy).sum(0)
    found = TemperatureTable.of(made).temperature_of_cross(float(sums[forward.COLUMN["cross"]]))
    q = torch.log_softmax(noisy.double(), -1)

    def divergence(temperature: float) -> float:
        p = torch.log_softmax(z.double() / temperature, -1)
        return float((q.exp() * (q - p)).sum(-1).mean())

    grid = np.linspace(found - 0.05, found + 0.05, 101)
    best = grid[int(np.argmin([divergence(t) for t in grid]))]
    assert found == pytest.approx(best, abs=0.002)  # two steps of the search


def test_the_predicted_temperature() -> None:
    assert predicted(0.0, 2.0) == 1.0
    assert predicted(2.0, 2.0) == pytest.approx(2**0.5)
    assert np.isnan(predicted(1.0, 0.0))


def test_gradient_sums_against_float64() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(300, 50), "b": nn.Linear(20, 30)})
    layers = model_inventory(model).measured
    taken = backward.Gradients(model, layers)
    r = {"a.weight": torch.randn(50, 300), "b.weight": torch.randn(30, 20)}
    g = {name: value + 0.1 * torch.randn_like(value) for name, value in r.items()}
    sums = taken.compare(g, r, taken.norms(r))
    for row, live in zip(sums, layers, strict=True):
        one, two = (t[live.view.parameter].double().flatten() for t in (g, r))
        wanted = [one @ one, one @ two, (one - two).square().sum(), two @ two]
        np.testing.assert_allclose(row, [float(v) for v in wanted], rtol=1e-6)  # float32 rows
    cosines = [torch.cosine_similarity(g[n].flatten(), r[n].flatten(), 0) for n in g]
    np.testing.assert_allclose(backward.cosine(sums), cosines, rtol=1e-5)
    same = taken.compare(r, r, taken.norms(r))
    assert (backward.norm_ratio(same) == 1).all()
    assert np.isnan(backward.snr_db(same)).all(), "an exact gradient has no noise"


def test_gradients_leave_grad_alone_and_may_be_absent() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(4, 3)})
    layers = model_inventory(model).measured
    taken = backward.Gradients(model, layers)
    found = taken.of(model["used"](torch.ones(2, 4)).sum(), keep_graph=False)
    assert found["unused.weight"] is None
    assert all(p.grad is None for p in model.parameters())
    sums = taken.compare(found, found, taken.norms(found))
    assert np.isnan(backward.cosine(sums)).tolist() == [False, True]


def test_shapley_adds_up_and_ignores_the_order() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        values = {}

        def value(present: frozenset[str]) -> float:
            return values.setdefault(present, float(generator.normal()))  # noqa: B023

        shares = shapley(value)
        total = value(ALL) - value(frozenset())
        assert sum(shares[name] for name in COMPONENTS) == pytest.approx(total, abs=1e-12)
        assert shares["total"] == total
    # additive effects are attributed as they are; an interaction is split evenly
    effect = {"scale": 3.0, "deadzone": 1.0, "grid": 0.5}

    def together(present: frozenset[str]) -> float:
        own = sum(effect[name] for name in present)
        return own - (2.0 if {"scale", "grid"} <= present else 0.0)

    shares = shapley(together)
    assert shares == pytest.approx({"scale": 2.0, "deadzone": 1.0, "grid": -0.5, "total": 2.5})


# ---- noise -------------------------------------------------------------------------------------


def test_jitter_is_relative_and_follows_repeat_and_record() -> None:
    jitter, x = Jitter(1e-6, seed=5), numbers(64, 64) + 3

    def draw(repeat: int, record: int) -> Tensor:
        jitter.begin(repeat, record)
        return jitter.moved(x)

    one = draw(0, 0)
    assert torch.equal(one, draw(0, 0))
    assert not torch.equal(one, draw(1, 0))
    assert not torch.equal(one, draw(0, 1))
    relative = ((one.double() - x.double()) / x.double()).square().mean().sqrt()
    assert float(relative) == pytest.approx(1e-6, rel=0.1)  # 4096 draws, float32 ulps of 1e-7
    assert jitter.moved(torch.arange(3)).dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_jitter_of_16_bit_values_keeps_the_mean(dtype: torch.dtype) -> None:
    x = (0.9 * torch.rand(2000, 500) + 1.05).to(dtype)  # within one binade
    x[0, 0] = 0.0
    jitter = Jitter(1e-6, seed=5)
    jitter.begin(0, 0)
    moved = jitter.moved(x)
    step = torch.finfo(dtype).eps
    changes = (moved.double() - x.double())[x != moved]
    assert 0 < len(changes) < 0.01 * x.numel()
    assert (changes.abs() == step).all(), "a move is to the neighbour"
    # chance of a move: E|1e-6 n x| / step with E|n| = 0.8 and x = 1.5 on average
    assert len(changes) / x.numel() == pytest.approx(1.2e-6 / step, rel=0.2)
    assert moved[0, 0] == 0


def test_mean_and_sd() -> None:
    assert mean_and_sd([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert mean_and_sd([1.0]) == (1.0, None)
    assert mean_and_sd([1.0, float("nan")]) == (None, None)


# ---- mixtures ----------------------------------------------------------------------------------


def test_changed_choices_are_counted_as_sets() -> None:
    before = {"m": [torch.tensor([[0, 1], [2, 3], [4, 5]])]}
    after = {"m": [torch.tensor([[1, 0], [2, 7], [6, 7]])]}
    assert routing.changed(before, after) == (3.0, 6.0)
    assert routing.changed(before, before) == (0.0, 6.0)
    assert routing.changed(before, {}) == (0.0, 0.0)


def test_choices_of_a_mixture_are_seen() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=50,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    stacks = [name for name, p in model.named_parameters() if p.dim() > 2]
    seen = routing.Routing(*routing.mixture_modules(model, stacks))
    with seen.attached(model), torch.no_grad():
        seen.begin()
        model(torch.arange(11).unsqueeze(0))
        found = seen.taken()
    assert [tuple(c.shape) for choices in found.values() for c in choices] == [(11, 2)] * 2
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_depth_is_the_first_index_of_a_name() -> None:
    assert depth_of("model.layers.12.mlp.experts.3.gate_proj") == 12
    assert depth_of("transformer.h.0.attn.c_attn") == 0
    assert depth_of("lm_head") is None
