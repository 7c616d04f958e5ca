"""The Triton kernels against the reference: under Triton's interpreter, on a GPU if there is one,
and compiled ahead of time for GPUs that are not there.

The interpreter needs TRITON_INTERPRET before triton is imported, and then serves a whole process:
it runs in one of its own, which the test process hands tensors and gets results from.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from edge_cases import ELEMENT_CASES, RULES, SCALE_CASES
from mxdiag.errors import TensorError
from mxdiag.formats import SCALE_RULES
from mxdiag.quantize import reference
from mxdiag.quantize.sums import SUM_FIELDS, Sums
from paths import SUPPORT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: [outer, K, inner]: ragged rows and ragged columns under every rule; then both, and rows of whole
#: blocks, which are read as one long row.
SHAPES_AND_RULES = (
    *(((3, 70, 1), rule) for rule in RULES),
    *(((1, 70, 40), rule) for rule in RULES),
    ((2, 33, 5), "even"),
    ((3, 64, 1), "floor"),
)
PICKS = [
    frozenset(names)
    for count in (1, 2, 3)
    for names in itertools.combinations(reference.COMPONENTS, count)
]


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def call(entry: str, *args: Any, **options: Any) -> Any:
    """Run an entry point of the Triton module, imported here and not at the top of this file."""
    from mxdiag.quantize.triton import launch as triton_kernel

    return getattr(triton_kernel, entry)(*args, **options)


def measure_with_long_programs(x: torch.Tensor, rule: str) -> Sums:
    """As on a large tensor, where a program takes several tiles."""
    from mxdiag.quantize.triton import measure as triton_kernel

    with mock.patch.object(triton_kernel, "_WANTED_PROGRAMS", 1):
        return triton_kernel.measure(x, rule)


def far_apart(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Results and expectations for blocks 2^31 elements apart. Only pages they touch are used."""
    distance = (1 << 31) + 64
    storage = torch.empty(distance + 4096, dtype=torch.float16, device=device)
    results = []
    for shape, strides in (((2, 64, 1), (distance, 1, 1)), ((1, 2, 64), (1, distance, 1))):
        x = storage.as_strided(shape, strides)
        x.copy_(torch.arange(128).reshape(shape) / 7)
        results.append(
            (call("quantize_dequantize", x), reference.quantize_dequantize(x.contiguous(), 1))
        )
    return results


class Kernel:
    """The Triton module on one device: `kernel.measure(x, rule)` and so on, results on the CPU."""

    def __init__(self, device: str, pool: ProcessPoolExecutor | None) -> None:
        self.device, self.pool = device, pool

    def run(self, function: Any, *args: Any, **options: Any) -> Any:
        if self.pool is not None:
            return self.pool.submit(function, *args, **options).result()
        result = function(*(self._moved(arg) for arg in args), **options)
        if isinstance(result, reference.Encoded):
            return reference.Encoded(result.codes.cpu(), result.scale_codes.cpu())
        return result.cpu() if isinstance(result, torch.Tensor) else result

    def _moved(self, value: Any) -> Any:
        """A tensor on the device, as the same view of the same storage."""
        if not isinstance(value, torch.Tensor):
            return value
        flat = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(self.device)
        return flat.as_strided(value.shape, value.stride(), value.storage_offset())

    def __getattr__(self, entry: str) -> Any:
        return lambda *args, **options: self.run(call, entry, *args, **options)


DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(scope="module", params=DEVICES)
def kernel(request):
    if request.param != "cpu":
        yield Kernel(request.param, None)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_interpret) as pool:
        yield Kernel("cpu", pool)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed values over many binades; zeros of both signs, subnormals, the largest values,
    an all-zero block, a NaN and an infinity.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_t(2, shape) * 2.0 ** rng.uniform(-6, 6, (shape[0], 1, shape[2]))
    x[rng.random(shape) < 0.05] = 0.0
    x[rng.random(shape) < 0.02] = -0.0
    result = torch.tensor(x, dtype=torch.float32).to(dtype)
    first = result[0, :, 0]
    first[:8] = torch.finfo(dtype).smallest_normal * torch.tensor([0.75, -0.5, 0.25, 1, 0, 3, 1, 1])
    first[8:32] = 0.0
    first[32:] = torch.finfo(dtype).max * torch.linspace(-1, 0.01, first[32:].numel()).to(dtype)
    last = result[-1, :, -1]
    last[:32] = 0.0
    last[32] = torch.nan
    if shape[2] > 2:
        result[0, 1, 1] = -torch.inf
    return result


