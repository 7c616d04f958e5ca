"""One layer at a time: reuse is exact, an interrupted run goes on, predictors are what they say."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from mxdiag.commands.impact.inject.configurations import configurations
from mxdiag.commands.impact.per_layer import sensitivity
from mxdiag.commands.impact.per_layer.blocks import Blocks
from mxdiag.commands.impact.per_layer.journal import Journal
from mxdiag.commands.impact.per_layer.predictors import run_predictors
from mxdiag.commands.impact.per_layer.results import rank_correlation, sensitivities, shares
from mxdiag.commands.impact.per_layer.sensitivity import (
    SensitivitySettings,
    measure_sensitivity,
    units_of,
)
from mxdiag.commands.impact.results import impact_object
from mxdiag.commands.impact.session import Session
from mxdiag.commands.impact.settings import ImpactSettings
from mxdiag.commands.recommend.choose import choose
from mxdiag.commands.scan.settings import ScanSettings
from mxdiag.errors import UsageError
from mxdiag.model.batches import make_batches
from mxdiag.progress import Progress
from mxdiag.quantize import reference
from mxdiag.run.run import Run
from small_models import RECORDS, llama, mixtral


def session_of(model: torch.nn.Module, repeats: int = 2, **scan: object) -> Session:
    settings = ImpactSettings(scan=ScanSettings(**scan), repeats=repeats)
    batches = make_batches(model, RECORDS, None, seq_len=64, samples=None, gradients=True)
    return Session(model, batches, settings)


class HaltError(Exception):
    """Stands for a user's Ctrl-C."""


class StopAfter(Progress):
    """Stops the work after so many steps; counts them."""

    def __init__(self, steps: float = math.inf) -> None:
        self.left, self.total = steps, None
        self.seen = 0

    def phase(self, label: str, total: int, unit: str = ""):
        self.total = total
        return super().phase(label, total, unit)

    def advance(self, steps: int = 1) -> None:
        self.seen += steps
        self.left -= steps
        if self.left <= 0:
            raise HaltError


# ---- reuse -------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [llama, mixtral])
@pytest.mark.parametrize("operands", ["W", "WA"])
def test_skipping_blocks_changes_no_bit(build, operands, monkeypatch):
    settings = SensitivitySettings(operands=operands)
    fast = measure_sensitivity(session_of(build(), 1), settings)
    monkeypatch.setattr(sensitivity._Sweep, "_reproduces", lambda *_: False)
    slow = measure_sensitivity(session_of(build(), 1), settings)
    assert fast["per_layer"] == slow["per_layer"]
    assert fast["per_layer_notes"] == []


def test_blocks_before_a_layer_do_not_run_and_run_again_afterwards():
    model = llama()
    names = [name for name, _ in model.named_parameters() if "proj" in name]
    blocks = Blocks(model, names)
    ran: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: ran.append(index))
    ids = torch.tensor([RECORDS[0]["input_ids"]])
    with torch.no_grad():
        with blocks.recording():
            expected = model(ids, use_cache=False).logits
        ran.clear()
        with blocks.skipping(["model.layers.2.mlp.up_proj.weight"]) as skipped:
            logits = model(ids, use_cache=False).logits
        assert (skipped, ran) == (2, [2, 3])
        assert torch.equal(logits, expected)
        with pytest.raises(HaltError), blocks.skipping(["model.layers.3.mlp.up_proj.weight"]):
            raise HaltError
        ran.clear()
        assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert ran == [0, 1, 2, 3]
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_parameter_used_outside_of_blocks_skips_nothing():
    model = llama()
    shared = model.model.layers[3].mlp.down_proj
    model.extra = torch.nn.Linear(*shared.weight.shape, bias=False)
    model.extra.weight = shared.weight
    blocks = Blocks(model, ["model.layers.3.mlp.down_proj.weight"])
    with torch.no_grad(), blocks.recording():
        model(torch.tensor([[1, 2, 3]]), use_cache=False)
    assert blocks.before(["model.layers.3.mlp.down_proj.weight"]) == []


def test_a_block_called_twice_is_never_skipped():
    model = llama()
    layers = model.model.layers
    layers[1] = layers[0]  # one block at two depths
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 2, 3)]
    blocks = Blocks(model, names)
    with torch.no_grad(), blocks.recording():
        model(torch.tensor([[1, 2, 3]]), use_cache=False)
    assert blocks.before([names[0]]) == []
    assert len(blocks.before([names[2]])) == 1


