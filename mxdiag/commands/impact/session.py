"""Running a model with and without injections: the reference beside every configuration.

For each repeat and record the gradient passes come first: one unquantized forward pass serves the
reference and every backward-only configuration, since only the backward pass differs. Then, without
gradients, the forward passes. What is compared is always of the same kind: a forward pass with
gradients may round differently from one without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mxdiag.commands.impact.evidence import Baseline, Evidence, Facts, Seen
from mxdiag.commands.impact.inject.configurations import Configuration
from mxdiag.commands.impact.inject.injector import Injector
from mxdiag.commands.impact.measures.backward import Gradients, only_these
from mxdiag.commands.impact.measures.forward import (
    COLUMN,
    Positions,
    Reference,
    logits_of,
    positions_of,
)
from mxdiag.commands.impact.measures.noise import Jitter
from mxdiag.commands.impact.measures.routing import Routing, changed, mixture_modules
from mxdiag.commands.impact.measures.temperature import TemperatureTable
from mxdiag.commands.impact.settings import ImpactSettings
from mxdiag.errors import ModelError
from mxdiag.model.batches import (
    Batch,
    Loss,
    evaluating,
    labelled_tokens,
    language_loss,
    language_task,
    run_batch,
)
from mxdiag.model.inventory import ModelInventory, model_inventory
from mxdiag.model.live import LiveLinear
from mxdiag.progress import QUIET, Progress
from mxdiag.tap.layouts import WeightView
from mxdiag.tap.observers import Observer, Product
from mxdiag.tap.parameters import parameter_names
from mxdiag.tap.tap import Tap


class Session:
    """A model ready to be run under injections; `open` taps it, and leaves it as found.

    Parameters
    ----------
    model
        Any torch module; language models need no `loss`.
    batches
        One record each.
    settings
        Scale rule, backend, seed, repeats, jitter, included and excluded layers.
    loss
        `loss(output, batch) -> scalar` for modules without a language-model loss.
    absent
        Parameters that the checkpoint lacked.

    Attributes
    ----------
    inventory, layers
        The linear layers; those that are measured, in the order of the model.
    injector
        `injector.using(plan)` decides what the next passes compute with.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        settings: ImpactSettings,
        *,
        loss: Loss | None = None,
        absent: Sequence[str] = (),
    ) -> None:
        scan = settings.scan
        self.model, self.batches, self.settings = model, list(batches), settings
        self.task = language_task(model)
        self.inventory: ModelInventory = model_inventory(model, scan.include, scan.exclude, absent)
        self.injector = Injector(self.inventory, scan.scale_rule, scan.backend, scan.seed)
        self.layers: list[LiveLinear] = []
        self.gradients: Gradients | None = None
        self._loss = loss
        self._labelled = labelled_tokens(self.batches, self.task)
        self._jitter = Jitter(settings.jitter, scan.seed)
        self._routing = Routing((), ())

    # ---- readiness -----------------------------------------------------------------------------

    @contextmanager
    def open(self, *, gradients: bool = True) -> Iterator[Session]:
        """Tap the model for a block; `gradients` also lets the measured weights require grad.

        Raises
        ------
        ModelError
            If the model has no layer to measure, or does not run.
        """
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.model, self.settings.scan.seed))
            self._find_layers()
            names = list(dict.fromkeys(live.view.parameter for live in self.layers))
            if gradients:
                stack.enter_context(only_these(self.model, names))
                self.gradients = Gradients(self.model, self.layers)
            self._watch_routing(stack, names)
            stack.enter_context(self._jitter.attached(self.model))
            stack.enter_context(Tap(self.model, substitute=self.injector))
            yield self

    def _find_layers(self) -> None:
        """One plain pass tells what is multiplied."""
        tap = Tap(self.model, _Resolver(self.inventory))
        with tap, torch.no_grad():
            run_batch(self.model, self.batches[0])
        self.inventory.settle(tap)
        self.layers = [
            live for live in self.inventory.measured if live.view.parameter not in tap.untapped
        ]
        if not self.layers:
            raise ModelError(
                "has no linear layer to inject into",
                where=type(self.model).__name__,
                advice="See --include: heads, embeddings and routers are left out by default",
            )

    def _watch_routing(self, stack: ExitStack, names: Sequence[str]) -> None:
        shapes = {name: p.dim() for name, p in parameter_names(self.model).items()}
        stacks = [name for name in names if shapes[name] > 2]
        self._routing = Routing(*mixture_modules(self.model, stacks))
        stack.enter_context(self._routing.attached(self.model))

    # ---- single passes -------------------------------------------------------------------------

    def run(self, record: int, repeat: int) -> Any:
        """The model's output on a record, with the jitter of that repeat."""
        self._jitter.begin(repeat, record)
        self._routing.begin()
        self.injector.draw = (repeat,)
        return run_batch(self.model, self.batches[record])

    def loss(self, output: Any, record: int) -> Tensor | None:
        """The scalar whose gradients are compared; the records' scalars add up to the loss."""
        batch = self.batches[record]
        if self._loss is not None:
            return self._loss(output, batch.raw if batch.record is None else batch.record)
        if batch.record is None or self.task is None:
            return getattr(output, "loss", None)
        if not self._labelled:
            return None
        return language_loss(output.logits, batch, self.task, self._labelled)

    def positions(self, output: Any, record: int) -> Positions:
        """The logits that predict something.

        Raises
        ------
        ModelError
            If the model's output holds no logits.
        """
        logits = logits_of(output)
        if logits is None:
            raise ModelError(
                "the output holds no logits",
                where=type(self.model).__name__,
                advice="Use a model whose output is a tensor or has `.logits`",
            )
        return positions_of(logits, self.batches[record], self.task)

    # ---- all passes ----------------------------------------------------------------------------

    def measure(
        self, configurations: Sequence[Configuration], progress: Progress = QUIET
    ) -> Evidence:
        """Run every configuration beside the reference, in every repeat and on every record.

        Raises
        ------
        ModelError
            If the model has no logits or no loss where they are needed.
        """
        evidence = Evidence(self.layers, seen={c: Seen() for c in configurations})
        by_pass = {
            which: [c for c in configurations if c.which == which]
            for which in ("forward", "backward", "both")
        }
        for repeat in range(self.settings.repeats):
            for record in range(len(self.batches)):
                if by_pass["backward"] or by_pass["both"]:
                    self._with_gradients(evidence, by_pass, repeat, record, progress)
                self._without_gradients(evidence, by_pass["forward"], repeat, record, progress)
        return evidence

    def passes(self, configurations: Sequence[Configuration]) -> int:
        """Steps that `measure` reports to its progress."""
        return self.settings.repeats * len(self.batches) * len(configurations)

    def _with_gradients(
        self,
        evidence: Evidence,
        by_pass: dict[str, list[Configuration]],
        repeat: int,
        record: int,
        progress: Progress,
    ) -> None:
        assert self.gradients is not None, "the session was opened without gradients"
        backward, both = by_pass["backward"], by_pass["both"]
        with torch.enable_grad():
            output = self.run(record, repeat)
            loss = self._scalar(output, record)
            reference, routes = None, {}
            if both:
                own = None if self._language(record) else loss
                reference = self._reference(evidence, "both", output, own, repeat, record)
                routes = self._routing.taken()
            del output
            target = self.gradients.of(loss, keep_graph=bool(backward))
            norms = self.gradients.norms(target)
            for left, configuration in zip(range(len(backward))[::-1], backward, strict=True):
                with self.injector.using(configuration.plan):
                    found = self.gradients.of(loss, keep_graph=left > 0)
                sums = self.gradients.compare(found, target, norms)
                _append(evidence.seen[configuration].gradients, repeat, sums)
                del found
                progress.advance()
            del loss
            for configuration in both:
                seen = evidence.seen[configuration]
                with self.injector.using(configuration.plan):
                    output = self.run(record, repeat)
                    loss = self._scalar(output, record)
                    found = self.gradients.of(loss, keep_graph=False)
                assert reference is not None
                own = None if self._language(record) else loss
                self._compare(seen, reference, output, own, routes, repeat, record)
                del output, loss, own
                sums = self.gradients.compare(found, target, norms)
                _append(seen.gradients, repeat, sums)
                del found
                progress.advance()

    def _without_gradients(
        self,
        evidence: Evidence,
        forward: Sequence[Configuration],
        repeat: int,
        record: int,
        progress: Progress,
    ) -> None:
        with torch.no_grad():
            if not forward and "both" in evidence.baselines:
                return
            output = self.run(record, repeat)
            loss = self._own_loss(output, record)
            reference = self._reference(evidence, "forward", output, loss, repeat, record)
            routes = self._routing.taken()
            del output
            for configuration in forward:
                with self.injector.using(configuration.plan):
                    output = self.run(record, repeat)
                loss = self._own_loss(output, record)
                seen = evidence.seen[configuration]
                self._compare(seen, reference, output, loss, routes, repeat, record)
                del output
                progress.advance()

    def _scalar(self, output: Any, record: int) -> Tensor:
        loss = self.loss(output, record)
        if loss is None:
            raise ModelError(
                "the model has no loss, so there is no gradient",
                where=type(self.model).__name__,
                advice="Give labels or a loss, or measure the forward pass alone",
            )
        return loss

    def _language(self, record: int) -> bool:
        """Whether the loss is made of the tokens' NLL: it needs no keeping then."""
        known = self.batches[record].record is not None and self.task is not None
        return known and self._loss is None

    def _own_loss(self, output: Any, record: int) -> Tensor | None:
        return None if self._language(record) else self.loss(output, record)

    def _reference(
        self,
        evidence: Evidence,
        kind: str,
        output: Any,
        loss: Tensor | None,
        repeat: int,
        record: int,
    ) -> Reference:
        positions = self.positions(output, record)
        if len(evidence.facts) == record:
            facts = Facts.of(self.batches[record], positions.labels, self.task)
            evidence.facts.append(facts)
        baseline = evidence.baselines.setdefault(kind, Baseline())
        reference = Reference.of(positions)
        tokens = reference.compare(positions.logits)
        table = TemperatureTable.of(reference)
        if len(tokens):
            table = table.anchored(
                float(tokens[:, COLUMN["cross"]].sum()), float(tokens[:, COLUMN["entropy"]].sum())
            )
        _append(baseline.tables, repeat, table)
        _append(baseline.variances, repeat, reference.variance())
        _append(baseline.seen.tokens, repeat, tokens)
        _append(baseline.seen.losses, repeat, _number(loss))
        return reference

    def _compare(
        self,
        seen: Seen,
        reference: Reference,
        output: Any,
        loss: Tensor | None,
        routes: dict[str, list[Tensor]],
        repeat: int,
        record: int,
    ) -> None:
        tokens = reference.compare(self.positions(output, record).logits)
        _append(seen.tokens, repeat, tokens)
        _append(seen.losses, repeat, _number(loss))
        if routes:
            _append(seen.routing, repeat, changed(routes, self._routing.taken()))


class _Resolver(Observer):
    """Shows the inventory every product."""

    def __init__(self, inventory: ModelInventory) -> None:
        self._inventory = inventory
        self._known: set[WeightView] = set()

    def forward(self, product: Product, x: Tensor) -> None:
        if product.view not in self._known:
            self._known.add(product.view)
            self._inventory.resolve(product.view)


def _number(loss: Tensor | None) -> float:
    return float("nan") if loss is None else float(loss.detach())


def _append(rows: list[list[Any]], repeat: int, value: Any) -> None:
    """Put a record's value into its repeat's row."""
    if len(rows) == repeat:
        rows.append([])
    rows[repeat].append(value)
