"""What the default rules find, where, and that they cost no more than they may."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.safety.findings import ActionTable, Finding, Severity
from gateway.safety.output.filter import IMAGE, answer_rules
from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.rules.spec import Form, RuleSpec, default_rules
from gateway.safety.settings import OutputSettings
from tests.gateway.safety.rules import benign
from tests.gateway.safety.rules.attacks import ATTACKS
from tests.gateway.safety.rules.corpus import sentences
from tests.gateway.safety.rules.counting import CountedRules, counted_rules, shipped_rules
from tests.gateway.safety.rules.samples import FOUND, IN_CONTEXT, NOT_FOUND


def spans(text: str) -> list[tuple[str, str]]:
    return [(each.rule, text[each.start : each.end]) for each in shipped_rules().scan(text)]


@pytest.mark.parametrize("frame", ["{}", "see {} now", "é漢字 {}\n", '"{}",', "x={};"])
@pytest.mark.parametrize("rule", FOUND)
def test_every_rule_finds_its_sample_from_end_to_end(rule: str, frame: str) -> None:
    assert (rule, FOUND[rule]) in spans(frame.format(FOUND[rule]))


@pytest.mark.parametrize("rule", IN_CONTEXT)
def test_what_counts_in_context_only_needs_it(rule: str) -> None:
    frame, value = IN_CONTEXT[rule]
    assert (rule, value) in spans(frame.format(value))
    assert rule not in {found for found, _ in spans(f"the value {value}")}
    assert rule not in {found for found, _ in spans(frame.format("x" * 200 + " " + value))}


@pytest.mark.parametrize("text", NOT_FOUND)
def test_what_only_looks_alike_is_none(text: str) -> None:
    assert spans(f"see {text} here") == []


def test_every_default_rule_has_a_sample() -> None:
    sampled = {*FOUND, *IN_CONTEXT} | {spec.id for spec in shipped_rules().specs if spec.scored}
    assert {spec.id for spec in shipped_rules().specs} == sampled | {
        "pii.fr_nir"
    }  # that one is in the corpus


PLACES = {
    "other digits and dashes": (
        "كارت ٤١١١ ١١١١ ١١١١ ١١١١ و 123\u201145\u20136789",
        [("pii.payment_card", "٤١١١ ١١١١ ١١١١ ١١١١"), ("pii.us_ssn", "123\u201145\u20136789")],
    ),
    "surrogates and NUL": ("\ud800\x00 a@example.org \udfff", [("pii.email", "a@example.org")]),
    "number inside a refused one": (
        "card no 0000 4111 1111 1111 1111", [("pii.payment_card", "4111 1111 1111 1111")]
    ),
    "IBAN behind what is none": (
        "XX12 DE89370400440532013000", [("pii.iban", "DE89370400440532013000")]
    ),
    "IBAN as long as its country says": (
        "DE89 3704 0044 0532 0130 00 and more", [("pii.iban", "DE89 3704 0044 0532 0130 00")]
    ),
    # Orders about other things are no injections.
    "orders": ("Ignore all orders from May.", []),
    "meeting": ("Please forget the rules meeting on Monday.", []),
    "pictures": ("The printed instructions are wrong, ignore all the pictures.", []),
    "settings": ("Does the filter override all three settings, and which rules apply then?", []),
    "nothing": ("", []),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_findings_lie_where_they_should(name: str) -> None:
    text, found = PLACES[name]
    assert spans(text) == found


def test_a_private_key_without_an_end_is_cut_at_its_maximum() -> None:
    text = "-----BEGIN PRIVATE KEY-----\n" + FOUND["secret.github_token"][4:] * 3 + "A1b" * 9000
    found = [each for each in shipped_rules().scan(text) if each.rule == "secret.private_key"]
    assert [each.end - each.start for each in found] == [16384]


def test_structured_numbers_are_found_and_near_misses_are_not() -> None:
    found, planted, false = Counter[str](), Counter[str](), 0
    for sentence in sentences(seed=20240611, per_kind=100):
        label = (sentence.rule, sentence.start, sentence.end)
        hits = [
            (each.rule, each.start, each.end)
            for each in shipped_rules().scan(sentence.text)
            if each.rule[:3] == "pii"
        ]
        planted[sentence.rule] += sentence.valid
        found[sentence.rule] += sentence.valid and label in hits
        false += len(hits) - (sentence.valid and label in hits)
    assert all(found[rule] >= 0.99 * planted[rule] for rule in planted)
    assert found.total() / (found.total() + false) >= 0.98


def share_blocked(texts: list[str]) -> float:
    blocked = [
        text
        for text in texts
        if any(each.severity >= Severity.HIGH for each in shipped_rules().scan(text))
    ]
    return len(blocked) / len(texts)


ORDINARY: dict[str, tuple[Iterable[str], float]] = {
    "pages": (benign.pages(), 0.0),
    "library": (benign.library(seed=1, count=700), 0.005),
    "scripts": (benign.SCRIPTS, 0.0),
    "like attacks": (benign.SOUNDS_LIKE_ATTACKS, 0.0),
}
"""Texts, and the share that may be blocked."""


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_texts_are_not_blocked(name: str) -> None:
    texts, most = ORDINARY[name]
    assert share_blocked(list(texts)) <= most


@pytest.mark.parametrize("text", ATTACKS)
def test_attacks_are_found(text: str) -> None:
    for variant in (text, text.upper(), "Hello! " * 40 + text + " Thanks." * 40):
        injections = [
            each.severity
            for each in shipped_rules().scan(variant)
            if each.rule.startswith("injection.")
        ]
        assert max(injections, default=Severity.LOW) >= Severity.MEDIUM


def test_most_attacks_are_severe() -> None:
    assert share_blocked(list(ATTACKS)) >= 0.8


HOSTILE = (
    "a", "1", "@", "-", " ", "\n", "a@", "a@a.", "1 ", "1-", "12:", "ab:", "1.2.3.", "4111 1111 1111 1112 ",
    "4111111111111112 ", "eyJhbGciOi", "eyJhbGciOi.", "-----BEGIN PRIVATE KEY-----", "ignore ",
    "ignore all previous ", "password=", "password: a1b2c3d4 ", "+49 30 901820 ", "call 0301234567 ",
    "DE89 3704 ", "sk-", "xoxb-", "a://b:", "%41", "69676e6f ", "aWdub3Jl", "\\x41",
    "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAee ", "1NEDqZPvTWRaoho48qXuLLsrYomMXPABfX ", "é", "a\u0301\u0302",
    "\U0001f600", "<|im_start|>", "ignore all previous instructions ", "show your ", "\ud800", "system: \n",
)  # fmt: skip


@pytest.mark.parametrize("unit", HOSTILE)
def test_hostile_text_costs_work_in_proportion_to_its_length(unit: str) -> None:
    works = []
    for size in (8_000, 24_000):
        text = (unit * size)[:size]
        works.append(counted_rules().scan(text)[1])
    small, large = works
    for name in ("bytes_scanned", "candidates", "chars_read"):
        assert getattr(large, name) <= 3.3 * getattr(small, name) + 20_000
    total = len(text.encode("utf-8", "replace"))
    assert large.bytes_scanned <= 100 * total
    assert large.candidates <= total
    assert large.chars_read <= total + 16_384
    assert large.bytes_decoded <= 33_000


@pytest.mark.parametrize("opening", ["<img ", "![a](//ok.example/", "![a](https://ok.example/ "])
def test_allowed_images_inside_each_other_are_searched_once(opening: str) -> None:
    settings = OutputSettings(image_hosts=("ok.example",))
    rules = CountedRules(answer_rules(settings, ActionTable()))
    for ending in ("//ok.example >", "//ok.example/)"):
        findings, work = rules.scan(opening * 2_000 + ending)
        assert IMAGE not in {finding.rule for finding in findings}
        assert work.candidates <= 2
    findings, _ = rules.scan(opening * 2_000 + "//evil.example >)")
    assert IMAGE in {finding.rule for finding in findings}


def test_numbers_without_a_context_word_are_not_searched() -> None:
    spec = next(spec for spec in default_rules() if spec.id == "pii.phone_national")
    forms = tuple(form for form in spec.forms if form.in_context)
    rules = CountedRules([replace(spec, forms=forms)])
    numbers = "12 34-5678 9, " * 100
    assert rules.scan(numbers)[1].candidates == 0
    assert rules.scan(f"{numbers} call {numbers}")[1].candidates > 0


@given(
    st.lists(
        st.sampled_from([*HOSTILE, *FOUND.values(), *NOT_FOUND, *benign.SCRIPTS]), max_size=30
    ),
    st.randoms(),
)
def test_findings_lie_inside_the_text_and_do_not_overlap(
    parts: list[str], rng: random.Random
) -> None:
    text = rng.choice(["", " ", "\n", "é"]).join(parts)
    limits = {spec.id: spec.max_length for spec in shipped_rules().specs}
    ends: dict[bool, int] = {}
    for each in shipped_rules().scan(text):
        assert 0 <= each.start < each.end <= len(text)
        assert each.end - each.start <= limits.get(each.rule, len(text))
        if not each.rule.startswith("limit."):
            group = each.rule.startswith("injection.")
            assert each.start >= ends.get(group, 0)
            ends[group] = each.end


@given(st.text(alphabet="aé漢\U0001f600 \n.,", max_size=3000), st.sampled_from(sorted(FOUND)))
def test_offsets_count_characters_whatever_stands_before(before: str, rule: str) -> None:
    text = f"{before}\n{FOUND[rule]}\n"
    start = len(before) + 1
    assert (rule, start, start + len(FOUND[rule])) in {
        (each.rule, each.start, each.end) for each in shipped_rules().scan(text)
    }


def test_a_scan_is_a_pure_function() -> None:
    text = " ".join(FOUND.values())
    assert shipped_rules().scan(text) == shipped_rules().scan(text)
    assert shipped_rules().scan(text) == RuleSet(default_rules()).scan(text)


def test_long_phone_lists_skip_validation() -> None:
    given = [f"+44 20 7946 {at:04}\n" for at in range(512)]
    not_given = "+44 99 9999 9999\n"
    found = shipped_rules().scan(not_given + "".join(given))
    assert len(found) == 512
    found = shipped_rules().scan("".join([*given[:-1], not_given]))
    assert len(found) == 511
    found = shipped_rules().scan("".join([*given, not_given]))
    assert len(found) == 513


def test_rules_too_large_for_one_pass_are_all_searched() -> None:
    forms = tuple(Form("zebra", hint=rf"\pL{{{1000 - at}}}") for at in range(6))
    rules = RuleSet((RuleSpec("x.a", forms, Severity.LOW, 5),))
    assert rules.scan("a zebra") == [Finding("x.a", 2, 7, Severity.LOW)]
