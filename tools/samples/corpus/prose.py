"""Prose: stories, descriptions, reports, instructions, letters and diaries, each on one topic."""

from __future__ import annotations

from random import Random

from tools.samples.corpus import words as w
from tools.samples.corpus.words import Topic


def story(rng: Random, topic: Topic) -> str:
    """Two people, one object, a problem and how it ends."""
    hero, friend = rng.sample(w.NAMES, 2)
    job, thing, place = (
        rng.choice(topic.workers),
        rng.choice(topic.things),
        rng.choice(topic.places),
    )
    quality = rng.choice(topic.qualities)
    he, his = w.pronoun(hero), w.possessive(hero)
    opening = rng.choice(
        (
            f"Once there was {w.article(job)} called {hero} who lived near the {place}.",
            f"{hero} was {w.article(job)} in the town of {rng.choice(w.TOWNS)}.",
            f"Every {rng.choice(w.WEEKDAYS)}, the {job} {hero} went to the {place}.",
            f"Nobody in {rng.choice(w.TOWNS)} knew the {place} better than {hero}, the {job}.",
        )
    )
    wish = rng.choice(
        (
            f"More than anything, {he} wanted {w.article(f'{quality} {thing}')}.",
            f"{w.capital(he)} owned {w.article(f'{quality} {thing}')} and kept it in {his} house.",
            f"One day {he} found {w.article(f'{quality} {thing}')} in the {place}.",
        )
    )
    paragraphs = [" ".join((opening, wish, *_actions(rng, topic, hero, rng.randint(1, 2))))]
    paragraphs.append(_meeting(rng, topic, hero, friend, thing))
    if rng.random() < 0.7:
        paragraphs.append(" ".join(_actions(rng, topic, friend, rng.randint(2, 4))))
    paragraphs.append(_ending(rng, hero, friend, thing, quality))
    return "\n\n".join(paragraphs)


def _actions(rng: Random, topic: Topic, name: str, count: int) -> list[str]:
    """Sentences in the past tense about what one person did."""
    he = w.pronoun(name)
    sentences = []
    for index in range(count):
        verb, other = rng.sample(topic.verbs, 2)
        thing, second = rng.sample(topic.things, 2)
        who = name if index == 0 else he
        sentence = rng.choice(
            (
                f"{who} {w.past(verb)} the {thing} and {w.past(other)} the {second}.",
                f"{rng.choice(('Then', 'Later', 'After lunch', 'At night'))} {who} "
                f"{w.past(verb)} {w.counted(rng.randint(2, 9), thing)} in the "
                f"{rng.choice(topic.places)}.",
                f"because the {thing} was {rng.choice(topic.qualities)}, {who} {w.past(verb)} it "
                f"{rng.choice(w.MANNERS)}.",
                f"{who} was {rng.choice(w.FEELINGS)} while {w.gerund(verb)} the {thing}.",
                f"{who} needed {rng.choice(topic.goods)} for the {thing}, so {he} {w.past(other)} "
                f"the {second} first.",
            )
        )
        sentences.append(w.capital(sentence))
    return sentences


def _meeting(rng: Random, topic: Topic, hero: str, friend: str, thing: str) -> str:
    """The two people talk about the object."""
    verb = rng.choice(topic.verbs)
    line = rng.choice(
        (
            f'"Where is the {thing}?" asked {friend}. "I left it in the '
            f'{rng.choice(topic.places)}," said {hero}.',
            f'"Will you help me {verb} the {thing}?" asked {hero}. "Of course," said {friend}, '
            f'"but we need {rng.choice(topic.goods)}."',
            f'"I have never seen such {w.article(rng.choice(topic.qualities))} {thing}," said '
            f'{friend}. {hero} smiled and said, "It is yours."',
            f'"You must not {verb} the {thing} today," said {friend}. "Why not?" asked {hero}. '
            f'"Because of the {rng.choice(w.WEATHER)}."',
        )
    )
    arrival = rng.choice(
        (
            f"On {rng.choice(w.WEEKDAYS)} {friend} came from {rng.choice(w.TOWNS)}.",
            f"In {rng.choice(w.MONTHS)} {hero} met {friend} at the {rng.choice(topic.places)}.",
            f"Soon {friend} heard about the {thing}.",
        )
    )
    return f"{arrival} {line}"


