"""Arithmetic, word problems with worked solutions, sequences and tables."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tools.samples.corpus import words as w
from tools.samples.corpus.words import Topic


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem: its text, the steps of its solution, and a sentence with the answer."""

    question: str
    start: int
    steps: tuple[tuple[str, int], ...]
    subject: str

    @property
    def answer(self) -> int:
        """The value after the last step."""
        return self.steps[-1][1]


def problem(rng: Random, topic: Topic, changes: int) -> Problem:
    """A person has some things and gains, loses or multiplies them `changes` times."""
    name = rng.choice(w.NAMES)
    he, thing = w.pronoun(name), rng.choice(topic.things)
    value = rng.randint(4, 30)
    start = value
    sentences = [f"{name} has {w.counted(value, thing)}."]
    steps = []
    for _ in range(changes):
        kind = rng.choice(("gain", "lose", "times"))
        if kind == "lose" and value > 3:
            amount = rng.randint(1, value - 1)
            how = rng.choice(("loses", "sells", f"gives {rng.choice(w.NAMES)}"))
            sentences.append(f"On {rng.choice(w.WEEKDAYS)} {he} {how} {amount} of them.")
            steps.append((f"{value} - {amount}", value - amount))
        elif kind == "times" and value < 40:
            factor = rng.randint(2, 4)
            sentences.append(f"Then the number grows to {factor} times as many.")
            steps.append((f"{value} * {factor}", value * factor))
        else:
            amount = rng.randint(2, 25)
            how = rng.choice(("finds", "buys", "gets"))
            sentences.append(f"In the {rng.choice(topic.places)} {he} {how} {amount} more.")
            steps.append((f"{value} + {amount}", value + amount))
        value = steps[-1][1]
    sentences.append(f"How many {w.plural(thing)} does {name} have now?")
    return Problem(" ".join(sentences), start, tuple(steps), f"{name} has {{}} {w.plural(thing)}")


def solution(rng: Random, task: Problem, *, mistake: bool = False) -> str:
    """Work a problem step by step; with `mistake`, one step is off and the rest follows."""
    wrong = rng.randrange(len(task.steps)) if mistake else -1
    opening = rng.choice(
        (
            f"We start with {task.start}.",
            f"At first there are {task.start}.",
            f"Let us count step by step from {task.start}.",
        )
    )
    lines = [opening]
    value = task.start
    for index, (expression, _) in enumerate(task.steps):
        _, operator, amount = expression.split()
        before = value
        value = _apply(value, operator, int(amount))
        if index == wrong:
            value += rng.choice((1, 2, 10))
        lines.append(
            f"{rng.choice(('Step', 'So', 'Then'))}: {before} {operator} {amount} = {value}."
        )
    lines.append(f"Answer: {task.subject.format(value)}.")
    return "\n".join(lines)


def _apply(value: int, operator: str, amount: int) -> int:
    if operator == "+":
        return value + amount
    return value - amount if operator == "-" else value * amount


def sums(rng: Random, topic: Topic) -> str:
    """A column of additions, subtractions and products."""
    del topic
    lines = []
    for _ in range(rng.randint(8, 14)):
        operator = rng.choice("+-*")
        a, b = rng.randint(2, 60), rng.randint(2, 60)
        if operator == "*":
            a, b = a % 10 + 2, b % 10 + 2
        a, b = max(a, b), min(a, b)
        lines.append(f"{a} {operator} {b} = {_apply(a, operator, b)}")
    return "\n".join(lines)


def word_problems(rng: Random, topic: Topic) -> str:
    """Word problems with their worked solutions."""
    parts = []
    for _ in range(rng.randint(2, 3)):
        task = problem(rng, topic, rng.randint(1, 3))
        parts.append(f"Problem: {task.question}\n{solution(rng, task)}")
    return "\n\n".join(parts)


def sequences(rng: Random, topic: Topic) -> str:
    """Number sequences with a constant step, and sorted lists of words."""
    lines = []
    for _ in range(rng.randint(3, 5)):
        start, step = rng.randint(0, 20), rng.choice((1, 2, 3, 5, 10))
        terms = [start + step * index for index in range(9)]
        lines.append(f"Count by {step}: {', '.join(map(str, terms))}.")
        chosen = rng.sample(topic.things, rng.randint(3, 6))
        lines.append(f"Sort {', '.join(chosen)}: {', '.join(sorted(chosen))}.")
        if rng.random() < 0.5:
            lines.append(f"Reverse {', '.join(chosen)}: {', '.join(reversed(chosen))}.")
    return "\n".join(lines)


def table(rng: Random, topic: Topic) -> str:
    """A stock list as a table, with its total."""
    rows = rng.sample(topic.things, rng.randint(4, 7))
    amounts = [rng.randint(1, 30) for _ in rows]
    lines = ["| thing | amount | place |", "|---|---|---|"]
    for row, amount in zip(rows, amounts, strict=True):
        lines.append(f"| {row} | {amount} | {rng.choice(topic.places)} |")
    largest = rows[amounts.index(max(amounts))]
    lines.append(f"| total | {sum(amounts)} | |")
    lines.append("")
    lines.append(f"There are {sum(amounts)} things in all, and the most common is the {largest}.")
    return "\n".join(lines)


KINDS = (sums, word_problems, word_problems, sequences, table)
