"""Scanning: rows against captured tensors, both routes to W, the model left as found."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import mxdiag
from mxdiag.errors import CalibrationError, ModelError, UsageError
from mxdiag.gemms import CELLS
from mxdiag.quantize import reference
from mxdiag.run.run import Run

#: Float32 sums of a few rows on the fast path against float64 in the reference.
FAST = {"rel": 1e-6, "abs": 1e-9}


def llama(seed: int = 0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def records(count: int = 3, length: int = 45) -> list[dict]:
    rng = np.random.default_rng(1)
    return [{"input_ids": rng.integers(0, 97, length - i).tolist()} for i in range(count)]


def captured(model, batches) -> dict[tuple[str, str], list[torch.Tensor]]:
    """A and G of every nn.Linear, by plain hooks, under the mean loss over all records."""
    seen: dict[tuple[str, str], list[torch.Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def keep(module, args, output, name=name):
                seen.setdefault((name, "A"), []).append(args[0].detach().flatten(0, 1).clone())
                output.register_hook(
                    lambda g, name=name: seen.setdefault((name, "G"), []).append(
                        g.flatten(0, 1).clone()
                    )
                )

            handles.append(module.register_forward_hook(keep))
    tokens = sum(len(b["input_ids"]) - 1 for b in batches)
    for batch in batches:
        ids = torch.tensor([batch["input_ids"]])
        logits = model(ids).logits[0, :-1].float()
        loss = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / tokens
        loss.backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_equals_a_direct_computation(dtype):
    model, batches = llama(dtype=dtype), records()
    tensors = captured(model, batches)
    run = mxdiag.scan(model, calibration=batches, gemms="fprop,dgrad,wgrad", corrections="none")
    rows = {(r["layer"], r["operand"], r["gemm"]): r for r in run.tensors}
    linears = {
        n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"
    }
    assert set(rows) == {(n, c.operand, c.gemm) for n in linears for c in CELLS}
    for (layer, operand, gemm), row in rows.items():
        cell = next(c for c in CELLS if (c.operand, c.gemm) == (operand, gemm))
        calls = [linears[layer].weight.detach()] if operand == "W" else tensors[layer, operand]
        energies = np.zeros(5)
        for tensor in calls:
            swapped = tensor if cell.axis == 1 else tensor.t()
            energies += reference.measure(swapped[:, :, None]).sums[:5]
        signal, error, _, deadzone, grid = energies
        assert row["rel_mse"] == pytest.approx(error / signal, **FAST)
        assert row["recoverable"] == pytest.approx(deadzone / error, **FAST)
        assert row["irreducible"] == pytest.approx(grid / error, **FAST)
        assert row["calls"] == 3
        assert row["dtype"] == str(dtype).removeprefix("torch.")
        assert abs(row["closure_residual"]) < 1e-6
        if operand != "W":
            assert row["tokens"] == sum(len(b["input_ids"]) for b in batches)
            assert row["shape"] == [row["tokens"], calls[0].shape[1]]


def test_token_means_are_over_all_tokens():
    model, batches = llama(), records()
    tensors = captured(model, batches)
    run = mxdiag.scan(model, calibration=batches, operands="A,G", corrections="none")
    for row in run.tensors:
        ratios, energies = [], []
        for x in tensors[row["layer"], row["operand"]]:
            x = x.double()
            e = (reference.quantize_dequantize(x) - x).square().sum(1)
            used = e > 0
            ratios.append(10 * torch.log10(x.square().sum(1)[used] / e[used]))
            energies.append(x.square().sum(1))
        assert row["sqnr_db_token"] == pytest.approx(float(torch.cat(ratios).mean()), rel=1e-6)
        energy = torch.cat(energies)
        share = float(energy.max() / energy.sum())
        assert row["top_token_share"] == pytest.approx(share, rel=1e-6)


def test_the_model_is_left_as_found_and_no_weight_gradient_exists():
    model = llama().train()
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    before = {n: (id(p), p.requires_grad, type(p)) for n, p in model.named_parameters()}
    state = {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.get_rng_state()
    mxdiag.scan(model, calibration=records(), corrections="none")
    assert {n: (id(p), p.requires_grad, type(p)) for n, p in model.named_parameters()} == before
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert torch.equal(generator, torch.get_rng_state())
    with pytest.raises(ModelError, match="does not run on the calibration"):
        mxdiag.scan(model, calibration=[{"pixel_values": torch.zeros(1, 3)}], corrections="none")
    assert {n: (id(p), p.requires_grad, type(p)) for n, p in model.named_parameters()} == before


def test_streamed_and_loaded_weights_give_the_same_rows(tmp_path):
    model = llama(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    options = {"gemms": "fprop,dgrad", "operands": "W", "corrections": "none"}
    streamed = mxdiag.scan(tmp_path, weights_only=True, **options)
    loaded = mxdiag.scan(tmp_path, **options)
    in_memory = mxdiag.scan(model, **options)
    file = mxdiag.scan(tmp_path / "model.safetensors", **options)
    expected = streamed.frame.drop(columns="calls")
    for other in (loaded, in_memory, file):
        assert expected.equals(other.frame.drop(columns="calls"))
    assert streamed.data["totals"] == loaded.data["totals"]
    assert streamed.data["coverage"]["parameter_fraction"] == 1.0


def test_the_same_scan_twice_is_the_same_file(tmp_path):
    model = llama()
    for name in ("a", "b"):
        mxdiag.scan(model, calibration=records(), gemms="fprop,dgrad,wgrad").write(tmp_path / name)
    assert (tmp_path / "a/tensors.csv").read_bytes() == (tmp_path / "b/tensors.csv").read_bytes()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_backends_agree(backend):
    model = llama()
    run = mxdiag.scan(model, calibration=records(1), backend=backend, corrections="none")
    base = mxdiag.scan(model, calibration=records(1), corrections="none")
    for ours, theirs in zip(run.tensors, base.tensors, strict=True):
        for key in ("sqnr_db", "reducible", "gain", "delta_mean"):
            assert ours[key] == pytest.approx(theirs[key], **FAST)
        for key in ("deadzone_frac", "underflow_frac", "zero_frac", "delta_hist", "numel"):
            assert ours[key] == theirs[key]


def test_totals_are_the_sums_of_rows():
    run = mxdiag.scan(llama(), calibration=records(2), corrections="none")
    for row in run.data["totals"]:
        rows = [
            r
            for r in run.tensors
            if (r["operand"], r["gemm"]) == (row["operand"], row["gemm"])
            and row["role"] in (None, r["role"])
        ]
        assert row["rows"] == len(rows)
        assert row["numel"] == sum(r["numel"] for r in rows)
        signal = sum(r["rms"] ** 2 * r["numel"] for r in rows)
        error = sum(r["rel_mse"] * r["rms"] ** 2 * r["numel"] for r in rows)
        # rms and rel_mse are quotients, multiplied back.
        assert row["rel_mse"] == pytest.approx(error / signal, rel=1e-12)


def test_a_model_without_a_language_model_loss_reports_why():
    module = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    batches = [torch.randn(50, 64), torch.randn(7, 64)]
    run = mxdiag.scan(module, calibration=batches, corrections="none")
    statuses = {(r["layer"], r["operand"]): r["status"] for r in run.tensors}
    assert statuses["0", "A"] == "ok"
    assert statuses["2", "G"] == "not_observed"
    reasons = {e["reason"] for e in run.data["coverage"]["not_observed"]}
    assert reasons == {"the model has no language-model loss"}
    run = mxdiag.scan(
        module, calibration=batches, loss=lambda y, x: y.square().mean(), corrections="none"
    )
    assert {r["status"] for r in run.tensors} == {"ok"}
    without = mxdiag.scan(module, corrections="none")
    assert {e["reason"] for e in without.data["coverage"]["not_observed"]} == {
        "no calibration was given"
    }


def test_advantages_scale_the_gradients():
    """Advantage 0 leaves no gradient; opposite advantages give the same split as one sign."""
    model, (record,) = llama(), records(1)
    zero = mxdiag.scan(model, calibration=[{**record, "advantage": 0.0}], operands="G")
    assert {r["status"] for r in zero.tensors} == {"zero"}
    plus = mxdiag.scan(model, calibration=[record], operands="G", corrections="none")
    minus = mxdiag.scan(
        model, calibration=[{**record, "advantage": -1.0}], operands="G", corrections="none"
    )
    for ours, theirs in zip(plus.tensors, minus.tensors, strict=True):
        assert ours["sqnr_db"] == pytest.approx(theirs["sqnr_db"], rel=1e-9)


def test_nonfinite_weights_and_activations_are_flagged(tmp_path):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    run = mxdiag.scan(model, calibration=records(1), corrections="none")
    rows = {(r["layer"], r["operand"]): r for r in run.tensors}
    assert rows["model.layers.1.mlp.up_proj", "W"]["status"] == "nonfinite"
    assert rows["model.layers.1.mlp.up_proj", "W"]["nonfinite"] == 1
    assert rows["model.layers.1.mlp.up_proj", "W"]["sqnr_db"] > 10
    assert any("non-finite at model.layers.1.mlp.down_proj" in w for w in run.data["warnings"])
    run.write(tmp_path)
    json.loads((tmp_path / "run.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert Run.load(tmp_path).tensors == run.tensors


def test_bad_requests_are_refused():
    model = llama()
    with pytest.raises(CalibrationError, match="all labels are -100"):
        mxdiag.scan(model, calibration=[{"input_ids": [1, 2], "labels": [-100, -100]}])
    with pytest.raises(CalibrationError, match="outside the model's vocabulary"):
        mxdiag.scan(model, calibration=[{"input_ids": [1, 200]}])
    batch = {
        "input_ids": torch.ones(1, 4).long(),
        "attention_mask": torch.tensor([[1, 1, 1, 0]]),
    }
    with pytest.raises(CalibrationError, match="padded"):
        mxdiag.scan(model, calibration=[batch])
    with pytest.raises(UsageError, match="unknown operand 'X'"):
        mxdiag.scan(model, operands="X")
    with pytest.raises(UsageError, match="unknown option"):
        mxdiag.scan(model, operand="W")
    with pytest.raises(UsageError, match="take no part"):
        mxdiag.scan(model, operands="W", gemms="wgrad")
    with pytest.raises(ModelError, match="no linear layer"):
        mxdiag.scan(nn.Sequential(nn.Conv2d(3, 4, 3)))


def test_records_longer_than_the_model_are_cut_and_said():
    run = mxdiag.scan(llama(), calibration=[{"input_ids": [1] * 200}], operands="A")
    assert run.tensors[0]["tokens"] == 128
    assert any("128 positions" in warning for warning in run.data["warnings"])


def test_weights_only_needs_w(tmp_path):
    save_file({"a.weight": torch.randn(4, 64)}, tmp_path / "x.safetensors")
    with pytest.raises(UsageError, match="measures W"):
        mxdiag.scan(tmp_path / "x.safetensors", operands="A")


def test_weights_that_are_computed_are_never_measured_as_what_they_are_computed_from():
    """A weight norm's v, a pruned layer's unpruned weight: close to the weight, and not it."""
    from torch.nn.utils import parametrizations, prune

    normed = nn.Sequential(parametrizations.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 32))
    pruned = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    prune.l1_unstructured(pruned[0], "weight", 0.3)
    for model in (normed, pruned):
        for options in ({"operands": "W"}, {"calibration": [torch.randn(40, 64)]}):
            run = mxdiag.scan(model, corrections="none", **options)
            assert {row["layer"] for row in run.tensors} == {"1"}
            (entry,) = [e for e in run.data["coverage"]["unsupported"] if e["parameters"] == 4096]
            assert "computed from it" in entry["reason"]
            assert run.data["coverage"]["parameter_fraction"] < 1


def test_a_loss_that_cannot_be_differentiated_is_refused():
    model = nn.Linear(64, 32)
    for loss in (lambda y, x: 1.0, lambda y, x: y, lambda y, x: y.detach().sum()):
        with pytest.raises(ModelError, match="no scalar tensor"):
            mxdiag.scan(model, calibration=[torch.randn(4, 64)], loss=loss)
    assert all(p.grad is None for p in model.parameters())


def test_float64_values_whose_squares_overflow_are_not_finite():
    run = mxdiag.scan(nn.Linear(64, 32).double(), operands="W", corrections="none")
    assert run.tensors[0]["status"] == "ok"
    huge = mxdiag.decompose(np.full((4, 64), 1e200))
    assert huge.status == "nonfinite"
    json.dumps(huge.metrics(), allow_nan=False)


def test_rows_say_what_each_correction_leaves():
    """Scale-type corrections keep the deadzone and grid errors, so their shares follow."""
    model = nn.Linear(256, 64)
    run = mxdiag.scan(model, operands="W", corrections="mbs:32,of,sr")
    (row,) = run.tensors
    for share in ("recoverable", "irreducible"):
        after = row[share] / row["mse_ratio:mbs:32"]
        assert row[f"{share}:mbs:32"] == pytest.approx(after, rel=1e-9)
    shares = [row[f"{name}:mbs:32"] for name in ("reducible", "recoverable", "irreducible")]
    assert sum(shares) == pytest.approx(1, abs=1e-12)
    assert abs(shares[0]) < abs(row["reducible"]) / 4  # a mantissa per block is nearly ideal
    assert "reducible:of" not in row
    # Stochastic rounding is unbiased: its gain is nearer to 1 than that of rounding to nearest.
    assert abs(row["gain:sr"] - 1) < abs(row["gain"] - 1)
    assert row["error_sum:sr"] is not None
