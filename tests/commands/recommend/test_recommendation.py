"""Recommendations: known best corrections, targets, budgets against brute force, fused groups."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch

from mxdiag.commands.recommend import allocation
from mxdiag.commands.recommend.choose import Recommendation, choose
from mxdiag.errors import UsageError
from mxdiag.layers.fusing import fused_group
from mxdiag.quantize import reference
from mxdiag.quantize.corrections.evaluate import evaluate_corrections
from mxdiag.quantize.corrections.registry import parse_corrections

#: MSE ratios that N(0, 1) has.
GAUSSIAN = {
    "mbs": 0.89,
    "of": 0.25,
    "mbs+of": 0.222,
    "scale:mse": 0.934,
    "nvfp4": 0.68,
    "mxfp8": 0.053,
}


def row(
    layer: str = "layers.0.self_attn.o_proj",
    operand: str = "W",
    gemm: str = "fprop",
    sqnr_db: float | None = 18.75,
    ratios: dict[str, float] | None = None,
    **columns,
) -> dict:
    shares = {"reducible": 0.23, "recoverable": 0.02, "irreducible": 0.75}
    base = {
        "layer": layer,
        "role": layer.rpartition(".")[2],
        "expert": None,
        "operand": operand,
        "gemm": gemm,
        "status": "ok",
        "numel": 1024,
        "rel_mse": None if sqnr_db is None else 10 ** (-sqnr_db / 10),
        "sqnr_db": sqnr_db,
        **shares,
    }
    measured = GAUSSIAN if ratios is None else ratios
    return {**base, **{f"mse_ratio:{name}": value for name, value in measured.items()}, **columns}


def measured_row(x: torch.Tensor, names: str, operand: str = "W", gemm: str = "fprop") -> dict:
    """The row of a tensor [rows, K]."""
    sums = reference.measure(x[..., None])
    signal, error, deadzone, grid = (float(sums.sums[i]) for i in (0, 1, 3, 4))
    raw = evaluate_corrections(x[..., None], "rceil", parse_corrections(names))
    return row(
        operand=operand,
        gemm=gemm,
        sqnr_db=10 * math.log10(signal / error),
        ratios={name: values[0] / error for name, values in raw.items()},
        numel=x.numel(),
        reducible=1 - (deadzone + grid) / error,
        recoverable=deadzone / error,
        irreducible=grid / error,
    )


def chosen(result: Recommendation) -> list[str | None]:
    return [choice.recommended for choice in result.choices]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------- tensors with a known best


def offset_scales() -> torch.Tensor:
    """Every block's amax is 7: one scale offset throughout, too far above 6 to saturate well."""
    x = normal(64, 512).clamp(-3, 3).unflatten(-1, (16, 32))
    return (x / x.abs().amax(-1, keepdim=True) * 7).flatten(-2)


def one_outlier_a_block() -> torch.Tensor:
    """The rest lies in the deadzone of the outlier."""
    x = normal(64, 512).unflatten(-1, (16, 32)) * 0.1
    x[..., 0], x[..., 16] = 6.0, 6.0  # NVFP4's smaller blocks do not get rid of it
    return x.flatten(-2)


def spiky_rows() -> torch.Tensor:
    """Heavy tails: a few elements of each block are far above the rest."""
    x = normal(64, 512)
    return x * x.abs() ** 1.5


NAMES = "default,hadamard,scale:m2"


def test_uniform_scale_offset_gets_macro_block_scaling():
    best = measured_row(offset_scales(), NAMES)
    result = choose([best], target_mse_ratio=best["mse_ratio:mbs"] * 1.001)
    assert chosen(result) == ["mbs"]
    assert best["mse_ratio:mbs"] < best["mse_ratio:scale:m2"] < best["mse_ratio:scale:mse"] < 1
    # With one amax throughout, a macro block does reach the floor.
    floor = best["recoverable"] + best["irreducible"]
    assert best["mse_ratio:mbs"] == pytest.approx(floor, rel=0.02)
    assert "reducible scale bias" in result.choices[0].reason


