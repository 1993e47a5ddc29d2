"""What a rule is made of. Plain data: a policy file could hold it."""

from dataclasses import dataclass

from gateway.safety.findings import Severity


class RuleError(ValueError):
    """A rule that cannot be used, with its id and the place of the mistake.

    ``position`` counts characters of the pattern from 0; None when the mistake is not in a pattern.
    """

    def __init__(self, rule: str, reason: str, position: int | None = None) -> None:
        self.rule = rule
        self.reason = reason
        self.position = position
        place = "" if position is None else f", position {position}"
        super().__init__(f"rule {rule}{place}: {reason}")


@dataclass(frozen=True, slots=True)
class Form:
    """One pattern of a rule."""

    pattern: str
    """Linear-time syntax with bounded repeats only, see `gateway.safety.rules.syntax`."""
    in_context: bool = False
    """It counts only behind one of the rule's context words."""
    weight: int = 0
    """How strong a sign it is; rules that are scored only, see `gateway.safety.rules.scoring`."""
    hint: str = ""
    """A cheaper pattern that matches inside every match of ``pattern``; empty: the pattern itself."""
    head: str = ""
    """The beginning of ``pattern`` that must be there but is in no finding, so that a stream need not wait for it."""


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """One rule, before it is compiled."""

    id: str
    forms: tuple[Form, ...]
    severity: Severity
    max_length: int
    """No finding of this rule is longer, in characters. Longer text is cut, and goes on being searched."""
    validator: str = ""
    """A name of `gateway.safety.rules.validators.VALIDATORS`; empty: the pattern decides alone."""
    options: tuple[str, ...] = ()
    """What the validator needs to know, such as regions."""
    context: tuple[str, ...] = ()
    """Words that make a form in context count. They match at the start of a word, in any case."""
    context_chars: int = 48
    """How far before the match a context word may start."""

    @property
    def scored(self) -> bool:
        """Whether the severity follows from the weights of what is found nearby."""
        return any(form.weight for form in self.forms)
