"""The fused CPU path against the reference: exactly on everything discrete, closely on sums."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_cases import ELEMENT_CASES, RULES, SCALE_CASES, ScaleCase
from kernel_inputs import BF16, DTYPES, KINDS, draw, to_torch
from mxdiag.errors import TensorError
from mxdiag.formats import MXFP4, SCALE_RULES, ScaleRule
from mxdiag.quantize import reference
from mxdiag.quantize.cpu import launch as cpu
from mxdiag.quantize.cpu.layout import UNIT_ELEMENTS
from mxdiag.quantize.sums import SUM_FIELDS, Sums
from paths import ROOT

RCEIL = SCALE_RULES["rceil"]

#: [outer, K, inner]: rows, ragged rows, short rows, columns, ragged columns, few columns, both.
SHAPES = (
    (5, 64, 1),
    (37, 33, 1),
    (3, 1000, 1),
    (100, 16, 1),
    (1, 1, 1),
    (1, 64, 64),
    (1, 70, 83),
    (1, 32, 5),
    (2, 33, 17),
    (3, 40, 3),
)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    x = x.contiguous()
    return x.view(torch.int16).numpy().view(BF16) if x.dtype == torch.bfloat16 else x.numpy()


def bits(x: np.ndarray) -> np.ndarray:
    return np.array(x, order="C").view(f"u{x.dtype.itemsize}")


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit, signs of zeros included; NaNs of any payload are equal."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    nan = np.isnan(expected.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float64)), nan)
    np.testing.assert_array_equal(bits(actual)[~nan], bits(expected)[~nan])


def assert_sums_agree(actual: Sums, expected: Sums, numel: int) -> None:
    """Counts exactly; sums within 1e-6 of their natural scale.

    The fast path adds 32 products in float32 (2^-24 each) and everything beyond in float64. The
    error's parts are measured against their total, delta against one octave per block.
    """
    np.testing.assert_array_equal(actual.counts, expected.counts)
    np.testing.assert_array_equal(actual.delta_hist, expected.delta_hist)
    assert actual.amax == expected.amax
    want = dict(zip(SUM_FIELDS, expected.sums, strict=True))
    total = want["scale2"] + want["deadzone2"] + want["grid2"]
    scales = dict.fromkeys(SUM_FIELDS, total)
    scales |= {"x2": want["x2"], "qx": want["x2"], "e": (total * numel) ** 0.5}
    scales |= {name: max(want[name], want["delta"], 1.0) for name in ("delta", "delta2")}
    for name, value in zip(SUM_FIELDS, actual.sums, strict=True):
        assert abs(value - want[name]) <= 1e-6 * scales[name], name
    if expected.tokens is not None:
        assert actual.tokens is not None
        scale = expected.tokens.max(axis=0, initial=0)
        assert (np.abs(actual.tokens - expected.tokens) <= 1e-6 * scale).all()


@pytest.mark.parametrize("case", SCALE_CASES, ids=lambda case: case.reason)
@pytest.mark.parametrize("shape", [(1, 32, 1), (1, 32, 16)], ids=["rows", "columns"])
def test_scale_cases(case: ScaleCase, shape: tuple[int, int, int]) -> None:
    if case.dtype == "float16":
        shape = (1, 32, 1)
    x = np.zeros(shape, DTYPES[case.dtype])
    x[0, 3] = case.amax
    for name, code, decoded in zip(RULES, case.codes, case.decoded, strict=True):
        _, scale_codes = cpu.encode(x, SCALE_RULES[name])
        assert (scale_codes == code).all()
        values = cpu.quantize_dequantize(x, SCALE_RULES[name])
        np.testing.assert_array_equal(values[0, 3].astype(np.float64), decoded)


@pytest.mark.parametrize(("reason", "value", "decoded", "code"), ELEMENT_CASES)
def test_element_cases(reason: str, value: float, decoded: float, code: int) -> None:
    x = np.zeros((1, 32, 1), np.float32)
    x[0, 0], x[0, 1] = 6, value
    assert cpu.encode(x, RCEIL)[0][0, 1, 0] == code, reason
    result = cpu.quantize_dequantize(x, RCEIL)[0, 1, 0]
    assert result == decoded
    assert np.signbit(result) == np.signbit(np.float32(decoded))


def is_measured(dtype: np.dtype, rule: ScaleRule, shape: tuple[int, ...]) -> bool:
    """Which sums to compare: all of them, but for kernels that differ in nothing from others.

    Rules fall into two classes (can a scale be below the ideal one), dtypes into two widths.
    """
    if dtype == np.float16:
        return shape[2] == 1 and rule.name in ("rceil", "ceil")
    if rule.name in ("floor", "even"):
        return (shape[2] == 1) == (dtype == BF16)
    return True


@pytest.mark.parametrize("rule", SCALE_RULES.values(), ids=SCALE_RULES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_equals_the_reference(dtype: np.dtype, rule: ScaleRule) -> None:
    """Codes, scale bytes, decoded and injected values exactly, sums closely, for every layout."""
    choices = [{"scale"}, {"deadzone"}, {"grid"}, {"scale", "deadzone"}, {"scale", "grid"}]
    choices += [{"deadzone", "grid"}, {"scale", "deadzone", "grid"}, set()]
    for seed, shape in enumerate(SHAPES):
        for number, kind in enumerate(KINDS):
            if rule is not RCEIL and (seed + number) % 2:
                continue
            x = draw(seed, shape, dtype, kind)
            if is_measured(dtype, rule, shape):
                tokens = rule.name in ("rceil", "ceil") and (shape[0] == 1 or shape[2] == 1)
                have = cpu.measure(x, rule, tokens=tokens)
                want = reference.measure(to_torch(x), rule, tokens=tokens)
                assert_sums_agree(have, want, x.size)
            if dtype == np.float16 and shape[2] > 1:
                continue
            encoded = reference.encode(to_torch(x), 1, rule)
            codes, scale_codes = cpu.encode(x, rule)
            np.testing.assert_array_equal(codes, encoded.codes.numpy())
            np.testing.assert_array_equal(scale_codes, encoded.scale_codes.numpy())
            decoded = reference.quantize_dequantize(to_torch(x), 1, rule)
            assert_same(cpu.quantize_dequantize(x, rule), to_numpy(decoded))
            parts = frozenset(choices[(seed + 3 * number) % len(choices)])
            injected = reference.inject(to_torch(x), parts, 1, rule)
            assert_same(cpu.inject(x, parts, rule), to_numpy(injected))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_bit_pattern(data: st.DataObject) -> None:
    """Random bits, subnormals and non-finite values among them, in rows of any length."""
    dtype = data.draw(st.sampled_from([np.dtype(np.float32), BF16]))
    unsigned = np.dtype(f"u{dtype.itemsize}")
    length = data.draw(st.integers(1, 70))
    words = st.integers(0, 2 ** (8 * dtype.itemsize) - 1)
    values = data.draw(st.lists(words, min_size=length, max_size=length))
    x = np.array(values, unsigned).view(dtype)[None, :, None]
    decoded = reference.quantize_dequantize(to_torch(x), 1, RCEIL)
    assert_same(cpu.quantize_dequantize(x, RCEIL), to_numpy(decoded))
    want, have = reference.measure(to_torch(x), RCEIL), cpu.measure(x, RCEIL)
    np.testing.assert_array_equal(have.counts, want.counts)
    np.testing.assert_array_equal(have.delta_hist, want.delta_hist)


def test_ideal_rounding_of_every_bf16_pair() -> None:
    """Every mantissa of x against every mantissa of amax, over the octaves that have thresholds."""
    mantissas = np.arange(128, 256, dtype=np.float64)
    octaves = 2.0 ** -np.arange(7)
    x = (mantissas * octaves[:, None]).reshape(-1)
    blocks = [
        np.concatenate([[amax], part]) for amax in mantissas for part in x[x <= 255].reshape(-1, 28)
    ]
    values = np.minimum(np.array(blocks), np.array(blocks)[:, :1]).astype(BF16)[:, :, None]
    have = cpu.inject(values, frozenset({"deadzone", "grid"}), RCEIL)
    want = reference.inject(to_torch(values), frozenset({"deadzone", "grid"}), 1, RCEIL)
    assert_same(have, to_numpy(want))


@pytest.mark.parametrize("rule", SCALE_RULES.values(), ids=SCALE_RULES)
def test_ideal_rounding_at_float32_thresholds(rule: ScaleRule) -> None:
    """The float32 neighbours of t amax / 6, where single precision decides wrongly 1 time in 10."""
    rng = np.random.default_rng(1)
    amax = rng.integers(1 << 23, 1 << 24, (500, 1))
    amax[::2] -= amax[::2] % 24  # exact ties
    near = amax * np.array([1, 3, 5, 7, 10, 14, 20]) // 24
    integers = np.concatenate([amax, near - 1, near, near + 1, near + 2], axis=1)
    signs = np.where(rng.random(integers.shape) < 0.5, -1.0, 1.0)
    x = (signs * integers * 2.0 ** rng.integers(-100, 80, amax.shape)).astype(np.float32)[..., None]
    for parts in ({"deadzone", "grid"}, {"scale"}):
        want = reference.inject(to_torch(x), frozenset(parts), 1, rule)
        assert_same(cpu.inject(x, frozenset(parts), rule), to_numpy(want))
    want_sums = reference.measure(to_torch(x), rule)
    np.testing.assert_array_equal(cpu.measure(x, rule).counts, want_sums.counts)


@pytest.mark.parametrize("rule", SCALE_RULES.values(), ids=SCALE_RULES)
def test_delta_bins_of_every_edge(rule: ScaleRule) -> None:
    """Blocks whose amax lies on either side of each histogram edge, and on the octave's ends."""
    low = rule.delta_low(MXFP4.element)
    edges = 6 / 2.0 ** (low + np.arange(33) / 32)
    amax = np.float32(edges)[:, None] * (1 + np.float32(2.0**-23) * np.arange(-3, 4))
    x = np.zeros((amax.size, 32, 1), np.float32)
    x[:, 5, 0] = amax.reshape(-1)
    want = reference.measure(to_torch(x), rule)
    np.testing.assert_array_equal(cpu.measure(x, rule).delta_hist, want.delta_hist)


