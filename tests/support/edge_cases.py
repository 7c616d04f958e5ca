"""Named edge cases of MXFP4, each with its reason: every implementation must pass them all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RULES = ("floor", "ceil", "rceil", "even")


def just(value: float, toward: float) -> float:
    """The float32 next to `value`."""
    return float(np.nextafter(np.float32(value), np.float32(toward)))


@dataclass(frozen=True)
class ScaleCase:
    """A block with one non-zero element: its scale bytes and decoded values in RULES' order."""

    reason: str
    amax: float
    codes: tuple[int, int, int, int]
    decoded: tuple[float, float, float, float]
    dtype: str = "float32"


SCALE_CASES = (
    ScaleCase("a power of two is exact under every rule", 4.0, (127,) * 4, (4.0,) * 4),
    ScaleCase("only ceil looks at any mantissa bit", 2.7, (126, 127, 126, 126), (3.0,) * 4),
    ScaleCase(
        "6 is the largest element: rceil needs no more", 6.0, (127, 128, 127, 127), (6.0,) * 4
    ),
    ScaleCase(
        "one float32 step above 6 raises rceil", just(6, 9), (127, 128, 128, 127), (6.0,) * 4
    ),
    ScaleCase(
        "7 is 1.75: a tie to even one bit up", 7.0, (127, 128, 128, 128), (6.0, 8.0, 8.0, 8.0)
    ),
    ScaleCase(
        "one step below 256: float32 log2 would round to 8",
        just(256, 0),
        (132, 133, 133, 133),
        (192.0, 256.0, 256.0, 256.0),
    ),
    ScaleCase(
        "one step below 16: float32 log2 would round to 4",
        just(16, 0),
        (128, 129, 129, 129),
        (12.0, 16.0, 16.0, 16.0),
    ),
    ScaleCase(
        "the bf16 below 8: bf16 log2 would round to 3",
        7.96875,
        (127, 128, 128, 128),
        (6.0, 8.0, 8.0, 8.0),
        "bfloat16",
    ),
    ScaleCase(
        "1.2: an exponent cut toward zero would be 126",
        1.2,
        (125, 126, 125, 125),
        (1.0, 1.0, 1.0, 1.0),
    ),
    ScaleCase(
        "3.9999 must not be rounded to bf16 first",
        3.9999,
        (126, 127, 127, 127),
        (3.0, 4.0, 4.0, 4.0),
    ),
    ScaleCase(
        "just above 768 = 6 * 2^7 raises rceil",
        just(768, 1000),
        (134, 135, 135, 134),
        (768.0,) * 4,
    ),
    ScaleCase(
        "13 * 2^-24 is 1.625 * 2^-21: dividing by 6 in fp16 would lose it",
        13 * 2.0**-24,
        (104, 105, 105, 104),
        (12 * 2.0**-24,) * 4,
        "float16",
    ),
    ScaleCase(
        "2^-126 has byte 0, which is 2^-127, not 0", 2.0**-126, (0, 0, 0, 0), (2.0**-126,) * 4
    ),
    ScaleCase("a subnormal amax is still exact", 2.0**-128, (0, 0, 0, 0), (2.0**-128,) * 4),
    ScaleCase("2^-129 is half the smallest step: a tie to 0", 2.0**-129, (0, 0, 0, 0), (0.0,) * 4),
    ScaleCase(
        "saturates under floor only", 957.0, (134, 135, 135, 135), (768.0, 1024.0, 1024.0, 1024.0)
    ),
    ScaleCase("an all-zero block has byte 0 and no 0/0", 0.0, (0, 0, 0, 0), (0.0,) * 4),
    ScaleCase(
        "float32 max decodes to 2^128, infinite in float32, but for floor",
        float(np.finfo(np.float32).max),
        (252, 253, 253, 253),
        (6 * 2.0**125, np.inf, np.inf, np.inf),
    ),
    ScaleCase("an infinity makes the block NaN", np.inf, (255,) * 4, (np.nan,) * 4),
    ScaleCase("a NaN makes the block NaN", np.nan, (255,) * 4, (np.nan,) * 4),
)

#: Elements of a block whose amax is 6, so that the scale is 1 under floor, rceil and even.
ELEMENT_CASES = (
    ("ties go to the even code", 0.25, 0.0, 0),
    ("", 0.75, 1.0, 2),
    ("", 1.25, 1.0, 2),
    ("", 1.75, 2.0, 4),
    ("", 2.5, 2.0, 4),
    ("", 3.5, 4.0, 6),
    ("", 5.0, 4.0, 6),
    ("one float32 step above a tie", just(5, 9), 6.0, 7),
    ("float32 above a tie that bf16 would round onto it", 1.2501, 1.5, 3),
    ("negative zero stays", -0.25, -0.0, 8),
    ("negative zero in, negative zero out", -0.0, -0.0, 8),
    ("just below the deadzone's edge of a quarter", just(0.25, 0), 0.0, 0),
    ("just above it", just(0.25, 1), 0.5, 1),
)