def test_one_outlier_a_block_gets_outlier_fallback():
    best = measured_row(one_outlier_a_block(), NAMES, "A")
    result = choose([best], target_mse_ratio=0.3)
    assert chosen(result) == ["of"]
    assert best["recoverable"] > 0.9
    reason = result.choices[0].reason
    assert reason.startswith("A·fprop: 9")
    assert "recoverable deadzone; of brings it from" in reason
    assert reason.endswith("for 4.25 bits and a second GEMM pass (rollout quality)")


def test_a_gaussian_gets_the_smaller_blocks_of_nvfp4():
    best = measured_row(normal(256, 512), NAMES)
    assert chosen(choose([best], target_mse_ratio=0.7)) == ["nvfp4"]
    # And nothing at all under the default target.
    assert chosen(choose([best], allow="mbs,of")) == ["mxfp4"]


def test_spiky_rows_get_a_rotation():
    best = measured_row(spiky_rows(), NAMES, "A")
    result = choose([best], target_sqnr=18.0)
    assert best["sqnr_db"] < 17
    assert chosen(result) == ["hadamard"]
    assert "for a rotation of both operands" in result.choices[0].reason


# ---------------------------------------------------------------- targets


def test_the_cheapest_candidate_that_meets_the_target():
    for target, best in (
        (18.0, "scale:mse"),  # free, and the weights' scales are searched offline
        (19.2, "mbs"),
        (20.4, "nvfp4"),
        (24.7, "of"),
        (25.2, "mbs+of"),
        (31.0, "mxfp8"),
        (40.0, "bf16"),
    ):
        assert chosen(choose([row()], target_sqnr=target)) == [best], target
    assert chosen(choose([row(operand="A")], target_sqnr=18.0)) == ["mxfp4"]
    assert chosen(choose([row()], target_mse_ratio=0.25)) == ["of"]
    both = choose([row()], target_sqnr=18, target_mse_ratio=0.23)
    assert chosen(both) == ["mbs+of"]
    assert both.targets == {"target_sqnr": 18, "target_mse_ratio": 0.23}


def test_default_target():
    result = choose([row("a", "A", sqnr_db=15.3), row("b", "A")])
    assert chosen(result) == ["of", "mxfp4"]
    assert result.targets == {"target_sqnr": 18.0}
    assert choose([row()]).choices[0].sqnr_db == pytest.approx(18.75 - 10 * math.log10(0.934))


def test_reasons_state_numbers_cost_and_failure_mode():
    rows = [
        row("l.0.o_proj", "A", "fprop", 15.3, recoverable=0.44, irreducible=0.4, reducible=0.16),
        row("l.0.o_proj", "G", "dgrad", 16.0, recoverable=0.44, irreducible=0.4, reducible=0.16),
        row("l.0.o_proj", "A", "wgrad", 17.9),
        row("l.1.o_proj", "A", "fprop", 18.5),
    ]
    reasons = [choice.reason for choice in choose(rows, allow="of").choices]
    cost = "for 4.25 bits and a second GEMM pass"
    share = "44 % of the error is recoverable deadzone"
    assert reasons == [
        f"A·fprop: {share}; of brings it from 15.3 to 21.3 dB {cost} (rollout quality)",
        f"G·dgrad: {share}; of brings it from 16.0 to 22.0 dB {cost} (gradient accuracy)",
        "A·wgrad: 75 % of the error is irreducible grid noise; of brings it from 17.9 to 23.9 dB "
        f"{cost} (gradient accuracy)",
        "A·fprop: plain MXFP4 has 18.5 dB, which meets 18 dB; what is left (75 % grid noise) acts "
        "on entropy",
    ]


def test_a_reason_tells_what_large_tokens_hide():
    hidden = choose([row(operand="A", sqnr_db=21.0, sqnr_db_token=16.7)]).choices[0].reason
    assert "21.0 dB (16.7 dB per token), which meets 18 dB" in hidden
    alike = choose([row(operand="A", sqnr_db=21.0, sqnr_db_token=20.7)]).choices[0].reason
    assert "per token" not in alike


