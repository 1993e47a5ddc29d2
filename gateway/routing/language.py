"""Language identification for routing rules: py3langid over the first `SAMPLE_CHARS` characters.

The model (under 1 MB on disk, 40 MB in memory) is loaded once, on the first call; `preload` does it at start-up.
"""

from functools import cache
from typing import Any, Final

SAMPLE_CHARS: Final = 600
CONFIDENCE_MIN: Final = 0.5
"""Below it the language counts as unknown, as for numbers or code alone."""


@cache
def preload() -> Any:
    """The identifier, with its model."""
    # Loads a model of 97 languages: only where a rule asks for a language.
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_pickled_model(MODEL_FILE, norm_probs=True)


def language_of(text: str) -> str:
    """ISO 639-1, or "" where it cannot be told."""
    language, confidence = preload().classify(text[:SAMPLE_CHARS])
    return str(language) if confidence >= CONFIDENCE_MIN else ""