def test_closure_of_constant_blocks() -> None:
    """32 equal terms are all rounded the same way; the parts must still re-add to ||e||^2."""
    values = np.linspace(1, 2, 4096, dtype=np.float32)
    x = np.repeat(values[:, None], 32, axis=1)[:, :, None]
    s = dict(zip(SUM_FIELDS, cpu.measure(x, RCEIL).sums, strict=True))
    total = s["scale2"] + s["deadzone2"] + s["grid2"]
    assert abs(total + 2 * s["scale_grid"] + 2 * s["scale_deadzone"] - s["e2"]) < 1e-6 * total


def equal_sums(a: Sums, b: Sums) -> bool:
    tokens = a.tokens is b.tokens or np.array_equal(a.tokens, b.tokens)
    return (
        np.array_equal(a.sums, b.sums)
        and np.array_equal(a.counts, b.counts)
        and np.array_equal(a.delta_hist, b.delta_hist)
        and a.amax == b.amax
        and tokens
    )


@pytest.mark.parametrize("shape", [(700, 1000, 1), (1, 1000, 700)], ids=["rows", "columns"])
def test_thread_count_does_not_matter(shape: tuple[int, int, int]) -> None:
    x = draw(0, shape, BF16, "plain")
    assert x.size > 8 * UNIT_ELEMENTS
    one, decoded = cpu.measure(x, RCEIL, threads=1), cpu.quantize_dequantize(x, RCEIL, threads=1)
    for threads in (2, 3, 7):
        assert equal_sums(cpu.measure(x, RCEIL, threads=threads), one)
        assert_same(cpu.quantize_dequantize(x, RCEIL, threads=threads), decoded)


