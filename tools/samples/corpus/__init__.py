"""A seeded generator of English-like text, small programs and arithmetic.

The samples are trained on it. Every document is a pure function of (seed, index), so the corpus
needs no file and any part of it can be made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tools.samples.corpus import code, dialogue, numbers, prose
from tools.samples.corpus.words import TOPICS

#: Families of documents and how often each is drawn.
_FAMILIES = ((prose.KINDS, 4), (numbers.KINDS, 2), (code.KINDS, 2), (dialogue.KINDS, 3))
#: Seeds of the shipped calibration text and rollouts; training uses another.
CALIBRATION_SEED = 20_001
ROLLOUT_SEED = 20_002
#: Shortest and longest calibration text: 200 to 500 tokens of the samples' tokenizer.
_CALIBRATION_CHARACTERS = (600, 1050)


def document(seed: int, index: int) -> str:
    """Document `index` of the corpus `seed`: one kind of text on one topic."""
    # A string seed goes through SHA-512, so neighbouring indices are unrelated.
    rng = Random(f"{seed}/{index}")
    kinds = rng.choices([kinds for kinds, _ in _FAMILIES], [weight for _, weight in _FAMILIES])[0]
    return rng.choice(kinds)(rng, rng.choice(TOPICS))


def documents(seed: int) -> Iterator[str]:
    """The endless corpus of one seed."""
    index = 0
    while True:
        yield document(seed, index)
        index += 1


def calibration_texts(count: int = 20) -> list[str]:
    """Held-out texts: every family in turn, each one or more documents on one topic."""
    texts = []
    for index in range(count):
        rng = Random(f"{CALIBRATION_SEED}/{index}")
        topic = TOPICS[index % len(TOPICS)]
        kinds = _FAMILIES[index % len(_FAMILIES)][0]
        text = rng.choice(kinds)(rng, topic)
        while len(text) < _CALIBRATION_CHARACTERS[0]:
            longer = f"{text}\n\n{rng.choice(kinds)(rng, topic)}"
            if len(longer) <= _CALIBRATION_CHARACTERS[1]:
                text = longer
        texts.append(text)
    return texts


def rollout_records() -> list[dict[str, str | float]]:
    """Two groups of four answers to one word problem each, with group-relative advantages.

    The advantage is (reward - mean) / std over the group, reward 1 for a right answer: the first
    group has one right answer, the second three.
    """
    records: list[dict[str, str | float]] = []
    for group, right in enumerate((1, 3)):
        rng = Random(f"{ROLLOUT_SEED}/{group}")
        task = numbers.problem(rng, rng.choice(TOPICS), 5)
        rewards = [1.0] * right + [0.0] * (4 - right)
        mean = sum(rewards) / 4
        std = (sum((reward - mean) ** 2 for reward in rewards) / 4) ** 0.5
        for reward in rewards:
            records.append(
                {
                    "prompt": f"Problem: {task.question}\n",
                    "response": numbers.solution(rng, task, mistake=reward == 0.0),
                    "advantage": round((reward - mean) / std, 4),
                }
            )
    return records