def same_bits(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bit for bit, zeros' signs included; a NaN equals any NaN."""
    assert result.dtype == expected.dtype
    if result.shape != expected.shape or not torch.equal(result.isnan(), expected.isnan()):
        return False
    integer = {2: torch.int16, 4: torch.int32}[result.element_size()]
    kept = ~expected.isnan()
    return torch.equal(result[kept].view(integer), expected[kept].view(integer))


def assert_equal_sums(result: Sums, expected: Sums) -> None:
    """Counts exactly; sums within 1e-6 of their natural scale, which for the parts of the error is
    their total and for a signed sum what it cannot exceed: the float32 sums inside a program round
    a few times at 2^-24.
    """
    np.testing.assert_array_equal(result.counts, expected.counts)
    np.testing.assert_array_equal(result.delta_hist, expected.delta_hist)
    assert result.amax == expected.amax
    x2, e2, *parts = expected.sums[:5]
    counted, blocks, total = expected.counts[1], expected.counts[6], sum(parts)
    scale = dict.fromkeys(SUM_FIELDS, total)
    scale |= {"x2": x2, "qx": x2, "e": np.sqrt(counted * e2)}
    scale |= {"delta": blocks + expected.sums[10], "delta2": blocks + expected.sums[10]}
    excess = np.abs(result.sums - expected.sums) - 1e-6 * np.array([*scale.values()])
    assert (excess <= 0).all(), dict(zip(SUM_FIELDS, excess, strict=True))
    assert abs(closure(result.sums)) <= 1e-6 * total


def closure(sums: np.ndarray) -> float:
    """What the parts miss of ||e||^2."""
    named = dict(zip(SUM_FIELDS, sums, strict=True))
    crossed = named["scale_grid"] + named["scale_deadzone"]
    return named["e2"] - (named["scale2"] + named["deadzone2"] + named["grid2"] + 2 * crossed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "rule"), SHAPES_AND_RULES, ids=str)
def test_sums_equal_the_reference(kernel, dtype, shape, rule):
    x = values(*shape, dtype=dtype)
    expected = reference.measure(x, rule, tokens=True)
    assert expected.counts[-1] > 0, "the values hold no non-finite block"
    result = kernel.measure(x, rule, tokens=True)
    assert_equal_sums(result, expected)
    # Per token, relative to the token: its own blocks are summed, in float64 along K.
    np.testing.assert_allclose(result.tokens, expected.tokens, rtol=1e-6, atol=0)
    assert_equal_sums(kernel.measure(x, rule), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "rule"), SHAPES_AND_RULES, ids=str)
def test_written_values_equal_the_reference(kernel, dtype, shape, rule):
    x = values(*shape, dtype=dtype, seed=1)
    encoded, expected = kernel.encode(x, rule), reference.encode(x, 1, rule)
    assert torch.equal(encoded.scale_codes, expected.scale_codes)
    assert torch.equal(encoded.codes, expected.codes)
    decoded = kernel.quantize_dequantize(x, rule)
    assert same_bits(decoded, reference.quantize_dequantize(x, 1, rule))
    # All choices of components take their turn.
    first = 2 * SHAPES_AND_RULES.index((shape, rule))
    for components in (PICKS[first % 7], PICKS[(first + 1) % 7]):
        injected = kernel.inject(x, components, rule)
        assert same_bits(injected, reference.inject(x, components, 1, rule)), components


