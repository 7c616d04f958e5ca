"""Measuring a live model: W from its parameters, A and G as they appear under a tap.

Activations and gradients are reduced to sums at once. No weight gradient is computed: gradients
flow through activations only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxdiag.commands.scan.settings import ScanSettings
from mxdiag.decomposition import Decomposition, decompose
from mxdiag.errors import ModelError
from mxdiag.gemms import Cell, choose_cells
from mxdiag.model.batches import (
    Batch,
    Loss,
    evaluating,
    is_record,
    labelled_tokens,
    language_loss,
    language_task,
    make_batches,
    other_input,
    position_limit,
    run_batch,
)
from mxdiag.model.calibration import Calibration
from mxdiag.model.checkpoint_names import transformers_models
from mxdiag.model.inventory import ModelInventory, model_inventory
from mxdiag.model.live import LiveLinear
from mxdiag.model.loading import LoadedModel, TokenizerOnDemand, load_model
from mxdiag.progress import Progress
from mxdiag.quantize.corrections.base import Correction
from mxdiag.quantize.cpu.threads import cpu_count
from mxdiag.quantize.dispatch import choose_backend, dtype_name, measure
from mxdiag.quantize.sums import Sums
from mxdiag.run.rows import Coverage, Measured, Measurement
from mxdiag.tap.observers import Observer, Product
from mxdiag.tap.offload import input_device
from mxdiag.tap.tap import Tap

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")


class Accumulator(Observer):
    """Adds up the decompositions of A and G by layer and cell.

    Layers that share an input (q, k and v; gate and up) share its measurement: the last input is
    remembered, and is the same tensor if it has the same memory, layout and version. Tensors are
    reduced to raw sums at once; those wait, a few at a time, to be made into decompositions in one
    go, since each is little work on code and data that the model's own pass drives out of the
    caches.
    """

    _MOST_WAITING = 64

    def __init__(
        self,
        inventory: ModelInventory,
        cells: Sequence[Cell],
        settings: ScanSettings,
        corrections: Sequence[Correction],
    ) -> None:
        self._inventory, self._settings, self._corrections = inventory, settings, corrections
        self._cells = {
            operand: [cell for cell in cells if cell.operand == operand] for operand in ("A", "G")
        }
        self._last: tuple[Tensor, int, dict[Cell, Sums]] | None = None
        self._waiting: list[tuple[LiveLinear, dict[Cell, Sums]]] = []
        self.parts: dict[tuple[LiveLinear, Cell], Decomposition] = {}
        self.seen: dict[tuple[LiveLinear, str], tuple[int, int, str]] = {}
        self.calls: Counter[LiveLinear] = Counter()
        self.first_nonfinite: str | None = None

    def forward(self, product: Product, x: Tensor) -> None:
        """See `Observer.forward`."""
        parts = self._inventory.resolve(product.view)
        for part in parts:
            self.calls[part.live] += 1
        if not parts or not self._cells["A"] or not x.numel():
            return
        measured = self._shared(x)
        for part in parts:
            self._add(part.live, "A", x, measured)

    def backward(self, product: Product, g: Tensor) -> None:
        """See `Observer.backward`."""
        if not self._cells["G"] or not g.numel():
            return
        for part in self._inventory.resolve(product.view):
            own = part.gradient(g)
            self._add(part.live, "G", own, self._measure("G", own))

    def finish(self) -> None:
        """Let go of the last input, and add up what waits."""
        self._last = None
        self._settle()

    def _shared(self, x: Tensor) -> dict[Cell, Sums]:
        if self._last is not None:
            last, version, measured = self._last
            same = (last.data_ptr(), last.shape, last.stride(), last.dtype) == (
                x.data_ptr(),
                x.shape,
                x.stride(),
                x.dtype,
            )
            if same and version == x._version:
                return measured
        measured = self._measure("A", x)
        self._last = (x, x._version, measured)
        return measured

    def _measure(self, operand: str, x: Tensor) -> dict[Cell, Sums]:
        return {
            cell: measure(
                x,
                cell.axis,
                self._settings.scale_rule,
                tokens=True,
                corrections=[c for c in self._corrections if operand in c.operands],
                backend=self._settings.backend,
            )
            for cell in self._cells[operand]
        }

    def _add(self, live: LiveLinear, operand: str, x: Tensor, measured: dict[Cell, Sums]) -> None:
        calls, tokens, _ = self.seen.get((live, operand), (0, 0, ""))
        self.seen[live, operand] = (calls + 1, tokens + x.shape[0], dtype_name(x))
        self._waiting.append((live, measured))
        if len(self._waiting) >= self._MOST_WAITING:
            self._settle()

    def _settle(self) -> None:
        """Add what waits, in the order in which it was seen."""
        made: dict[int, Decomposition] = {}
        for live, measured in self._waiting:
            for cell, sums in measured.items():
                own = made.get(id(sums))
                if own is None:
                    own = made[id(sums)] = Decomposition.of(sums, self._settings.scale_rule)
                known = self.parts.get((live, cell))
                self.parts[live, cell] = own if known is None else known + own
                if cell.operand == "A" and own.status == "nonfinite":
                    self.first_nonfinite = self.first_nonfinite or live.layer
        self._waiting.clear()


@dataclass(slots=True)
class Request:
    """What a scan of a live model is asked for."""

    settings: ScanSettings
    corrections: Sequence[Correction]
    progress: Progress
    calibration: Calibration | None = None
    loss: Loss | None = None

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells to measure."""
        return choose_cells(self.settings.operands, self.settings.gemms)

    def wants(self, operand: str) -> bool:
        """Whether any cell is of that operand."""
        return any(cell.operand == operand for cell in self.cells)


