"""What the Python API is given by mistake: one MxdiagError that says what to do, no traceback."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import mxdiag
from mxdiag import api as analyze
from mxdiag.errors import CalibrationError, ModelError, TensorError, UsageError

BATCHES = [torch.ones(3, 64)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32))


def total(output, batch):
    return output.sum()


TENSORS = {
    "text": (lambda: "abc", "cannot quantize a str"),
    "nothing": (lambda: None, "cannot quantize a NoneType"),
    "a dict": (lambda: {"a": 1}, "cannot quantize a dict"),
    "a generator": (lambda: (i for i in range(3)), "cannot quantize a generator"),
    "a number": (lambda: 3.0, "0-dimensional"),
    "words": (lambda: ["a", "b"], "cannot quantize a list"),
    "ragged": (lambda: [[1.0], [1.0, 2.0]], "cannot read a list"),
    "sparse": (lambda: torch.eye(32).to_sparse(), "sparse_coo.*to_dense"),
    "sparse rows": (lambda: torch.eye(32).to_sparse_csr(), "sparse_csr.*to_dense"),
    "meta": (lambda: torch.ones(32, device="meta"), "holds no values"),
    "complex": (lambda: torch.ones(32, dtype=torch.complex64), "dtype complex64"),
    "complex array": (lambda: np.ones(32, complex), "dtype complex128"),
    "masked": (lambda: np.ma.masked_array(np.ones(32), mask=[True] * 32), "masked.*filled"),
    "objects": (lambda: np.array([1.0] * 32, object), "dtype object"),
    "integers": (lambda: torch.arange(32), "dtype int64"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("entry", [mxdiag.decompose, mxdiag.quantize_dequantize])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", TENSORS)
def test_what_is_no_tensor_of_numbers_is_refused(entry, backend, name):
    make, match = TENSORS[name]
    with pytest.raises(TensorError, match=match) as caught:
        entry(make(), backend=backend)
    assert caught.value.advice


@pytest.mark.filterwarnings("ignore")
def test_nested_and_quantized_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])
    quantized = torch.quantize_per_tensor(torch.ones(32), 1.0, 0, torch.qint8)
    for x, match in ((nested, "nested"), (quantized, r"qint8. Pass x.dequantize\(\)")):
        with pytest.raises(TensorError, match=match):
            mxdiag.decompose(x)


def test_lists_are_read_as_numpy_reads_them():
    values = [[1.0, 0.3, -2.7], [4, 5, 6]]
    array = np.array(values)
    assert mxdiag.decompose(values).metrics() == mxdiag.decompose(array).metrics()
    found = mxdiag.quantize_dequantize(values)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, mxdiag.quantize_dequantize(array))


def test_unusual_layouts_of_numbers_are_read():
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    expected = mxdiag.quantize_dequantize(x)
    swapped = x.astype(x.dtype.newbyteorder(">"))
    np.testing.assert_array_equal(mxdiag.quantize_dequantize(swapped), expected)
    negated = torch.complex(torch.zeros(64), torch.from_numpy(-x)).conj().imag
    assert negated.is_neg()
    np.testing.assert_array_equal(mxdiag.quantize_dequantize(negated).numpy(), expected)


@pytest.mark.parametrize("axis", [1.0, None, "x"])
def test_an_axis_is_an_integer(axis):
    with pytest.raises(TensorError, match="axis must be an integer"):
        mxdiag.decompose(np.ones((2, 32), np.float32), axis=axis)


def test_names_are_no_corrections():
    with pytest.raises(UsageError, match=r"'mbs' is no correction.*parse_corrections"):
        mxdiag.decompose(np.ones((2, 32), np.float32), corrections=["mbs"])


@pytest.mark.parametrize("entry", [mxdiag.scan, analyze.impact])
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (None, "type NoneType.*or a torch module"),
        (3, "type int"),
        ([1], "type list"),
        ({"w": torch.ones(2, 2)}, "type dict"),
        (nn.Linear, "the class Linear, only an instance"),
        ("", "name is empty"),
        (" ", "name is empty"),
    ],
)
def test_what_is_no_model_is_refused(entry, wrong, match):
    with pytest.raises(UsageError, match=match):
        entry(wrong, calibration=BATCHES)


@pytest.mark.parametrize("entry", [mxdiag.scan, analyze.impact])
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (5, "type int.*list of records"),
        (torch.tensor(1.0), "type Tensor"),
        ({"input_ids": [1, 2]}, "a single dict"),
        (b"abc", "a single bytes"),
    ],
)
def test_what_is_no_calibration_is_refused(entry, wrong, match):
    with pytest.raises(CalibrationError, match=match):
        entry(model(), calibration=wrong)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss": 5}, "loss cannot be of type int"),
        ({"settings": 5}, "settings cannot be of type int"),
        ({"seq_len": "long"}, "--seq-len cannot be 'long'"),
        ({"samples": True}, "--samples cannot be True"),
        ({"operands": 5}, "--operands cannot be 5"),
        ({"include": 5}, "--include cannot be 5"),
        ({"exclude": ["a", 5]}, "--exclude cannot be"),
    ],
)
def test_options_of_a_wrong_type_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        mxdiag.scan(model(), calibration=BATCHES, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"settings": 5}, "settings cannot be of type int"),
        ({"repeats": "3"}, "--repeats cannot be '3'"),
        ({"configs": 5}, "--configs cannot be 5"),
        ({"jitter": None, "aqn_sigmas": ("a",)}, "--aqn-sigmas cannot be"),
        ({"seq_len": 1.5}, "--seq-len cannot be 1.5"),
    ],
)
def test_options_of_an_impact_too(options, match):
    with pytest.raises(UsageError, match=match):
        analyze.impact(model(), calibration=BATCHES, **options)


def test_one_pattern_is_a_pattern_not_its_letters():
    with pytest.raises(ModelError, match="no linear layer"):
        mxdiag.scan(model(), exclude="0")
    assert len(mxdiag.scan(model(), exclude="x0").tensors) == 3


def test_a_module_without_parameters_says_so():
    with pytest.raises(ModelError, match=r"no linear layer to measure. It has no parameters"):
        mxdiag.scan(nn.ReLU(), calibration=BATCHES)


def test_inference_tensors_are_told_from_the_callers_inference_mode():
    """A model made in that mode can never have gradients; one that is only scanned in it can."""
    options = {"calibration": BATCHES, "loss": total, "corrections": "none"}
    with torch.inference_mode():
        made = model()
    with pytest.raises(ModelError, match=r"0\.weight: .*inference_mode.*outside of it"):
        mxdiag.scan(made, **options)
    assert mxdiag.scan(made, operands="W").tensors[0]["status"] == "ok"
    outside = mxdiag.scan(model(), **options)
    ordinary = model()
    with torch.inference_mode():
        inside = mxdiag.scan(ordinary, **options | {"calibration": [torch.ones(3, 64)]})
    assert inside.tensors == outside.tensors
    assert {row["operand"] for row in inside.tensors if row["calls"]} >= {"A", "G"}