def test_no_component_gives_x_and_all_give_q(kernel):
    x = values(3, 70, 1, dtype=torch.bfloat16)
    assert same_bits(kernel.inject(x, frozenset()), x)
    everything = kernel.inject(x, frozenset(reference.COMPONENTS))
    assert same_bits(everything, kernel.quantize_dequantize(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_named_scale_cases(kernel, dtype):
    cases = [case for case in SCALE_CASES if getattr(torch, case.dtype) == dtype]
    x = torch.zeros(len(cases), 32, 1, dtype=dtype)
    x[:, 0, 0] = torch.tensor([case.amax for case in cases], dtype=dtype)
    for index, rule in enumerate(RULES):
        codes = kernel.encode(x, rule).scale_codes.flatten()
        decoded = kernel.quantize_dequantize(x, rule)[:, 0, 0].to(torch.float64)
        for case, code, value in zip(cases, codes.tolist(), decoded.tolist(), strict=True):
            assert code == case.codes[index], (rule, case.reason)
            assert np.array_equal(value, case.decoded[index], equal_nan=True), (rule, case.reason)


def test_named_elements_at_scale_one(kernel):
    x = torch.tensor([6.0, *(value for _, value, _, _ in ELEMENT_CASES)])[None, :, None]
    decoded = kernel.quantize_dequantize(x)[0, 1:, 0]
    codes = kernel.encode(x).codes[0, 1:, 0]
    for (reason, value, expected, code), got, got_code in zip(
        ELEMENT_CASES, decoded, codes, strict=True
    ):
        assert got == expected, (reason, value)
        assert torch.signbit(got) == np.signbit(expected), (reason, value)
        assert int(got_code) == code, (reason, value)


def at_rounding_points(amax: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Blocks [len(amax), 32, 1] of elements on and next to each rounding point of amax / 6."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    exact = torch.from_numpy(amax[:, None] * ties / 6)
    near = exact.to(dtype)
    integer = {2: torch.int16, 4: torch.int32}[near.element_size()]
    steps = [(near.view(integer) + step).view(dtype) for step in (-1, 0, 1)]
    blocks = torch.cat([torch.from_numpy(amax[:, None]).to(dtype), *steps], 1)
    return torch.nn.functional.pad(blocks, (0, 32 - blocks.shape[1]))[..., None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ideal_scale_decides_as_exact_arithmetic(kernel, dtype):
    """Every 16-bit mantissa of amax, and 600 of float32's, where rounding would show.
    The decision is monotone in the element, so its neighbourhood of the rounding points is enough.

    With deadzone and grid injected the result is Q* itself.
    """
    if dtype == torch.float32:
        amax = np.random.default_rng(5).uniform(1, 2, 600).astype(np.float32).astype(np.float64)
    else:
        bits = {torch.bfloat16: 7, torch.float16: 10}[dtype]
        amax = 1 + np.arange(1 << bits) / (1 << bits)
    x = at_rounding_points(amax, dtype)
    ideal = kernel.inject(x, frozenset({"deadzone", "grid"}))
    assert same_bits(ideal, reference.inject(x, frozenset({"deadzone", "grid"}), 1))
    assert_equal_sums(kernel.measure(x), reference.measure(x))


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_programs_of_several_tiles(kernel, axis):
    """Scales that differ by 2^160 between the tiles of a program, largest first and last."""
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(2))
    x = x * torch.logspace(-24, 24, 16, base=10)
    x = torch.cat([x, x.flip(1)], 1).T.reshape(32, 512)
    x = x.reshape(1, -1, 1) if axis == "rows" else x[:, :6].reshape(1, -1, 3).contiguous()
    expected = reference.measure(x)
    assert_equal_sums(kernel.run(measure_with_long_programs, x, "rceil"), expected)


def adversarial() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    grid = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6])[
        torch.randint(7, (2, 64, 1), generator=generator)
    ]
    grid[:, ::32] = 6.0
    nudge = 1 + 2.0**-23 * torch.randint(-1, 2, grid.shape, generator=generator)
    two = torch.full((2, 64, 1), 1.7)
    two[:, ::32] = 3.3
    return {
        "a constant": torch.full((2, 64, 1), 4.1),
        "two values": two,
        "a float32 step around MXFP4": grid * nudge,
        "MXFP4 but for an amax one step up": grid.where(grid != 6, torch.tensor(6.0000005)),
        "subnormals": torch.randn(2, 64, 1, generator=generator) * 2.0**-130,
        "the top of float32": torch.rand(2, 64, 1, generator=generator) * 3.4e38,
        "an outlier per block": grid.where(grid != 6, torch.tensor(1e9)),
    }


@pytest.mark.parametrize("name", adversarial())
def test_closure_where_float32_is_weakest(kernel, name):
    x = adversarial()[name]
    for rule in ("rceil", "floor"):
        assert_equal_sums(kernel.measure(x, rule), reference.measure(x, rule))


def test_a_tensor_that_is_mxfp4_has_no_error_at_all(kernel):
    x = reference.quantize_dequantize(values(3, 64, 1)[:2], 1).nan_to_num(0, 0, 0)
    sums = dict(zip(SUM_FIELDS, kernel.measure(x).sums, strict=True))
    assert sums["x2"] > 0
    assert sums["e2"] == 0


@pytest.mark.parametrize("rule", RULES)
def test_the_histogram_at_its_bounds(kernel, rule):
    """amax next to every bound between two bins of delta."""
    low = SCALE_RULES[rule].delta_low(reference.MXFP4.element)
    bounds = (6 * 2.0 ** -(low + np.arange(33) / 32)).astype(np.float32)
    near = [np.nextafter(bounds, np.float32(to)) for to in (0, 100)]
    x = torch.zeros(99, 32, 1)
    x[:, 0, 0] = torch.from_numpy(np.concatenate([bounds, *near]))
    result = kernel.measure(x, rule).delta_hist
    np.testing.assert_array_equal(result, reference.measure(x, rule).delta_hist)


def views() -> dict[str, torch.Tensor]:
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(6))
    return {
        "transposed rows": x[:, :6].t()[:, :, None],
        "transposed columns": x[:6].t()[None],
        "half of the columns": x[:5].chunk(2, 1)[1][:, :, None],
        "half of the columns, side by side": x.chunk(2, 1)[1][None],
        "every seventh": x[::7, 1:65][:, :, None],
        "an expanded row": x[:1, :64].expand(5, -1)[:, :, None],
        "an expanded element": x[:1, :1, None].expand(2, 64, 3),
        "a short K": x[:5, :3, None],
    }


