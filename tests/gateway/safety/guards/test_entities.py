"""Tags of token classifiers become spans, whatever their scheme."""

import pytest

from gateway.safety.findings import Severity
from gateway.safety.guards.entities import EntityTags, LabelledToken, entities_of, rule_of


def read(text: str, tags: str, **keys: object) -> list[tuple[str, str]]:
    """The rule and the text of each finding; ``tags``: one a word, after a slash its score in percent."""
    words = [tag.partition("/") for tag in tags.split()]
    labels = tuple(dict.fromkeys(["O", *(word[0] for word in words)]))
    tokens, at = [], 0
    for number, (word, (label, _, score)) in enumerate(zip(text.split(), words, strict=True)):
        start = text.index(word, at)
        at = start + len(word)
        chance = float(score or 90) / 100
        tokens.append(LabelledToken(start, at, number, labels.index(label), chance))
    found = list(EntityTags(labels, **keys).findings(tokens))  # type: ignore[arg-type]
    assert all(one.severity is Severity.MEDIUM for one in found)
    return [(one.rule, text[one.start : one.end]) for one in found]


@pytest.mark.parametrize(
    "tags",
    [
        "O B-PER I-PER O B-LOC I-LOC",  # IOB2
        "O I-PER I-PER O I-LOC I-LOC",  # IOB1
        "O B-PER E-PER O B-LOC E-LOC",  # BIOES
        "O B-PER L-PER O B-LOC L-LOC",  # BILOU
        "O B_PER I_PER O B_LOC I_LOC",
        "O PER PER O LOC LOC",
    ],
)
def test_the_schemes_say_the_same(tags: str) -> None:
    found = read("ask Anna Smith in New York", tags)
    assert found == [("ner.per", "Anna Smith"), ("ner.loc", "New York")]


@pytest.mark.parametrize("tags", ["B-PER B-PER", "S-PER S-PER", "U-PER U-PER", "E-PER B-PER"])
def test_neighbours_stay_apart_where_the_tags_say_so(tags: str) -> None:
    assert read("Anna Ben", tags) == [("ner.per", "Anna"), ("ner.per", "Ben")]


def test_another_entity_ends_one_and_a_lone_inside_tag_is_one() -> None:
    assert read("Anna Berlin Smith", "B-PER I-LOC I-PER") == [
        ("ner.per", "Anna"),
        ("ner.loc", "Berlin"),
        ("ner.per", "Smith"),
    ]


def test_word_has_the_label_of_its_first_token() -> None:
    tokens = [
        LabelledToken(0, 5, "karlsruhe", 1, 0.9),
        LabelledToken(5, 9, "karlsruhe", 0, 0.9),
        LabelledToken(10, 13, "and", 0, 0.9),
        LabelledToken(13, 15, "and", 1, 0.9),
    ]
    (found,) = EntityTags(("O", "B-LOC")).findings(tokens)
    assert (found.start, found.end) == (0, 9)


def test_categories_and_the_threshold_leave_out_the_rest() -> None:
    text, tags = "Anna Smith in Berlin", "B-PER/90 I-PER/40 O B-LOC/99"
    assert read(text, tags, categories=("LOC",)) == [("ner.loc", "Berlin")]
    assert read(text, tags, threshold=0.7) == [("ner.loc", "Berlin")]
    assert len(read(text, tags, threshold=0.6)) == 2


def test_names_of_rules() -> None:
    assert rule_of("GIVEN-NAME") == "ner.given_name"
    assert entities_of(("O", "B-PER", "I-PER", "MISC")) == ("PER", "MISC")
    assert EntityTags(("O", "B-PER", "I-LOC")).rules == ("ner.per", "ner.loc")