def test_blocks_that_hand_on_more_than_they_return_are_not_reused():
    model = llama()
    shared: dict[str, torch.Tensor] = {}
    first, last = model.model.layers[0], model.model.layers[3]
    first.register_forward_pre_hook(lambda *_: shared.clear())
    first.mlp.register_forward_hook(lambda m, a, out: shared.update(out=out))
    last.mlp.register_forward_hook(lambda m, a, out: out + shared.get("out", 0 * out))
    result = measure_sensitivity(session_of(model, repeats=1), SensitivitySettings())
    assert any("nothing before a layer was reused" in note for note in result["per_layer_notes"])


# ---- what is measured --------------------------------------------------------------------------


def test_a_unit_of_all_layers_equals_the_configuration_all():
    session = session_of(llama(), exclude=("*self_attn*", "*.up_proj", "*.gate_proj"))
    result = measure_sensitivity(session, SensitivitySettings("role", "WA"))
    (entry,) = result["per_layer"]
    session = session_of(llama(), exclude=("*self_attn*", "*.up_proj", "*.gate_proj"))
    chosen = configurations(
        ImpactSettings(configs=("all",), passes=("forward",), operands=("WA",), repeats=2)
    )
    with session.open(gradients=False):
        evidence = session.measure(chosen)
    tokens = [np.concatenate(repeat)[:, 0].mean() for repeat in evidence.seen[chosen[0]].tokens]
    # the same float64 numbers, added up in another order
    assert entry["kl_mean"] == pytest.approx(np.mean(tokens), rel=1e-12)
    (whole,) = impact_object(evidence, 0)["forward"]
    # losses are float32 here, and differences of them: 1e-7 of a loss of 5
    assert entry["loss_change"] == pytest.approx(whole["loss_change"], abs=2e-6)
    assert abs(entry["loss_change"]) > 1e-4
    assert entry["unit"] == "down_proj"
    assert entry["kl_mean"] > 0
    assert 0 <= entry["kl_mean_sd"] < entry["kl_mean"]


def test_units_hold_every_layer_once():
    session = session_of(llama())
    with session.open(gradients=False):
        layers = session.layers
    names = [live.layer for live in layers]
    for granularity, count in (("layer", 28), ("role", 7), ("group", 16)):
        units = units_of(layers, granularity)
        assert len(units) == count
        assert sorted(name for unit in units for name in unit.names) == sorted(names)
    group = units_of(layers, "group")[0]
    assert group.name == "model.layers.0.self_attn.(k_proj|q_proj|v_proj)"


def test_experts_are_one_group_and_unrouted_ones_cost_nothing():
    session = session_of(mixtral(), repeats=1)
    result = measure_sensitivity(session, SensitivitySettings("group"))
    experts = [entry for entry in result["per_layer"] if "all experts" in entry["unit"]]
    assert [len(entry["layers"]) for entry in experts] == [12, 12]
    for entry in result["per_layer"]:
        assert math.fsum(member["share"] for member in entry["layers"]) == pytest.approx(1)


def test_unknown_granularity_and_operands():
    with pytest.raises(UsageError, match="--per-layer 'head'"):
        SensitivitySettings("head")
    with pytest.raises(UsageError, match="--per-layer-operands 'G'"):
        SensitivitySettings(operands="G")


# ---- interruption ------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on(tmp_path):
    whole = measure_sensitivity(session_of(llama()), SensitivitySettings("group"))
    file = tmp_path / "run" / "per_layer.jsonl"
    model = llama()
    with pytest.raises(HaltError):
        measure_sensitivity(
            session_of(model), SensitivitySettings("group"), journal=file, progress=StopAfter(21)
        )
    assert not any("forward" in vars(module) for module in model.modules())
    assert type(model.lm_head.weight) is torch.nn.Parameter
    assert len(file.read_text().splitlines()) == 21
    file.write_text(file.read_text()[:-30])  # killed while writing
    progress = StopAfter()
    resumed = measure_sensitivity(
        session_of(model), SensitivitySettings("group"), journal=file, progress=progress
    )
    assert resumed == whole
    assert progress.seen == progress.total == 16 * 2 * 2
    lines = file.read_text().splitlines()
    assert len(lines) == 65  # the damaged line stays
    keys = {json.loads(line)["key"] for number, line in enumerate(lines) if number != 20}
    assert len(keys) == 1


