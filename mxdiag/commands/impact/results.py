"""From what was seen to the impact object: means over repeats, with their noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mxdiag.commands.impact.evidence import Baseline, Evidence, Facts, Seen
from mxdiag.commands.impact.inject.configurations import COMPONENT_SETS, Configuration
from mxdiag.commands.impact.measures import backward
from mxdiag.commands.impact.measures.attribution import shapley
from mxdiag.commands.impact.measures.depth import depth_points, log2_norm_ratio
from mxdiag.commands.impact.measures.forward import COLUMN
from mxdiag.commands.impact.measures.noise import resamples, spread, summarized
from mxdiag.commands.impact.measures.temperature import TemperatureTable, predicted

#: Positions of greatest divergence that an entry lists.
WORST = 5
#: Measures that are attributed to components, and their value without injection: a number, or the
#: reference's own.
FORWARD_MEASURES = ("kl_mean", "loss", "entropy", "agreement", "t_eff_measured")
BACKWARD_MEASURES = ("cosine_mean", "norm_ratio_mean")
#: Means over tokens, and the column of each.
_TOKEN_MEANS = (("kl_mean", "kl"), ("agreement", "agreement"), ("entropy", "entropy"))
_UNTOUCHED = {
    "kl_mean": 0.0,
    "agreement": 1.0,
    "t_eff_measured": 1.0,
    "cosine_mean": 1.0,
    "norm_ratio_mean": 1.0,
}

MeasureValues = dict[str, float]


def impact_object(evidence: Evidence, seed: int) -> dict[str, Any]:
    """The tables in the form of `run.json`, without what rollouts and single layers add."""
    seeds = resamples(len(evidence.facts) or _records(evidence), seed)
    tables: dict[str, list[dict[str, Any]]] = {"forward": [], "backward": [], "both": []}
    by_repeat: dict[Configuration, list[MeasureValues]] = {}
    for configuration, seen in evidence.seen.items():
        entry: dict[str, Any] = {"config": configuration.name, "operands": configuration.operands}
        values: list[MeasureValues] = [{} for _ in range(evidence.repeats)]
        if configuration.which != "backward":
            baseline = evidence.baselines[configuration.which]
            entry |= _forward_entry(seen, baseline, evidence.facts, values, seeds)
        if configuration.which != "forward":
            entry |= _backward_entry(seen, evidence, values, seeds)
        tables[configuration.which].append(entry)
        by_repeat[configuration] = values
    return {
        "reference": reference_entry(evidence),
        **tables,
        "attribution": attribution(evidence, by_repeat),
        "rollout": [],
        "per_layer": [],
    }


def _records(evidence: Evidence) -> int:
    return max((len(row) for seen in evidence.seen.values() for row in seen.gradients), default=0)


def reference_entry(evidence: Evidence) -> dict[str, Any]:
    """Loss, entropy and perplexity of the model as it is, and how many positions were compared."""
    baseline = evidence.baselines.get("forward") or evidence.baselines.get("both")
    entry: dict[str, Any] = dict.fromkeys(("loss", "entropy", "perplexity"))
    if baseline is not None:
        values = [_reference_values(baseline, evidence.facts, r) for r in range(evidence.repeats)]
        for name in ("loss", "entropy", "perplexity"):
            entry |= summarized(name, [v[name] for v in values])
    entry["tokens"] = int(sum(len(facts.labelled) for facts in evidence.facts))
    entry["labelled_tokens"] = int(sum(facts.labelled.sum() for facts in evidence.facts))
    entry["records"] = len(evidence.facts)
    return entry


def _reference_values(baseline: Baseline, facts: Sequence[Facts], repeat: int) -> MeasureValues:
    seen = baseline.seen
    return _token_values(seen.tokens[repeat], facts, seen.losses[repeat])


# ---- forward -----------------------------------------------------------------------------------


def _token_values(
    tokens: Sequence[np.ndarray], facts: Sequence[Facts], losses: Sequence[float]
) -> MeasureValues:
    """Measures of one repeat that need nothing but the configuration's own statistics."""
    rows = np.concatenate(tokens)
    labelled = np.concatenate([f.labelled for f in facts])
    nll = rows[:, COLUMN["nll"]]
    weighted = [
        f.advantage * t[f.labelled, COLUMN["nll"]].sum() for t, f in zip(tokens, facts, strict=True)
    ]
    values = {"loss": float(np.mean(losses)), "perplexity": math.nan}
    if labelled.any():
        mean = nll[labelled].mean()
        values["perplexity"] = float(np.exp(mean)) if mean < 700 else math.inf
        if not np.isfinite(losses).all():  # else a loss of the caller's own
            values["loss"] = float(math.fsum(weighted) / labelled.sum())
    for name, column in _TOKEN_MEANS:
        values[name] = _mean(rows[:, COLUMN[column]])
    values["kl_p95"] = float(np.quantile(rows[:, COLUMN["kl"]], 0.95)) if len(rows) else math.nan
    return values


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _temperatures(tokens: Sequence[np.ndarray], baseline: Baseline, repeat: int) -> MeasureValues:
    sums = np.concatenate(tokens).sum(0)
    table = _sum(baseline.tables[repeat])
    error = _mean(np.concatenate(tokens)[:, COLUMN["error_var"]])
    return {
        "t_eff_measured": table.temperature_of_cross(float(sums[COLUMN["cross"]])),
        "t_eff_entropy": table.temperature_of_entropy(float(sums[COLUMN["entropy"]])),
        "t_eff_predicted": predicted(error, _mean(np.concatenate(baseline.variances[repeat]))),
    }


