"""Rollouts: texts that the quantized model writes, beside the reference's.

Greedy ones tell how soon a quantized model says something else. Sampled ones are scored by the
reference: RL engines draw from a quantized policy and train another one, and how far the two are
apart on the drawn tokens decides how much of the data counts. Each repeat has its own jitter of the
embeddings and its own draws; the copies of a prompt that make up the repeats are decoded together.
The `reference` entry is what noise alone does.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mxdiag.commands.impact.inject.configurations import COMPONENT_SETS, Configuration
from mxdiag.commands.impact.measures.noise import Jitter, summarized
from mxdiag.commands.impact.rollout.decode import Decoder, Sequences, beside, greedy, sampler
from mxdiag.commands.impact.rollout.measures import divergence, mismatch
from mxdiag.commands.impact.session import Session
from mxdiag.errors import UsageError
from mxdiag.model.batches import Batch, evaluating, position_limit
from mxdiag.model.calibration import Record
from mxdiag.progress import QUIET, Progress
from mxdiag.tap.tap import Tap

REFERENCE = "reference"
PLAIN_CONFIG = "all"


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How to roll out.

    `tokens` after each prompt; `temperature` of the sampled ones; `clip`: an importance ratio is
    outside beyond 1 +- clip. `halve_texts`: records without a prompt begin with their first half,
    else they are left out.
    """

    tokens: int = 32
    temperature: float = 1.0
    clip: float = 0.2
    halve_texts: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UsageError(f"--rollout-tokens must be at least 1, not {self.tokens}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise UsageError(f"--rollout-temperature must be above 0, not {self.temperature}")
        if not 0 < self.clip < 1:
            raise UsageError(f"--rollout-clip must be between 0 and 1, not {self.clip}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Where a rollout begins. `response` is what the record goes on with, None if nothing is."""

    index: int
    ids: Tensor
    response: Tensor | None
    advantage: float
    steps: int


@dataclass(slots=True)
class _Written:
    """What one policy did with one prompt, by copy.

    `sampled` and `recorded` are log-ratios, trainer minus rollout, by token; `scores` the
    reference's log-probabilities of the recorded response.
    """

    greedy: list[list[int]]
    sampled: list[np.ndarray]
    recorded: list[np.ndarray] = field(default_factory=list)
    scores: Tensor | None = None


def rollout_configurations(configurations: Sequence[Configuration]) -> list[Configuration]:
    """The forward configurations that are rolled out: plain on W and WA, w4a8, corrections on WA.

    Single components and noise are left out.
    """
    return [
        c
        for c in configurations
        if c.which == "forward"
        and ((c.name == PLAIN_CONFIG and "W" in c.operands) or c.name not in COMPONENT_SETS)
        and not c.name.startswith("aqn")
    ]


def roll_out(
    session: Session,
    configurations: Sequence[Configuration],
    settings: RolloutSettings,
    *,
    notes: list[str],
    progress: Progress = QUIET,
) -> list[dict[str, Any]]:
    """Decode from the reference and from each configuration; see the module.

    Parameters
    ----------
    session
        Not open: the model is tapped in here, and left as found. Its records give the prompts.
    configurations
        Forward ones, as of `rollout_configurations`.
    settings
        Tokens, temperature, clip range.
    notes
        Hears of what was not done: no causal model, no prompts, too few positions.
    progress
        Hears of one step for each policy and prompt.

    Returns
    -------
    list of dict
        The `rollout` of an impact. Each entry has config, operands, mode, records, tokens and,
        each with `_sd` over repeats: in mode `greedy` those of `divergence`, against the
        reference's text of the same repeat (the reference: of another repeat); in mode `sampled`
        those of `mismatch`; in mode `recorded` the same on the records' own responses, drawn by
        neither policy. The latter two have `splits` by the sign of the record's advantage.
    """
    if session.task != "causal":
        notes.append("rollouts need a causal language model: none were made")
        return []
    prompts = prompts_of(session.batches, session, settings, notes)
    if not prompts:
        return []
    work = _Rollout(session, settings)
    with (
        work.ready(),
        progress.phase("rollouts", (1 + len(configurations)) * len(prompts), "texts"),
    ):
        references = [work.reference(prompt, progress) for prompt in prompts]
        entries = work.entries(REFERENCE, "", prompts, references, references)
        for configuration in configurations:
            with session.injector.using(configuration.plan, keep_weights=True):
                name = f"{configuration.name}|{configuration.operands}"
                written = [
                    work.quantized(name, prompt, reference, progress)
                    for prompt, reference in zip(prompts, references, strict=True)
                ]
            entries += work.entries(
                configuration.name, configuration.operands, prompts, references, written
            )
    return entries


def prompts_of(
    batches: Sequence[Batch], session: Session, settings: RolloutSettings, notes: list[str]
) -> list[Prompt]:
    """The prompts of the records, with room for what comes after them."""
    limit = position_limit(session.model)
    found, short = [], 0
    for index, batch in enumerate(batches):
        record = batch.record
        if record is None:
            continue
        length = record.prompt_length
        if not length and settings.halve_texts:
            length = len(record.input_ids) // 2
        if not length:
            continue
        room = settings.tokens if limit is None else min(settings.tokens, limit - length)
        short += room < settings.tokens
        if room > 0:
            found.append(_prompt(index, record, length, room, session))
    if short:
        notes.append(f"{short} rollouts end early: the model has {limit} positions")
    if not found:
        notes.append("no rollouts: no record has a prompt (see --rollout-tokens)")
    return found


def _prompt(index: int, record: Record, length: int, room: int, session: Session) -> Prompt:
    device = next(session.model.parameters()).device
    ids = torch.tensor(record.input_ids, device=device)
    given = ids[length:] if record.prompt_length and len(ids) > length else None
    return Prompt(index, ids[:length], given, record.advantage, room)


class _Rollout:
    """The passes, with the jitter of each prompt and the draws of each (configuration, prompt)."""

    def __init__(self, session: Session, settings: RolloutSettings) -> None:
        self._session, self._settings = session, settings
        self._seed, self._copies = session.settings.scan.seed, session.settings.repeats
        self._jitter = Jitter(session.settings.jitter, self._seed)
        self._decoder = Decoder(session.model, settings.temperature, self._on_step)
        self._record = 0

    @contextmanager
    def ready(self) -> Iterator[None]:
        session = self._session
        with ExitStack() as stack:
            stack.enter_context(evaluating(session.model, self._seed))
            stack.enter_context(self._jitter.attached(session.model))
            stack.enter_context(Tap(session.model, substitute=session.injector))
            stack.enter_context(torch.no_grad())
            yield

    def _on_step(self, step: int) -> None:
        self._session.injector.draw = (self._record, step)

    def _begin(self, prompt: Prompt) -> None:
        """The same jitter for every policy that goes on from a prompt in the same way."""
        self._record = prompt.index
        self._jitter.begin(0, prompt.index)

    def _decode(self, name: str, prompt: Prompt) -> tuple[Sequences, Sequences]:
        """Texts of the policy that is in place: greedy and sampled ones, decoded side by side."""
        self._begin(prompt)
        place, copies = f"{self._seed}|{name}|{prompt.index}", self._copies
        choose = beside(greedy, copies, sampler(zlib.crc32(place.encode())))
        found = self._decoder.decode(prompt.ids, 2 * copies, prompt.steps, choose)
        return found.part(slice(copies)), found.part(slice(copies, None))

    def _write(self, name: str, prompt: Prompt) -> _Written:
        """Decode from the policy that is in place; score what was drawn by the reference."""
        likeliest, drawn = self._decode(name, prompt)
        with self._session.injector.using(None):
            self._begin(prompt)
            trainer = self._decoder.score(prompt.ids, drawn.tokens)
        ratios = [row.cpu().numpy() for row in drawn.rows(trainer - drawn.log_p)]
        return _Written(likeliest.texts(), ratios)

    def _score(self, prompt: Prompt) -> Tensor | None:
        """The policy's log-probabilities of the recorded response, [copies, tokens]."""
        if prompt.response is None:
            return None
        self._begin(prompt)
        response = prompt.response.unsqueeze(0).expand(self._copies, -1)
        return self._decoder.score(prompt.ids, response)

    def reference(self, prompt: Prompt, progress: Progress) -> _Written:
        """What noise alone does: rollouts of the reference itself."""
        written = self._write(REFERENCE, prompt)
        written.scores = self._score(prompt)
        progress.advance()
        return written

    def quantized(
        self, name: str, prompt: Prompt, reference: _Written, progress: Progress
    ) -> _Written:
        """Rollouts of a configuration that is being injected."""
        written = self._write(name, prompt)
        rollout = self._score(prompt)
        if rollout is not None and reference.scores is not None:
            written.recorded = list((reference.scores - rollout).cpu().numpy())
        progress.advance()
        return written

    # ---- entries -------------------------------------------------------------------------------

    def entries(
        self,
        config: str,
        operands: str,
        prompts: Sequence[Prompt],
        references: Sequence[_Written],
        written: Sequence[_Written],
    ) -> list[dict[str, Any]]:
        """One entry for each mode that has tokens."""
        base: dict[str, Any] = {"config": config, "operands": operands}
        found = [base | {"mode": "greedy"} | self._divergence(references, written)]
        for mode, ratios in (
            ("sampled", [w.sampled for w in written]),
            ("recorded", [w.recorded for w in written]),
        ):
            if not any(ratios):
                continue
            entry = base | {"mode": mode} | self._mismatch(ratios)
            entry["splits"] = {
                name: self._mismatch([ratios[index] for index in chosen])
                for name, chosen in _splits(prompts)
                if any(ratios[index] for index in chosen)
            }
            found.append(entry)
        return found

    def _divergence(
        self, references: Sequence[_Written], written: Sequence[_Written]
    ) -> dict[str, Any]:
        """Texts of each repeat against the reference's; its own against the next repeat's."""
        shift = 1 if references[0] is written[0] else 0
        entry: dict[str, Any] = {
            "records": len(written),
            "tokens": sum(len(text) for w in references for text in w.greedy),
        }
        return entry | _summary(
            divergence(
                (ours.greedy[copy], theirs.greedy[(copy + shift) % self._copies])
                for ours, theirs in zip(written, references, strict=True)
            )
            for copy in range(self._copies)
        )

    def _mismatch(self, ratios: Sequence[Sequence[np.ndarray]]) -> dict[str, Any]:
        ratios = [rows for rows in ratios if rows]
        entry: dict[str, Any] = {
            "records": len(ratios),
            "tokens": sum(len(row) for rows in ratios for row in rows),
        }
        return entry | _summary(
            mismatch(np.concatenate([rows[copy] for rows in ratios]), self._settings.clip)
            for copy in range(self._copies)
        )


def _splits(prompts: Sequence[Prompt]) -> Iterator[tuple[str, list[int]]]:
    """Prompts by the sign of their record's advantage; none if no advantage differs from 1."""
    if all(prompt.advantage == 1.0 for prompt in prompts):
        return
    signs: dict[str, Callable[[float], bool]] = {
        "advantage_positive": lambda advantage: advantage > 0,
        "advantage_negative": lambda advantage: advantage < 0,
    }
    for name, chosen in signs.items():
        indices = [i for i, prompt in enumerate(prompts) if chosen(prompt.advantage)]
        if indices:
            yield name, indices


def _summary(by_repeat: Iterator[dict[str, float]]) -> dict[str, float | None]:
    """Mean and standard deviation over repeats of every measure."""
    values = list(by_repeat)
    entry: dict[str, float | None] = {}
    for name in values[0]:
        entry |= summarized(name, [value[name] for value in values])
    return entry
