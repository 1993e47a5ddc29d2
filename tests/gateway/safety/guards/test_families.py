"""Verdicts in the forms that the families' model cards publish, and what is none."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.guards.families import (
    OBJECTION,
    Family,
    GuardVerdict,
    Unparsable,
    family_of,
)
from gateway.safety.settings import GuardSettings
from sluice.v1.inference_pb2 import TokenLogprob

CUSTOM = {
    "prompt": "Is this fine? {prompt} / {answer}",
    "unsafe": r"^BAD(?: \((?P<category>[^)]*)\))?",
    "safe": "^FINE",
}


def family(template: str, labels: tuple[str, ...] = (), **keys: object) -> Family:
    keys = (CUSTOM if template == "custom" else {}) | {"template": template, **keys}
    return family_of(GuardSettings.model_validate({"model": "guard", **keys}), labels)


VERDICTS: list[tuple[str, str, tuple[str, ...] | None]] = [
    ("llama_guard", "\n\nsafe", ()),
    ("llama_guard", "safe", ()),
    ("llama_guard", "\n\nunsafe\nS1", ("S1",)),
    ("llama_guard", "unsafe\nS2, S14\n", ("S2", "S14")),
    ("llama_guard", "unsafe", (OBJECTION,)),
    ("llama_guard", "unsafe\n<|eot_id|>S1", None),
    ("shieldgemma", "Yes", (OBJECTION,)),
    ("shieldgemma", "No, the question is about", ()),
    ("shieldgemma", "**Yes**", (OBJECTION,)),
    ("granite_guardian", "No", ()),
    ("granite_guardian", "Yes\n<confidence> High </confidence>", ("harm",)),
    ("granite_guardian", "<score> yes </score>", ("harm",)),
    ("granite_guardian", "<think>Yes? it is harmless.</think>\n<score> no </score>", ()),
    ("custom", "FINE.", ()),
    ("custom", "bad", (OBJECTION,)),
    ("custom", "BAD (weapons, self harm, !)", ("weapons", "self harm")),
    ("custom", "BAD ()", (OBJECTION,)),
    *(
        (template, text, None)
        for template in ("llama_guard", "shieldgemma", "granite_guardian", "custom")
        for text in ("", "\n", "I cannot answer that", "safe-ish", "<score></score>")
    ),
]
"""Family, answer and categories; none: no objection; None: no verdict."""


@pytest.mark.parametrize(("template", "text", "categories"), VERDICTS)
def test_answers_are_verdicts_or_none(
    template: str, text: str, categories: tuple[str, ...] | None
) -> None:
    if categories is None:
        with pytest.raises(Unparsable):
            family(template).verdict(text)
    else:
        assert family(template).verdict(text) == GuardVerdict(bool(categories), categories)


LABELS = ("BENIGN", "INJECTION", "JAILBREAK")
BAD = {"labels": LABELS, "categories": LABELS[1:]}
LLAMA = "\n\nsafe", {"\n\n": 1.0}, {"safe": 0.6, "unsafe": 0.3, " maybe": 0.1}
CHANCES = {"a": 0.4, "b": 0.35, "c": 0.25}
SCORES = [
    ("llama_guard", {}, LLAMA, False, 1 / 3),
    ("llama_guard", {"threshold": 0.3}, LLAMA, True, 1 / 3),
    ("shieldgemma", {"threshold": 0.7}, ("Yes", {"Yes": 0.6, "No": 0.4}), False, 0.6),
    # Behind a tag or a thought there is no score.
    ("granite_guardian", {"threshold": 0.9}, ("<score> yes </score>", {"<": 1.0}), True, None),
    ("granite_guardian", {"threshold": 0.1}, ("<score> no </score>", {"Yes": 1.0}), False, None),
    ("classifier", BAD, ("", CHANCES), False, 0.6),
    ("classifier", BAD | {"threshold": 0.5}, ("", CHANCES), True, 0.6),
]
"""Family, settings, answer with the chances of tokens by place, and the verdict with its score."""


@pytest.mark.parametrize(("template", "keys", "answer", "flagged", "score"), SCORES)
def test_threshold_overrules_the_first_word(
    template: str,
    keys: dict[str, tuple[str, ...]],
    answer: tuple[str, *tuple[dict[str, float], ...]],
    flagged: bool,
    score: float | None,
) -> None:
    text, *places = answer
    options = [
        [
            TokenLogprob(token_id=number, text=word, logprob=math.log(chance))
            for number, (word, chance) in enumerate(place.items())
        ]
        for place in places
    ]
    verdict = family(template, **keys).verdict(text, options)
    assert verdict.flagged is flagged
    assert verdict.score == (None if score is None else pytest.approx(score))
    if template == "classifier":
        assert verdict.categories == ("INJECTION",) * flagged


def test_classifier_without_labels_gives_no_verdict() -> None:
    option = TokenLogprob(token_id=0, text="a", logprob=0.0)
    for labels, places in (((), [[option]]), (LABELS, [])):
        with pytest.raises(Unparsable):
            family("classifier", labels, categories=["a"]).verdict("x", places)


def test_families_get_the_turns_that_their_templates_take() -> None:
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    assert len(family("llama_guard").messages(turns, "")) == 3
    assert [m["role"] for m in family("llama_guard").messages(turns, "x")][-1] == "assistant"
    assert [m["role"] for m in family("shieldgemma").messages(turns, "x")] == ["user", "assistant"]
    (message,) = family("custom").messages([{"role": "user", "content": "say {answer}"}], "ok")
    assert message["content"] == "Is this fine? say {answer} / ok", "filled in once"
    config = family("granite_guardian", criterion="jailbreak").variables["guardian_config"]
    assert config == {"risk_name": "jailbreak", "criteria_id": "jailbreak"}


WORDS = [
    "Yes",
    "no",
    "YES",
    "safe",
    "Unsafe",
    "unsafe",
    "S1",
    "yesterday",
    "nobody",
    "é",
    "_",
    "**",
]
PIECES = st.sampled_from([*WORDS, "\n", " ", ","])
ANSWERS = st.lists(PIECES, max_size=4).map("".join) | st.text(max_size=20)


def read(template: str, text: str) -> bool | None:
    """Whether the guard objects; None: no verdict."""
    try:
        verdict = family(template).verdict(text)
    except Unparsable:
        return None
    assert bool(verdict.categories) is verdict.flagged
    return verdict.flagged


@given(ANSWERS)
def test_llama_guard_objects_when_its_first_line_is_unsafe(text: str) -> None:
    lines = [line.strip().lower() for line in text.splitlines() if line.strip()]
    flagged = read("llama_guard", text)
    if lines[:1] not in (["safe"], ["unsafe"]):
        assert flagged is None
    elif flagged is not None or len(lines) == 1:
        assert flagged is (lines[0] == "unsafe")


@given(ANSWERS, st.sampled_from(["shieldgemma", "granite_guardian"]))
def test_yes_is_the_first_word_or_there_is_no_verdict(text: str, template: str) -> None:
    marks = itertools.dropwhile(lambda c: not (c.isalnum() or c == "_"), text)
    word = "".join(itertools.takewhile(lambda c: c.isascii() and c.isalpha(), marks)).lower()
    assert read(template, text) is {"yes": True, "no": False}.get(word)
