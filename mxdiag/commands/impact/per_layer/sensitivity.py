"""One layer, role or fused group in MXFP4 at a time: which of them the model feels most.

Everything before the quantized layers is as in the reference, so their blocks are skipped
(`per_layer.blocks`); the numbers are those of a whole pass, bit for bit. Finished
measurements go to a file at once, and a later run with the same settings, model and records goes
on from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxdiag import __version__
from mxdiag.commands.impact.inject.plan import PLAIN_MXFP4, InjectionPlan, restricted, uniform
from mxdiag.commands.impact.measures.forward import COLUMN, Reference
from mxdiag.commands.impact.measures.noise import summarized
from mxdiag.commands.impact.per_layer.blocks import Blocks
from mxdiag.commands.impact.per_layer.journal import Journal, digest
from mxdiag.commands.impact.per_layer.predictors import Predictions, run_predictors
from mxdiag.commands.impact.per_layer.results import measured, rankings, shares
from mxdiag.commands.impact.session import Session
from mxdiag.errors import ModelError, UsageError
from mxdiag.layers.fusing import fused_group
from mxdiag.model.live import LiveLinear
from mxdiag.progress import QUIET, Progress
from mxdiag.tap.parameters import parameter_names

UNIT_GRANULARITIES = ("layer", "role", "group")
UNIT_OPERANDS = ("W", "A", "WA")
#: Elements of each parameter that its fingerprint is made of.
_SAMPLED = 4096


@dataclass(frozen=True, slots=True)
class SensitivitySettings:
    """What a unit is, and which of its operands are quantized in fprop.

    `layer`: each by itself; `role`: all layers of a role (q_proj, down_proj, ...); `group`: layers
    that serving stacks fuse, and all experts of a block. `W` is what a budget of bits needs.
    """

    granularity: str = "layer"
    operands: str = "W"

    def __post_init__(self) -> None:
        for option, value, known in (
            ("per-layer", self.granularity, UNIT_GRANULARITIES),
            ("per-layer-operands", self.operands, UNIT_OPERANDS),
        ):
            if value not in known:
                raise UsageError(
                    f"--{option} {value!r} is not known", advice=f"Use one of {', '.join(known)}"
                )


@dataclass(frozen=True, slots=True)
class Unit:
    """Layers that are quantized together."""

    name: str
    layers: tuple[LiveLinear, ...]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that hold them."""
        return list(dict.fromkeys(live.view.parameter for live in self.layers))

    @property
    def names(self) -> frozenset[str]:
        """Names of the layers."""
        return frozenset(live.layer for live in self.layers)


def units_of(layers: Sequence[LiveLinear], granularity: str) -> list[Unit]:
    """The units of a model's layers, in the order of their first layer; every layer is in one.

    Layers that share one product (the segments of a fused weight) share its input: quantizing A in
    the first of them does so for all.
    """
    groups: dict[str, list[LiveLinear]] = {}
    for live in layers:
        if granularity == "layer":
            name = live.layer
        elif granularity == "role":
            name = live.linear.role
        else:
            name = fused_group(live.layer, live.linear.expert)
        groups.setdefault(name, []).append(live)
    return [Unit(name, tuple(members)) for name, members in groups.items()]


def measure_sensitivity(
    session: Session,
    settings: SensitivitySettings,
    *,
    journal: Path | str | None = None,
    progress: Progress = QUIET,
) -> dict[str, Any]:
    """Quantize one unit at a time, and rank the units by what that does.

    Parameters
    ----------
    session
        Not open; its repeats, jitter and records are used.
    settings
        Granularity and operands.
    journal
        File of finished measurements, see `sensitivity_journal`. Interrupted, the function goes on
        from there when it is called again.
    progress
        Hears of one step for each unit, repeat and record.

    Returns
    -------
    dict
        `per_layer`, one entry a unit: unit, granularity, config, operands, layers [{layer, share}],
        kl_mean (nats a token) and loss_change, each with `_sd` over repeats, and the predictors of
        `sensitivity_predictors`; `per_layer_ranking`: Spearman's correlation of each predictor with
        each measure; `per_layer_notes`.

    Raises
    ------
    ModelError
        If the model has no logits, or does not run.
    RunError
        If the journal cannot be read or written.
    """
    cheap = run_predictors(session, "W" if settings.operands == "W" else "WA")
    with session.open(gradients=False), torch.no_grad():
        units = units_of(session.layers, settings.granularity)
        file = Journal(journal, _key(session, settings))
        sweep = _Sweep(session, settings, units, file, progress)
        sweep.run()
    entries = [_entry(unit, settings, sweep, cheap) for unit in units]
    notes = [*cheap.notes, *sweep.notes, *session.injector.notes]
    return {
        "per_layer": entries,
        "per_layer_ranking": rankings(entries),
        "per_layer_notes": list(dict.fromkeys(notes)),
    }


