"""What was seen of each configuration, by repeat and record, before anything is averaged."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from mxdiag.commands.impact.inject.configurations import Configuration
from mxdiag.commands.impact.measures.temperature import TemperatureTable
from mxdiag.model.batches import Batch
from mxdiag.model.calibration import IGNORED_LABEL
from mxdiag.model.live import LiveLinear


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one record's positions, whatever the model.

    Attributes
    ----------
    labelled, response
        bool [tokens]: positions that the loss counts; that predict a token of the response
        (`response` None: the record has no prompt).
    predicted
        int [tokens]: the token that each position should predict, -1 if none is known.
    advantage
        Of the record.
    first
        Index in the record of the token that the first position predicts.
    """

    labelled: np.ndarray
    response: np.ndarray | None
    predicted: np.ndarray
    advantage: float
    first: int = 0

    @classmethod
    def of(cls, batch: Batch, labels: Tensor, task: str | None) -> Facts:
        """From a batch and the labels of its positions."""
        values = labels.cpu().numpy()
        labelled = values != IGNORED_LABEL
        predicted = np.where(labelled, values, -1)
        record = batch.record
        if record is None:
            return cls(labelled, None, predicted, 1.0)
        response, first = None, 0
        if task == "causal":
            first = 1
            predicted = np.array(record.input_ids[1:], dtype=np.int64)
            if record.prompt_length:
                response = np.arange(1, len(record.input_ids)) >= record.prompt_length
        return cls(labelled, response, predicted, record.advantage, first)


@dataclass(slots=True)
class Seen:
    """One configuration, or the reference: outer lists are repeats, inner ones records.

    `tokens` hold `forward.FIELDS`, `gradients` `backward.FIELDS` by layer, `losses` the loss where
    it is not made of the tokens' NLL, `routing` changed and all choices of experts.
    """

    tokens: list[list[np.ndarray]] = field(default_factory=list)
    gradients: list[list[np.ndarray]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    routing: list[list[tuple[float, float]]] = field(default_factory=list)


@dataclass(slots=True)
class Baseline:
    """The reference that configurations of one kind of pass are compared with."""

    seen: Seen = field(default_factory=Seen)
    tables: list[list[TemperatureTable]] = field(default_factory=list)
    variances: list[list[np.ndarray]] = field(default_factory=list)  # of its logits, by token


@dataclass(slots=True)
class Evidence:
    """Everything that a session saw."""

    layers: list[LiveLinear]
    facts: list[Facts] = field(default_factory=list)
    baselines: dict[str, Baseline] = field(default_factory=dict)  # "forward", "both"
    seen: dict[Configuration, Seen] = field(default_factory=dict)

    @property
    def repeats(self) -> int:
        """How often everything was run."""
        seen = next(iter(self.seen.values()))
        return max(len(seen.tokens), len(seen.gradients))
