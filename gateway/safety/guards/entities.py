"""Entities (names, places) from the labels of a token classifier: tags to spans, spans to findings.

The label of a word is that of its first token, as such models are trained; a span is never a part
of a word. Tags may be BIO, IOB1 or IOB2, BIOES or BILOU ("B-PER"), or plain names ("PER"); "O" is
no entity.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from typing import Final

from gateway.safety.findings import Finding, Severity

FAMILY: Final = "ner"
"""Family of the findings, which are called "ner.LABEL" in lower case."""
OUTSIDE: Final = "O"
"""Label of tokens that belong to no entity."""
_TAG: Final = re.compile(r"(?:([BIESLU])[-_])?(.+)")


def rule_of(entity: str) -> str:
    """Return the name of findings of `entity`: "PER" gives "ner.per"."""
    return f"{FAMILY}.{re.sub(r'[^a-z0-9_]', '_', entity.lower())}"


def entities_of(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the entities that a model with `labels` finds: "B-PER" and "I-PER" are one."""
    return tuple(dict.fromkeys(_tag(label)[1] for label in labels if label != OUTSIDE))


@dataclass(frozen=True, slots=True)
class LabelledToken:
    """A token of a text, and the model's label for it.

    Attributes:
        start: offset of its first character in the text.
        end: offset behind its last character.
        word: equal for the tokens of a word, which follow each other.
        label: number of the most probable label.
        score: probability of that label.
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
        """Return whether a word with this tag continues the entity."""
        return self.open and name == self.name and mark in ("", "I", "E", "L")


@dataclass(frozen=True)
class EntityTags:
    """The labels of one model, and which of them are findings.

    Attributes:
        labels: labels of the model, by number.
        wanted: entities that are findings; empty: all.
        threshold: least mean probability of an entity's words.
    """

    labels: tuple[str, ...]
    wanted: tuple[str, ...] = ()
    threshold: float = 0.0

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of all findings."""
        return tuple(map(rule_of, self.wanted or entities_of(self.labels)))

    def findings(self, tokens: Iterable[LabelledToken]) -> Iterator[Finding]:
        """Yield the entities in the tokens of a text, in its order."""
        for entity in self._entities(tokens):
            if fmean(entity.scores) >= self.threshold and (
                not self.wanted or entity.name in self.wanted
            ):
                yield Finding(rule_of(entity.name), entity.start, entity.end, Severity.MEDIUM)

    def _entities(self, tokens: Iterable[LabelledToken]) -> Iterator[_Entity]:
        current: _Entity | None = None
        for _, group in groupby(tokens, key=lambda token: token.word):
            word = list(group)
            # Models are trained to label the first token of a word; the other labels mean nothing.
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
    """Return mark and entity: ("B", "PER") of "B-PER", ("", "PER") of "PER"."""
    match = _TAG.fullmatch(label)
    assert match is not None, "a label is not empty"
    return match[1] or "", match[2]
