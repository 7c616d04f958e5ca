"""Runs built by hand from random tensors, for the tests of what reads runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np

from mxdiag.commands.gate.budget import Budget
from mxdiag.commands.gate.evaluate import evaluate
from mxdiag.commands.gate.parse import load_budget
from mxdiag.commands.gate.verdict import Verdict
from mxdiag.decomposition import Decomposition, decompose, total
from mxdiag.run.run import Run

COSTS = {
    "scale:mse": {"bits": 0.0, "gemm_passes": 0, "transforms": 0},
    "mbs": {"bits": 0.0625, "gemm_passes": 0, "transforms": 0},
    "mxfp8": {"bits": 4.0, "gemm_passes": 0, "transforms": 0},
    "mbs+of": {"bits": 4.3125, "gemm_passes": 1, "transforms": 0},
}
#: What the corrections leave of the error, as measured on real weights (MBS, OF) or about so.
RATIOS = {"scale:mse": 0.97, "mbs": 0.85, "mxfp8": 0.01, "mbs+of": 0.2}
HOSTILE = (
    'a,"b"\nc',
    "=cmd|'/c calc'!A1",
    "</script><img src=x onerror=alert(1)>",
    "[/bold][red]x[/red]",
    "::error::pwned %0A ##[error]x",
    "`|`\\|x",
    "\x1b[31mred\x1b[0m\x00\x07",
    "]]>&amp;<!--",
    "@someone [link](http://example.invalid)",
    "layers.*.q[0-9]?",
    "日本語.weight\u202e",
)


def columns(decomposition: Decomposition, ratios: dict[str, float] | None = None) -> dict[str, Any]:
    """A row's (or a total's) numbers."""
    found: dict[str, Any] = dict(decomposition.metrics())
    for name, ratio in (RATIOS if ratios is None else ratios).items():
        has_error = decomposition.status in ("ok", "nonfinite")
        found[f"mse_ratio:{name}"] = ratio if has_error else None
    found["delta_hist"] = [int(count) for count in decomposition.delta_hist]
    return found


def tensor(kind: str = "normal", seed: int = 0, shape: tuple[int, int] = (32, 64)) -> np.ndarray:
    """`normal`, `laplace`, `exact` (already MXFP4), `zero`, `nan`, `outliers`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if kind == "laplace":
        x = rng.laplace(size=shape)
    elif kind == "exact":
        x = rng.choice([0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0], size=shape)
        x[:, ::32] = 6.0
    elif kind == "zero":
        x = np.zeros(shape)
    elif kind == "nan":
        x[3, 5] = np.nan
    elif kind == "outliers":
        x[:, ::32] *= 100.0
    return x


