"""The reference against bytes written by hand, torchao, and exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

import edge_cases
from edge_cases import ELEMENT_CASES, RULES, SCALE_CASES
from mxdiag.errors import TensorError, UsageError
from mxdiag.formats import E2M1, E4M3, MXFP4, MXFP8, SCALE_RULES
from mxdiag.quantize import dispatch, reference
from mxdiag.quantize.corrections.evaluate import evaluate_corrections
from mxdiag.quantize.corrections.registry import parse_corrections
from mxdiag.quantize.sums import COUNT_FIELDS, SUM_FIELDS


def heavy_tailed(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Student-t values with a spread of row scales: outliers, zeros and tiny blocks together."""
    rng = np.random.default_rng(seed)
    values = rng.standard_t(2, shape) * 2.0 ** rng.uniform(
        -20, 20, (shape[0],) + (1,) * (len(shape) - 1)
    )
    values[rng.random(shape) < 0.05] = 0.0
    return torch.tensor(values, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("case", SCALE_CASES, ids=lambda case: case.reason)
def test_scale_bytes_and_decoded_values(case):
    x = torch.tensor([case.amax], dtype=getattr(torch, case.dtype))
    for rule, code, decoded in zip(RULES, case.codes, case.decoded, strict=True):
        encoded = reference.encode(x, rule=rule)
        assert int(encoded.scale_codes[0]) == code, rule
        value = float(reference.quantize_dequantize(x, rule=rule)[0])
        assert np.array_equal(value, decoded, equal_nan=True), rule


@pytest.mark.parametrize(("reason", "value", "decoded", "code"), ELEMENT_CASES)
def test_elements_at_scale_one(reason, value, decoded, code):
    x = torch.tensor([6.0, value])
    for rule in ("floor", "rceil", "even"):
        result = reference.quantize_dequantize(x, rule=rule)[1]
        assert result == decoded, reason
        assert torch.signbit(result) == np.signbit(decoded), reason
        assert int(reference.encode(x, rule=rule).codes[1]) == code, reason


def test_formats_hold_the_values_of_the_specification():
    assert E2M1.grid == (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert (E2M1.emax, E4M3.emax, E4M3.max_normal, E4M3.min_subnormal) == (2, 8, 448, 2.0**-9)
    assert E4M3.grid[-1] == 448
    assert (MXFP4.bits_per_element, MXFP8.bits_per_element) == (4.25, 8.25)
    assert len(E4M3.grid) == 127  # 0x7f is NaN


def test_deltas_fill_one_octave():
    amax = torch.linspace(1, 2, 4001)[:-1].to(torch.float32)[:, None, None]
    for name, rule in SCALE_RULES.items():
        p = reference.parts(amax, 1, name)
        delta = torch.log2(6 * p.scale / p.amax).flatten() - rule.delta_low(E2M1)
        assert delta.min() >= -1e-12, name
        assert delta.max() <= 1 + 1e-12, name
        assert delta.min() < 0.001 < 0.999 < delta.max(), name


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torchao(rule, dtype):
    """Away from tiny scales and float32 neighbours of 6 * 2^k, where torchao's log2 is off."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    mode = mx.ScaleCalculationMode[rule.upper()]
    for x in (
        torch.randn(64, 256, generator=torch.Generator().manual_seed(1)),
        heavy_tailed(64, 256),
    ):
        x = x.to(dtype)
        scales, packed = mx.to_mx(x, torch.float4_e2m1fn_x2, 32, mode)
        encoded = reference.encode(x, rule=rule)
        assert torch.equal(encoded.scale_codes, scales.view(torch.uint8))
        packed = packed.view(torch.uint8)
        unpacked = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        nonzero = encoded.scale_codes.repeat_interleave(32, -1) > 0
        assert torch.equal(encoded.codes[nonzero], unpacked[nonzero])
        expected = mx.to_dtype(packed, scales, torch.float4_e2m1fn_x2, 32, dtype)
        assert torch.equal(reference.quantize_dequantize(x, rule=rule), expected)


def exact_code(x: float, amax: float) -> int:
    """Code of |x| under the ideal scale amax / 6, in rational arithmetic."""
    y = abs(Fraction(x)) * 6 / Fraction(amax)
    ties = (
        Fraction(1, 4),
        Fraction(3, 4),
        Fraction(5, 4),
        Fraction(7, 4),
        Fraction(5, 2),
        Fraction(7, 2),
        5,
    )
    return sum(y > tie or (y == tie and index % 2 == 1) for index, tie in enumerate(ties))


def test_ideal_scale_decides_as_exact_arithmetic():
    """Elements placed on and next to every threshold of amax / 6, where rounding would show."""
    rng = np.random.default_rng(3)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    grid = np.array(E2M1.grid)
    for amax in rng.uniform(1, 64, 300).astype(np.float32):
        near = np.float32(np.float64(amax) * ties / 6)
        xs = np.concatenate(
            [near, np.nextafter(near, np.float32(0)), np.nextafter(near, amax), [amax]]
        )
        p = reference.parts(torch.from_numpy(xs.astype(np.float32)))
        got = p.q_star.flatten()[: xs.size].numpy() * 6 / np.float64(amax)
        expected = [grid[exact_code(float(x), float(amax))] for x in xs]
        np.testing.assert_allclose(got, expected, rtol=1e-15, atol=0)


def test_codes_and_scales_decode_to_the_quantized_values():
    x = heavy_tailed(5, 77)
    for axis in (0, 1):
        encoded = reference.encode(x, axis)
        decoded = reference.decode(encoded, axis)
        assert encoded.scale_codes.shape == ((1, 77), (5, 3))[axis]
        assert torch.equal(decoded, reference.quantize_dequantize(x, axis).double())


def test_blocks_run_along_the_given_axis():
    x = torch.ones(32, 32)
    x[0] = 1000.0
    assert torch.equal(reference.quantize_dequantize(x, -1)[1:], torch.ones(31, 32))
    assert torch.equal(reference.quantize_dequantize(x, 0)[1:], torch.zeros(31, 32))


@pytest.mark.parametrize("size", [1, 16, 31, 32, 33, 64, 65])
def test_ragged_blocks_equal_zero_padding(size):
    x = heavy_tailed(3, size)
    padded = torch.nn.functional.pad(x, (0, -size % 32))
    assert torch.equal(
        reference.quantize_dequantize(x), reference.quantize_dequantize(padded)[:, :size]
    )
    sums = reference.measure(x[:, :, None])
    counts = dict(zip(COUNT_FIELDS, sums.counts, strict=True))
    assert counts["numel"] == counts["counted"] == x.numel()
    assert counts["zero"] == int((x == 0).sum())


def test_views_equal_their_copies():
    x = heavy_tailed(64, 96)
    for view in (x.t(), x.chunk(2, 1)[1], x[::2], x[:1].expand(8, 96), x[:, 0].expand(3, 64)):
        assert torch.equal(
            dispatch.quantize_dequantize(view, backend="reference"),
            reference.quantize_dequantize(view.contiguous()),
        )


def test_a_nonfinite_block_is_left_out_of_every_sum():
    x = heavy_tailed(4, 96)
    clean = reference.measure(torch.cat([x[:, :32], x[:, 64:]], 1)[:, :, None])
    x[1, 40] = torch.nan
    x[0, 41] = x[2, 42] = x[3, 43] = torch.inf
    dirty = reference.measure(x[:, :, None])
    np.testing.assert_allclose(dirty.sums, clean.sums, rtol=1e-13)
    counts = dict(zip(COUNT_FIELDS, dirty.counts, strict=True))
    assert (counts["nonfinite_blocks"], counts["counted"], counts["numel"]) == (4, 256, 384)
    assert torch.isnan(reference.quantize_dequantize(x)[:, 32:64]).all()


@pytest.mark.parametrize("rule", RULES)
def test_injected_components_are_the_decomposition(rule):
    x = heavy_tailed(8, 100).double()
    p = reference.parts(x, -1, rule)
    total, scale = p.q - p.x, p.q - p.q_star
    own = p.q_star - p.x
    zero = torch.zeros(())
    errors = {
        "scale": scale,
        "deadzone": torch.where(p.deadzone, own, zero),
        "grid": torch.where(p.deadzone, zero, own),
    }
    assert torch.equal(
        reference.inject(x, frozenset(errors), rule=rule),
        reference.quantize_dequantize(x, rule=rule),
    )
    assert torch.equal(reference.inject(x, frozenset(), rule=rule), x)
    for names in (
        ["scale"],
        ["deadzone"],
        ["grid"],
        ["deadzone", "grid"],
        ["scale", "deadzone"],
        ["scale", "grid"],
    ):
        injected = reference.inject(x, frozenset(names), rule=rule)
        expected = reference.from_blocks(p.x + sum(errors[name] for name in names), x, -1)
        # Picked values differ from summed ones by the rounding of the sum: a few float64 steps.
        torch.testing.assert_close(injected, expected, rtol=1e-14, atol=0.0)
    assert (total**2).sum() > 0


def test_the_sums_are_those_of_plain_numpy():
    """A second, independent computation: numpy, thresholds and division, no shared code."""
    x = heavy_tailed(16, 128).double().numpy()
    sums = dict(zip(SUM_FIELDS, reference.measure(torch.tensor(x)[:, :, None]).sums, strict=True))
    blocks = x.reshape(-1, 32)
    blocks = blocks[np.abs(blocks).max(1) > 0]
    amax = np.abs(blocks).max(1, keepdims=True)
    scale = 2.0 ** np.array(
        [[next(k for k in range(-200, 200) if m <= 6 * 2.0**k)] for m in amax[:, 0]]
    )
    grid = np.array(E2M1.grid)

    def rounded(values):
        distance = np.abs(np.abs(values)[..., None] - grid)
        return np.sign(values) * grid[distance.argmin(-1)]

    q, ideal = rounded(blocks / scale) * scale, rounded(blocks / (amax / 6)) * amax / 6
    dead = (blocks != 0) & (ideal == 0)
    expected = {
        "x2": (blocks**2).sum(),
        "e2": ((q - blocks) ** 2).sum(),
        "scale2": ((q - ideal) ** 2).sum(),
        "deadzone2": (blocks[dead] ** 2).sum(),
        "grid2": ((ideal - blocks)[~dead] ** 2).sum(),
        "scale_grid": ((q - ideal) * (ideal - blocks))[~dead].sum(),
        "qx": (q * blocks).sum(),
        "delta": np.log2(scale / (amax / 6)).sum(),
    }
    for name, value in expected.items():
        assert sums[name] == pytest.approx(value, rel=1e-12), name


def test_refuses_what_it_cannot_block():
    with pytest.raises(TensorError, match="0-dimensional"):
        reference.encode(torch.tensor(1.0))
    with pytest.raises(TensorError, match="int64"):
        reference.encode(torch.arange(3))
    with pytest.raises(UsageError, match="rceil"):
        reference.encode(torch.ones(3), rule="nearest")
    with pytest.raises(TensorError, match="out of range"):
        dispatch.quantize_dequantize(torch.ones(3), axis=2)


def test_edge_case_reasons_are_unique():
    reasons = [case.reason for case in edge_cases.SCALE_CASES]
    assert len(set(reasons)) == len(reasons)


def subnormal_range(dtype: torch.dtype) -> torch.Tensor:
    """Every order of magnitude down to the least subnormal of the dtype."""
    least = {torch.float16: -24, torch.bfloat16: -133, torch.float32: -149}[dtype]
    rng = np.random.default_rng(5)
    values = rng.standard_normal((64, 64)) * 2.0 ** (least + rng.integers(0, 30, (64, 1)))
    return torch.tensor(values).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_flushing_subnormals_changes_nothing(dtype):
    """torch.set_flush_denormal is the caller's, and reaches every conversion on the thread."""
    x = subnormal_range(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16

    def results():
        return (
            reference.quantize_dequantize(x).view(bits),
            reference.inject(x, frozenset({"grid"})).view(bits),
            reference.encode(x).codes,
            torch.from_numpy(reference.measure(x[:, :, None]).sums),
            torch.from_numpy(
                evaluate_corrections(x[:, :, None], "rceil", parse_corrections("bf16"))["bf16"]
            ),
        )

    want = results()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals to zero")
    try:
        found = results()
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip(want, found, strict=True):
        assert torch.equal(one, other)
    assert want[3][0] > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_conversions_by_bits_are_torchs_own(dtype):
    x = torch.cat(
        [subnormal_range(dtype).flatten(), torch.tensor([0.0, -0.0, 1.0, -3.5]).to(dtype)]
    )
    wide = reference.to_float64(x)
    assert torch.equal(wide, x.to(torch.float64))
    assert torch.equal(torch.signbit(wide), torch.signbit(x))
    back = reference.round_once(wide, dtype)
    assert torch.equal(back, x)
    assert torch.equal(torch.signbit(back), torch.signbit(x))