def test_where_nothing_helps_bf16_is_said_with_its_cost():
    result = choose([row()], target_sqnr=40, allow="mbs,of")
    (choice,) = result.choices
    assert choice.recommended == "bf16"
    assert choice.reason == (
        "W·fprop: no correction reaches 40 dB (the best, of, leaves 24.8 dB); bf16 for 11.75 bits "
        "(rollout quality)"
    )
    assert (choice.mse_ratio, choice.sqnr_db) == (0.0, None)
    assert result.totals["W"]["bits_after"] == 16
    bare = choose([row(ratios={})], target_sqnr=40).choices[0]
    assert "no correction reaches 40 dB (none was evaluated)" in bare.reason


def test_bf16_counts_what_was_measured():
    float32 = row(ratios={"bf16": 0.0002})
    assert choose([float32], target_sqnr=40).choices[0].mse_ratio == 0.0002


def test_rows_without_an_error_to_correct():
    rows = [
        row(status="exact", rel_mse=0.0, sqnr_db=None, ratios={}),
        row("b", status="zero", rel_mse=None, sqnr_db=None, ratios={}),
        row("c", status="nonfinite"),
        row("d", "A", status="not_observed", rel_mse=None, numel=0, ratios={}),
        row("e", "A", status="not_observed", rel_mse=math.nan, numel=math.nan, ratios={}),
    ]
    for options in ({}, {"max_bits": 4.25}, {"target_sqnr": 99}):
        result = choose(rows, **options)
        assert chosen(result) == ["mxfp4", "mxfp4", None, None, None]
        assert "exactly" in result.choices[0].reason
        assert "zeros" in result.choices[1].reason
        assert "NaN" in result.choices[2].reason
        assert "not observed" in result.choices[3].reason
        assert result.totals["W"]["rows"] == 2
        assert "A" not in result.totals
        assert any("3 rows" in sentence for sentence in result.sentences)
        assert result.schedule is None


def test_noise_and_stochastic_rounding_are_no_error_fixes():
    ratios = {"aqn": 0.5, "sr": 0.5, "mbs": 0.9}
    assert chosen(choose([row(ratios=ratios)], target_sqnr=21)) == ["bf16"]
    assert chosen(choose([row(ratios=ratios)], max_bits=4.5)) == ["mbs"]


def test_corrections_for_weights_are_not_offered_to_activations():
    ratios = {"block2d": 0.1, "mbs": 0.9}
    assert chosen(choose([row(ratios=ratios)], target_sqnr=20)) == ["block2d"]
    assert chosen(choose([row(operand="A", ratios=ratios)], target_sqnr=20)) == ["bf16"]
    assert "saves 0.24 bits" in choose([row(ratios=ratios)], target_sqnr=20).choices[0].reason


def test_a_frame_gives_the_same_as_its_rows():
    rows = [row(f"layers.{i}.mlp.down_proj", sqnr_db=17 + i, expert=None) for i in range(4)]
    rows += [row("e", "A", status="not_observed", rel_mse=None, numel=None, ratios={})]
    frame = pd.DataFrame(rows)
    frame["expert"] = frame["expert"].astype("Int64")
    assert choose(frame).choices == choose(rows).choices
    assert choose([]).choices == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_sqnr": math.nan}, "--target-sqnr"),
        ({"target_mse_ratio": 0}, "--target-mse-ratio"),
        ({"max_bits": -4}, "--max-bits"),
        ({"max_bits": 4.0}, r"the least is 4\.2500|The least is 4\.2500"),
        ({"allow": "foo"}, "unknown correction"),
        ({"allow": "mbs:64"}, "did not evaluate mbs:64"),
        ({"fuse": "all"}, "--fuse"),
        ({"sensitivities": {}}, "--max-bits"),
        ({"sensitivities": {}, "max_bits": 5}, "no sensitivity"),
        ({"sensitivities": {"layers.0.self_attn.o_proj": None}, "max_bits": 5}, "no sensitivity"),
    ],
)
def test_bad_requests_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        choose([row()], **options)


