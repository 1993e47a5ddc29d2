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
    settings = GuardSettings.model_validate({"model": "guard", "template": template, **keys})
    return family_of(settings, labels)


def said(text: str, *places: dict[str, float]) -> tuple[str, list[list[TokenLogprob]]]:
    """``places``: probabilities by token text."""
    options = [
        [
            TokenLogprob(token_id=number, text=word, logprob=math.log(chance))
            for number, (word, chance) in enumerate(place.items())
        ]
        for place in places
    ]
    return text, options


@pytest.mark.parametrize(
    ("text", "categories"),
    [
        ("\n\nsafe", ()),
        ("safe", ()),
        ("\n\nunsafe\nS1", ("S1",)),
        ("unsafe\nS2,S9", ("S2", "S9")),
        ("unsafe\nS2, S14\n", ("S2", "S14")),
        ("unsafe", (OBJECTION,)),
    ],
)
def test_llama_guard(text: str, categories: tuple[str, ...]) -> None:
    assert family("llama_guard").verdict(text) == GuardVerdict(bool(categories), categories)


@pytest.mark.parametrize(
    ("template", "text", "flagged"),
    [
        ("shieldgemma", "Yes", True),
        ("shieldgemma", "No, the question is about", False),
        ("shieldgemma", "**Yes**", True),
        ("granite_guardian", "No", False),
        ("granite_guardian", "Yes\n<confidence> High </confidence>", True),
        ("granite_guardian", "<score> yes </score>", True),
        ("granite_guardian", "<think>Yes? it is harmless.</think>\n<score> no </score>", False),
    ],
)
def test_yes_and_no(template: str, text: str, flagged: bool) -> None:
    verdict = family(template).verdict(text)
    assert verdict.flagged is flagged
    assert verdict.categories == (({"shieldgemma": OBJECTION}.get(template, "harm"),) * flagged)


@pytest.mark.parametrize("template", ["llama_guard", "shieldgemma", "granite_guardian"])
@pytest.mark.parametrize("text", ["", "\n", "I cannot answer that", "safe-ish", "<score></score>"])
def test_what_is_no_verdict(template: str, text: str) -> None:
    with pytest.raises(Unparsable):
        family(template).verdict(text)


def test_a_list_that_is_no_list_of_categories() -> None:
    with pytest.raises(Unparsable):
        family("llama_guard").verdict("unsafe\n<|eot_id|>S1")


def test_threshold_overrules_the_first_word() -> None:
    answer = said("\n\nsafe", {"\n\n": 1.0}, {"safe": 0.6, "unsafe": 0.3, " maybe": 0.1})
    verdict = family("llama_guard").verdict(*answer)
    assert not verdict.flagged
    assert verdict.score == pytest.approx(1 / 3)
    strict = family("llama_guard", threshold=0.3).verdict(*answer)
    assert (strict.flagged, strict.categories) == (True, (OBJECTION,))
    lenient = said("Yes", {"Yes": 0.6, "No": 0.4})
    assert not family("shieldgemma", threshold=0.7).verdict(*lenient).flagged


def test_behind_a_thought_there_is_no_score() -> None:
    answer = said("<score> yes </score>", {"<": 1.0}, {"score": 1.0})
    assert family("granite_guardian", threshold=0.9).verdict(*answer) == GuardVerdict(
        True, ("harm",)
    )


def test_word_between_tags_has_no_score() -> None:
    answer = said("<score> no </score>", {"<": 0.9, "Yes": 0.1})
    assert family("granite_guardian", threshold=0.5).verdict(*answer) == GuardVerdict(False)


def test_classifiers_answer_with_labels() -> None:
    labels = ("BENIGN", "INJECTION", "JAILBREAK")
    bad = ["INJECTION", "JAILBREAK"]
    answer = said("", {"a": 0.4, "b": 0.35, "c": 0.25})
    by_label = family("classifier", labels, categories=bad).verdict(*answer)
    assert (by_label.flagged, by_label.score) == (False, pytest.approx(0.6))
    by_score = family("classifier", labels, categories=bad, threshold=0.5).verdict(*answer)
    assert (by_score.flagged, by_score.categories) == (True, ("INJECTION",))
    with pytest.raises(Unparsable):
        family("classifier", labels, categories=bad).verdict("x")


@pytest.mark.parametrize(
    ("text", "categories"),
    [
        ("FINE.", ()),
        ("bad", (OBJECTION,)),
        ("BAD (weapons)", ("weapons",)),
        ("BAD (weapons, self harm, !)", ("weapons", "self harm")),
        ("BAD ()", (OBJECTION,)),
    ],
)
def test_custom_patterns(text: str, categories: tuple[str, ...]) -> None:
    custom = family("custom", **CUSTOM)
    assert custom.verdict(text) == GuardVerdict(bool(categories), categories)
    with pytest.raises(Unparsable):
        custom.verdict("who knows")


def test_a_classifier_without_labels_gives_no_verdict() -> None:
    with pytest.raises(Unparsable):
        family("classifier", (), categories=["a"]).verdict(*said("", {"a": 1.0}))


def test_a_custom_prompt_is_filled_in_once() -> None:
    turns = [{"role": "user", "content": "say {answer}"}]
    (message,) = family("custom", **CUSTOM).messages(turns, "ok")
    assert message["content"] == "Is this fine? say {answer} / ok"


def test_families_get_the_turns_that_their_templates_take() -> None:
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    assert len(family("llama_guard").messages(turns, "")) == 3
    assert [m["role"] for m in family("llama_guard").messages(turns, "x")][-1] == "assistant"
    assert [m["role"] for m in family("shieldgemma").messages(turns, "x")] == ["user", "assistant"]
    assert family("granite_guardian", criterion="jailbreak").variables["guardian_config"] == {
        "risk_name": "jailbreak",
        "criteria_id": "jailbreak",
    }


WORDS = (
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
)
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
