"""The built-in samples: what is shipped is trained, complete, and made by the committed script."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from mxdiag import samples
from mxdiag.errors import MxdiagError, UsageError
from mxdiag.samples import SAMPLES
from tools.samples import corpus

VOCABULARY = 1024
#: Nats per token of the best model without context; measured in a test below on the same text.
UNIGRAM_ENTROPY = 5.0


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module", params=SAMPLES)
def loaded(request):
    """Model and tokenizer of one sample, from the shipped folder alone."""
    folder = samples.sample_path(request.param)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return request.param, model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def token_ids(loaded):
    """Token ids [1, tokens] of every calibration text."""
    _, _, tokenizer = loaded
    records = read_jsonl(samples.calibration_path())
    return [tokenizer(record["text"], return_tensors="pt").input_ids for record in records]


def stored(name: str) -> dict[str, torch.Tensor]:
    with safe_open(samples.sample_path(name) / "model.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)


def test_size_and_dtype(loaded):
    name, model, _ = loaded
    assert 1e6 < model.num_parameters() < 2e6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in stored(name).values()} == {torch.bfloat16}
    folder = samples.sample_path(name)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4e6


def test_dimensions_are_whole_blocks(loaded):
    name, _, _ = loaded
    matrices = [tensor for tensor in stored(name).values() if tensor.ndim == 2]
    ragged = [tuple(m.shape) for m in matrices if m.shape[1] % 32]
    assert ragged == []


def test_weights_are_alive(loaded):
    name, _, _ = loaded
    for key, tensor in stored(name).items():
        values = tensor.double()
        assert torch.isfinite(values).all(), key
        assert (values != 0).any(-1).all(), f"{key} has a row of zeros"
        if tensor.ndim == 2:
            rows = values.norm(dim=1)
            # Random rows of 128 or more differ by some 6 %; a row that training abandoned decays.
            assert rows.min() > rows.median() / 20, f"{key} has a dead row"


def test_moe_checkpoint_has_one_tensor_per_expert_projection():
    keys = stored("moe").keys()
    for layer in range(3):
        for expert in range(8):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                assert f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight" in keys


@pytest.mark.parametrize("text", ["Ada has 17 apples.\n", "def f(x):\n    return x", "naïve 雪 \t"])
def test_tokenizer_round_trip(loaded, text):
    _, model, tokenizer = loaded
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer) == model.config.vocab_size == VOCABULARY


def test_end_of_text_is_consistent(loaded):
    _, model, tokenizer = loaded
    assert tokenizer.eos_token_id == model.config.eos_token_id == 0
    assert model.generation_config.eos_token_id == 0
    assert tokenizer.pad_token is None
    assert model.config.pad_token_id is None


def test_calibration_loss_is_that_of_a_trained_model(loaded, token_ids):
    """Random weights give ln(1024) = 6.93, token frequencies alone UNIGRAM_ENTROPY."""
    _, model, _ = loaded
    counts = np.bincount(torch.cat(token_ids, dim=1)[0].numpy(), minlength=VOCABULARY)
    shares = counts[counts > 0] / counts.sum()
    assert -(shares * np.log(shares)).sum() > UNIGRAM_ENTROPY
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss.item() for ids in token_ids]
    assert np.mean(losses) < UNIGRAM_ENTROPY / 2
    assert max(losses) < math.log(VOCABULARY) / 2


def test_every_expert_is_routed_to():
    """With room to spare: 1 % of the assignments, where an even share is 12.5 %."""
    folder = samples.sample_path("moe")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    counts = torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    with torch.no_grad():
        for record in read_jsonl(samples.calibration_path()):
            ids = tokenizer(record["text"], return_tensors="pt").input_ids
            logits = model(input_ids=ids, output_router_logits=True).router_logits
            for layer, scores in enumerate(logits):
                chosen = scores.topk(model.config.num_experts_per_tok).indices.flatten()
                counts[layer] += torch.bincount(chosen, minlength=model.config.num_experts)
    assert counts.shape == (3, 8)
    assert (counts / counts.sum(1, keepdim=True)).min() > 0.01


def test_calibration_text_fits_the_model(loaded, token_ids):
    _, model, _ = loaded
    lengths = [ids.shape[1] for ids in token_ids]
    assert 16 <= len(lengths) <= 24
    # Also whole under the default --seq-len.
    assert 200 <= min(lengths) <= max(lengths) <= 512 <= model.config.max_position_embeddings


def test_rollouts_have_answers_of_both_signs(loaded):
    _, model, tokenizer = loaded
    records = read_jsonl(samples.rollouts_path())
    assert len(records) == 8
    for group in (records[:4], records[4:]):
        assert len({record["prompt"] for record in group}) == 1
        advantages = [record["advantage"] for record in group]
        assert min(advantages) < 0 < max(advantages)
        # (reward - mean) / std, stored with four digits.
        assert sum(advantages) == pytest.approx(0, abs=4 * 5e-5)
        right = {_answer(record) for record in group if record["advantage"] > 0}
        wrong = {_answer(record) for record in group if record["advantage"] < 0}
        assert len(right) == 1
        assert not right & wrong
    for record in records:
        ids = tokenizer(record["prompt"] + record["response"]).input_ids
        assert len(ids) <= model.config.max_position_embeddings


def _answer(record: dict) -> str:
    return record["response"].rpartition("Answer: ")[2]


def test_shipped_texts_are_what_the_generator_makes():
    texts = [record["text"] for record in read_jsonl(samples.calibration_path())]
    assert texts == corpus.calibration_texts()
    assert read_jsonl(samples.rollouts_path()) == corpus.rollout_records()


def test_corpus_is_deterministic_and_varied():
    """The same in another process with another hash seed; nearly every document is a new one."""
    first = list(islice(corpus.documents(7), 400))
    assert first == [corpus.document(7, index) for index in range(400)]
    assert len(set(first)) > 395
    assert set(first).isdisjoint(islice(corpus.documents(8), 400))
    program = "from tools.samples.corpus import document; print(document(7, 11), end='')"
    command = [sys.executable, "-X", "utf8", "-c", program]
    environment = {"PYTHONHASHSEED": "123", "PYTHONPATH": ":".join(filter(None, sys.path))}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert run.stdout == first[11]


def test_balance_loss_is_one_when_even_and_more_when_not():
    from tools.samples import train

    even = torch.eye(8).roll(1, 0) + 2 * torch.eye(8)  # token t goes to experts t and t + 1
    assert train.balance_loss([even]).item() == pytest.approx(1, abs=1e-6)  # float32 sums
    # All tokens to experts 0 and 1 with (almost) all probability: 8 * (1/2 * 1/2 + 1/2 * 1/2).
    starved = torch.tensor([[50.0, 50, 0, 0, 0, 0, 0, 0]]).repeat(8, 1)
    assert train.balance_loss([starved]).item() == pytest.approx(4, abs=1e-6)
    # Layers are not pooled: the second favours exactly the experts that the first starves.
    both = train.balance_loss([starved, starved.roll(2, 1)])
    assert both.item() == pytest.approx(4, abs=1e-6)


def test_training_script_writes_a_loadable_checkpoint(tmp_path):
    """Two steps: the whole path from corpus to checkpoint, without the time training takes."""
    from tools.samples import train

    schedule = train.Schedule(steps=2, batch=1, length=64)
    result = train.train_sample("moe", tmp_path, schedule, log=lambda line: None)
    shipped = samples.sample_path("moe")
    assert result.loss > result.unigram_entropy > UNIGRAM_ENTROPY
    tokenizer = (tmp_path / "tokenizer.json").read_bytes()
    assert json.loads(tokenizer) == json.loads((shipped / "tokenizer.json").read_bytes())
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted(f.name for f in shipped.iterdir())
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.num_parameters() == result.parameters


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_path_takes_the_name_with_and_without_prefix(name):
    assert samples.sample_path(f"sample:{name}") == samples.sample_path(name)
    assert (samples.sample_path(name) / "config.json").is_file()


@pytest.mark.parametrize("name", ["large", "", "sample:", "../dense", "sample:sample:dense"])
def test_unknown_sample_lists_the_names(name):
    with pytest.raises(UsageError, match="sample:dense, sample:moe"):
        samples.sample_path(name)


@pytest.mark.parametrize("exists", [False, True])
def test_write_sample(tmp_path, exists):
    target = tmp_path / "new" / "dense"
    if exists:
        target.mkdir(parents=True)
    written = samples.write_sample("sample:dense", target)
    assert written == sorted(target.iterdir())
    assert [entry.name for entry in target.parent.iterdir()] == ["dense"]
    for file in samples.sample_path("dense").iterdir():
        assert (target / file.name).read_bytes() == file.read_bytes()
    assert (target / "calibration.jsonl").read_bytes() == samples.calibration_path().read_bytes()
    assert (target / "rollouts.jsonl").read_bytes() == samples.rollouts_path().read_bytes()


def test_write_sample_refuses_what_is_there(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    for target, reason in ((tmp_path, "not empty"), (kept, "file"), (kept / "below", "written")):
        with pytest.raises(MxdiagError, match=reason) as caught:
            samples.write_sample("dense", target)
        assert str(target) in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "mine"


@pytest.mark.parametrize("exists", [False, True])
def test_write_sample_leaves_nothing_half_written(tmp_path, monkeypatch, exists):
    target = tmp_path / "out"
    if exists:
        target.mkdir()
    real, copied = samples.shutil.copyfile, []

    def full_disk(source, destination):
        if len(copied) == 2:
            raise OSError(28, "No space left on device")
        copied.append(real(source, destination))

    monkeypatch.setattr(samples.shutil, "copyfile", full_disk)
    with pytest.raises(MxdiagError, match="No space left"):
        samples.write_sample("moe", target)
    assert [path for path in tmp_path.rglob("*") if path != target] == []
    assert target.exists() == exists


def test_samples_import_neither_torch_nor_transformers():
    program = (
        "import sys, mxdiag.samples as s; s.sample_path('moe'); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == 0