def test_a_budget_needs_weights():
    with pytest.raises(UsageError, match="no weight rows"):
        choose([row(operand="A")], max_bits=5)


# ---------------------------------------------------------------- fused groups


@pytest.mark.parametrize(
    ("layers", "expert"),
    [
        ("a.self_attn.q_proj a.self_attn.k_proj a.self_attn.v_proj", None),
        ("a.mlp.gate_proj a.mlp.up_proj", None),
        ("a.attention.self.query a.attention.self.key a.attention.self.value", None),
        ("a.mlp.experts.0.gate_proj a.mlp.experts.0.up_proj a.mlp.experts.0.down_proj", 0),
        ("a.mlp.experts.0.gate_proj a.mlp.experts.17.down_proj", 0),
        ("a.mlp.experts.gate_up_proj[5].gate_proj a.mlp.experts.down_proj[6]", 5),
        ("a.block_sparse_moe.local_experts.0.w1 a.block_sparse_moe.local_experts.1.w2", 0),
        ("a.ffn.w1[3] a.ffn.w2[0]", 3),
    ],
)
def test_what_serving_stacks_fuse(layers, expert):
    names = layers.split()
    assert len({fused_group(name, expert) for name in names}) == 1
    assert {fused_group(name, expert, "none") for name in names} == set(names)
    elsewhere = {fused_group("b" + name[1:], expert) for name in names}
    assert elsewhere.isdisjoint(fused_group(name, expert) for name in names)


def test_what_is_not_fused():
    names = ["a.self_attn.q_proj", "a.self_attn.o_proj", "a.mlp.gate_proj", "a.mlp.down_proj"]
    names += ["a.mlp.shared_expert.gate_proj", "b.self_attn.q_proj"]
    groups = [fused_group(name, None) for name in names]
    groups.append(fused_group("a.mlp.experts.0.gate_proj", 0))
    assert len(set(groups)) == len(groups)


def test_fused_rows_get_one_format():
    q, k, v = (f"layers.0.self_attn.{name}_proj" for name in "qkv")
    rows = [row(q, "A", sqnr_db=19), row(k, "A", sqnr_db=15), row(v, "A", sqnr_db=17.6)]
    together = choose(rows, target_sqnr=18)
    assert chosen(together) == ["of", "of", "of"]
    assert together.choices[0].reason.endswith(f"; needed by {k}, which shares its format")
    assert "needed by" not in together.choices[1].reason
    assert chosen(choose(rows, target_sqnr=18, fuse="none")) == ["mxfp4", "of", "mbs"]
    # The same layers' weights are another tensor: they follow their own numbers.
    both = choose([*rows, row(q), row(k), row(v)], target_sqnr=18)
    assert chosen(both) == ["of"] * 3 + ["scale:mse"] * 3


def test_a_weight_has_one_format_in_all_its_gemms():
    rows = [row(gemm="fprop", sqnr_db=19), row(gemm="dgrad", sqnr_db=16)]
    for fuse in ("serving", "none"):
        assert chosen(choose(rows, target_sqnr=18, fuse=fuse)) == ["of", "of"]
    activations = [row(operand="A", gemm="fprop", sqnr_db=19), row("x", "A", "wgrad", 16)]
    assert chosen(choose(activations, target_sqnr=18)) == ["mxfp4", "of"]