@torch.inference_mode(False)  # the caller's mode would make every tensor an inference tensor
def load_with_tokenizer(
    source: str, settings: ScanSettings, progress: Progress
) -> tuple[LoadedModel, TokenizerOnDemand]:
    """Load a model with transformers; its tokenizer is loaded when text is first read.

    Raises
    ------
    ModelError
        If it cannot be loaded.
    """
    progress.note(f"loading {source}")
    loaded = load_model(
        source,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        allow_pickle=settings.allow_pickle,
        revision=settings.revision,
    )
    tokenizer = TokenizerOnDemand(
        source, trust_remote_code=settings.trust_remote_code, revision=settings.revision
    )
    return loaded, tokenizer


def load_and_scan(source: str, request: Request) -> Measured:
    """Load a model with transformers and measure it.

    Raises
    ------
    ModelError, CalibrationError
        If it cannot be loaded, or run on the calibration.
    """
    loaded, tokenizer = load_with_tokenizer(source, request.settings, request.progress)
    measured = scan_module(loaded.model, tokenizer, request, absent=loaded.absent)
    folder = Path(source)
    if folder.is_dir():
        measured.model["files"] = [
            {"name": file.name, "bytes": file.stat().st_size}
            for file in sorted(folder.iterdir())
            if file.suffix in _WEIGHT_FILES
        ]
    measured.model["revision"] = request.settings.revision
    measured.warnings = [*loaded.warnings, *measured.warnings]
    return measured