@pytest.mark.parametrize("change", ["weights", "records", "operands", "jitter"])
def test_another_model_or_setting_starts_anew(tmp_path, change, monkeypatch):
    file = tmp_path / "per_layer.jsonl"
    measure_sensitivity(session_of(llama(), 1), SensitivitySettings("role"), journal=file)
    model, settings = llama(), SensitivitySettings("role", "A" if change == "operands" else "W")
    if change == "weights":
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    session = session_of(model, 1)
    if change == "jitter":
        session.settings = ImpactSettings(scan=session.settings.scan, repeats=1, jitter=1e-5)
    if change == "records":
        records = [RECORDS[0], {**RECORDS[1], "advantage": 0.25}]
        batches = make_batches(model, records, None, seq_len=64, samples=None, gradients=True)
        session = Session(model, batches, session.settings)
    measure_sensitivity(session, settings, journal=file)
    assert len(file.read_text().splitlines()) == 2 * 7 * 2


def test_a_finished_journal_measures_nothing_again(tmp_path, monkeypatch):
    file = tmp_path / "per_layer.jsonl"
    first = measure_sensitivity(session_of(llama(), 1), SensitivitySettings(), journal=file)
    size = file.stat().st_size
    monkeypatch.setattr(Journal, "add", lambda *_, **__: pytest.fail("measured again"))
    assert measure_sensitivity(session_of(llama(), 1), SensitivitySettings(), journal=file) == first
    assert file.stat().st_size == size


def test_damaged_journal_lines_count_as_not_there(tmp_path):
    good = {"key": "k", "unit": "u", "repeat": 0, "record": 1, "kl": 0.5, "loss": None}
    bad = [
        b"",
        b"\xff\xfe",
        b"[1]",
        b'{"key": "k"}',
        json.dumps({**good, "kl": "0.5"}).encode(),
        json.dumps({**good, "record": 0.0}).encode(),
        json.dumps({**good, "key": "other", "record": 3}).encode(),
        json.dumps({**good, "record": 4})[:40].encode(),
    ]
    file = tmp_path / "j"
    file.write_bytes(b"\n".join([json.dumps(good).encode(), *bad]))
    journal = Journal(file, "k")
    assert journal.done == {("u", 0, 1): {"kl": 0.5, "loss": None}}
    journal.add("u", 0, 2, kl=1.0, loss=2.0)
    assert set(Journal(file, "k").done) == {("u", 0, 1), ("u", 0, 2)}


# ---- predictors --------------------------------------------------------------------------------


def test_predictors_against_autograd():
    """g from .grad of weights and of an input, e by the float64 reference."""
    model = llama()
    session = session_of(model)
    found = run_predictors(session, "WA")
    linear = model.model.layers[1].mlp.down_proj
    name = "model.layers.1.mlp.down_proj"
    inputs: list[torch.Tensor] = []

    def keep(module, args):
        inputs.append(args[0])
        args[0].retain_grad()

    handle = linear.register_forward_pre_hook(keep)
    expected = {"W": [0.0, 0.0, 0.0], "A": [0.0, 0.0, 0.0]}
    labelled = sum(len(record["input_ids"]) - 1 for record in RECORDS)
    for record in RECORDS:
        ids = torch.tensor([record["input_ids"]])
        model.zero_grad()
        logits = model(ids, use_cache=False).logits[0, :-1]
        nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        (record["advantage"] * nll / labelled).backward()
        x = inputs[-1]
        for operand, value, g in (("W", linear.weight, linear.weight.grad), ("A", x[0], x.grad[0])):
            value = value.detach().double()
            error = reference.quantize_dequantize(value, 1, "rceil") - value
            change = g.double() * error
            energy = float(error.square().sum())
            before = expected[operand]
            before[0] = energy if operand == "W" else before[0] + energy
            before[1] += float(change.sum())
            before[2] += float(change.square().sum())
    handle.remove()
    for operand, (energy, first, fisher) in expected.items():
        sums = found.sums[name, operand]
        # float32 gradients against float64 products of them
        assert sums.e2 == pytest.approx(energy, rel=1e-5)
        assert sums.first == pytest.approx(first, rel=1e-3, abs=1e-7)
        assert sums.fisher == pytest.approx(fisher, rel=1e-4)
    assert all(p.grad is None or name for name, p in model.named_parameters())