def test_all_experts_of_a_layer_are_budgeted_together():
    rows = [
        row(f"l.{layer}.mlp.experts.{e}.{name}", expert=e, sqnr_db=15 + layer + e)
        for layer in range(2)
        for e in range(4)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    picked = chosen(choose(rows, max_bits=4.375))
    assert len(set(picked[:12])) == len(set(picked[12:])) == 1
    assert picked[0] == "nvfp4"  # layer 0 has the larger error
    assert len(set(chosen(choose(rows, max_bits=4.375, fuse="none")))) > 1


def test_an_exact_tensor_keeps_its_group_from_what_was_not_measured_on_it():
    names = [f"a.self_attn.{name}_proj" for name in "qkv"]
    rows = [row(names[0], status="exact", rel_mse=0.0, ratios={}), row(names[1]), row(names[2])]
    assert chosen(choose(rows, target_sqnr=20)) == ["bf16"] * 3
    assert chosen(choose(rows, target_sqnr=18)) == ["mxfp4"] * 3
    assert chosen(choose(rows, max_bits=8)) == ["mxfp4"] * 3


# ---------------------------------------------------------------- the budget


def brute_force(cost: np.ndarray, error: np.ndarray, budget: float) -> float:
    groups = np.arange(len(cost))
    feasible = (
        error[groups, list(columns)].sum()
        for columns in itertools.product(range(cost.shape[1]), repeat=len(cost))
        if cost[groups, list(columns)].sum() <= budget * (1 + 1e-12)
    )
    return min(feasible)


@pytest.mark.parametrize("seed", range(40))
def test_allocation_equals_brute_force(seed):
    random = np.random.default_rng(seed)
    groups, candidates = int(random.integers(1, 7)), int(random.integers(2, 6))
    numel = 32.0 * random.integers(1, 40, (groups, 1))
    bits = random.choice([4.0078125, 4.25, 4.3125, 4.5, 8.25, 8.5, 16.0], candidates)
    cost = numel * bits
    error = numel * random.random((groups, candidates))
    error[:, 1:][random.random((groups, candidates - 1)) < 0.2] = np.inf
    least = allocation.lowest_cost(cost, error)
    top = float(cost.max(1).sum())
    for budget in (least, *random.uniform(least, top, 3), top * 2):
        result = allocation.allocate(cost, error, float(budget))
        spent = cost[np.arange(groups), result.choice].sum()
        assert spent <= budget * (1 + 1e-11)
        best = brute_force(cost, error, float(budget))
        # Within the tolerance at which a solution is taken, and never beyond the stated gap.
        assert result.error <= best * (1 + allocation.GAP_TOLERANCE) + 1e-12
        assert result.error * (1 - result.gap) <= best * (1 + 1e-9) + 1e-12


def test_integer_programme_closes_the_gap(monkeypatch):
    """Costs that fit badly: what greedy leaves open HiGHS proves, within the stated gap."""
    monkeypatch.setattr(allocation, "GAP_TOLERANCE", 0.0)
    for seed in range(15):
        random = np.random.default_rng(seed)
        cost = np.cumsum(random.integers(1, 30, (6, 4)), axis=1).astype(float)
        error = np.sort(random.random((6, 4)), axis=1)[:, ::-1].copy()
        budget = float(cost.min(1).sum() + random.integers(0, 120))
        result = allocation.allocate(cost, error, budget)
        assert result.error == pytest.approx(brute_force(cost, error, budget), rel=1e-9)
        assert result.gap < 1e-6


def test_many_groups_are_all_but_optimal():
    random = np.random.default_rng(0)
    numel = random.choice([2.0**20, 3 * 2.0**19, 2.0**22], (3000, 1))
    cost = numel * np.array([[4.25, 4.3125, 8.5, 4.5, 8.25, 16.0]])
    error = numel * np.array([[1.0, 0.85, 0.25, 0.7, 0.05, 0.0]]) * random.random((3000, 6))
    result = allocation.allocate(cost, error, 4.4 * float(numel.sum()))
    assert result.gap <= 2 * allocation.GAP_TOLERANCE


def test_a_budget_recommends_the_least_total_error():
    rows = [row(f"l.{i}.o_proj", sqnr_db=db, numel=1024) for i, db in enumerate((12, 15, 18, 20))]
    names = ["mxfp4", *GAUSSIAN, "bf16"]
    bits = [4.25, 4.3125, 8.5, 8.5625, 4.25, 4.5, 8.25, 16.0]
    ratio = [1.0, *GAUSSIAN.values(), 0.0]
    cost = np.array([[1024 * b for b in bits]] * 4)
    error = np.array([[1024 * r["rel_mse"] * x for x in ratio] for r in rows])
    for max_bits in (4.25, 4.3, 4.5, 5.3, 7.0, 16.0):
        result = choose(rows, max_bits=max_bits)
        columns = [names.index(name) for name in chosen(result)]
        total = error[np.arange(4), columns].sum()
        assert total == pytest.approx(brute_force(cost, error, max_bits * 4096), rel=1e-9)
        assert result.totals["W"]["bits_after"] <= max_bits * (1 + 1e-12)
        assert result.totals["W"]["error_after"] == pytest.approx(total / 4096)
        assert result.gap < 1e-6


def test_sensitivities_take_the_place_of_the_error():
    rows = [row("a.o_proj", sqnr_db=12), row("b.o_proj", sqnr_db=20)]
    assert chosen(choose(rows, max_bits=4.375)) == ["nvfp4", "scale:mse"]
    weights = {"a.o_proj": 0.001, "b.o_proj": 0.5}
    result = choose(rows, max_bits=4.375, sensitivities=weights)
    assert chosen(result) == ["scale:mse", "nvfp4"]
    noise = choose(rows, max_bits=4.375, sensitivities={"a.o_proj": 0.001, "b.o_proj": -0.5})
    assert chosen(noise)[0] == "nvfp4"


def test_activations_and_gradients_are_totalled_apart():
    rows = [row(), row(operand="A", sqnr_db=15), row(operand="G", gemm="dgrad", sqnr_db=16)]
    result = choose(rows, max_bits=4.3125, allow="mbs,of")
    assert chosen(result) == ["mbs", "of", "of"]
    assert {k: t["bits_after"] for k, t in result.totals.items()} == {
        "W": 4.3125,
        "A": 8.5,
        "G": 8.5,
    }
    assert result.totals["A"]["second_pass_rows"] == 1
    assert result.totals["W"]["second_pass_rows"] == 0
    assert result.totals["W"]["chosen"] == {"mbs": 1}
    assert any(
        "within" in sentence and "best possible" in sentence for sentence in result.sentences
    )


# ---------------------------------------------------------------- noise schedules


def test_noise_follows_the_residual():
    plain = choose([row(operand="W")], allow="aqn").schedule
    assert (plain.sigma_start, plain.sigma_end) == (0.01, 0.001)
    assert plain.residual == pytest.approx(10 ** (-18.75 / 20))
    corrected = choose([row()], target_sqnr=24, allow="of,aqn").schedule
    assert corrected.sigma_start == pytest.approx(0.01 * math.sqrt(0.25))
    assert corrected.sigma_end == pytest.approx(0.001 * math.sqrt(0.25))
    assert "entropy, not the error" in corrected.sentence
    assert choose([row()], allow="of").schedule is None
    assert choose([row(operand="A")]).schedule is None
    none = choose([row()], target_sqnr=90).schedule
    assert none.sigma_start == 0
    assert "no quantization noise" in none.sentence


@pytest.mark.parametrize(("cosine", "verdict"), [(0.95, ": recommended"), (0.905, "not recom")])
def test_stochastic_rounding_goes_by_its_measured_effect(cosine, verdict):
    impact = {
        "backward": [
            {"config": "all", "operands": "G", "cosine_mean": 0.9, "cosine_mean_sd": 0.003},
            {"config": "sr", "operands": "G", "cosine_mean": cosine, "cosine_mean_sd": 0.004},
        ]
    }
    sentence = choose([row()], impact=impact).sentences[-1]
    assert sentence.startswith("sr on G")
    assert verdict in sentence
    assert not any("sr on" in s for s in choose([row()]).sentences)
    assert not any("sr on" in s for s in choose([row()], impact={"backward": []}).sentences)