def test_views_equal_their_copies() -> None:
    base = draw(0, (1, 200, 160), np.dtype(np.float32), "plain")[0]
    views = {
        "row stride": base[:, :64],
        "every other row": base[::2],
        "every other column": base[:, ::2],
        "transposed": base.T,
        "reversed": base[::-1],
        "half of the columns": base[:, 80:],
        "expanded": np.broadcast_to(base[0], (40, 160)),
    }
    for name, view in views.items():
        for x in (view[:, :, None], view[None]):
            copy = np.array(x, order="C")
            decoded = cpu.quantize_dequantize(x, RCEIL)
            assert_same(decoded, cpu.quantize_dequantize(copy, RCEIL))
            have, want = cpu.measure(x, RCEIL), cpu.measure(copy, RCEIL)
            np.testing.assert_array_equal(have.counts, want.counts, err_msg=name)
            # The order of blocks follows the layout; float64 sums of them agree to rounding.
            np.testing.assert_allclose(have.sums, want.sums, rtol=1e-12, atol=1e-12 * want.sums[0])
            have, want = (cpu.measure(y, RCEIL, tokens=True) for y in (x, copy))
            np.testing.assert_allclose(have.tokens, want.tokens, rtol=1e-12)


def test_output_goes_where_it_is_asked() -> None:
    x = draw(0, (8, 70, 1), np.dtype(np.float32), "plain")
    whole = np.full((8, 200, 1), 7, np.float32)
    out = whole[:, :140:2]
    assert cpu.quantize_dequantize(x, RCEIL, out=out) is out
    assert_same(out, cpu.quantize_dequantize(x, RCEIL))
    assert (whole[:, 1::2] == 7).all()
    assert (whole[:, 140:] == 7).all()
    assert_same(cpu.inject(x, frozenset({"scale", "deadzone", "grid"}), RCEIL), np.array(out))