def test_the_first_order_predictor_is_the_slope_of_the_loss():
    """A weight moved by a thousandth of its error changes the loss by a thousandth of <g, e>."""
    model = llama().double()
    session = session_of(model, 1)
    first = run_predictors(session, "W").sums["model.layers.2.self_attn.v_proj", "W"].first
    weight = model.model.layers[2].self_attn.v_proj.weight

    def loss() -> float:
        with torch.no_grad():
            outputs = [model(**batch.kwargs) for batch in session.batches]
            return sum(float(session.loss(out, i)) for i, out in enumerate(outputs))

    error = reference.quantize_dequantize(weight.detach(), 1, "rceil") - weight.detach()
    before = loss()
    with torch.no_grad():
        weight += 1e-3 * error
    # gradients are float32 products; the second-order term is a thousandth of the second order
    assert (loss() - before) / 1e-3 == pytest.approx(first, rel=0.02)


def test_predictions_leave_the_model_as_found():
    model = llama()
    model.train()
    model.lm_head.weight.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    run_predictors(session_of(model), "WA")
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None and type(p) is torch.nn.Parameter for p in model.parameters())


def test_ranking_has_every_predictor_and_measure():
    result = measure_sensitivity(session_of(llama(), 1), SensitivitySettings())
    ranking = {(r["predictor"], r["measure"]): r for r in result["per_layer_ranking"]}
    assert len(ranking) == 8
    entries = result["per_layer"]
    kl = [entry["kl_mean"] for entry in entries]
    fisher = ranking["fisher", "kl_mean"]
    rho = spearmanr([entry["fisher"] for entry in entries], kl).statistic
    assert fisher["spearman"] == pytest.approx(rho)
    assert fisher["units"] == 28
    assert fisher["low"] < fisher["spearman"] < fisher["high"]


def test_rank_correlation_by_hand():
    """Ranks 1 2 3 4 5 and 2 1 4 3 5: rho = 1 - 6 * 4 / (5 * 24) = 0.8."""
    found = rank_correlation([1.0, 2.0, 3.0, 4.0, 50.0], [2.0, 1.0, 4.0, 3.0, 5.0])
    assert found["spearman"] == pytest.approx(0.8)
    assert found["p_value"] == pytest.approx(0.104, abs=1e-3)  # t(3) of 0.8 sqrt(3 / 0.36)
    half = 1.959964 * math.sqrt((1 + 0.32) / 2)
    assert found["low"] == pytest.approx(math.tanh(math.atanh(0.8) - half))
    assert found["high"] == pytest.approx(math.tanh(math.atanh(0.8) + half))


@pytest.mark.parametrize(
    ("x", "y", "why"),
    [([1.0, 2.0], [1.0, 2.0], "too few"), ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], "all equal")],
)
def test_no_rank_correlation(x, y, why):
    assert rank_correlation(x, y)["spearman"] is None, why


# ---- into a recommendation ---------------------------------------------------------------------


def test_sensitivities_split_groups_by_error():
    entry = {
        "unit": "g",
        "operands": "W",
        "kl_mean": 0.4,
        "layers": [{"layer": "a", "share": 0.25}, {"layer": "b", "share": 0.75}],
    }
    run = Run({"impact": {"per_layer": [entry]}, "tensors": []})
    assert sensitivities(run) == pytest.approx({"a": 0.1, "b": 0.3})
    assert shares([1.0, 3.0]) == [0.25, 0.75]
    assert shares([0.0, 0.0]) == [0.5, 0.5]


@pytest.mark.parametrize("entries", [[], [{"unit": "u", "operands": "WA", "layers": []}]])
def test_sensitivities_that_cannot_be_had(entries):
    with pytest.raises(UsageError, match=r"--per-layer layer` on W"):
        sensitivities(Run({"impact": {"per_layer": entries}, "tensors": []}))


def test_a_budget_follows_the_sensitivities():
    """Of two equal layers the one that the model feels gets the bits."""
    row = {
        "operand": "W",
        "gemm": "fprop",
        "status": "ok",
        "numel": 1024,
        "rel_mse": 0.01,
        "mse_ratio:mxfp8": 0.01,
    }
    rows = [{**row, "layer": name} for name in ("a", "b")]
    for felt in ("a", "b"):
        entries = [
            {
                "unit": name,
                "operands": "W",
                "kl_mean": 0.3 if name == felt else 0.001,
                "layers": [{"layer": name, "share": 1.0}],
            }
            for name in ("a", "b")
        ]
        costs = sensitivities(Run({"impact": {"per_layer": entries}, "tensors": rows}))
        result = choose(rows, max_bits=6.25, sensitivities=costs, allow="mxfp8")
        chosen = {choice.layer: choice.recommended for choice in result.choices}
        assert chosen == {"a": "mxfp4", "b": "mxfp4"} | {felt: "mxfp8"}
