"""One command scans a mixture of experts: a row for each of its 1,536 expert projections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from mxdiag.run.run import Run
from zoo import VOCABULARY, entry

LAYERS, EXPERTS, TOP_K = 4, 128, 2
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
#: Few tokens, so that most experts get none.
RECORDS = ([5, 9, 20, 33, 41, 7, 8], [12, 3, 60])


def scan(folder: Path, *options: object) -> tuple[subprocess.CompletedProcess[str], Run]:
    command = [sys.executable, "-m", "mxdiag", "scan", folder, "--out", folder / "run", *options]
    result = subprocess.run(
        [*map(str, command), "--corrections", "none"],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result, Run.load(folder / "run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    config = AutoConfig.for_model(
        "qwen3_moe",
        **{
            **entry("qwen3_moe").config,
            "num_hidden_layers": LAYERS,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
        },
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    lines = [json.dumps({"input_ids": ids}) for ids in RECORDS]
    (folder / "calibration.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_one_command_gives_every_expert_of_a_loaded_model(folder: Path) -> None:
    result, run = scan(folder, "--calib", folder / "calibration.jsonl")
    experts = [row for row in run.tensors if row["expert"] is not None]
    others = [row for row in run.tensors if row["expert"] is None]
    assert {row["layer"] for row in others} == {
        f"model.layers.{i}.self_attn.{p}_proj" for i in range(LAYERS) for p in "qkvo"
    }
    assert all(row["status"] == "ok" for row in others)
    names = {
        f"model.layers.{i}.mlp.experts.{e}.{p}"
        for i in range(LAYERS)
        for e in range(EXPERTS)
        for p in PROJECTIONS
    }
    for operand in "WAG":
        assert {row["layer"] for row in experts if row["operand"] == operand} == names
    assert Counter(row["role"] for row in experts) == dict.fromkeys(
        (f"expert.{p}" for p in PROJECTIONS), 3 * LAYERS * EXPERTS
    )
    assert all(row["status"] == "ok" for row in experts if row["operand"] == "W")
    check_tokens(experts)

    coverage = run.data["coverage"]
    assert coverage["parameter_fraction"] == 1.0
    unseen = [row for row in experts if row["status"] == "not_observed"]
    assert len(unseen) == len(coverage["not_observed"])
    assert {entry["reason"] for entry in coverage["not_observed"]} == {"no token was routed to it"}
    line = next(line for line in result.stdout.splitlines() if line.startswith("coverage:"))
    assert "1552 layers measured" in line.replace(",", "")
    assert f"{len(unseen)} rows not observed" in line.replace(",", "")


def check_tokens(experts: list[dict]) -> None:
    """Every token goes to TOP_K experts of a layer; an expert without one is not observed."""
    routed: Counter[str] = Counter()
    for row in experts:
        if row["operand"] != "A":
            continue
        assert (row["status"] == "ok") == bool(row["tokens"])
        layer, _, rest = row["layer"].partition(".experts.")
        routed[f"{layer} {rest.partition('.')[2]}"] += row["tokens"] or 0
    tokens = sum(len(ids) for ids in RECORDS)
    assert routed == {
        f"model.layers.{i}.mlp {p}": tokens * TOP_K for i in range(LAYERS) for p in PROJECTIONS
    }
    seen = {o: {r["layer"] for r in experts if r["operand"] == o and r["tokens"]} for o in "AG"}
    assert seen["A"] == seen["G"]
    assert 0 < len(seen["A"]) < LAYERS * EXPERTS * len(PROJECTIONS)


def test_the_stream_gives_the_same_rows(folder: Path) -> None:
    _, loaded = scan(folder, "--operands", "W")
    _, streamed = scan(folder, "--weights-only")
    assert len(streamed.tensors) == 1536 + 4 * LAYERS
    columns = ["calls"]
    assert streamed.frame.drop(columns=columns).equals(loaded.frame.drop(columns=columns))
    left_out = sum(entry["parameters"] for entry in streamed.data["coverage"]["excluded"])
    assert left_out == 2 * VOCABULARY * 32 + LAYERS * EXPERTS * 32, "embedding, head, routers"