def _ending(rng: Random, hero: str, friend: str, thing: str, quality: str) -> str:
    return rng.choice(
        (
            f"In the end {hero} gave the {thing} to {friend}, and both of them were "
            f"{rng.choice(w.FEELINGS)}.",
            f"From that day on, {hero} and {friend} shared the {thing}. It was no longer "
            f"{quality}, but nobody cared.",
            f"{hero} never saw the {thing} again. Still, {w.pronoun(hero)} was "
            f"{rng.choice(w.FEELINGS)}, because {friend} was {w.possessive(hero)} friend.",
            f"The lesson is simple: {w.article(quality)} {thing} is worth less than a good friend.",
        )
    )


def description(rng: Random, topic: Topic) -> str:
    """What a thing is, what it is for and how it compares with another."""
    thing, other = rng.sample(topic.things, 2)
    job = rng.choice(topic.workers)
    sentences = [
        f"{w.capital(w.article(thing))} is one of the most {rng.choice(('common', 'useful'))} "
        f"things in {topic.name}.",
        f"Most {w.plural(thing)} are {rng.choice(topic.qualities)}, but some are "
        f"{rng.choice(topic.qualities)}.",
    ]
    for _ in range(rng.randint(5, 9)):
        verb = rng.choice(topic.verbs)
        good, place = rng.choice(topic.goods), rng.choice(topic.places)
        sentences.append(
            rng.choice(
                (
                    f"Every {job} {w.third(verb)} {w.plural(thing)} in the {place}.",
                    f"{w.capital(w.plural(thing))} need {good}, while {w.plural(other)} do not.",
                    f"It takes {w.counted(rng.randint(2, 12), 'hour')} to {verb} "
                    f"{w.article(thing)}.",
                    f"Unlike {w.article(other)}, {w.article(thing)} is rarely "
                    f"{rng.choice(topic.qualities)}.",
                    f"In {rng.choice(w.SEASONS)}, {w.plural(job)} {verb} them "
                    f"{rng.choice(w.MANNERS)}.",
                    f"The {w.plural(thing)} of {rng.choice(w.TOWNS)} are known for their {good}.",
                    f"When {w.article(thing)} is {rng.choice(topic.qualities)}, the {job} "
                    f"{w.third(verb)} it in the {place}.",
                )
            )
        )
    return f"{w.capital(thing)}\n\n" + " ".join(sentences)


def report(rng: Random, topic: Topic) -> str:
    """A short news item with numbers and a forecast."""
    town, month = rng.choice(w.TOWNS), rng.choice(w.MONTHS)
    thing, job, place = (rng.choice(group) for group in (topic.things, topic.workers, topic.places))
    before, change = rng.randint(20, 90), rng.randint(2, 19)
    up = rng.random() < 0.5
    after = before + change if up else before - change
    warm = rng.randint(-5, 30)
    sentences = [
        f"{town}, {rng.randint(1, 28)} {month}.",
        f"The number of {w.plural(thing)} in the {place} {'rose' if up else 'fell'} from {before} "
        f"to {after} this year, a change of {change}.",
        f'"We are {rng.choice(w.FEELINGS)}," said {rng.choice(w.NAMES)}, {w.article(job)} from '
        f"{rng.choice(w.TOWNS)}.",
        f"Next year the town plans to {rng.choice(topic.verbs)} "
        f"{w.counted(rng.randint(3, 40), rng.choice(topic.things))}.",
        f"The weather in {town}: {rng.choice(w.WEATHER)} in the morning, {rng.choice(w.WEATHER)} "
        f"in the evening, {warm} degrees by day and {warm - rng.randint(3, 9)} degrees at night.",
        f"On {rng.choice(w.WEEKDAYS)} expect {rng.choice(w.WEATHER)}.",
    ]
    return " ".join(sentences)