@pytest.mark.parametrize("shape", [(0, 32, 1), (3, 0, 1), (1, 0, 8), (1, 5, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    x = np.zeros(shape, np.float32)
    have, want = cpu.measure(x, RCEIL, tokens=True), reference.measure(to_torch(x), tokens=True)
    np.testing.assert_array_equal(have.counts, want.counts)
    assert have.sums.tolist() == [0.0] * len(SUM_FIELDS)
    assert have.tokens is not None
    assert want.tokens is not None
    assert have.tokens.shape == want.tokens.shape
    assert cpu.quantize_dequantize(x, RCEIL).shape == shape
    assert cpu.encode(x, RCEIL)[1].shape == (shape[0], -(-shape[1] // 32), shape[2])


def test_what_cannot_be_taken_is_refused() -> None:
    with pytest.raises(TensorError, match="outer, K, inner"):
        cpu.measure(np.zeros((4, 4), np.float32), RCEIL)
    with pytest.raises(TensorError, match="float64"):
        cpu.measure(np.zeros((1, 4, 1)), RCEIL)
    with pytest.raises(TensorError, match="token"):
        cpu.measure(np.zeros((2, 4, 2), np.float32), RCEIL, tokens=True)
    with pytest.raises(TensorError, match="noise"):
        cpu.inject(np.zeros((1, 4, 1), np.float32), frozenset({"noise"}), RCEIL)
    x = np.zeros((1, 4, 1), np.float32)
    with pytest.raises(TensorError, match="output"):
        cpu.quantize_dequantize(x, RCEIL, out=np.zeros((1, 5, 1), np.float32))


def test_flush_to_zero_changes_nothing() -> None:
    """torch.set_flush_denormal sets the mode of the calling thread, and threads inherit it."""
    x = draw(3, (64, 64, 1), np.dtype(np.float32), "range")
    x[:8] *= np.float32(2.0**-120)
    parts = frozenset({"scale"})
    want = [cpu.measure(x, RCEIL), cpu.quantize_dequantize(x, RCEIL), cpu.inject(x, parts, RCEIL)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals to zero")
    try:
        have = [
            cpu.measure(x, RCEIL),
            cpu.quantize_dequantize(x, RCEIL),
            cpu.inject(x, parts, RCEIL),
        ]
    finally:
        torch.set_flush_denormal(False)
    assert equal_sums(have[0], want[0])
    assert_same(have[1], want[1])
    assert_same(have[2], want[2])


CACHE_SCRIPT = """
import sys
import numpy as np
from mxdiag.formats import RCEIL
from mxdiag.quantize.cpu import launch as cpu
x = np.full((2, 32, 1), 2.7, np.float16)
print(cpu.needs_compiling())
assert (cpu.quantize_dequantize(x, RCEIL) == 3).all()
print(cpu.needs_compiling())
assert "torch" not in sys.modules
"""
PACKAGE = ROOT / "mxdiag"


def run_script(root: Path, **variables: str) -> list[str]:
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    result = subprocess.run(
        [sys.executable, "-c", CACHE_SCRIPT],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_kernels_are_cached_on_disk(tmp_path: Path) -> None:
    assert run_script(PACKAGE.parent, NUMBA_CACHE_DIR=str(tmp_path)) == ["True", "False"]
    assert run_script(PACKAGE.parent, NUMBA_CACHE_DIR=str(tmp_path)) == ["False", "False"]


def test_no_writable_cache_only_costs_compiling(tmp_path: Path) -> None:
    """Neither beside the package nor in the home folder: files stand where folders should."""
    shutil.copytree(
        PACKAGE, tmp_path / "mxdiag", ignore=shutil.ignore_patterns("__pycache__", "samples")
    )
    (tmp_path / "mxdiag" / "quantize" / "__pycache__").write_text("")
    (tmp_path / "home").write_text("")
    home = str(tmp_path / "home")
    nowhere = {"HOME": home, "XDG_CACHE_HOME": home, "NUMBA_CACHE_DIR": ""}
    assert run_script(tmp_path, **nowhere) == ["True", "False"]
