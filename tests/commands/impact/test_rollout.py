"""Rollouts: the decoding loop, the measures by hand, and what quantized policies come to."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, MambaConfig, MambaForCausalLM

from mxdiag.commands.impact.inject import injector as substitute
from mxdiag.commands.impact.inject.configurations import configurations
from mxdiag.commands.impact.rollout.decode import Decoder, greedy, sampler
from mxdiag.commands.impact.rollout.measures import agreement_length, divergence, mismatch
from mxdiag.commands.impact.rollout.rollout import RolloutSettings, roll_out, rollout_configurations
from mxdiag.commands.impact.session import Session
from mxdiag.commands.impact.settings import ImpactSettings
from mxdiag.commands.scan.settings import ScanSettings
from mxdiag.errors import ModelError, UsageError
from mxdiag.model.batches import make_batches
from mxdiag.quantize import dispatch
from small_models import SMALL, llama, mixtral

IDS = [(7 * i * i + 3 * i) % 128 for i in range(24)]
RECORDS = [
    {"input_ids": IDS, "labels": [-100] * 10 + IDS[10:], "advantage": 1.0},
    {"input_ids": IDS[::-1], "labels": [-100] * 12 + IDS[::-1][12:], "advantage": -0.5},
]
PROMPT = torch.tensor(IDS[:10])


def settings(repeats: int = 3, jitter: float = 1e-6, **options: object) -> ImpactSettings:
    scan = ScanSettings(corrections=("mbs",))
    return ImpactSettings(scan=scan, repeats=repeats, jitter=jitter, **options)


def session_of(model: torch.nn.Module, records=None, **options: object) -> Session:
    batches = make_batches(
        model,
        RECORDS if records is None else records,
        None,
        seq_len=64,
        samples=None,
        gradients=False,
    )
    return Session(model, batches, settings(**options))


def rolled(model, configs=("all",), tokens=8, records=None, notes=None, **options):
    session = session_of(model, records, configs=configs, **options)
    chosen = rollout_configurations(configurations(session.settings))
    notes = [] if notes is None else notes
    return roll_out(session, chosen, RolloutSettings(tokens), notes=notes)


def pick(entries, config, operands="", mode="greedy"):
    wanted = {"config": config, "operands": operands, "mode": mode}
    (found,) = [e for e in entries if wanted.items() <= e.items()]
    return found


# ---- measures by hand --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], (3, True)),
        ([1, 2, 3], [1, 9, 3], (1, False)),
        ([5], [6], (0, False)),
        ([1, 2], [1, 2, 3], (2, False)),  # the first ended where the second goes on
    ],
)
def test_first_difference(a, b, expected):
    assert agreement_length(a, b) == expected
    assert agreement_length(b, a) == expected


def test_divergence_is_a_mean_over_texts():
    found = divergence([([1, 2, 3, 4], [1, 2, 3, 4]), ([1, 2], [1, 3])])
    assert found == {"first_divergence_mean": 2.5, "identical": 0.5}


def test_mismatch_by_hand():
    """Ratios 1, 1/2, 2 and 1.1: (4.6)^2 / (4 * 6.46), two of four outside 0.8 ... 1.2."""
    found = mismatch(np.log([1.0, 0.5, 2.0, 1.1]), 0.2)
    assert found["ess"] == pytest.approx(4.6**2 / (4 * 6.46))
    assert found["outside_clip"] == 0.5
    assert found["log_ratio_mean"] == pytest.approx(math.log(1.1) / 4)
    assert found["log_ratio_abs_mean"] == pytest.approx((2 * math.log(2) + math.log(1.1)) / 4)
    # sorted sizes 0, log 1.1, log 2, log 2: the 95 % quantile lies between the last two
    assert found["log_ratio_abs_p95"] == pytest.approx(math.log(2))
    assert mismatch(np.log([0.81, 1.19]), 0.2)["outside_clip"] == 0
    assert mismatch(np.full(3, 800.0), 0.2)["ess"] == 1  # e^800 overflows unless scaled
    assert math.isnan(mismatch(np.zeros(0), 0.2)["ess"])


# ---- decoding ----------------------------------------------------------------------------------


def mamba() -> MambaForCausalLM:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=2, initializer_range=0.1
    )
    return MambaForCausalLM(config).eval()


@pytest.mark.parametrize("build", [llama, mixtral, mamba])
def test_greedy_decoding_is_the_argmax_of_whole_passes(build):
    model = build()
    decoder = Decoder(model)
    with torch.no_grad():
        found = decoder.decode(PROMPT, 2, 6, greedy)
        text = PROMPT.tolist()
        for step in range(6):
            log_p = torch.log_softmax(model(torch.tensor([text])).logits[0, -1], -1)
            assert found.tokens[:, step].tolist() == [int(log_p.argmax())] * 2
            # one token at a time against the whole text: float32 in another order
            assert found.log_p[0, step] == pytest.approx(float(log_p.max()), abs=1e-4)
            text.append(int(log_p.argmax()))
        scored = decoder.score(PROMPT, found.tokens)
    assert torch.allclose(scored, found.log_p, atol=1e-4)


def test_a_temperature_divides_the_logits():
    model = llama()
    with torch.no_grad():
        tokens = torch.tensor([[3, 4]])
        logits = model(torch.cat([PROMPT, tokens[0]]).unsqueeze(0)).logits[0]
        found = Decoder(model, 0.5).score(PROMPT, tokens)
    expected = torch.log_softmax(2 * logits, -1)
    assert torch.allclose(found[0], torch.stack([expected[9, 3], expected[10, 4]]), atol=1e-5)


def test_the_sampler_follows_the_probabilities_and_its_seed():
    p = torch.tensor([0.1, 0.0, 0.6, 0.3])
    log_p = p.log().expand(4000, -1)
    drawn = sampler(7)(log_p)
    assert torch.equal(drawn, sampler(7)(log_p))
    assert not torch.equal(drawn, sampler(8)(log_p))
    share = torch.bincount(drawn, minlength=4) / 4000
    assert share[1] == 0
    # 4000 draws: a standard deviation is at most sqrt(0.6 * 0.4 / 4000) = 0.008
    assert torch.allclose(share, p, atol=0.03)


def test_texts_end_at_the_end_token():
    model = llama()
    with torch.no_grad():
        free = Decoder(model).decode(PROMPT, 1, 6, greedy).texts()[0]
        model.generation_config.eos_token_id = [free[2], 127]
        ended = Decoder(model).decode(PROMPT, 1, 6, greedy)
    first = free.index(free[2]) + 1
    assert ended.texts() == [free[:first]]
    assert ended.lengths == [first]


def test_a_model_that_cannot_decode_is_explained():
    class Broken(torch.nn.Module):
        def forward(self, input_ids):
            raise RuntimeError("no such luck")

    with pytest.raises(ModelError, match="cannot decode: no such luck"):
        Decoder(Broken()).decode(PROMPT, 1, 1, greedy)


# ---- rollouts of quantized policies ------------------------------------------------------------


def test_weights_in_mxfp4_roll_out_as_a_model_that_holds_them():
    """W4A16 against a copy whose weights were quantized beforehand: the same texts and ratios."""
    model = llama()
    entries = rolled(model, repeats=2, jitter=0.0)
    quantized = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in quantized.named_parameters():
            if "proj" in name:
                p.copy_(dispatch.quantize_dequantize(p.detach(), 1, "rceil"))
    lengths, same, ratios = [], [], []
    with torch.no_grad():
        for record in RECORDS:
            length = record["labels"].count(-100)
            ids = torch.tensor(record["input_ids"])
            theirs = Decoder(model).decode(ids[:length], 1, 8, greedy).texts()[0]
            ours = Decoder(quantized).decode(ids[:length], 1, 8, greedy).texts()[0]
            found = agreement_length(ours, theirs)
            lengths.append(found[0])
            same.append(found[1])
            response = ids[length:].unsqueeze(0)
            trainer, rollout = (
                Decoder(m).score(ids[:length], response) for m in (model, quantized)
            )
            ratios.append((trainer - rollout)[0].numpy())
    entry = pick(entries, "all", "W")
    assert entry["first_divergence_mean"] == np.mean(lengths)
    assert entry["identical"] == np.mean(same)
    assert entry["first_divergence_mean"] < 8
    recorded = pick(entries, "all", "W", "recorded")
    ratios = np.concatenate(ratios)
    # one copy against two: float32 in another order
    assert recorded["log_ratio_abs_mean"] == pytest.approx(np.abs(ratios).mean(), rel=1e-3)
    assert recorded["log_ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-2)
    assert recorded["tokens"] == 2 * (14 + 12)


def test_the_reference_differs_from_itself_by_noise_alone():
    entries = rolled(llama(), tokens=6)
    greedy_entry, sampled = (pick(entries, "reference", mode=m) for m in ("greedy", "sampled"))
    assert greedy_entry["first_divergence_mean"] == 6
    assert greedy_entry["identical"] == 1
    assert sampled["log_ratio_abs_p95"] < 1e-3  # float32 and a jitter of 1e-6
    assert sampled["ess"] > 0.99999
    assert sampled["outside_clip"] == 0
    plain = pick(entries, "all", "WA", "sampled")
    assert plain["log_ratio_abs_mean"] > 100 * sampled["log_ratio_abs_mean"]
    assert plain["log_ratio_mean"] < 0  # it estimates -KL(rollout || trainer)
    assert plain["ess"] < sampled["ess"]
    assert plain["outside_clip"] > 0
    assert plain["log_ratio_mean_sd"] > 0


def test_default_configurations_are_those_that_serve():
    chosen = rollout_configurations(configurations(settings()))
    names = [(c.name, c.operands) for c in chosen]
    assert names == [("all", "W"), ("all", "WA"), ("mbs", "WA"), ("w4a8", "WA")]


def test_rollouts_are_deterministic_and_follow_the_seed():
    first = rolled(mixtral(), tokens=4, repeats=2)
    assert first == rolled(mixtral(), tokens=4, repeats=2)
    session = session_of(mixtral(), configs=("all",), repeats=2)
    other = ImpactSettings(scan=ScanSettings(seed=1), configs=("all",), repeats=2)
    session = Session(session.model, session.batches, other)
    chosen = rollout_configurations(configurations(other))
    second = roll_out(session, chosen, RolloutSettings(4), notes=[])
    assert pick(first, "all", "W", "sampled") != pick(second, "all", "W", "sampled")


def test_each_weight_is_quantized_once_per_configuration(monkeypatch):
    shapes: list[tuple[int, ...]] = []
    original = substitute.injected
    monkeypatch.setattr(
        substitute, "injected", lambda x, *rest: shapes.append(x.shape) or original(x, *rest)
    )
    rolled(llama(), operands=("W",), tokens=5)
    assert len(shapes) == 28  # 4 blocks of 7, whatever the number of steps


def test_splits_by_the_sign_of_the_advantage():
    entries = rolled(llama(), tokens=4, repeats=2)
    whole = pick(entries, "all", "WA", "recorded")
    positive, negative = (
        whole["splits"]["advantage_positive"],
        whole["splits"]["advantage_negative"],
    )
    assert (positive["records"], negative["records"]) == (1, 1)
    total = positive["tokens"] + negative["tokens"]
    assert whole["tokens"] == total
    parts = [e["tokens"] * e["log_ratio_mean"] for e in (positive, negative)]
    assert whole["log_ratio_mean"] == pytest.approx(sum(parts) / total)
    plain = [{**record, "advantage": 1.0} for record in RECORDS]
    entries = rolled(llama(), tokens=2, records=plain)
    assert all(entry.get("splits", {}) == {} for entry in entries)


def test_the_model_is_left_as_found_also_after_an_exception(monkeypatch):
    model = llama().train()
    rolled(model, tokens=2)

    def broken(self, step):
        if step == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("mxdiag.commands.impact.rollout.rollout._Rollout._on_step", broken)
    with pytest.raises(KeyboardInterrupt):
        rolled(model, tokens=2)
    assert model.training
    assert all(type(p) is torch.nn.Parameter and p.requires_grad for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


# ---- what is not rolled out --------------------------------------------------------------------


def test_only_causal_models_roll_out():
    config = BertConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"})
    notes: list[str] = []
    assert rolled(BertForMaskedLM(config), notes=notes) == []
    assert notes == ["rollouts need a causal language model: none were made"]


def test_text_records_roll_out_only_if_asked():
    records = [{"input_ids": IDS}]
    notes: list[str] = []
    assert rolled(llama(), records=records, notes=notes) == []
    assert "no record has a prompt" in notes[0]
    session = session_of(llama(), records, configs=("all",), repeats=2)
    chosen = rollout_configurations(configurations(session.settings))
    entries = roll_out(session, chosen, RolloutSettings(3, halve_texts=True), notes=notes)
    assert {e["mode"] for e in entries} == {"greedy", "sampled"}
    assert len(notes) == 1


def test_rollouts_end_where_the_model_does():
    records = [{"input_ids": (IDS * 3)[:60], "labels": [-100] * 59 + [1]}]
    notes: list[str] = []
    entries = rolled(llama(), tokens=8, records=records, notes=notes, repeats=2)
    assert pick(entries, "reference")["tokens"] == 2 * (64 - 59)
    assert notes == ["1 rollouts end early: the model has 64 positions"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "--rollout-tokens"),
        ({"temperature": 0.0}, "--rollout-temperature"),
        ({"temperature": math.nan}, "--rollout-temperature"),
        ({"clip": 1.0}, "--rollout-clip"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(UsageError, match=message):
        RolloutSettings(**options)


def test_a_text_that_ended_stays_ended_while_others_go_on():
    model = llama()
    model.generation_config.eos_token_id = 9
    forced = iter([[5, 6], [9, 7], [9, 9], [1, 1]])
    with torch.no_grad():
        found = Decoder(model).decode(PROMPT, 2, 8, lambda _: torch.tensor(next(forced)))
    assert found.texts() == [[5, 9], [6, 7, 9]]
    assert found.tokens.shape == (2, 3)  # nothing is decoded once all have ended