def instructions(rng: Random, topic: Topic) -> str:
    """A numbered how-to."""
    thing = rng.choice(topic.things)
    goal = rng.choice(topic.verbs)
    goods, tool = ", ".join(rng.sample(topic.goods, 3)), w.article(rng.choice(topic.things))
    lines = [f"How to {goal} {w.article(thing)}", "", f"You need: {goods} and {tool}."]
    for step in range(1, rng.randint(5, 8)):
        verb = rng.choice(topic.verbs)
        other = rng.choice(topic.things)
        text = rng.choice(
            (
                f"{w.capital(verb)} the {other} {rng.choice(w.MANNERS)}.",
                f"Wait {w.counted(rng.randint(2, 30), 'minute')} until the {other} is "
                f"{rng.choice(topic.qualities)}.",
                f"If the {other} is {rng.choice(topic.qualities)}, {verb} it in the "
                f"{rng.choice(topic.places)}.",
                f"Add {rng.choice(topic.goods)} to the {thing}.",
                f"Ask {w.article(rng.choice(topic.workers))} before you {verb} the {other}.",
            )
        )
        lines.append(f"{step}. {text}")
    lines.append(f"Now the {thing} is ready.")
    return "\n".join(lines)


def letter(rng: Random, topic: Topic) -> str:
    """A letter between two people."""
    sender, receiver = rng.sample(w.NAMES, 2)
    thing, place = rng.choice(topic.things), rng.choice(topic.places)
    greeting = rng.choice(("I hope you are well", "How are you", "It has been a long time"))
    body = [
        f"{greeting}{'?' if greeting.startswith('How') else '.'}",
        f"I am writing to you from the {place} in {rng.choice(w.TOWNS)}, where I "
        f"{rng.choice(topic.verbs)} {w.plural(thing)} all day.",
        f"Yesterday I {w.past(rng.choice(topic.verbs))} {w.article(rng.choice(topic.things))}, and "
        f"today I am {rng.choice(w.FEELINGS)}.",
        f"The {w.plural(rng.choice(topic.workers))} here are {rng.choice(w.FEELINGS)}, and there "
        f"is always {rng.choice(topic.goods)}.",
        f"Please send me {w.counted(rng.randint(2, 9), rng.choice(topic.things))} before "
        f"{rng.choice(w.WEEKDAYS)}.",
        f"Do you remember the {rng.choice(topic.qualities)} {thing} that we "
        f"{w.past(rng.choice(topic.verbs))} last {rng.choice(w.SEASONS)}?",
    ]
    return f"Dear {receiver},\n\n{' '.join(body)}\n\nYours,\n{sender}"


def diary(rng: Random, topic: Topic) -> str:
    """Consecutive days, consistent in date and weekday."""
    day, weekday = rng.randint(1, 20), rng.randrange(7)
    month = rng.choice(w.MONTHS)
    entries = []
    for offset in range(rng.randint(3, 5)):
        date = f"{w.WEEKDAYS[(weekday + offset) % 7]}, {day + offset} {month}."
        verb, thing = rng.choice(topic.verbs), rng.choice(topic.things)
        sky = rng.choice(w.WEATHER)
        entries.append(
            f"{date} There was {sky} all day. I {w.past(verb)} the {thing} in the "
            f"{rng.choice(topic.places)} and felt {rng.choice(w.FEELINGS)}. "
            + rng.choice(
                (
                    f"Tomorrow I want to {rng.choice(topic.verbs)} the {thing} again.",
                    f"{rng.choice(w.NAMES)} brought {rng.choice(topic.goods)}.",
                    f"No {rng.choice(topic.goods)} is left.",
                )
            )
        )
    return "\n".join(entries)


KINDS = (story, description, report, instructions, letter, diary)
