"""Impact on models of several kinds: how they are left, what is told, what it costs."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    T5Config,
    T5ForConditionalGeneration,
)

from impact_fixtures import FEW, RECORDS, dense, entry, mixture, options
from mxdiag import api as analyze
from mxdiag.commands.impact.inject.configurations import configurations
from mxdiag.commands.impact.session import Session
from mxdiag.commands.impact.settings import impact_settings
from mxdiag.commands.impact.table import measure_impact
from mxdiag.errors import CalibrationError, ModelError, UsageError
from mxdiag.model.batches import make_batches
from mxdiag.progress import Progress
from mxdiag.run.run import Run
from mxdiag.tap.tensor import TapParameter

# ---- determinism, and how the model is left ----------------------------------------------------


def test_a_seed_settles_everything() -> None:
    one, same = (measure_impact(dense(), None, RECORDS, options(**FEW)) for _ in range(2))
    assert one == same
    other = measure_impact(dense(), None, RECORDS, options(**FEW, seed=1))
    assert other["forward"] != one["forward"]


def state(model: nn.Module) -> list[Any]:
    return [
        [(type(p), p.requires_grad, p.grad) for p in model.parameters()],
        [vars(p).keys() for p in model.parameters()],
        [m.training for m in model.modules()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
    ]


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("fail_at", [None, 1, 2, 5, 9])
def test_the_model_is_left_as_found(fail_at: int | None) -> None:
    model = dense().train()
    model.lm_head.weight.requires_grad_(False)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise StoppedError

    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(count)
    before, weights = state(model), copy.deepcopy(model.state_dict())
    generator = torch.random.get_rng_state()
    try:
        measure_impact(model, None, RECORDS, options(**FEW))
        assert fail_at is None
    except StoppedError:
        assert fail_at is not None
    assert state(model) == before
    assert not any(isinstance(p, TapParameter) for p in model.parameters())
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), generator)


def test_an_exception_in_the_backward_pass() -> None:
    model = dense()
    before = state(model)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise StoppedError

    handle = model.model.norm.register_forward_hook(lambda m, a, out: Fails.apply(out))
    with pytest.raises(StoppedError):
        measure_impact(model, None, RECORDS, options(**FEW))
    handle.remove()
    assert state(model) == before


# ---- other models ------------------------------------------------------------------------------


def test_a_mixture_of_experts_reports_rerouting() -> None:
    settings = options(configs=("all", "deadzone"), operands=("WA", "GWA"), repeats=1)
    found = measure_impact(mixture(), None, RECORDS, settings)
    for which in ("forward", "both"):
        operands = "WA" if which == "forward" else "GWA"
        changed = {
            c: entry(found, which, c, operands)["routing_changed"] for c in ("all", "deadzone")
        }
        assert 0 <= changed["deadzone"] < changed["all"] < 0.5
    assert "routing_changed" not in found["backward"][0]
    names = {layer["layer"] for layer in found["backward"][0]["layers"]}
    assert "model.layers.1.mlp.experts.3.down_proj" in names
    assert not any("mlp.gate" in name and "proj" not in name for name in names)


def test_an_encoder_decoder() -> None:
    torch.manual_seed(0)
    config = T5Config(
        d_model=32, d_ff=48, d_kv=16, num_heads=2, num_layers=1, vocab_size=61,
        decoder_start_token_id=0,
    )  # fmt: skip
    records = [{"input_ids": list(range(12)), "labels": [-100] * 5 + list(range(5, 12))}]
    found = measure_impact(
        T5ForConditionalGeneration(config), None, records, options(configs=("all",), repeats=1)
    )
    assert found["reference"]["tokens"] == 7  # the decoder's positions
    assert entry(found, "both", "all", "GWA")["cosine_mean"] < 1
    assert found["forward"][0]["kl_mean_sd"] is None, "one repeat has no spread"


def test_bfloat16() -> None:
    settings = options(configs=("all", "of"), operands=("WA", "GWA"), repeats=1)
    found = measure_impact(dense().bfloat16(), None, RECORDS, settings)
    for which, operands in (("forward", "WA"), ("both", "GWA")):
        assert entry(found, which, "of", operands)["kl_mean"] > 0
    cosines = [entry(found, "backward", c, "GWA")["cosine_mean"] for c in ("all", "of")]
    assert 0.5 < cosines[0] < cosines[1] < 1


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_a_module_with_a_loss_of_its_own() -> None:
    inputs = [torch.randn(40, 32), torch.randn(33, 32)]
    settings = options(configs=("all", "ideal"))
    found = measure_impact(
        Plain(), None, inputs, settings, loss=lambda output, batch: output.square().mean()
    )
    assert found["reference"]["tokens"] == 73
    assert found["reference"]["perplexity"] is None
    wanted = sum(float(Plain()(x).detach().square().mean()) for x in inputs) / 2
    assert found["reference"]["loss"] == pytest.approx(wanted, rel=1e-4)
    assert entry(found, "backward", "all", "GWA")["cosine_mean"] < 1


def test_what_cannot_be_measured_is_told() -> None:
    with pytest.raises(ModelError, match="no loss"):
        measure_impact(Plain(), None, [torch.randn(4, 32)], options(configs=("all",)))
    with pytest.raises(ModelError, match="no linear layer"):
        measure_impact(nn.LayerNorm(32), None, [torch.randn(4, 32)], options(passes=("forward",)))
    unlabelled = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}]
    with pytest.raises(CalibrationError, match="no loss"):
        measure_impact(dense(), None, unlabelled, options())
    found = measure_impact(
        dense(), None, unlabelled, options(passes=("forward",), configs=("all",))
    )
    assert found["reference"]["loss"] is None
    assert found["forward"][0]["kl_mean"] > 0


def test_a_correction_that_is_not_defined_is_noted() -> None:
    settings = options(configs=("hadamard",), passes=("backward",), repeats=1)
    found = measure_impact(dense(), None, RECORDS, settings)
    assert any("hadamard" in warning and "A·wgrad" in warning for warning in found["warnings"])


# ---- runs --------------------------------------------------------------------------------------


def test_impact_makes_a_run_or_adds_to_one(tmp_path: Path) -> None:
    settings = options(configs=("all",), passes=("forward",), repeats=1)
    made = analyze.impact(dense(), calibration=RECORDS, settings=settings)
    assert len(made.tensors) == 14 * 3
    assert made.data["impact"]["forward"]
    made.data["impact"]["per_layer"] = [{"layer": "kept"}]
    made.write(tmp_path)
    loaded = Run.load(tmp_path)
    rows = copy.deepcopy(loaded.tensors)
    again = analyze.impact(dense(), calibration=RECORDS, settings=settings, run=loaded)
    assert again.tensors == rows
    assert again.data["impact"]["per_layer"] == [{"layer": "kept"}]
    with pytest.raises(UsageError, match="the run is of"):
        analyze.impact(mixture(), calibration=RECORDS, settings=settings, run=loaded)


def test_options_are_split_between_impact_and_scan() -> None:
    settings = impact_settings(
        None, {"configs": "all,mbs", "passes": "both", "repeats": 5, "seed": 3, "operands": None}
    )
    assert (settings.configs, settings.passes, settings.repeats) == (("all", "mbs"), ("both",), 5)
    assert (settings.scan.seed, settings.scan.samples, settings.operands) == (3, 4, None)
    assert impact_settings(None, {"samples": 9}).scan.samples == 9


# ---- memory ------------------------------------------------------------------------------------

_PEAK = """
import resource, sys, threading, time, psutil, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
config = LlamaConfig(hidden_size=512, intermediate_size=1408, num_hidden_layers=4, vocab_size=2000,
                     num_attention_heads=8, num_key_value_heads=8)