def _sum(tables: Iterable[TemperatureTable]) -> TemperatureTable:
    first, *rest = tables
    for table in rest:
        first = first + table
    return first


def _forward_entry(
    seen: Seen,
    baseline: Baseline,
    facts: Sequence[Facts],
    values: list[MeasureValues],
    weights: np.ndarray | None,
) -> dict[str, Any]:
    for repeat, own in enumerate(values):
        before = _reference_values(baseline, facts, repeat)
        own |= _token_values(seen.tokens[repeat], facts, seen.losses[repeat])
        own |= {f"{name}_change": own[name] - before[name] for name in ("loss", "entropy")}
        own |= {f"{name}_reference": before[name] for name in ("loss", "entropy")}
        own |= _temperatures(seen.tokens[repeat], baseline, repeat)
        if seen.routing:
            other, whole = (math.fsum(c) for c in zip(*seen.routing[repeat], strict=True))
            own["routing_changed"] = other / whole if whole else math.nan
    names = [name for name in values[0] if not name.endswith("_reference")]
    entry: dict[str, Any] = {}
    for name in names:
        entry |= summarized(name, [own[name] for own in values])
    if weights is not None:
        entry |= _forward_resampled(seen, baseline, facts, weights)
    mean_tokens = [np.mean(group, axis=0) for group in zip(*seen.tokens, strict=True)]
    entry["worst"] = _worst(mean_tokens, facts)
    entry["splits"] = _splits(seen, facts)
    return entry


def _forward_resampled(
    seen: Seen, baseline: Baseline, facts: Sequence[Facts], weights: np.ndarray
) -> dict[str, float | None]:
    """`_boot_sd`: how much each number depends on which records were taken."""
    records = [np.mean(group, axis=0) for group in zip(*seen.tokens, strict=True)]
    tables = [_sum(group).times(1 / len(group)) for group in zip(*baseline.tables, strict=True)]
    counts = np.array([len(tokens) for tokens in records], dtype=float)
    sums = np.array([tokens.sum(0) for tokens in records])
    before = [np.mean(group, axis=0) for group in zip(*baseline.seen.tokens, strict=True)]
    entropy = sums[:, COLUMN["entropy"]] - [rows[:, COLUMN["entropy"]].sum() for rows in before]
    labelled = np.array([f.labelled.sum() for f in facts], dtype=float)
    losses, changes = _losses(records, facts), _losses(records, facts) - _losses(before, facts)
    tokens = weights @ counts
    with np.errstate(divide="ignore", invalid="ignore"):
        means = {
            name: (weights @ sums[:, COLUMN[column]]) / tokens for name, column in _TOKEN_MEANS
        }
        means["entropy_change"] = (weights @ entropy) / tokens
        means["loss"] = (weights @ losses) / (weights @ labelled)
        means["loss_change"] = (weights @ changes) / (weights @ labelled)
    result = {f"{name}_boot_sd": spread(values) for name, values in means.items()}
    kl = [tokens[:, COLUMN["kl"]] for tokens in records]
    quantiles, temperatures = [], []
    for row in weights:
        drawn = [values for values, n in zip(kl, row, strict=True) for _ in range(n)]
        whole = np.concatenate(drawn)
        quantiles.append(float(np.quantile(whole, 0.95)) if len(whole) else math.nan)
        table = _sum(t.times(n) for t, n in zip(tables, row, strict=True))
        temperatures.append(table.temperature_of_cross(float(row @ sums[:, COLUMN["cross"]])))
    result["kl_p95_boot_sd"] = spread(quantiles)
    result["t_eff_measured_boot_sd"] = spread(temperatures)
    return result


def _losses(records: Sequence[np.ndarray], facts: Sequence[Facts]) -> np.ndarray:
    """Each record's sum of advantage * NLL over its labelled tokens."""
    return np.array(
        [
            f.advantage * rows[f.labelled, COLUMN["nll"]].sum()
            for rows, f in zip(records, facts, strict=True)
        ]
    )


def _worst(tokens: Sequence[np.ndarray], facts: Sequence[Facts]) -> list[dict[str, Any]]:
    """Positions of greatest mean divergence: record, index of the token predicted, its id."""
    found = [
        (float(kl), record, position)
        for record, rows in enumerate(tokens)
        for position, kl in enumerate(rows[:, COLUMN["kl"]])
        if math.isfinite(kl)
    ]
    return [
        {
            "record": record,
            "position": position + facts[record].first,
            "token": int(facts[record].predicted[position]),
            "kl": kl,
        }
        for kl, record, position in sorted(found, reverse=True)[:WORST]
    ]