@pytest.mark.parametrize("name", views())
def test_views_equal_their_copies(kernel, name):
    x = views()[name]
    assert_equal_sums(kernel.measure(x, tokens=True), reference.measure(x))
    assert_equal_sums(kernel.measure(x), reference.measure(x))
    encoded, expected = kernel.encode(x), reference.encode(x, 1)
    assert torch.equal(encoded.codes, expected.codes)
    assert torch.equal(encoded.scale_codes, expected.scale_codes)
    assert same_bits(kernel.quantize_dequantize(x), reference.quantize_dequantize(x, 1))


def test_blocks_more_than_2_to_the_31_elements_apart(kernel):
    for result, expected in kernel.run(far_apart, kernel.device):
        assert torch.equal(result.cpu(), expected.cpu())


def test_results_are_the_same_every_time(kernel):
    x = values(3, 70, 1)
    first, second = kernel.measure(x, tokens=True), kernel.measure(x, tokens=True)
    np.testing.assert_array_equal(first.sums, second.sums)
    np.testing.assert_array_equal(first.tokens, second.tokens)


@pytest.mark.parametrize("shape", [(0, 64, 1), (2, 0, 1), (1, 64, 0)])
def test_empty_tensors(kernel, shape):
    x = torch.empty(shape)
    result, expected = kernel.measure(x, tokens=True), reference.measure(x, tokens=True)
    np.testing.assert_array_equal(result.sums, expected.sums)
    np.testing.assert_array_equal(result.counts, expected.counts)
    assert result.tokens.shape == expected.tokens.shape
    assert kernel.quantize_dequantize(x).shape == x.shape
    assert kernel.encode(x).scale_codes.shape == reference.encode(x, 1).scale_codes.shape


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 32, 1, dtype=torch.float64), "float64"),
        (torch.zeros(1, 32, 1, dtype=torch.int32), "int32"),
        (torch.zeros(32), "1 axes"),
    ],
)
def test_what_cannot_be_read_is_refused(kernel, x, message):
    with pytest.raises(TensorError, match=message):
        kernel.measure(x)


