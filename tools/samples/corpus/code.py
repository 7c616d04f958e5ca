"""Small programs: functions, classes, loops with their output, and records as JSON."""

from __future__ import annotations

import json
from random import Random

from tools.samples.corpus import words as w
from tools.samples.corpus.words import Topic


def functions(rng: Random, topic: Topic) -> str:
    """A module of small functions over a list."""
    thing = rng.choice(topic.things)
    parts = []
    for _ in range(rng.randint(2, 4)):
        verb = rng.choice(topic.verbs)
        many = w.plural(thing)
        limit, step = rng.randint(1, 20), rng.randint(2, 9)
        parts.append(
            rng.choice(
                (
                    f"def {verb}_{many}({many}, limit={limit}):\n"
                    f'    """{w.capital(verb)} every {thing} above the limit."""\n'
                    f"    result = []\n    for {thing} in {many}:\n"
                    f"        if {thing} > limit:\n            result.append({thing} * {step})\n"
                    f"    return result",
                    f"def count_{many}({many}):\n    total = 0\n    for {thing} in {many}:\n"
                    f"        total += {thing}.amount\n    return total",
                    f"def {verb}_{thing}({thing}):\n    if {thing} is None:\n"
                    f'        raise ValueError("no {thing}")\n'
                    f"    return {thing}.{verb}({limit})",
                    f"def is_{rng.choice(topic.qualities)}({thing}):\n"
                    f"    return {thing}.size >= {limit} and {thing}.weight < {limit + step}",
                )
            )
        )
    return "\n\n\n".join(parts)


def classes(rng: Random, topic: Topic) -> str:
    """A class with a constructor and methods."""
    thing, part = rng.sample(topic.things, 2)
    name, many = w.capital(thing), w.plural(part)
    lines = [
        f"class {name}:",
        f'    """{w.capital(w.article(rng.choice(topic.qualities)))} {thing}."""',
        "",
        f"    def __init__(self, {many}, size={rng.randint(1, 50)}):",
        f"        self.{many} = {many}",
        "        self.size = size",
    ]
    for verb in rng.sample(topic.verbs, rng.randint(2, 3)):
        lines += ["", f"    def {verb}(self, {part}):"]
        lines += rng.choice(
            (
                [f"        self.{many}.append({part})", f"        return len(self.{many})"],
                [
                    f"        if {part} not in self.{many}:",
                    "            return False",
                    f"        self.{many}.remove({part})",
                    "        return True",
                ],
                [f"        self.size += {part}.size", "        return self.size"],
            )
        )
    return "\n".join(lines)


def session(rng: Random, topic: Topic) -> str:
    """Interactive lines with the output they really give."""
    lines = []
    for _ in range(rng.randint(4, 7)):
        name = rng.choice(topic.things)
        values = [rng.randint(1, 20) for _ in range(rng.randint(3, 6))]
        call, output = rng.choice(
            (
                (f"sum({name})", sum(values)),
                (f"max({name})", max(values)),
                (f"min({name})", min(values)),
                (f"sorted({name})", sorted(values)),
                (f"len({name})", len(values)),
                (f"[2 * x for x in {name}]", [2 * value for value in values]),
                (f"{name}[0] + {name}[1]", values[0] + values[1]),
            )
        )
        lines += [f">>> {name} = {values}", f">>> {call}", f"{output}"]
    return "\n".join(lines)


def records(rng: Random, topic: Topic) -> str:
    """A list of records as JSON lines."""
    lines = []
    for number in range(1, rng.randint(5, 7)):
        record = {
            "id": number,
            "name": rng.choice(w.NAMES),
            "job": rng.choice(topic.workers),
            "town": rng.choice(w.TOWNS),
            "items": rng.sample(topic.things, 2),
            "paid": rng.random() < 0.5,
        }
        lines.append(json.dumps(record))
    return "\n".join(lines)


KINDS = (functions, classes, session, records)
