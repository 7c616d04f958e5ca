"""What quantization does to next-token distributions, token by token.

The reference's log-probabilities stand for its logits throughout: a shift of all logits of a token
changes none of the measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mxdiag.model.batches import Batch
from mxdiag.model.calibration import IGNORED_LABEL

#: Columns of the per-token statistics. kl: KL(reference || quantized), nats. agreement: 1 if both
#: find the same token likeliest. nll: of the label, NaN without one. cross: the mean of the
#: reference's log-probability under the quantized distribution. error_var: variance over the
#: vocabulary of the logit error.
LOGIT_FIELDS = ("kl", "agreement", "entropy", "nll", "cross", "error_var")
COLUMN = {name: column for column, name in enumerate(LOGIT_FIELDS)}
#: Logits taken at a time: temporaries stay in a CPU's cache, and small beside the logits anywhere.
_CHUNK = {"cpu": 1 << 19}
_CHUNK_ELSEWHERE = 1 << 25


@dataclass(frozen=True, slots=True)
class Positions:
    """Logits that predict something, [tokens, vocabulary], and what they should predict."""

    logits: Tensor
    labels: Tensor


def logits_of(output: Any) -> Tensor | None:
    """The logits of a model's output: its `logits`, or itself if it is a tensor."""
    found = getattr(output, "logits", None)
    if isinstance(found, Tensor):
        return found
    return output if isinstance(output, Tensor) and output.is_floating_point() else None


def positions_of(logits: Tensor, batch: Batch, task: str | None) -> Positions:
    """The positions of one batch that have a next token, with the label of each.

    In a causal model the position before each token but the first; in an encoder-decoder every
    position of the decoder; in any other model all of them, without labels.
    """
    logits = logits.detach()
    if batch.record is None or task is None:
        flat = logits.reshape(-1, logits.shape[-1])
        return Positions(flat, torch.full((flat.shape[0],), IGNORED_LABEL, device=logits.device))
    if task == "seq2seq":
        return Positions(logits[0], batch.kwargs["labels"][0])
    labels = torch.tensor(batch.record.labels[1:], device=logits.device, dtype=torch.long)
    end = logits.shape[1] - 1
    return Positions(logits[0, end - labels.numel() : end], labels)


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference's distributions over the vocabulary, float32 [tokens, vocabulary]."""

    log_p: Tensor
    p: Tensor
    labels: Tensor

    @classmethod
    def of(cls, positions: Positions) -> Reference:
        """From the reference's logits."""
        log_p = torch.log_softmax(positions.logits.float(), -1)
        return cls(log_p, log_p.exp(), positions.labels)

    def variance(self) -> np.ndarray:
        """Variance over the vocabulary of the reference's logits, by token."""
        parts = [self.log_p[rows].var(-1, unbiased=False) for rows in chunks(self.log_p)]
        return _numpy(parts)

    def compare(self, logits: Tensor) -> np.ndarray:
        """Per-token statistics of a quantized model's logits [tokens, vocabulary].

        Returns
        -------
        np.ndarray
            float64 [tokens, len(FIELDS)]; the reference's own logits give kl 0 and agreement 1.
        """
        parts = [
            self._compare(rows, torch.log_softmax(logits[rows].float(), -1))
            for rows in chunks(logits)
        ]
        return _numpy(parts).reshape(-1, len(LOGIT_FIELDS))

    def _compare(self, rows: slice, log_q: Tensor) -> Tensor:
        log_p, labels = self.log_p[rows], self.labels[rows]
        q, error = log_q.exp(), log_p - log_q
        labelled = labels != IGNORED_LABEL
        nll = -log_q.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
        columns = {
            "kl": (self.p[rows] * error).sum(-1),
            "agreement": (log_q.argmax(-1) == log_p.argmax(-1)).float(),
            "entropy": -(q * log_q).sum(-1),
            "nll": torch.where(labelled, nll, torch.nan),
            "cross": (q * log_p).sum(-1),
            "error_var": error.var(-1, unbiased=False),
        }
        return torch.stack([columns[name] for name in LOGIT_FIELDS], 1)


def chunks(logits: Tensor) -> Iterator[slice]:
    """Rows of [tokens, vocabulary] to take at a time."""
    size = _CHUNK.get(logits.device.type, _CHUNK_ELSEWHERE)
    step = max(1, size // max(logits.shape[-1], 1))
    for start in range(0, logits.shape[0], step):
        yield slice(start, start + step)


def _numpy(parts: list[Tensor]) -> np.ndarray:
    if not parts:
        return np.zeros(0)
    return torch.cat(parts).double().cpu().numpy()
