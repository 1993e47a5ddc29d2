"""Words that say how hard a prompt is, whatever it is about: written by hand, one class a line.

What a prompt is about is left to grams learned from outcomes (`grams`).
"""

from collections.abc import Mapping
from typing import Final

SINGLE: Final = tuple(
    word
    for line in (
        "what which who when where why how if suppose assume given find calculate compute determine evaluate solve",
        "following best most likely true false statement statements according because should would could might",
        "scenario both only all none above between example except each every per more less than fewer many much",
        "times remaining left rest total altogether then after before average same again another first second until",
        "cost price age old hour hours minute minutes day days week weeks month months year years but however instead",
    )
    for word in line.split()
)
"""Words that count by themselves."""

CLASSES: Final[Mapping[str, str]] = {
    "function": "the of and to in a is that for it as was with be by on not he i this are or his from at which but "
    "have an had they you were their one all we can her has there been if more when will would who so no she other "
    "its may these what them than some him time into only could new then any my now such like our over me also most",
    "negation": "not except least false incorrect cannot never neither nor none without no isn't doesn't don't won't "
    "can't wrong wasn't aren't didn't",
    "number": "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen twenty thirty "
    "forty fifty sixty seventy eighty ninety hundred thousand million dozen half third quarter fifth twice double "
    "triple thrice couple pair",
    "relation": "more less fewer than as times twice half each every per equally split share shared sharing increase "
    "increases increased decrease decreased discount profit ratio fraction percent average remaining rest total",
    "adds": "total altogether sum combined together more both",
    "subtracts": "left remaining remain fewer less rest difference than",
    "multiplies": "times each every per twice double triple percent",
    "divides": "half third quarter thirds quarters average split equally shared divided",
    "asks back": "start started starts originally original initially initial begin began beginning",
    "first person": "i my me mine we our us myself",
    "logic": "therefore hence implies implied because since thus conclude follows necessarily sufficient iff either",
    "task": "write code explain describe summarize translate list compare prove show implement function program "
    "essay story poem email",
}


def slots() -> Mapping[str, tuple[int, ...]]:
    """The columns of each word: first one a word of `SINGLE`, then one a class."""
    table: dict[str, list[int]] = {}
    for column, word in enumerate(SINGLE):
        table.setdefault(word, []).append(column)
    for column, words in enumerate(CLASSES.values(), len(SINGLE)):
        for word in words.split():
            table.setdefault(word, []).append(column)
    return {word: tuple(columns) for word, columns in table.items()}
