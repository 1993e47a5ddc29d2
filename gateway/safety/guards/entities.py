"""Entities (names, places) from the labels of a token classifier: tags to spans, spans to findings.

The label of a word is that of its first token, as such models are trained; a span is never a part of a word. Tags may
be BIO, IOB1 or IOB2, BIOES or BILOU ("B-PER"), or plain names ("PER"); "O" is no entity.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from typing import Final

from gateway.safety.findings import Finding, Severity

FAMILY: Final = "ner"
"""Findings are called "ner.LABEL", in lower case."""
OUTSIDE: Final = "O"
_TAG: Final = re.compile(r"(?:([BIESLU])[-_])?(.+)")


def rule_of(entity: str) -> str:
    """The name of findings of ``entity``: "PER" gives "ner.per"."""
    return f"{FAMILY}.{re.sub(r'[^a-z0-9_]', '_', entity.lower())}"


def entities_of(labels: Sequence[str]) -> tuple[str, ...]:
    """The entities that a model with ``labels`` finds: "B-PER" and "I-PER" are one."""
    return tuple(dict.fromkeys(_tag(label)[1] for label in labels if label != OUTSIDE))


@dataclass(frozen=True, slots=True)
class LabelledToken:
    """A token of a text and what the model says of it.

    Attributes:
        start: its first character in the text.
        end: one past the last.
        word: equal for the tokens of a word, which follow each other.
        label: number of the most probable one.
        score: the label's probability.
    """

    start: int
    end: int
    word: object
    label: int
    score: float


@dataclass
class _Entity:
    name: str
    start: int
    end: int
    open: bool
    scores: list[float] = field(default_factory=list)

    def joins(self, mark: str, name: str) -> bool:
        """Whether a word tagged so goes on with it."""
        return self.open and name == self.name and mark in ("", "I", "E", "L")


@dataclass(frozen=True)
class EntityTags:
    """How the labels of one model are read.

    Attributes:
        labels: of the model, by number.
        wanted: the entities that are findings; empty: all.
        threshold: the least mean probability of an entity's words.
    """

    labels: tuple[str, ...]
    wanted: tuple[str, ...] = ()
    threshold: float = 0.0

    @property
    def rules(self) -> tuple[str, ...]:
        """The names of all findings."""
        return tuple(map(rule_of, self.wanted or entities_of(self.labels)))

    def findings(self, tokens: Iterable[LabelledToken]) -> Iterator[Finding]:
        """The entities in the tokens of a text, in its order."""
        for one in self._entities(tokens):
            if fmean(one.scores) >= self.threshold and (not self.wanted or one.name in self.wanted):
                yield Finding(rule_of(one.name), one.start, one.end, Severity.MEDIUM)

    def _entities(self, tokens: Iterable[LabelledToken]) -> Iterator[_Entity]:
        current: _Entity | None = None
        for _, group in groupby(tokens, key=lambda token: token.word):
            word = list(group)
            label = self.labels[word[0].label]
            mark, name = ("", "") if label == OUTSIDE else _tag(label)
            if current is None or not current.joins(mark, name):
                if current is not None:
                    yield current
                current = _Entity(name, word[0].start, 0, True) if name else None
            if current is not None:
                current.end = max(token.end for token in word)
                current.open = mark not in ("E", "L", "S", "U")
                current.scores.append(word[0].score)
        if current is not None:
            yield current


def _tag(label: str) -> tuple[str, str]:
    """Mark and entity: ("B", "PER") of "B-PER", ("", "PER") of "PER"."""
    found = _TAG.fullmatch(label)
    assert found is not None, "a label is not empty"
    return found[1] or "", found[2]
