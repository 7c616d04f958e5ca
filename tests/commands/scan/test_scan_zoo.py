"""Every architecture of the zoo through `mxdiag.scan`: all rows, all numbers, both routes to W."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mxdiag
from capture import by_rows, direct, hooked, operands, tapped
from mxdiag.checkpoint.inventory import checkpoint_inventory
from mxdiag.checkpoint.open import open_checkpoint
from mxdiag.checkpoint.stream import read
from mxdiag.gemms import CELLS
from mxdiag.run.rows import MEASURED
from zoo import ZOO, Entry, batch, build, loss_of

OPTIONS = {"gemms": "fprop,dgrad,wgrad", "corrections": "none"}
#: W: float32 sums of a block on the fast path against float64 in the reference. A and G as well
#: depend, in their last bits and on some CPUs, on whether torch is asked for the parameters'
#: gradients, which chooses its kernels; a last bit can move a value across a step of the grid.
LOOSE = {"rel": 1e-4, "abs": 1e-9}
FAST = {"W": {"rel": 1e-6, "abs": 1e-9}, "A": LOOSE, "G": LOOSE}


def loss_for(item: Entry, seen: list[Tensor]):
    def loss(output, _batch):
        value = output.last_hidden_state.square().mean() if item.head == "features" else output.loss
        seen.append(value.detach().clone())
        return value

    return loss


def plain_run(model: nn.Module, item: Entry) -> list[Tensor | None]:
    """Loss and gradient of every parameter, with no tap about."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, item, batch(item))
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return found


def assert_same_bits(before: list[Tensor | None], after: list[Tensor | None]) -> None:
    for a, b in zip(before, after, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def assert_is(row: dict, calls: list[Tensor], cell) -> None:
    """A row's numbers are those of its tensors."""
    sums, counts = direct(calls, cell)
    fast = FAST[cell.operand]
    assert row["numel"] == counts["numel"]
    for column, field in (
        ("deadzone_frac", "deadzone"),
        ("underflow_frac", "underflow"),
        ("zero_frac", "zero"),
    ):
        assert row[column] == pytest.approx(counts[field] / counts["counted"], rel=1e-15)
    assert row["status"] == ("ok" if sums["e2"] else "exact" if sums["x2"] else "zero")
    if sums["x2"]:
        assert row["rel_mse"] == pytest.approx(sums["e2"] / sums["x2"], **fast)
        assert row["gain"] == pytest.approx(sums["qx"] / sums["x2"], **fast)
    if sums["e2"]:
        assert row["recoverable"] == pytest.approx(sums["deadzone2"] / sums["e2"], **fast)
        assert row["irreducible"] == pytest.approx(sums["grid2"] / sums["e2"], **fast)
        assert row["scale_energy"] == pytest.approx(sums["scale2"] / sums["e2"], **fast)
        assert abs(row["closure_residual"]) < 1e-6


@pytest.mark.parametrize("item", ZOO, ids=lambda item: item.name)
def test_every_row_of_every_architecture(item: Entry, tmp_path: Path) -> None:
    model = build(item, experts_implementation="eager")
    model.save_pretrained(tmp_path)
    with hooked(model) as plain:
        before = plain_run(model, item)
    rows = by_rows(plain + tapped(model, lambda: loss_of(model, item, batch(item))))

    seen: list[Tensor] = []
    run = mxdiag.scan(model, calibration=[batch(item)], loss=loss_for(item, seen), **OPTIONS)
    assert torch.equal(seen[0], before[0])
    assert_same_bits(before, plain_run(model, item))
    check_coverage(run)

    found = {(row["layer"], row["operand"], row["gemm"]): row for row in run.tensors}
    with open_checkpoint(tmp_path) as checkpoint:
        stored = {linear.layer: linear for linear in checkpoint_inventory(checkpoint).measured}
        assert set(found) == {(layer, c.operand, c.gemm) for layer in stored for c in CELLS}
        for layer, linear in stored.items():
            weight = read(checkpoint, linear)
            x, g = operands(weight, rows)
            tensors = {"W": [torch.from_numpy(weight)], "A": x, "G": g}
            for cell in CELLS:
                row = found[layer, cell.operand, cell.gemm]
                if row["status"] == "not_observed":
                    assert not tensors[cell.operand]
                    continue
                assert_is(row, tensors[cell.operand], cell)
                assert row["calls"] == len(x)
                if cell.operand != "W":
                    assert row["tokens"] == sum(len(t) for t in x)

    streamed = mxdiag.scan(tmp_path, weights_only=True, **OPTIONS)
    check_coverage(streamed)
    live = run.frame[run.frame["operand"] == "W"].drop(columns="calls").reset_index(drop=True)
    assert live.equals(streamed.frame.drop(columns="calls"))
    assert excluded(run) == excluded(streamed)


def excluded(run: mxdiag.Run) -> set[tuple[str, str, int]]:
    """What is left out, by which rule; masks that files hold as well are no parameters."""
    entries = run.data["coverage"]["excluded"]
    return {(e["layer"], e["rule"], e["parameters"]) for e in entries if e["parameters"]}


def check_coverage(run: mxdiag.Run) -> None:
    """Every parameter of two or more axes is measured or excluded by a named rule."""
    coverage = run.data["coverage"]
    assert coverage["parameter_fraction"] == 1.0
    assert coverage["unsupported"] == []
    rest = sum(entry["parameters"] for entry in coverage["excluded"])
    assert coverage["measured_parameters"] + rest == coverage["parameters"]
    assert all(entry["rule"] for entry in coverage["excluded"])
    assert coverage["measured"] == len({row["layer"] for row in run.tensors})
    absent = [row for row in run.tensors if row["status"] not in MEASURED]
    assert len(absent) == len(coverage["not_observed"])
    assert all(entry["reason"] for entry in coverage["not_observed"])