def _entry(
    unit: Unit, settings: SensitivitySettings, sweep: _Sweep, cheap: Predictions
) -> dict[str, Any]:
    roles = dict.fromkeys(live.linear.role for live in unit.layers)
    errors = [cheap.of([live], "W")["relative_error"] or 0.0 for live in unit.layers]
    entry: dict[str, Any] = {
        "unit": unit.name,
        "granularity": settings.granularity,
        "role": ", ".join(roles),
        "config": "all",
        "operands": settings.operands,
        "layers": [
            {"layer": live.layer, "share": share}
            for live, share in zip(unit.layers, shares(errors), strict=True)
        ],
    }
    values = measured(sweep.journal.done, unit.name, sweep.repeats, sweep.tokens)
    for name, by_repeat in values.items():
        entry |= summarized(name, by_repeat)
    return entry | cheap.of(unit.layers, settings.operands)


class _Sweep:
    """Every unit in every repeat and record; the reference is run once for each of the latter."""

    def __init__(
        self,
        session: Session,
        settings: SensitivitySettings,
        units: Sequence[Unit],
        journal: Journal,
        progress: Progress,
    ) -> None:
        self.session, self.units, self.journal = session, units, journal
        self.repeats = session.settings.repeats
        self.tokens: list[int] = []
        self.notes: list[str] = []
        self._progress = progress
        self._plan: InjectionPlan = uniform(
            {(operand, "fprop"): PLAIN_MXFP4 for operand in settings.operands}
        )
        held = dict.fromkeys(name for unit in units for name in unit.parameters)
        self._blocks = Blocks(session.model, held)
        self._reuse: bool | None = None

    def run(self) -> None:
        """Measure what the journal does not hold yet."""
        session, done = self.session, self.journal.done
        records = range(len(session.batches))
        total = len(self.units) * self.repeats * len(records)
        with self._progress.phase("one at a time", total, "passes"):
            for repeat in range(self.repeats):
                for record in records:
                    left = [u for u in self.units if (u.name, repeat, record) not in done]
                    self._progress.advance(len(self.units) - len(left))
                    if left or repeat == 0:
                        self._measure(left, repeat, record)
        self._blocks.forget()

    def _measure(self, units: Sequence[Unit], repeat: int, record: int) -> None:
        session = self.session
        with self._blocks.recording():
            output = session.run(record, repeat)
        positions = session.positions(output, record)
        if repeat == 0:
            self.tokens.append(positions.logits.shape[0])
        if not units:
            return
        if self._reuse is None:
            self._reuse = self._reproduces(positions.logits, repeat, record)
        reference, before = Reference.of(positions), session.loss(output, record)
        del output, positions
        for unit in units:
            plan = restricted(self._plan, unit.names)
            with self._skipping(unit), session.injector.using(plan):
                output = session.run(record, repeat)
            logits = session.positions(output, record).logits
            kl = float(reference.compare(logits)[:, COLUMN["kl"]].sum())
            after = session.loss(output, record)
            loss = None if before is None or after is None else float(after) - float(before)
            self.journal.add(unit.name, repeat, record, kl=kl, loss=loss)
            self._progress.advance()

    @contextmanager
    def _skipping(self, unit: Unit) -> Iterator[None]:
        if not self._reuse:
            yield
            return
        with self._blocks.skipping(unit.parameters):
            yield

    def _reproduces(self, logits: Tensor, repeat: int, record: int) -> bool:
        """Whether the reference comes out bit for bit with blocks skipped: half, and all but one.

        It does not where blocks hand each other more than what they return.
        """
        session = self.session
        for parameters in self._blocks.depths():
            try:
                with self._blocks.skipping(parameters):
                    again = session.run(record, repeat)
            except ModelError:
                same = False
            else:
                same = torch.equal(session.positions(again, record).logits, logits)
            if not same:
                self.notes.append(
                    "nothing before a layer was reused: the model's blocks hand each other more "
                    "than what they return"
                )
                return False
        return True


def _key(session: Session, settings: SensitivitySettings) -> str:
    """Digest of all that a measurement depends on."""
    impact, scan = session.settings, session.settings.scan
    used = {
        "version": __version__,
        "torch": torch.__version__,
        "settings": dataclasses.asdict(settings),
        "jitter": impact.jitter,
        "scan": [scan.scale_rule, scan.backend, scan.seed, scan.include, scan.exclude],
        "model": type(session.model).__name__,
        "layers": [live.layer for live in session.layers],
        "records": len(session.batches),
        "labels": [
            None if b.record is None else [b.record.labels, b.record.advantage]
            for b in session.batches
        ],
    }
    inputs = [t for batch in session.batches for t in _tensors((batch.args, batch.kwargs))]
    with torch._C.DisableTorchFunctionSubclass():
        parameters = [_fingerprint(p) for p in parameter_names(session.model).values()]
        return digest(used, *map(_fingerprint, inputs), *parameters)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _fingerprint(t: Tensor) -> bytes:
    """Dtype, shape and evenly spaced elements, all of a small tensor."""
    head = f"{t.dtype} {tuple(t.shape)}".encode()
    if t.device.type == "meta" or hasattr(t, "full_tensor"):
        return head
    flat = t.detach().reshape(-1)
    step = max(1, flat.numel() // _SAMPLED)
    sample = flat[::step].contiguous().cpu()
    return head + sample.view(torch.uint8).numpy().tobytes()
