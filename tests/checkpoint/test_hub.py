"""Weights of a hub model, streamed from its downloaded files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import mxdiag
from mxdiag.errors import CheckpointError
from mxdiag.samples import sample_path


def test_weights_of_a_hub_model_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, Any]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert "*.safetensors" in allow_patterns
        assert not any("bin" in pattern for pattern in allow_patterns)
        return str(sample_path("sample:dense"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    run = mxdiag.scan("someone/model", weights_only=True, revision="v1", corrections="none")
    assert asked == [("someone/model", "v1")]
    assert (run.data["model"]["source"], run.data["model"]["kind"]) == ("someone/model", "hub")
    local = mxdiag.scan("sample:dense", weights_only=True, corrections="none")
    assert run.frame.equals(local.frame)


def test_a_hub_that_brings_nothing_is_one_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise OSError("no route to the hub\nand many more lines")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="does not bring it: no route to the hub") as caught:
        mxdiag.scan("someone/model", weights_only=True)
    assert "many more" not in str(caught.value)
    assert caught.value.where == "someone/model"
