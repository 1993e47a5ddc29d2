"""Entities (names, places) from the labels of a token classifier: tags to spans, spans to findings.

The label of a word is that of its first token, as such models are trained; a span is never a part
of a word. Tags may be BIO, IOB1 or IOB2, BIOES or BILOU ("B-PER"), or plain names ("PER"); "O" is
no entity.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class EntityTags:
    """The labels of one model, and which of them are findings.

    Attributes:
        labels: labels of the model, by number.
        categories: entities that are findings; empty: all.
        threshold: least mean probability of an entity's words.
    """

    labels: tuple[str, ...]
    categories: tuple[str, ...] = ()
    threshold: float = 0.0

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of all findings."""
        return tuple(map(rule_of, self.categories or entities_of(self.labels)))

    def findings(self, tokens: Iterable[LabelledToken]) -> Iterator[Finding]:
        """Yield the entities in the tokens of a text, in its order."""
        for name, words in self._entities(tokens):
            score, end = fmean(word[0].score for word in words), max(t.end for t in words[-1])
            if score >= self.threshold and (not self.categories or name in self.categories):
                yield Finding(rule_of(name), words[0][0].start, end, Severity.MEDIUM)

    def _entities(
        self, tokens: Iterable[LabelledToken]
    ) -> list[tuple[str, list[list[LabelledToken]]]]:
        """Return each entity with its words, which are tokens."""
        entities: list[tuple[str, list[list[LabelledToken]]]] = []
        continuing = ""
        for _, group in groupby(tokens, key=lambda token: token.word):
            word = list(group)
            # Models are trained to label the first token of a word; the other labels mean nothing.
            label = self.labels[word[0].label]
            mark, name = ("", "") if label == OUTSIDE else _tag(label)
            if name and name == continuing and mark in ("", "I", "E", "L"):
                entities[-1][1].append(word)
            elif name:
                entities.append((name, [word]))
            continuing = "" if mark in ("E", "L", "S", "U") else name
        return entities


def _tag(label: str) -> tuple[str, str]:
    """Return mark and entity: ("B", "PER") of "B-PER", ("", "PER") of "PER"."""
    match = _TAG.fullmatch(label)
    assert match is not None, "a label is not empty"
    return match[1] or "", match[2]
