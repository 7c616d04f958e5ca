"""Questions and answers over a given passage, chats, and lists."""

from __future__ import annotations

from random import Random

from tools.samples.corpus import words as w
from tools.samples.corpus.words import Topic


def reading(rng: Random, topic: Topic) -> str:
    """Facts about several people, then questions whose answers stand in the facts."""
    names = rng.sample(w.NAMES, rng.randint(3, 5))
    facts = {
        name: (rng.choice(topic.things), rng.choice(topic.places), rng.choice(w.COLOURS))
        for name in names
    }
    lines = [
        " ".join(
            f"{name} has {w.article(f'{colour} {thing}')} and lives near the {place}."
            for name, (thing, place, colour) in facts.items()
        ),
        "",
    ]
    for _ in range(rng.randint(4, 7)):
        name = rng.choice(names)
        thing, place, colour = facts[name]
        question, answer = rng.choice(
            (
                (f"What does {name} have?", f"{name} has {w.article(f'{colour} {thing}')}."),
                (f"Where does {name} live?", f"{name} lives near the {place}."),
                (f"What colour is the {thing} of {name}?", f"It is {colour}."),
            )
        )
        lines += [f"Question: {question}", f"Answer: {answer}"]
    return "\n".join(lines)


def chat(rng: Random, topic: Topic) -> str:
    """A helpful conversation on one topic."""
    thing, job = rng.choice(topic.things), rng.choice(topic.workers)
    lines = []
    for _ in range(rng.randint(4, 6)):
        verb, good = rng.choice(topic.verbs), rng.choice(topic.goods)
        quality, place = rng.choice(topic.qualities), rng.choice(topic.places)
        hours, count = rng.randint(2, 9), rng.randint(2, 9)
        question, answer = rng.choice(
            (
                (
                    f"How do I {verb} {w.article(thing)}?",
                    f"To {verb} {w.article(thing)}, you need {good}. First look for a place in the "
                    f"{place}, then {verb} the {thing} {rng.choice(w.MANNERS)}.",
                ),
                (
                    f"Who can {verb} the {thing} for me?",
                    f"Ask {w.article(job)} in the {place}. {w.capital(w.article(job))} "
                    f"{w.third(verb)} {w.plural(thing)} every day.",
                ),
                (
                    f"Is the {thing} {quality}?",
                    rng.choice(
                        (
                            f"Yes, the {thing} is {quality}.",
                            f"No, the {thing} is not {quality}, it is "
                            f"{rng.choice(topic.qualities)}.",
                        )
                    ),
                ),
                (
                    f"One {thing} takes {hours} hours. How long do {w.counted(count, thing)} take?",
                    f"{w.capital(w.counted(count, thing))} take {count} * {hours} = "
                    f"{count * hours} hours.",
                ),
                (
                    "Thank you for your help!",
                    f"You are welcome. Enjoy the {thing}!",
                ),
            )
        )
        lines += [f"User: {question}", f"Assistant: {answer}"]
    return "\n".join(lines)


def lists(rng: Random, topic: Topic) -> str:
    """Shopping and to-do lists."""
    lines = []
    for _ in range(rng.randint(2, 3)):
        owner = rng.choice(w.NAMES)
        lines.append(
            f"{rng.choice(('Shopping', 'To do', 'Packing'))} list of {owner} ({topic.name}):"
        )
        for thing in rng.sample(topic.things, rng.randint(4, 6)):
            lines.append(
                rng.choice(
                    (
                        f"- {w.counted(rng.randint(1, 12), thing)}",
                        f"- {rng.choice(topic.verbs)} the {thing}",
                        f"- {rng.choice(topic.goods)} for the {thing}",
                    )
                )
            )
        lines.append("")
    return "\n".join(lines).rstrip()


KINDS = (reading, reading, chat, lists)