@torch.inference_mode(False)
def scan_module(
    model: nn.Module, tokenizer: Any, request: Request, *, absent: Sequence[str] = ()
) -> Measured:
    """Measure a module in memory; it is left as it was found.

    `absent` names parameters whose values are not the checkpoint's: they are not measured.

    Raises
    ------
    ModelError, CalibrationError
        If it has no linear layer, or does not run on the calibration.
    """
    settings = request.settings
    inventory = model_inventory(model, settings.include, settings.exclude, absent)
    accumulator = Accumulator(inventory, request.cells, settings, request.corrections)
    tap = Tap(model, accumulator, gradients="activations")
    warnings: list[str] = []
    reasons: dict[str, str] = {}
    records: dict[str, Any] | None = None
    if request.wants("A") or request.wants("G"):
        missing = _why_not_run(model, request.calibration)
        if missing is None:
            batches = _batches(model, tokenizer, request, warnings)
            records = _records(model, batches, request)
            reason = _run(model, batches, tap, request, records["loss_tokens"])
            reasons = {} if reason is None else {"G": reason}
        else:
            reasons = {"A": missing, "G": missing}
    accumulator.finish()
    inventory.settle(tap)
    if not inventory.measured:
        raise ModelError(
            "has no linear layer to measure",
            where=type(model).__name__,
            advice=_why_none(inventory),
        )
    if accumulator.first_nonfinite is not None:
        warnings.append(f"activations become non-finite at {accumulator.first_nonfinite}")
    return Measured(
        _measurements(inventory, accumulator, request, reasons, tap),
        _coverage(inventory),
        model={
            "architecture": _architecture(model),
            "parameters": inventory.parameters,
            "revision": None,
            "files": [],
        },
        calibration=records,
        device=str(input_device(model)),
        warnings=warnings,
    )


def _why_none(inventory: ModelInventory) -> str:
    if inventory.unsupported:
        first = inventory.unsupported[0]
        count = len(inventory.unsupported)
        return f"{count} weights are unsupported, such as {first.name}: {first.rule}"
    if not inventory.parameters:
        return "It has no parameters at all: give the model that holds the weights"
    return "See --include: output heads, embeddings and routers are left out by default"


def _architecture(model: nn.Module) -> str:
    """Class of the transformers model inside wrappers, else of the module itself."""
    inner = [found for _, found in transformers_models(model)]
    return type(inner[0] if len(inner) == 1 else model).__name__


def _why_not_run(model: nn.Module, calibration: Calibration | None) -> str | None:
    if calibration is None:
        return "no calibration was given"
    other = other_input(model)
    records = isinstance(calibration, (str, Path)) or all(is_record(item) for item in calibration)
    if other is not None and records:
        return f"the model reads {other}, which calibration records do not hold"
    return None


def _batches(
    model: nn.Module, tokenizer: Any, request: Request, warnings: list[str]
) -> list[Batch]:
    assert request.calibration is not None
    seq_len, limit = request.settings.seq_len, position_limit(model)
    cut = limit is not None and limit < seq_len
    seq_len = limit if limit is not None and cut else seq_len
    needs_labels = request.wants("G") and request.loss is None and language_task(model) is not None
    batches = make_batches(
        model,
        request.calibration,
        tokenizer,
        seq_len=seq_len,
        samples=request.settings.samples,
        gradients=needs_labels,
    )
    if cut and any(b.record is not None and len(b.record.input_ids) == limit for b in batches):
        warnings.append(f"records are cut to the model's {limit} positions")
    return batches


def _records(model: nn.Module, batches: Sequence[Batch], request: Request) -> dict[str, Any]:
    """What was run, and what the loss is divided by: None where that is not mxdiag's to choose."""
    task = language_task(model)
    own = labelled_tokens(batches, task) if task is not None and request.loss is None else None
    chosen = request.settings.loss_tokens
    return {
        "records": len(batches),
        "labelled_tokens": own,
        "loss_tokens": None if own is None else chosen or own,
    }


def _run(
    model: nn.Module, batches: Sequence[Batch], tap: Tap, request: Request, tokens: int | None
) -> str | None:
    """Run every batch under the tap; why there are no gradients, or None if there are."""
    task = language_task(model)
    wanted = request.wants("G")
    reason: str | None = "the model has no language-model loss"

    def scalar(output: Any, batch: Batch) -> Tensor | None:
        if request.loss is not None:
            return request.loss(output, batch.raw if batch.record is None else batch.record)
        if batch.record is None or task is None:
            return getattr(output, "loss", None)
        assert tokens is not None
        return language_loss(output.logits, batch, task, tokens)

    phase = request.progress.phase("model", len(batches), "records")
    with evaluating(model, request.settings.seed), tap, phase:
        for batch in batches:
            with torch.set_grad_enabled(wanted):
                output = run_batch(model, batch)
                value = scalar(output, batch) if wanted else None
            if value is not None:
                reason = None
                if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                    raise ModelError(
                        "the loss is no scalar tensor with a gradient",
                        where=type(model).__name__,
                        advice="Return a 0-dimensional tensor computed from the output",
                    )
                value.backward()
            request.progress.advance()
    return reason