model = LlamaForCausalLM(config)
ids = torch.arange(64)
{setup}
process, peak, done = psutil.Process(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.002)
base = process.memory_info().rss
thread = threading.Thread(target=watch); thread.start()
{work}
done = True; thread.join()
print(peak - base + sum(p.nbytes for p in model.parameters()))
"""
_STEP = (
    "optimizer = torch.optim.AdamW(model.parameters())",
    "for _ in range(2):\n"
    "    optimizer.zero_grad(); model(ids[None], labels=ids[None]).loss.backward()\n"
    "    optimizer.step()",
)
_IMPACT = (
    "from mxdiag.commands.impact.table import measure_impact\n"
    "from mxdiag.commands.impact.settings import ImpactSettings\n"
    "from mxdiag.quantize import dispatch\n"
    "settings = ImpactSettings(configs=('all', 'mbs'), operands=('WA', 'GWA'), repeats=1)\n"
    "for axis in (0, 1):  # compile first\n"
    "    dispatch.inject(torch.randn(64, 64), frozenset(('scale', 'deadzone', 'grid')), axis)",
    "measure_impact(model, None, [{'input_ids': ids.tolist()}], settings)",
)


def test_memory_stays_within_that_of_a_training_step() -> None:
    """Weights and peak growth of the process, beside those of an AdamW step on the same record."""
    peaks = []
    for setup, work in (_STEP, _IMPACT):
        code = _PEAK.format(setup=setup, work=work)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.strip().splitlines()[-1]))
    assert peaks[1] < 1.3 * peaks[0], peaks


# ---- the session -------------------------------------------------------------------------------


def test_every_pass_is_counted() -> None:
    model, settings = dense(), options(configs=("all",))
    chosen = configurations(settings)
    batches = make_batches(model, RECORDS, None, seq_len=64, samples=None, gradients=True)
    session = Session(model, batches, settings)

    class Counts(Progress):
        steps = 0

        def advance(self, steps: int = 1) -> None:
            self.steps += steps

    counts = Counts()
    with session.open():
        evidence = session.measure(chosen, counts)
    assert counts.steps == session.passes(chosen) == 2 * 2 * len(chosen)
    assert all(
        len(rows) == 2 and all(len(row) == 2 for row in rows)
        for seen in evidence.seen.values()
        for rows in (seen.tokens, seen.gradients)
        if rows
    )
