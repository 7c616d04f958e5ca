"""Word lists of the corpus, and the little grammar that inflects them."""

from __future__ import annotations

from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ada Boris Clara Daniel Edith Farid Greta Hassan Ines Jonas Kaya Leo Mira Nadia Oscar Petra "
    "Quentin Rosa Samuel Tilda Umar Vera Walter Xenia Yusuf Zora Anton Bela Celia Dario"
)

#: Those of NAMES that take `she`; the others take `he`.
_SHE = frozenset(
    _words("Ada Clara Edith Greta Ines Kaya Mira Nadia Petra Rosa Tilda Vera Xenia Zora Celia")
)

COLOURS = _words("red blue green yellow white black grey brown golden purple")
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words(
    "January February March April May June July August September October November December"
)
SEASONS = _words("spring summer autumn winter")
TOWNS = _words("Arlow Bexham Corvale Dunmere Eastwick Fallowden Grenby Hollerby Inverly Kestwood")
FEELINGS = _words("happy tired proud curious worried calm surprised grateful lonely hopeful")
MANNERS = _words("slowly quickly carefully quietly eagerly gently often rarely twice together")
WEATHER = _words("rain snow wind fog sunshine thunder frost hail drizzle mist")

#: Irregular forms that the rules below would get wrong.
_PLURALS = {
    "leaf": "leaves",
    "shelf": "shelves",
    "loaf": "loaves",
    "knife": "knives",
    "sheep": "sheep",
    "fish": "fish",
}
_PASTS = {
    "build": "built",
    "buy": "bought",
    "catch": "caught",
    "choose": "chose",
    "draw": "drew",
    "feed": "fed",
    "find": "found",
    "grow": "grew",
    "hear": "heard",
    "hold": "held",
    "keep": "kept",
    "lose": "lost",
    "read": "read",
    "sell": "sold",
    "send": "sent",
    "sing": "sang",
    "teach": "taught",
    "write": "wrote",
}
_DOUBLING = {"plan", "stir", "chop", "knit", "trim", "map", "drop"}


@dataclass(frozen=True, slots=True)
class Topic:
    """Words that belong together: a document keeps to one topic."""

    name: str
    workers: tuple[str, ...]
    things: tuple[str, ...]
    verbs: tuple[str, ...]
    qualities: tuple[str, ...]
    places: tuple[str, ...]
    goods: tuple[str, ...]


def _topic(
    name: str, workers: str, things: str, verbs: str, qualities: str, places: str, goods: str
) -> Topic:
    return Topic(name, *map(_words, (workers, things, verbs, qualities, places, goods)))


