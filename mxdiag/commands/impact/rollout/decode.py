"""Decoding from a causal model, and scoring of what was decoded, a few copies of a prompt at once.

A plain loop over the model's own forward pass and cache, so that nothing but the named temperature
shapes the distribution: `generate` would apply the checkpoint's own top-k, top-p and penalties.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxdiag.errors import ModelError

#: Chooses the next tokens, [copies], from log-probabilities [copies, vocabulary].
Choose = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Sequences:
    """What was decoded after one prompt.

    Attributes
    ----------
    tokens
        int64 [copies, steps]; behind the end of a sequence they mean nothing.
    lengths
        Tokens of each sequence, its end-of-text token counted.
    log_p
        float32 [copies, steps]: each token's log-probability when it was chosen.
    """

    tokens: Tensor
    lengths: list[int]
    log_p: Tensor

    def rows(self, values: Tensor) -> Iterator[Tensor]:
        """Values [copies, steps] of each sequence, cut to its length."""
        for row, length in zip(values, self.lengths, strict=True):
            yield row[:length]

    def part(self, copies: slice) -> Sequences:
        """Some of the copies."""
        return Sequences(self.tokens[copies], self.lengths[copies], self.log_p[copies])

    def texts(self) -> list[list[int]]:
        """The token ids of each sequence."""
        return [row.tolist() for row in self.rows(self.tokens)]


def greedy(log_p: Tensor) -> Tensor:
    """The likeliest token."""
    return log_p.argmax(-1)


def sampler(seed: int) -> Choose:
    """Draws tokens by their probability, with a generator of its own.

    Inverse transform in float64 on the CPU: the same draws on every device.
    """
    generator = torch.Generator().manual_seed(seed)

    def choose(log_p: Tensor) -> Tensor:
        cumulated = log_p.double().cpu().exp().cumsum(-1)
        draws = torch.rand((log_p.shape[0], 1), generator=generator, dtype=torch.float64)
        found = torch.searchsorted(cumulated, draws * cumulated[:, -1:], right=True).squeeze(-1)
        return found.clamp(max=log_p.shape[-1] - 1).to(log_p.device)

    return choose


def beside(first: Choose, copies: int, rest: Choose) -> Choose:
    """One choice for the first so many copies, another for the rest, in one pass of the model."""

    def choose(log_p: Tensor) -> Tensor:
        return torch.cat([first(log_p[:copies]), rest(log_p[copies:])])

    return choose


def end_tokens(model: nn.Module) -> frozenset[int]:
    """Tokens that end a text, as the model's generation settings or its config tell."""
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        value = getattr(holder, "eos_token_id", None)
        if isinstance(value, int):
            return frozenset((value,))
        if isinstance(value, (list, tuple)) and value:
            return frozenset(int(token) for token in value)
    return frozenset()


class Decoder:
    """Decodes from, and scores with, a causal language model.

    Parameters
    ----------
    model
        Its forward takes `input_ids` and returns `logits`. With `past_key_values` it is fed one
        token a step; without, the whole text again.
    temperature
        Log-probabilities are of the logits divided by it.
    on_step
        Called with the number of each step before the model runs.
    """

    def __init__(
        self,
        model: nn.Module,
        temperature: float = 1.0,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.model, self.temperature = model, temperature
        self._on_step = on_step
        parameters = inspect.signature(model.forward).parameters
        self._caches = {"past_key_values", "use_cache"} <= set(parameters)
        self._uncached = {"use_cache": False} if "use_cache" in parameters else {}
        self._keeps = "logits_to_keep" in parameters  # else logits of every position are made
        self._ends = end_tokens(model)

    def decode(self, prompt: Tensor, copies: int, steps: int, choose: Choose) -> Sequences:
        """Decode at most `steps` tokens after the prompt, int64 [positions], `copies` times.

        Raises
        ------
        ModelError
            If the model cannot be run so.
        """
        text = prompt.unsqueeze(0).expand(copies, -1)
        ended = torch.zeros(copies, dtype=torch.bool)
        lengths = [steps] * copies
        tokens, chances = [], []
        cache, fresh = None, text
        for step in range(steps):
            self._on_step(step)
            if self._caches:
                output = self._run(fresh, 1, {"use_cache": True, "past_key_values": cache})
            else:
                output = self._run(text, 1, self._uncached)
            cache = getattr(output, "past_key_values", None) if self._caches else None
            log_p = self._log_p(output.logits[:, -1])
            token = choose(log_p)
            tokens.append(token)
            chances.append(log_p.gather(1, token.unsqueeze(1)).squeeze(1))
            text = torch.cat([text, token.unsqueeze(1)], 1)
            fresh = text if cache is None else token.unsqueeze(1)
            for copy, value in enumerate(token.tolist()):
                if value in self._ends and not ended[copy]:
                    ended[copy], lengths[copy] = True, step + 1
            if bool(ended.all()):
                break
        return Sequences(torch.stack(tokens, 1), lengths, torch.stack(chances, 1))

    def score(self, prompt: Tensor, tokens: Tensor) -> Tensor:
        """Log-probability of each token after the prompt, by one pass over the whole text.

        `tokens` is [copies, steps]; returns float32 of that shape.
        """
        self._on_step(-1)
        text = torch.cat([prompt.unsqueeze(0).expand(tokens.shape[0], -1), tokens], 1)
        last = tokens.shape[1] + 1
        logits = self._run(text, last, self._uncached).logits[:, -last:-1]
        parts = [
            self._log_p(row).gather(1, wanted.unsqueeze(1)).squeeze(1)
            for row, wanted in zip(logits, tokens, strict=True)
        ]
        return torch.stack(parts)

    def _log_p(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits.float() / self.temperature, -1)

    def _run(self, ids: Tensor, last: int, options: dict[str, Any]) -> Any:
        """The model's output, with logits of the last so many positions at least."""
        if self._keeps:
            options = {**options, "logits_to_keep": last}
        try:
            return self.model(input_ids=ids, **options)
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
            text = " ".join(str(error).split())
            raise ModelError(
                f"the model cannot decode: {text[:300]}",
                where=type(self.model).__name__,
                advice="Measure without rollouts: --rollout-tokens 0",
            ) from error
