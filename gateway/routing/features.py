"""Features of a request for routing; languages are those of py3langid."""

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
_CODE_SIGNS: Final = 3


SAMPLE_CHARS: Final = 600
"""Characters from which the language is told."""
CONFIDENCE_MIN: Final = 0.5
"""Below it the language counts as unknown, as for numbers or code alone."""


@cache
def language_identifier() -> Any:
    """Identifies languages with a model of under 1 MB on disk and 40 MB in memory, which is loaded once."""
    # Loads a model of 97 languages: only where a rule asks for a language.
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_pickled_model(MODEL_FILE, norm_probs=True)


def language_of(text: str) -> str:
    """ISO 639-1, or "" where it cannot be told."""
    language, confidence = language_identifier().classify(text[:SAMPLE_CHARS])
    return str(language) if confidence >= CONFIDENCE_MIN else ""


@dataclass
class Features:
    """The features that routing reads; costly ones are computed on first use."""

    model: str | None
    """The model that the caller named; None for "auto"."""
    text: str = ""
    """The caller's turns."""
    last_turn: str | None = None
    """The last of the caller's turns; None: ``text`` is a single one."""
    prompt_tokens: int = 0
    """Length of the prompt in tokens of the default model; 0 where no rule asks."""
    answer_tokens: int = 0
    """The longest answer that the caller takes; 0: not known."""
    labels: Mapping[str, str] = field(default_factory=dict)
    tenant: str = "default"
    findings: frozenset[str] = frozenset()
    """Rules of the safety layer that found something."""
    governed: tuple[str, str] | None = None
    """The model that the safety policy has chosen, and the rule that found something."""
    resumed: bool = False
    """Whether the caller holds a part of the answer, of ``model``: no other model can continue it."""
    key: str = ""
    """Names the request: trials draw their share by it."""

    @cached_property
    def numbers(self) -> int:
        """Numbers in the text."""
        return len(_NUMBER.findall(self.text))

    @cached_property
    def language(self) -> str:
        """ISO 639-1, or "" where it cannot be told."""
        return language_of(self.text)

    @cached_property
    def has_code(self) -> bool:
        """Whether the text holds program code: a fence, or several signs of it."""
        text = self.text[:_CODE_CHARS]
        if "```" in text:
            return True
        return len([*islice(_CODE.finditer(text), _CODE_SIGNS)]) == _CODE_SIGNS
