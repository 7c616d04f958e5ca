"""The decomposition: known answers, closure, additivity, and what is undefined."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import torch

import mxdiag
from mxdiag.decomposition import METRICS, Decomposition, decompose, total

BACKENDS = ("reference", "cpu")
#: Closure relative to the parts' energy: float64 sums, and float32 groups of a few rows.
CLOSURE = {"reference": 1e-12, "cpu": 1e-6}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rows_of_mixed_scale() -> np.ndarray:
    rng = np.random.default_rng(1)
    return normal(2048, 2048, seed=2) * (2.0 ** rng.uniform(0, 4, (2048, 1))).astype(np.float32)


def laplace() -> np.ndarray:
    return np.random.default_rng(3).laplace(size=(2048, 2048)).astype(np.float32)


#: scale, deadzone, grid energy, cosine, deadzone fraction, SQNR: arXiv 2605.20402's quantities on
#: known distributions, computed once in float64.
KNOWN = {
    "normal": (lambda: normal(2048, 2048), (1.77, 0.0205, 0.747, -0.669, 0.0775, 18.75)),
    "mixed": (rows_of_mixed_scale, (1.748, 0.020, 0.731, -0.663, 0.0775, 18.66)),
    "laplace": (laplace, (1.577, 0.051, 0.551, -0.632, 0.153, 17.58)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name):
    make, expected = KNOWN[name]
    d = decompose(make())
    found = (
        d.scale_energy,
        d.deadzone_energy,
        d.grid_energy,
        d.cos_scale_grid,
        d.deadzone_frac,
        d.sqnr_db,
    )
    # The answers are given to three or four digits; sampling noise of 4 M elements is below that.
    # The energies of the mixed rows hang on which rows are large, so they move by 1 %.
    tolerance = 0.012 if name == "mixed" else 0.005
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=5e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("kind", ["normal", "constant", "fp4", "spiky", "subnormal"])
def test_the_sum_closes(backend, rule, kind):
    x = normal(64, 200)
    if kind == "constant":
        x[:] = 0.3
    elif kind == "fp4":
        x = mxdiag.quantize_dequantize(x, scale_rule=rule, backend="reference")
        x[0, 0] += np.float32(1e-3)
    elif kind == "spiky":
        x[:, ::40] *= 1000
    elif kind == "subnormal":
        x *= np.float32(1e-40)
    d = decompose(x, scale_rule=rule, backend=backend)
    assert abs(d.closure_residual) <= CLOSURE[backend]
    assert d.reducible + d.recoverable + d.irreducible == pytest.approx(1, abs=1e-12)
    if rule == "rceil" and kind != "subnormal":
        assert d.cross_scale_deadzone == 0


def test_reducible_may_be_negative():
    """The ideal scale of amax 2 puts 0.5 and 1 off its grid; the power of two holds them."""
    x = np.tile(np.array([2.0, 0.5, 1.0, 0.26], np.float32), 8)
    assert decompose(x).reducible < 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_merging_in_any_order_or_chunking_gives_the_same(backend):
    x = normal(256, 320, seed=5)
    whole = decompose(x, tokens=True, backend=backend)
    pieces = [decompose(piece, tokens=True, backend=backend) for piece in np.split(x, 8)]
    forward, backward = total(pieces, "rceil"), total(pieces[::-1], "rceil")
    columns = np.split(x, [32, 192], axis=1)
    sideways = total([decompose(piece, backend=backend) for piece in columns], "rceil")
    for other in (forward, backward, sideways):
        # float64 sums in another order: 1e-12 is the contract.
        np.testing.assert_allclose(other.sums, whole.sums, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(other.counts, whole.counts)
        np.testing.assert_array_equal(other.delta_hist, whole.delta_hist)
    assert forward.sqnr_db_token == pytest.approx(whole.sqnr_db_token, rel=1e-12)
    assert forward.top_token_share == pytest.approx(whole.top_token_share, rel=1e-12)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_token_means_are_means_of_the_rows(axis, backend):
    x = normal(70, 96, seed=6)
    x[3] *= 500  # one token with nearly all the energy
    x[4] = 0  # a token without energy
    d = decompose(x, axis, tokens=True, backend=backend)
    q = mxdiag.quantize_dequantize(x, axis, backend="reference").astype(np.float64)
    energy, error = (x.astype(np.float64) ** 2).sum(1), ((q - x) ** 2).sum(1)
    used = (energy > 0) & (error > 0)
    sqnr = (10 * np.log10(energy[used] / error[used])).mean()
    # float32 groups of rows on the fast path, float64 here.
    assert d.sqnr_db_token == pytest.approx(sqnr, rel=1e-6)
    assert d.top_token_share == pytest.approx(energy.max() / energy.sum(), rel=1e-6)
    assert 0 < d.recoverable_token < 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_statuses(backend):
    exact = mxdiag.quantize_dequantize(normal(4, 64), backend=backend)
    cases = {
        "ok": normal(4, 64),
        "exact": exact,
        "zero": np.zeros((4, 64), np.float32),
        "nonfinite": np.where(np.arange(64) == 3, np.nan, normal(4, 64)),
        "not_observed": np.zeros((0, 64), np.float32),
    }
    for status, x in cases.items():
        d = decompose(x.astype(np.float32), backend=backend)
        assert d.status == status
        json.dumps(d.metrics(), allow_nan=False)
        if status in ("exact", "zero"):
            assert d.sqnr_db is d.reducible is d.recoverable is None
            assert d.closure_residual == 0
        if status == "zero":
            assert (d.zero_frac, d.delta_mean, d.cos_scale_grid) == (1.0, None, None)
    assert decompose(np.full((2, 32), np.inf, np.float32), backend=backend).status == "nonfinite"


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_numpy_and_torch_give_the_same(dtype):
    x = normal(8, 64).astype(dtype)
    as_torch = torch.tensor(x.astype(np.float64)).to(getattr(torch, np.dtype(dtype).name))
    ours, theirs = decompose(x), decompose(as_torch)
    np.testing.assert_array_equal(ours.sums, theirs.sums)
    assert ours.metrics() == theirs.metrics()
    back = mxdiag.quantize_dequantize(x)
    assert back.dtype == x.dtype
    assert back.shape == x.shape
    assert mxdiag.quantize_dequantize(as_torch).dtype == as_torch.dtype


def test_saturation_is_counted_apart():
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = (959.5632, 10.0, 900.0)
    floor, rceil = decompose(x, scale_rule="floor"), decompose(x)
    assert floor.saturated_frac == pytest.approx(2 / 32)
    assert rceil.saturated_frac == 0


def test_metrics_are_the_contract_in_order():
    metrics = decompose(normal(4, 64), tokens=True).metrics()
    assert tuple(metrics) == METRICS
    assert None not in metrics.values()


def test_scale_rules_do_not_mix():
    with pytest.raises(ValueError, match="cannot add"):
        Decomposition.empty("rceil") + Decomposition.empty("floor")


@pytest.mark.parametrize("magnitude", [1e-200, 1e-158, 1e-310])
def test_energies_that_underflow_are_unknown_not_zero(magnitude):
    """Squares of such float64 values are no numbers; what is counted still is."""
    x = normal(8, 64).astype(np.float64)
    d, tiny = decompose(x), decompose(x * magnitude)
    assert (tiny.status, tiny.underflows, d.underflows) == ("ok", True, False)
    assert tiny.amax == np.abs(x * magnitude).max()
    assert tiny.underflow_frac == 1.0
    for name in ("sqnr_db", "rel_mse", "reducible", "rms", "gain", "closure_residual"):
        assert getattr(tiny, name) is None, name
    if magnitude > 1e-300:  # there the elements themselves have all their bits
        assert tiny.deadzone_frac == d.deadzone_frac
    assert (d + tiny).sqnr_db == pytest.approx(d.sqnr_db)


def test_energies_just_above_underflow_are_known():
    d = decompose(normal(8, 64).astype(np.float64) * 2.0**-470)
    assert d.sqnr_db == 0.0  # everything is far below the least scale and becomes zero
    assert abs(d.closure_residual) <= CLOSURE["reference"]