def test_unknown_components_are_refused(kernel):
    with pytest.raises(TensorError, match="bias"):
        kernel.inject(torch.zeros(1, 32, 1), frozenset({"bias"}))


def test_a_cpu_tensor_is_refused_without_the_interpreter():
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        job = pool.submit(call, "measure", torch.zeros(1, 32, 1))
        with pytest.raises(TensorError, match="on a GPU"):
            job.result()


AOT_TARGETS = (("cuda-80", "cuda-90", "cuda-100"), ("hip-gfx942", "hip-gfx950"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Rows of triton_aot.py by target, compiled afresh, NVIDIA's and AMD's side by side."""
    program = SUPPORT / "triton_aot.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    jobs = []
    for targets in AOT_TARGETS:
        cache = str(tmp_path_factory.mktemp("triton"))
        jobs.append(
            subprocess.Popen(
                [sys.executable, program, *targets],
                env=environment | {"TRITON_CACHE_DIR": cache},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    rows: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        output, errors = job.communicate()
        assert job.returncode == 0, errors
        for line in output.splitlines():
            row = json.loads(line)
            rows.setdefault(row["target"], []).append(row)
    return rows


@pytest.mark.parametrize("target", [target for group in AOT_TARGETS for target in group])
def test_compiles_ahead_of_time(compiled, target, record_property):
    rows = compiled[target]
    assert {"measure", "values", "codes", "inject"} <= {row["kernel"] for row in rows}
    for row in rows:
        name = "{kernel} {dtype} {layout}".format_map(row)
        resources = {key: row[key] for key in ("registers", "stack", "spilled")}
        record_property(f"{target} {name}", str(resources))
        print(target, name, resources)
        # The most any kernel needs is under 300 bytes; a tile of twice the size takes over 1 KB.
        assert row["stack"] <= 400, name
        assert not row["spilled"], name
        # The logarithm of delta may flush: its argument is near 1. Nothing else may.
        measures = row["kernel"].startswith("measure")
        assert set(row["flushes"]) <= ({"fma.rn.ftz.f32"} if measures else set()), name
        # Elements have 64-bit offsets; bounds and histogram are stepped through by a range of 32,
        # and the columns of a token's sums by 1 and 2.
        narrow = {"measure": 2, "measure-tokens": 4}
        assert row["narrow_offsets"] == narrow.get(row["kernel"], 0), name
        assert row["wide_loads" if row["layout"] == "rows" else "one_block_per_thread"], name
        assert (row["fma"] > 0) == measures or row["kernel"] == "inject", name
        assert row["exact_division"] or row["kernel"] != "inject", name


# ---- a whole scan ------------------------------------------------------------------------------


def scanned(backend: str) -> list[dict[str, Any]]:
    """Rows of a scan of W, A and G of two layers."""
    import mxdiag

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 32), torch.nn.Linear(32, 33))
    run = mxdiag.scan(
        model,
        calibration=[torch.randn(5, 40)],
        loss=lambda output, _: output.square().sum(),
        backend=backend,
        corrections="none",
    )
    return run.tensors


def test_a_scan_with_the_kernel_equals_one_on_the_cpu(kernel: Kernel) -> None:
    """The interpreter serves one call at a time, so weights must not be measured on threads."""
    if kernel.pool is None:
        pytest.skip("the interpreter's own test")
    found, wanted = kernel.run(scanned, "triton"), scanned("cpu")
    assert len(found) == len(wanted) == 6
    for ours, theirs in zip(found, wanted, strict=True):
        for name, value in theirs.items():
            close = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            if name != "closure_residual":
                assert ours[name] == close, name
