"""From rules as prompts are inspected to rules as a stream must follow them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from gateway.safety.output.automaton import WatchedRule

GROWN: Final[Mapping[str, tuple[str, ...]]] = {
    "secret.jwt": (r"\beyJ[A-Za-z0-9_-]{8}[A-Za-z0-9_.-]*",),
    "secret.private_key": (
        r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:-?[A-Za-z0-9+/=\s\\:,.])*-?(?:-----END [A-Z0-9 ]{1,48}-----)?",
    ),
}
"""Rules whose validators read on behind the pattern: here the pattern goes as far as they do."""


class FormLike(Protocol):
    """One pattern of a rule."""

    @property
    def pattern(self) -> str:
        """In RE2's syntax."""

    @property
    def head(self) -> str:
        """The beginning of the pattern that no finding holds, or nothing."""


class SpecLike(Protocol):
    """A rule of the inspection."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def forms(self) -> Sequence[FormLike]:
        """Its patterns; a finding lies inside a match of one of them, unless the rule is in `GROWN`."""

    @property
    def max_length(self) -> int:
        """No finding is longer, in characters."""

    @property
    def context_chars(self) -> int:
        """How far before a match it looks for words."""


def watched_rules(
    specs: Iterable[SpecLike],
    look_behind: int,
    look_ahead: int,
    grown: Mapping[str, tuple[str, ...]] = GROWN,
) -> tuple[WatchedRule, ...]:
    """``specs`` as the stream follows them.

    Args:
        specs: the rules.
        look_behind: characters before a match that a validator may look at, context words aside.
        look_ahead: characters behind it.
        grown: patterns that go further than those of the rule, by its name; without heads.
    """
    return tuple(
        WatchedRule(
            spec.id,
            grown.get(spec.id) or tuple(form.pattern for form in spec.forms),
            max_match_chars=spec.max_length,
            context_before=spec.context_chars + look_behind,
            context_after=look_ahead,
            heads=() if spec.id in grown else tuple(form.head for form in spec.forms),
        )
        for spec in specs
    )