def row(
    layer: str,
    kind: str = "normal",
    *,
    operand: str = "W",
    gemm: str = "fprop",
    role: str | None = None,
    seed: int = 0,
    ratios: dict[str, float] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One row, with its decomposition under `decomposition`. `kind` `unseen`: nothing observed."""
    x = tensor("normal" if kind == "unseen" else kind, seed)
    found = decompose(x, tokens=operand != "W", backend="reference")
    if kind == "unseen":
        found = Decomposition.empty("rceil")
    return {
        "layer": layer,
        "role": layer.rsplit(".", 1)[-1] if role is None else role,
        "expert": None,
        "operand": operand,
        "gemm": gemm,
        "status": found.status,
        "block_axis": "out_features" if gemm == "dgrad" else "in_features",
        "shape": list(x.shape),
        "numel": found.numel,
        "dtype": "float32",
        "calls": None if operand == "W" else 1,
        "tokens": None if operand == "W" else x.shape[0],
        **columns(found, ratios),
        "decomposition": found,
        **more,
    }


def make_run(rows: list[dict[str, Any]], **more: Any) -> Run:
    """A run of these rows, with totals, coverage and settings that fit them."""
    cells = list(dict.fromkeys((r["operand"], r["gemm"]) for r in rows))
    totals = [_total(*cell, None, rows) for cell in cells]
    for cell in cells:
        roles = dict.fromkeys(r["role"] for r in rows if (r["operand"], r["gemm"]) == cell)
        totals += [_total(*cell, role, [r for r in rows if r["role"] == role]) for role in roles]
    unseen = [r for r in rows if r["status"] == "not_observed"]
    data = {
        "schema_version": 1,
        "mxdiag_version": "0",
        "created": "2026-01-01T00:00:00+00:00",
        "model": {"source": "hand-made", "kind": "model", "architecture": "Toy"},
        "settings": {"scale_rule": "rceil", "operands": ["W", "A", "G"], "seed": 0, "out": "a"},
        "environment": {},
        "coverage": {
            "measured": len({r["layer"] for r in rows}),
            "measured_parameters": 1,
            "parameters": 1,
            "excluded": [{"layer": "lm_head", "rule": "lm_head", "parameters": 1}],
            "unsupported": [],
            "not_observed": [
                {k: r[k] for k in ("layer", "operand", "gemm")} | {"reason": "never called"}
                for r in unseen
            ],
            "parameter_fraction": 1.0,
        },
        "tensors": [{k: v for k, v in r.items() if k != "decomposition"} for r in rows],
        "totals": totals,
        "corrections": copy.deepcopy(COSTS),
        "impact": None,
        "warnings": [],
    }
    data.update(more)
    return Run(data)


def _total(operand: str, gemm: str, role: str | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    chosen = [r for r in rows if (r["operand"], r["gemm"]) == (operand, gemm)]
    found = total((r["decomposition"] for r in chosen), "rceil")
    identity = {"operand": operand, "gemm": gemm, "role": role}
    return {**identity, "rows": len(chosen), "numel": found.numel, **columns(found)}


def plain_run() -> Run:
    """Two layers, W, A and G each."""
    rows = [
        row(f"model.layers.{depth}.{name}", operand=operand, gemm=gemm, seed=seed)
        for seed, (depth, name, (operand, gemm)) in enumerate(
            (depth, name, cell)
            for depth in range(2)
            for name in ("q_proj", "down_proj")
            for cell in (("W", "fprop"), ("A", "fprop"), ("G", "dgrad"))
        )
    ]
    return make_run(rows)


def hostile_run() -> Run:
    """A layer per hostile name, each with an error that no sane budget allows."""
    return make_run([row(name, "outliers", role="r", seed=i) for i, name in enumerate(HOSTILE)])


def load(tmp_path: Path, text: str) -> Budget:
    """The budget that a text is."""
    path = tmp_path / "budget.toml"
    path.write_text(text, encoding="utf-8")
    return load_budget(path)


def judge(tmp_path: Path, run: Run, text: str, **options: Any) -> Verdict:
    """The verdict of a budget that a text is."""
    return evaluate(run, load(tmp_path, text), **options)


def rule(body: str, name: str = "r") -> str:
    """A `[[rule]]` of two lines, then the body."""
    return f'[[rule]]\nname = "{name}"\n{body}\n'


IMPACT: dict[str, Any] = {
    "reference": {"loss": 2.0, "entropy": 1.5, "perplexity": 7.4, "tokens": 100},
    "forward": [
        {
            "config": "all",
            "operands": "WA",
            "loss": 2.1,
            "loss_sd": 0.01,
            "kl_mean": 0.06,
            "kl_mean_sd": 0.004,
            "agreement": 0.9,
            "entropy": 1.6,
        },
        {"config": "scale", "operands": "W", "loss": 2.01, "kl_mean": 0.01, "agreement": None},
    ],
    "backward": [
        {
            "config": "all",
            "operands": "GWA",
            "cosine_mean": 0.97,
            "layers": [
                {"layer": "model.layers.0.q_proj", "cosine": 0.95, "norm_ratio": 1.0},
                {"layer": "model.layers.1.q_proj", "cosine": 0.99, "norm_ratio": 1.0},
            ],
        }
    ],
    "both": [],
}
