"""Features of a request that routing reads."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice
from typing import Any, Final

# 1,250.50 is one number; 3,4,5 are three.
_NUMBER: Final = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?")
_CODE: Final = re.compile(
    r"```|^\s*(?:def |class |import |from \w+ import |#include|public |private |func |fn |let |const |var "
    r"|SELECT |INSERT |UPDATE |<\?php|#!/)|[;{}]\s*$|=>|::|\bself\.|\w\(\w*\)[;:{]",
    re.MULTILINE,
)
_CODE_CHARS: Final = 8192
"""Length of the text that is searched for code, in characters."""
_CODE_SIGNS: Final = 3
"""Signs of code that make a text count as code."""


SAMPLE_CHARS: Final = 600
"""Length of the text that the language is identified from, in characters."""
CONFIDENCE_MIN: Final = 0.5
"""Least confidence; below it the language is unknown, as for numbers or code alone."""


@cache
def language_identifier() -> Any:
    """Load the language identifier once: under 1 MB on disk, 40 MB in memory."""
    # Loads a model of 97 languages: only where a rule asks for a language.
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_pickled_model(MODEL_FILE, norm_probs=True)


def language_of(text: str) -> str:
    """Return the ISO 639-1 code of the language of `text`, or "" if it is unknown."""
    language, confidence = language_identifier().classify(text[:SAMPLE_CHARS])
    return str(language) if confidence >= CONFIDENCE_MIN else ""


@dataclass
class Features:
    """The features that routing reads; costly ones are computed on first use."""

    model: str | None
    """Model that the caller named; None for "auto"."""
    text: str = ""
    """Text of the caller's turns."""
    last_turn: str | None = None
    """Last of the caller's turns; None: rules search `text` instead."""
    prompt_tokens: int = 0
    """Length of the prompt in tokens of the default model; 0 if no rule needs it."""
    answer_tokens: int = 0
    """Longest answer that the caller accepts; 0 if unknown."""
    labels: Mapping[str, str] = field(default_factory=dict)
    tenant: str = "default"
    findings: frozenset[str] = frozenset()
    """Names of the safety rules that found something."""
    governed: tuple[str, str] | None = None
    """Model that the safety policy has chosen, and the rule whose finding it followed."""
    resumed: bool = False
    """Whether the caller holds a part of the answer of `model`, which no other model can continue.
    """
    key: str = ""
    """Id of the request, or its `route_key`; decides which share of a trial it belongs to."""

    @cached_property
    def numbers(self) -> int:
        """Count of numbers in the text."""
        return len(_NUMBER.findall(self.text))

    @cached_property
    def language(self) -> str:
        """ISO 639-1 code, or "" if the language is unknown."""
        return language_of(self.text)

    @cached_property
    def has_code(self) -> bool:
        """Whether the text holds program code: a fence, or several signs of it."""
        text = self.text[:_CODE_CHARS]
        if "```" in text:
            return True
        return len([*islice(_CODE.finditer(text), _CODE_SIGNS)]) == _CODE_SIGNS
