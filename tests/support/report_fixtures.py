"""Runs for the report's tests: made-up models measured by the reference, and large ones."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np

from mxdiag.decomposition import METRICS, Decomposition, decompose, total
from mxdiag.run.run import Run

CORRECTIONS = {
    "mbs": {"bits": 0.0625, "gemm_passes": 0, "transforms": 0},
    "of": {"bits": 4.25, "gemm_passes": 1, "transforms": 0},
    "mbs+of": {"bits": 4.3125, "gemm_passes": 1, "transforms": 0},
    "scale:mse": {"bits": 0.0, "gemm_passes": 0, "transforms": 0},
    "nvfp4": {"bits": 0.25, "gemm_passes": 0, "transforms": 0},
    "mxfp8": {"bits": 4.0, "gemm_passes": 0, "transforms": 0},
}
SWEEP = {
    f"scale:m{bits}": {"bits": bits / 32, "gemm_passes": 0, "transforms": 0} for bits in range(9)
}
CELLS = (
    ("W", "fprop", -1, "in_features"),
    ("A", "fprop", -1, "in_features"),
    ("G", "dgrad", -1, "out_features"),
    ("W", "dgrad", 0, "out_features"),
    ("A", "wgrad", 0, "tokens"),
    ("G", "wgrad", 0, "tokens"),
)
HOSTILE = '</script><img src=x onerror="window.pwned=1">\u2028=cmd|"\'"[/bold],{{7*7}}'

_ATTENTION = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
_EXPERT = {"gate_proj": (48, 64), "up_proj": (48, 64), "down_proj": (64, 48)}
_MLP = {"gate_proj": (160, 64), "up_proj": (160, 64), "down_proj": (64, 160)}


def _buys(found: Decomposition, rng: np.random.Generator) -> dict[str, float]:
    """Plausible MSE ratios: MBS removes about half of what is reducible, the sweep all of it."""
    reducible = found.reducible or 0.0
    jitter = float(rng.normal(0, 0.01))
    ratios = {
        "mbs": 1 - 0.5 * reducible + jitter,
        "of": 0.25 + 0.2 * jitter,
        "mbs+of": 0.25 * (1 - 0.5 * reducible) + 0.2 * jitter,
        "scale:mse": 1 - 0.12 * reducible,
        "nvfp4": 0.72 - 0.3 * (found.recoverable or 0.0) + jitter,
        "mxfp8": 0.02 + 0.1 * abs(jitter),
    }
    for name in SWEEP:
        ratios[name] = 1 - reducible * (1 - 2.0 ** -(1.6 * int(name[7:])))
    return ratios


def _tensor(rng: np.random.Generator, operand: str, shape: tuple[int, int], depth: int) -> Any:
    x = rng.standard_normal(shape)
    if operand == "W":
        return (x * 0.02 * 2 ** rng.uniform(-1, 1, (shape[0], 1))).astype(np.float32)
    if operand == "A":
        x *= np.where(rng.random(shape[1]) < 0.04, 12.0, 1.0)
        if depth == 2:
            x[0] *= 200
        return x.astype(np.float32)
    heavy = rng.laplace(size=shape) * np.exp(rng.normal(0, 0.8, (shape[0], 1)))
    return (heavy * 1e-4 * 0.9**depth).astype(np.float32)


def _row(layer: str, role: str, expert: int | None, cell: tuple, shape: tuple, tokens: int) -> dict:
    operand, gemm, _, axis = cell
    return {
        "layer": layer,
        "role": role,
        "expert": expert,
        "operand": operand,
        "gemm": gemm,
        "block_axis": axis,
        "shape": list(shape),
        "numel": math.prod(shape),
        "dtype": "float32",
        "calls": None if operand == "W" else 1,
        "tokens": None if operand == "W" else tokens,
        "recommended": None,
        "reason": None,
    }


class _Builder:
    """Collects measured rows and the decompositions that the totals add up."""

    def __init__(self, cells: tuple, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.cells = cells
        self.rows: list[dict] = []
        self.found: dict[tuple[str, str, str | None], list[tuple[Decomposition, dict]]] = {}

    def add(self, layer: str, role: str, expert: int | None, shape: tuple, depth: int, tokens: int):
        for cell in self.cells:
            operand, gemm, axis, _ = cell
            seen = {"W": shape, "A": (tokens, shape[1]), "G": (tokens, shape[0])}[operand]
            row = _row(layer, role, expert, cell, seen, tokens)
            if not tokens and operand != "W":
                row |= {"status": "not_observed", **dict.fromkeys(METRICS), "delta_hist": [0] * 32}
                self.rows.append(row)
                continue
            tensor = _tensor(self.rng, operand, seen, depth)
            found = decompose(tensor, axis, backend="reference", tokens=operand != "W")
            ratios = _buys(found, self.rng)
            row |= {
                "status": found.status,
                **found.metrics(),
                "delta_hist": found.delta_hist.tolist(),
                **{f"mse_ratio:{name}": value for name, value in ratios.items()},
                "recommended": "mbs+of" if (found.recoverable or 0) > 0.1 else "mbs",
                "reason": f"{operand}·{gemm}: {found.recoverable:.0%} recoverable deadzone",
            }
            self.rows.append(row)
            for key in ((operand, gemm, None), (operand, gemm, role)):
                self.found.setdefault(key, []).append((found, ratios))

    def totals(self) -> list[dict]:
        result = []
        for (operand, gemm, role), items in self.found.items():
            merged = total([found for found, _ in items], "rceil")
            weights = [found.sum("e2") for found, _ in items]
            ratios = {
                f"mse_ratio:{name}": float(
                    np.average([ratio[name] for _, ratio in items], weights=weights)
                )
                for name in items[0][1]
            }
            result.append(
                {
                    "operand": operand,
                    "gemm": gemm,
                    "role": role,
                    "rows": len(items),
                    "measured": len(items),
                    "numel": merged.numel,
                    **merged.metrics(),
                    **ratios,
                }
            )
        return result


def _run(builder: _Builder, source: str, architecture: str, **more: Any) -> Run:
    layers = {row["layer"] for row in builder.rows}
    parameters = sum(row["numel"] for row in builder.rows if row["operand"] == "W")
    silent = [
        {
            "layer": row["layer"],
            "operand": row["operand"],
            "gemm": row["gemm"],
            "reason": "no token",
        }
        for row in builder.rows
        if row["status"] == "not_observed"
    ]
    return Run(
        {
            "schema_version": 1,
            "mxdiag_version": "0.1.0",
            "created": "2026-07-01T12:00:00+00:00",
            "model": {
                "source": source,
                "kind": "checkpoint",
                "architecture": architecture,
                "parameters": parameters + 40_000,
                "revision": None,
                "files": [{"name": "model.safetensors", "bytes": 4 * parameters}],
            },
            "settings": {"scale_rule": "rceil", "seq_len": 512, "samples": 16, "calib": None},
            "environment": {
                "versions": {"mxdiag": "0.1.0"},
                "device": "cpu",
                "backend": "reference",
            },
            "coverage": {
                "measured": len(layers),
                "measured_parameters": parameters,
                "parameters": parameters + 32_768,
                "parameter_fraction": 1.0,
                "excluded": [
                    {"layer": "lm_head", "rule": "lm_head", "parameters": 16_384},
                    {"layer": "model.embed_tokens", "rule": "embedding", "parameters": 16_384},
                ],
                "unsupported": [],
                "not_observed": silent,
                "not_weights": [],
                "unmeasured_by_design": ["attention scores and softmax"],
            },
            "tensors": builder.rows,
            "totals": builder.totals(),
            "corrections": {**CORRECTIONS, **SWEEP},
            "recommendation": None,
            "impact": None,
            "warnings": [],
            **more,
        }
    )


def dense_run(layers: int = 8, cells: tuple = CELLS, seed: int = 0, **more: Any) -> Run:
    """A llama-like model, measured."""
    builder = _Builder(cells, seed)
    for depth in range(layers):
        for block, roles in (("self_attn", _ATTENTION), ("mlp", _MLP)):
            for role, shape in roles.items():
                layer = f"model.layers.{depth}.{block}.{role}"
                builder.add(layer, role, None, shape, depth, 64)
    return _run(builder, "made-up/llama-like-1B", "LlamaForCausalLM", **more)


def moe_run(layers: int = 4, experts: int = 8, seed: int = 1, **more: Any) -> Run:
    """A mixture of experts; one expert of the last layer gets no token."""
    builder = _Builder(CELLS[:3], seed)
    for depth in range(layers):
        for role, shape in _ATTENTION.items():
            builder.add(f"model.layers.{depth}.self_attn.{role}", role, None, shape, depth, 64)
        routed = builder.rng.multinomial(128, builder.rng.dirichlet([1.0] * experts))
        routed[experts - 1] = 0 if depth == layers - 1 else max(1, routed[experts - 1])
        for expert in range(experts):
            for role, shape in {
                "gate_proj": (48, 64),
                "up_proj": (48, 64),
                "down_proj": (64, 48),
            }.items():
                layer = f"model.layers.{depth}.mlp.experts.{expert}.{role}"
                tokens = int(routed[expert])
                builder.add(layer, f"expert.{role}", expert, shape, depth, tokens)
    return _run(builder, "made-up/moe-8x1B", "Qwen3MoeForCausalLM", **more)


def large_run(rows: int, seed: int = 2) -> Run:
    """`rows` rows of a 48-layer, 128-expert mixture: measured once, then jittered."""
    base = moe_run(layers=1, experts=2)
    rng = np.random.default_rng(seed)
    kinds = [
        next(r for r in base.tensors if r["operand"] == operand and r["role"] == f"expert.{role}")
        for role in ("gate_proj", "up_proj", "down_proj")
        for operand in ("W", "A", "G")
    ]
    numeric = [
        name
        for name, value in kinds[1].items()
        if isinstance(value, float) and name != "closure_residual"
    ]
    result = []
    for index in range(rows):
        unit, kind = divmod(index, len(kinds))
        depth, expert = divmod(unit, 128)
        row = dict(kinds[kind])
        factors = rng.normal(1, 0.05, len(numeric)).tolist()
        row |= {
            name: row[name] * factor
            for name, factor in zip(numeric, factors, strict=True)
            if row[name] is not None
        }
        projection = row["role"].removeprefix("expert.")
        row["layer"] = f"model.layers.{depth}.mlp.experts.{expert}.{projection}"
        row["expert"] = expert
        row["reason"] = f"{row['recoverable']:.1%} of the error is recoverable deadzone"
        result.append(row)
    data = copy.deepcopy(base.data)
    data["tensors"] = result
    data["model"]["source"] = f"made-up/{rows}-rows"
    data["coverage"]["not_observed"] = []
    return Run(data)


def with_impact(run: Run, layers: int = 8) -> Run:
    """The run with an impact object of the documented shape, numbers after a real small model."""
    configs = {
        "all": (1.50, 0.81), "scale": (1.90, 0.64), "deadzone": (0.14, 0.99), "grid": (0.75, 0.90),
        "ideal": (0.60, 0.91), "scale+deadzone": (2.0, 0.63), "scale+grid": (1.3, 0.82),
        "mbs": (0.95, 0.86), "of": (0.30, 0.95), "mbs+of": (0.22, 0.96),
    }  # fmt: skip
    forward, backward = [], []
    for operands in ("W", "A", "WA"):
        factor = {"W": 0.4, "A": 0.7, "WA": 1.0}[operands]
        for name, (kl, _) in configs.items():
            mean = kl * factor
            entry = {"config": name, "operands": operands, "loss": 3.1 + 0.8 * mean}
            entry |= {"kl_mean": mean, "kl_p95": 3 * mean, "agreement": 1 / (1 + mean)}
            entry |= {"entropy": 2.4 + 0.3 * mean, "t_eff_measured": 1 + 0.2 * mean}
            entry |= {"t_eff_predicted": 1 + 0.24 * mean}
            entry |= {f"{key}_sd": 0.1 * abs(entry[key]) * 0.3 for key in list(entry)[2:]}
            forward.append(entry)
    for name, (_, cosine) in configs.items():
        points = [
            {
                "layer": f"model.layers.{depth}.mlp.down_proj",
                "cosine": 1 - (1 - cosine) * (layers - depth) / layers,
                "norm_ratio": 1 + 0.01 * math.sin(depth),
                "snr_db": 12.0 - 0.2 * depth,
            }
            for depth in range(layers)
        ]
        mean = sum(point["cosine"] for point in points) / layers
        backward.append(
            {
                "config": name,
                "operands": "GWA",
                "cosine_mean": mean,
                "cosine_mean_sd": 0.004,
                "layers": points,
            }
        )
    names = ("measure", "pass", "operands", "scale", "deadzone", "grid", "total")
    attribution = [
        dict(zip(names, values, strict=True))
        for values in (
            ("kl_mean", "forward", "WA", 1.05, 0.09, 0.36, 1.50),
            ("entropy", "forward", "WA", 0.35, -0.02, 0.12, 0.45),
            ("cosine_mean", "backward", "GWA", -0.07, -0.005, -0.035, -0.11),
        )
    ]
    rollout = [
        {
            "config": name,
            "operands": "WA",
            "first_divergence_mean": 20 / (1 + kl),
            "identical": max(0.0, 0.5 - kl / 4),
            "ess": 1 / (1 + kl),
            "outside_clip": min(1.0, kl / 3),
        }
        for name, (kl, _) in configs.items()
    ]
    impact = {
        "reference": {"loss": 3.1, "entropy": 2.4, "perplexity": 22.2, "tokens": 4096},
        "forward": forward,
        "backward": backward,
        "both": [],
        "attribution": attribution,
        "rollout": rollout,
        "per_layer": [],
    }
    return Run({**run.data, "impact": impact})


def renamed(run: Run, name: str) -> Run:
    """The run with one layer called `name`, and every other text of unknown origin hostile too."""
    data = copy.deepcopy(run.data)
    for row in data["tensors"][:6]:
        row["layer"] = name
        row["reason"] = name
    data["tensors"][0]["sqnr_db"] = -5.0
    data["model"]["source"] = data["model"]["architecture"] = name
    data["coverage"]["excluded"][0]["layer"] = name
    data["warnings"] = [name]
    return Run(data)