TOPICS = (
    _topic(
        "gardening",
        "gardener farmer botanist",
        "rose tree seed hedge apple pumpkin bean leaf spade bucket fence beehive",
        "plant water grow trim feed find move collect",
        "ripe wild tall fresh dry green sweet young",
        "garden orchard meadow greenhouse field",
        "soil compost honey water fruit",
    ),
    _topic(
        "sailing",
        "sailor captain fisherman",
        "boat sail anchor rope net mast oar harbour lantern map wave gull",
        "steer pull repair paint lose catch hold watch",
        "wet heavy old swift broken salty small steady",
        "harbour bay island river beach",
        "salt tar cargo canvas wind",
    ),
    _topic(
        "cooking",
        "cook baker waiter",
        "loaf pot knife onion carrot pie oven spoon recipe bowl cake kettle",
        "bake stir chop taste serve boil buy wash",
        "hot sweet sour crisp warm tender plain fresh",
        "kitchen bakery market cellar inn",
        "flour butter sugar milk pepper",
    ),
    _topic(
        "astronomy",
        "astronomer student engineer",
        "star planet comet telescope moon lens orbit crater signal mirror chart galaxy",
        "observe measure draw describe map discover follow count",
        "bright distant faint round cold massive dark rare",
        "observatory desert tower laboratory library",
        "light dust gas ice glass",
    ),
    _topic(
        "music",
        "singer drummer teacher",
        "song drum violin choir melody string flute concert note bell dance piano",
        "play hear sing write tune teach practise record",
        "loud soft slow lively sad joyful simple famous",
        "hall theatre school square church",
        "rhythm silence applause harmony noise",
    ),
    _topic(
        "computing",
        "programmer analyst operator",
        "program server file table network error test model queue cable screen key",
        "compile test send copy measure repair read train",
        "fast empty broken large secure idle modern tiny",
        "office laboratory basement library archive",
        "memory code data power heat",
    ),
    _topic(
        "animals",
        "shepherd keeper doctor",
        "dog cat horse sheep fox owl rabbit goat hen fish nest stable",
        "feed brush follow chase watch carry call protect",
        "hungry shy brave lazy clever gentle noisy wild",
        "farm forest barn valley zoo",
        "hay wool grain milk straw",
    ),
    _topic(
        "building",
        "mason carpenter architect",
        "wall roof bridge ladder brick window door beam nail tower hammer stair",
        "build measure paint plan repair lift drop design",
        "strong narrow wide wooden solid crooked new level",
        "village workshop quarry yard castle",
        "stone timber cement sand iron",
    ),
    _topic(
        "trade",
        "merchant clerk banker",
        "coin basket ledger shop letter cart ring carpet lamp price box ticket",
        "sell buy count weigh choose pack carry trade",
        "cheap costly rare honest fine useful heavy foreign",
        "market port square warehouse town",
        "silver silk paper tea spice",
    ),
    _topic(
        "travel",
        "traveller guide driver",
        "train road mountain bag map bridge station ticket tent path lake hotel",
        "cross visit climb follow reach draw remember miss",
        "long steep quiet distant famous narrow lovely early",
        "valley city coast border station",
        "luggage snow time weather news",
    ),
    _topic(
        "medicine",
        "doctor nurse patient",
        "bandage bottle bed report heart pill needle scale lamp question test ward",
        "examine treat wash help visit ask weigh record",
        "healthy pale weak careful clean sore patient warm",
        "hospital clinic village ward school",
        "medicine blood rest soap water",
    ),
    _topic(
        "school",
        "teacher pupil librarian",
        "book pencil lesson desk bell poem riddle shelf exam chair story page",
        "read write explain learn borrow answer copy finish",
        "difficult short clever quiet new strict funny clear",
        "school library classroom yard hall",
        "chalk ink paper homework praise",
    ),
)


def plural(noun: str) -> str:
    """The plural of a countable noun."""
    if noun in _PLURALS:
        return _PLURALS[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def counted(number: int, noun: str) -> str:
    """`3 apples`, `1 apple`."""
    return f"{number} {noun if number == 1 else plural(noun)}"


def article(phrase: str) -> str:
    """The phrase with its indefinite article."""
    silent = phrase.startswith(("honest", "hour"))
    glide = phrase.startswith(("use", "uni", "one"))
    vowel = phrase[0] in "aeiou"
    return f"{'an' if silent or (vowel and not glide) else 'a'} {phrase}"


def third(verb: str) -> str:
    """Third person singular, present tense."""
    return plural(verb)


def past(verb: str) -> str:
    """Past tense."""
    if verb in _PASTS:
        return _PASTS[verb]
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return (verb + verb[-1] if verb in _DOUBLING else verb) + "ed"


def gerund(verb: str) -> str:
    """The -ing form."""
    if verb.endswith("e") and not verb.endswith("ee"):
        return verb[:-1] + "ing"
    return (verb + verb[-1] if verb in _DOUBLING else verb) + "ing"


def pronoun(name: str) -> str:
    """`she` or `he` for a name of NAMES."""
    return "she" if name in _SHE else "he"


def possessive(name: str) -> str:
    """`her` or `his` for a name of NAMES."""
    return "her" if pronoun(name) == "she" else "his"


def capital(sentence: str) -> str:
    """The sentence with its first letter in upper case."""
    return sentence[0].upper() + sentence[1:]