def _splits(seen: Seen, facts: Sequence[Facts]) -> dict[str, dict[str, Any]]:
    """KL, agreement and entropy by prompt and response, and by the advantage's sign."""
    masks: dict[str, list[np.ndarray]] = {}
    if any(f.response is not None for f in facts):
        none = [np.zeros(len(f.labelled), bool) for f in facts]
        masks["prompt"] = [
            n if f.response is None else ~f.response for f, n in zip(facts, none, strict=True)
        ]
        masks["response"] = [
            n if f.response is None else f.response for f, n in zip(facts, none, strict=True)
        ]
    if any(f.advantage != 1.0 for f in facts):
        masks["advantage_positive"] = [f.labelled & (f.advantage > 0) for f in facts]
        masks["advantage_negative"] = [f.labelled & (f.advantage < 0) for f in facts]
    result: dict[str, dict[str, Any]] = {}
    for name, chosen in masks.items():
        picked = np.concatenate(chosen)
        if not picked.any():
            continue
        rows = [np.concatenate(repeat)[picked] for repeat in seen.tokens]
        result[name] = {"tokens": int(picked.sum())}
        for measure, column in _TOKEN_MEANS:
            result[name] |= summarized(measure, [_mean(r[:, COLUMN[column]]) for r in rows])
    return result


# ---- backward ----------------------------------------------------------------------------------


def _gradient_means(sums: np.ndarray) -> MeasureValues:
    """Means over layers from [layers, FIELDS]; the norm ratio's and the SNR's are geometric."""
    cosine, ratio = backward.cosine(sums), backward.norm_ratio(sums)
    snr = backward.snr_db(sums)
    with np.errstate(divide="ignore"):
        logs = np.log(ratio[ratio > 0])
    return {
        "cosine_mean": _mean(cosine[np.isfinite(cosine)]),
        "norm_ratio_mean": float(np.exp(_mean(logs))),
        "snr_db_mean": _mean(snr[np.isfinite(snr)]),
    }


def _backward_entry(
    seen: Seen, evidence: Evidence, values: list[MeasureValues], weights: np.ndarray | None
) -> dict[str, Any]:
    pooled = [np.sum(repeat, axis=0) for repeat in seen.gradients]
    for own, sums in zip(values, pooled, strict=True):
        own |= _gradient_means(sums)
    entry: dict[str, Any] = {}
    for name in ("cosine_mean", "norm_ratio_mean", "snr_db_mean"):
        entry |= summarized(name, [own[name] for own in values])
    if weights is not None:
        records = np.mean(np.array(seen.gradients), axis=0)
        drawn = [_gradient_means(np.tensordot(row, records, 1)) for row in weights]
        entry |= {f"{n}_boot_sd": spread(d[n] for d in drawn) for n in ("cosine_mean",)}
    names = [live.layer for live in evidence.layers]
    derived = {
        "cosine": [backward.cosine(sums) for sums in pooled],
        "norm_ratio": [backward.norm_ratio(sums) for sums in pooled],
        "snr_db": [backward.snr_db(sums) for sums in pooled],
    }
    entry["layers"] = [
        {"layer": name, **_layer_values(derived, index)} for index, name in enumerate(names)
    ]
    entry["depths"] = depth_points(names, derived)
    slope = [log2_norm_ratio(names, ratios) for ratios in derived["norm_ratio"]]
    entry |= summarized("log2_norm_ratio", slope)
    return entry


def _layer_values(derived: dict[str, list[np.ndarray]], index: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, repeats in derived.items():
        result |= summarized(name, [float(values[index]) for values in repeats])
    return result


# ---- attribution -------------------------------------------------------------------------------


def attribution(
    evidence: Evidence, by_repeat: dict[Configuration, list[MeasureValues]]
) -> list[dict[str, Any]]:
    """Shapley's shares of every measure wherever all seven sets of components were run."""
    found: list[dict[str, Any]] = []
    places = dict.fromkeys((c.which, c.operands) for c in by_repeat)
    for which, operands in places:
        own = {
            c.name: values
            for c, values in by_repeat.items()
            if (c.which, c.operands) == (which, operands)
        }
        if not all(name in own for name in COMPONENT_SETS):
            continue
        forward = FORWARD_MEASURES if which != "backward" else ()
        measures = (*forward, *(BACKWARD_MEASURES if which != "forward" else ()))
        for measure in measures:
            shares = [
                shapley(_value_of(own, measure, repeat)) for repeat in range(evidence.repeats)
            ]
            entry: dict[str, Any] = {"measure": measure, "pass": which, "operands": operands}
            for name in shares[0]:
                entry |= summarized(name, [share[name] for share in shares])
            if entry["total"] is not None:
                found.append(entry)
    return found


def _value_of(
    own: dict[str, list[MeasureValues]], measure: str, repeat: int
) -> Callable[[frozenset[str]], float]:
    names = {members: name for name, members in COMPONENT_SETS.items()}

    def value(present: frozenset[str]) -> float:
        if present:
            return own[names[present]][repeat][measure]
        plain = own["all"][repeat]
        return _UNTOUCHED[measure] if measure in _UNTOUCHED else plain[f"{measure}_reference"]

    return value