def _measurements(
    inventory: ModelInventory,
    accumulator: Accumulator,
    request: Request,
    reasons: dict[str, str],
    tap: Tap,
) -> list[Measurement]:
    measurements: list[Measurement] = []
    weights = _weights(inventory, request)
    for live in inventory.measured:
        for cell in request.cells:
            if cell.operand == "W":
                decomposition, reason = weights[live, cell]
                calls = accumulator.calls[live] if tap.calls else None
                dtype = inventory.dtype(live)
                measurements.append(
                    Measurement(live.linear, cell, decomposition, dtype, calls, reason=reason)
                )
                continue
            observed = accumulator.parts.get((live, cell))
            if observed is not None:
                calls, tokens, dtype = accumulator.seen[live, cell.operand]
                measurements.append(Measurement(live.linear, cell, observed, dtype, calls, tokens))
                continue
            own = inventory.why_not_observed(live, cell.operand, tap)
            reason = reasons.get(cell.operand) or own or "no value reached it"
            nothing = Decomposition.empty(request.settings.scale_rule)
            measurements.append(Measurement(live.linear, cell, nothing, reason=reason))
    return measurements


def _weights(
    inventory: ModelInventory, request: Request
) -> dict[tuple[LiveLinear, Cell], tuple[Decomposition, str | None]]:
    """The decomposition of every W, or why there is none.

    Weights in main memory are measured several at a time, each on a thread of its own, where the
    CPU kernel does it. Others go one by one.
    """
    settings, cells = request.settings, [c for c in request.cells if c.operand == "W"]
    corrections = [c for c in request.corrections if "W" in c.operands]
    found: dict[tuple[LiveLinear, Cell], tuple[Decomposition, str | None]] = {}
    pending: deque[tuple[LiveLinear, Cell, Future[Decomposition]]] = deque()

    def decomposed(weight: Tensor, cell: Cell) -> Decomposition:
        rule, backend = settings.scale_rule, settings.backend
        return decompose(weight, cell.axis, rule, corrections=corrections, backend=backend)

    def settle(at_most: int) -> None:
        while len(pending) > at_most:
            live, cell, future = pending.popleft()
            found[live, cell] = future.result(), None

    if not cells:
        return found
    workers, layers = cpu_count(), inventory.measured
    phase = request.progress.phase("weights", len(layers), "layers")
    with phase, ThreadPoolExecutor(workers, thread_name_prefix="mxdiag-weights") as pool:
        for live in layers:
            request.progress.advance()
            try:
                weight = inventory.weight(live)
            except ModelError as error:
                nothing = Decomposition.empty(settings.scale_rule)
                found |= {(live, cell): (nothing, error.what) for cell in cells}
                continue
            for cell in cells:
                if inventory.in_memory(live) and choose_backend(weight, settings.backend) == "cpu":
                    pending.append((live, cell, pool.submit(decomposed, weight, cell)))
                    settle(workers)
                else:
                    found[live, cell] = decomposed(weight, cell), None
        settle(0)
    return found


def _coverage(inventory: ModelInventory) -> Coverage:
    return Coverage(
        measured=len(inventory.measured),
        measured_parameters=inventory.measured_parameters,
        parameters=inventory.matrix_parameters,
        excluded=[
            {"layer": item.name, "rule": item.rule, "parameters": item.parameters}
            for item in inventory.excluded
        ],
        unsupported=[
            {"layer": item.name, "reason": item.rule, "parameters": item.parameters}
            for item in inventory.unsupported
        ],
    )
