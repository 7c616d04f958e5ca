"""Corrections in the fused CPU pass against their reference."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_inputs import BF16, DTYPES, KINDS, draw, to_torch
from mxdiag.formats import SCALE_RULES, ScaleRule
from mxdiag.quantize.corrections.base import Correction
from mxdiag.quantize.corrections.evaluate import evaluate_corrections
from mxdiag.quantize.corrections.registry import DEFAULT_CORRECTIONS, parse_corrections
from mxdiag.quantize.cpu import launch as cpu

RCEIL = SCALE_RULES["rceil"]
FUSED = (
    *DEFAULT_CORRECTIONS,
    "mbs:64",
    "mbs:32",
    "of:1.0",
    "mbs:64+of:0.25",
    "scale:m0",
    "scale:m3",
)
#: Whole and ragged macro blocks, in rows and in columns.
ROWS, COLUMNS = ((16, 512, 1), (5, 200, 1), (7, 33, 1)), ((1, 256, 64), (1, 100, 70), (3, 50, 20))
#: One kernel each: both widths, both classes of rules, both layouts.
CASES = (
    ("bfloat16", "rceil", ROWS),
    ("bfloat16", "floor", COLUMNS),
    ("float32", "even", ROWS),
    ("float32", "ceil", COLUMNS),
)


def assert_agree(x: np.ndarray, rule: ScaleRule, corrections: tuple[Correction, ...]) -> None:
    """Underflows exactly; sums within 1e-6 of their natural scale, as the plain sums do."""
    want = evaluate_corrections(to_torch(x), rule, corrections)
    sums = cpu.measure(x, rule, corrections=corrections)
    plain = cpu.measure(x, rule)
    np.testing.assert_array_equal(sums.counts, plain.counts)
    assert list(sums.corrections) == list(want)
    for name, (e2, qx, e, underflow) in want.items():
        have = sums.corrections[name]
        assert abs(have[0] - e2) <= 1e-6 * e2, name
        assert abs(have[1] - qx) <= 1e-6 * sums.sums[0], name
        assert abs(have[2] - e) <= 1e-6 * (e2 * x.size) ** 0.5, name
        assert have[3] == underflow, name


@pytest.mark.parametrize(("dtype", "rule", "shapes"), CASES)
def test_equal_the_reference(
    dtype: str, rule: str, shapes: tuple[tuple[int, int, int], ...]
) -> None:
    for seed, shape in enumerate(shapes):
        for kind in KINDS:
            x = draw(seed, shape, DTYPES[dtype], kind)
            assert_agree(x, SCALE_RULES[rule], parse_corrections(FUSED))


def test_a_piece_is_given_the_tensors_amax() -> None:
    corrections = parse_corrections(FUSED)
    x = draw(0, (64, 128, 1), BF16, "plain")
    amax = cpu.measure(x, RCEIL).amax
    whole = cpu.measure(x, RCEIL, corrections=corrections).corrections["nvfp4"]
    pieces = [
        cpu.measure(part, RCEIL, corrections=corrections, amax=amax).corrections["nvfp4"]
        for part in (x[:40], x[40:])
    ]
    # The same float64 blocks in another order of addition.
    np.testing.assert_allclose(sum(pieces), whole, rtol=1e-12)


def test_thread_count_does_not_matter() -> None:
    corrections = parse_corrections(FUSED)
    x = draw(1, (600, 1024, 1), BF16, "plain")
    one, three = (cpu.measure(x, RCEIL, corrections=corrections, threads=n) for n in (1, 3))
    np.testing.assert_array_equal(one.sums, three.sums)
    for name, fields in one.corrections.items():
        np.testing.assert_array_equal(fields, three.corrections[name])


def test_the_others_are_named_and_refused() -> None:
    fused = {correction.name: cpu.is_fused(correction) for correction in parse_corrections("all")}
    assert {name for name, yes in fused.items() if yes} == set(DEFAULT_CORRECTIONS)
    x, search = np.zeros((1, 32, 1), np.float32), parse_corrections("mbs:search")
    with pytest.raises(ValueError, match="mbs:search"):
        cpu.measure(x, RCEIL, corrections=search)


def test_empty() -> None:
    corrections = parse_corrections(DEFAULT_CORRECTIONS)
    sums = cpu.measure(np.zeros((0, 32, 1), BF16), RCEIL, corrections=corrections)
    assert all(fields.tolist() == [0.0] * 4 for fields in sums.corrections.values())
