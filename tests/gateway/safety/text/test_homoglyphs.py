"""Homoglyphs: words of two scripts that pass for one are flagged, what people write is not."""

import pytest

from gateway.safety.text.normalize import normalize
from tests.gateway.safety.text.corpus import LEGITIMATE


def flagged(text: str) -> list[str]:
    findings = normalize(text).findings
    return [text[f.start : f.end] for f in findings if f.rule == "unicode.homoglyph"]


@pytest.mark.parametrize(
    "word",
    ["ignоre", "раypal", "Іgnore", "οverride", "pаsswоrd", "Tолько", "ѕystem", "аdmin", "Ρaypal"],
)
def test_mixed_words_are_flagged(word: str) -> None:
    assert flagged(f"please {word} it") == [word]


@pytest.mark.parametrize(
    "text",
    ["SMSка от PDFа", "cosα ΔT λx νe", "USB-кабель и Wi-Fi роутер", "x_а",
     "кафе cafe", "αβγ abc", "Война и мир", "3D-модель"],
)  # fmt: skip
def test_what_people_write_is_not(text: str) -> None:
    assert flagged(text) == []


@pytest.mark.parametrize("name", LEGITIMATE)
def test_the_corpus_is_not(name: str) -> None:
    assert flagged(LEGITIMATE[name]) == []


def test_long_runs_are_cut_into_pieces() -> None:
    assert flagged("aо" * 500)
    assert normalize("aо" * 500).text == "aо" * 500
