"""Loading models: the class that the config names, quietly, or one clear message."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertForMaskedLM

from mxdiag.errors import ModelError
from mxdiag.model.inventory import model_inventory
from mxdiag.model.loading import load_model, load_tokenizer
from zoo import build, entry


def saved(name: str, folder: Path) -> Path:
    build(entry(name)).save_pretrained(folder)
    return folder


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("gpt2", "GPT2LMHeadModel"),
        ("mixtral", "MixtralForCausalLM"),
        ("bert", "BertForMaskedLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
        ("siglip_vision", "SiglipVisionModel"),
        ("llava", "LlavaForConditionalGeneration"),
    ],
)
def test_the_class_is_the_configs_and_nothing_is_written(
    name: str, architecture: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = saved(name, tmp_path)
    capfd.readouterr()
    loaded = load_model(folder)
    assert type(loaded.model).__name__ == architecture
    assert not loaded.model.training
    assert not loaded.absent
    assert not loaded.warnings
    assert capfd.readouterr() == ("", "")


def test_a_causal_model_without_architectures_gets_its_head(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    rewrite(folder, architectures=None)
    assert type(load_model(folder).model).__name__ == "LlamaForCausalLM"


def test_random_weights_are_said_and_not_measured(tmp_path: Path) -> None:
    folder = saved("bert", tmp_path)
    rewrite(folder, architectures=["BertForSequenceClassification"])
    loaded = load_model(folder)
    assert set(loaded.absent) == {
        *("bert.pooler.dense.weight", "bert.pooler.dense.bias"),
        *("classifier.weight", "classifier.bias"),
    }
    (warning,) = loaded.warnings
    assert "4 weights are not in the checkpoint" in warning
    inventory = model_inventory(loaded.model, absent=loaded.absent)
    assert {item.name for item in inventory.unsupported} == {
        "bert.pooler.dense.weight",
        "classifier.weight",
    }


def test_dtype(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    assert load_model(folder).model.dtype is torch.float32
    assert load_model(folder, dtype="bfloat16").model.dtype is torch.bfloat16
    for name in ("int8", "float8_e4m3fn", "nonsense", "nn"):
        with pytest.raises(ModelError, match="no dtype to run a model in"):
            load_model(folder, dtype=name)


def test_device_that_is_not_there(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    with pytest.raises(ModelError, match="device 'nonsense' cannot be used"):
        load_model(folder, device="nonsense")
    with pytest.raises(ModelError, match="device 'cuda:99' cannot be used"):
        load_model(folder, device="cuda:99")


def damage(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "no weights":
        weights.unlink()
    elif how == "no config":
        (folder / "config.json").unlink()
    elif how == "broken config":
        (folder / "config.json").write_text("{")
    elif how == "unknown type":
        rewrite(folder, model_type="no_such_type", architectures=["NoSuchModel"])
    elif how == "adapter":
        (folder / "config.json").rename(folder / "adapter_config.json")
    elif how == "pickle":
        torch.save(nn.Linear(2, 2).state_dict(), folder / "pytorch_model.bin")
        weights.unlink()
    elif how == "wrong shapes":
        rewrite(folder, intermediate_size=49)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "cannot load the model"),
        ("no weights", "cannot load the model"),
        ("no config", "has no config.json"),
        ("broken config", "cannot load the model"),
        ("unknown type", "cannot load the model"),
        ("adapter", "adapter alone"),
        ("pickle", "pickle files only"),
        ("wrong shapes", "cannot load the model"),
    ],
)
def test_whatever_is_wrong_is_one_message(how: str, message: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    damage(folder, how)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)
    assert caught.value.advice
    assert "\n" not in str(caught.value)


def test_pickle_loads_when_asked(tmp_path: Path) -> None:
    model = build(entry("llama"))
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    loaded = load_model(tmp_path, allow_pickle=True)
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight)


def test_paths_that_are_not_there() -> None:
    with pytest.raises(ModelError, match="is no folder"):
        load_model("/no/such/folder")
    with pytest.raises(ModelError, match="cannot load the model"):
        load_model("no-such-owner/no-such-model")


def test_code_from_a_checkpoint_runs_only_when_allowed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}})
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="trust-remote-code"):
        load_model(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    with pytest.raises(ModelError, match="cannot load the tokenizer") as caught:
        load_tokenizer(folder)
    assert "input_ids" in str(caught.value)


def test_logging_is_as_before(tmp_path: Path) -> None:
    from transformers.utils import logging as transformers_logging

    before = (logging.root.manager.disable, transformers_logging.is_progress_bar_enabled())
    with pytest.raises(ModelError):
        load_model(tmp_path)
    saved("llama", tmp_path)
    load_model(tmp_path)
    assert before == (logging.root.manager.disable, transformers_logging.is_progress_bar_enabled())


def test_weights_are_the_files(tmp_path: Path) -> None:
    model = build(entry("bert"))
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path).model
    assert isinstance(loaded, BertForMaskedLM)
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name
