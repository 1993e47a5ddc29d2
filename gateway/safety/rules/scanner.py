"""Rules compiled together, and what they find in one text. No decoding, no lists: that is `RuleSet`'s."""

from collections.abc import Mapping, Sequence

from gateway.safety.findings import Finding
from gateway.safety.rules.forms import CompiledForm
from gateway.safety.rules.prefilter import prefilter
from gateway.safety.rules.scoring import Sign, judge, weigh
from gateway.safety.rules.spec import RuleError, RuleSpec
from gateway.safety.rules.subject import Subject
from gateway.safety.rules.work import Work


class Scanner:
    """One pass for all patterns, then a closer look at those that occur.

    The pass has two halves: the scored patterns are asked for alone as well, and rarely change between policies.
    """

    def __init__(
        self, specs: Sequence[RuleSpec], extra_hints: Sequence[tuple[str, str]] = ()
    ) -> None:
        """``extra_hints``: names and patterns that others want to know of from the same pass."""
        _refuse_duplicates(specs)
        self._forms = [CompiledForm(spec, form) for spec in specs for form in spec.forms]
        self._scored = [at for at, form in enumerate(self._forms) if form.form.weight]
        self._plain = [at for at, form in enumerate(self._forms) if not form.form.weight]
        self._extra = [name for name, _ in extra_hints]
        self._scored_pass = prefilter(self._hints(self._scored))
        self._plain_pass = prefilter((*self._hints(self._plain), *extra_hints))

    def _hints(self, places: Sequence[int]) -> tuple[tuple[str, str], ...]:
        return tuple((self._forms[at].spec.id, self._forms[at].hint) for at in places)

    def look(self, subject: Subject, work: Work) -> tuple[Mapping[int, int], frozenset[str]]:
        """Which forms occur, for `findings`, and which of the extra hints do."""
        occurring = self._plain_pass.present(subject.data, work)
        count = len(self._plain)
        extra = frozenset(self._extra[at - count] for at in occurring if at >= count)
        plain = {self._plain[at]: end for at, end in occurring.items() if at < count}
        return {**plain, **self.look_for_signs(subject, work)}, extra

    def look_for_signs(self, subject: Subject, work: Work) -> Mapping[int, int]:
        """Which scored forms occur, for `findings`. Cheaper than `look`."""
        if not self._scored:
            return {}
        occurring = self._scored_pass.present(subject.data, work)
        return {self._scored[at]: end for at, end in occurring.items()}

    def findings(self, subject: Subject, present: Mapping[int, int], work: Work) -> list[Finding]:
        """What the forms that occur find, in no particular order and with overlaps."""
        plain: list[Finding] = []
        signs: list[Sign] = []
        for at, end in present.items():
            compiled = self._forms[at]
            rule, weight = compiled.spec.id, compiled.form.weight
            spans = compiled.findings(subject, end, work)
            if weight:
                signs.extend(weigh(subject.text, Sign(rule, *span, weight)) for span in spans)
            else:
                plain.extend(Finding(rule, *span, compiled.spec.severity) for span in spans)
        return [*plain, *judge(signs)] if signs else plain


def _refuse_duplicates(specs: Sequence[RuleSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.id in seen:
            raise RuleError(spec.id, "two rules have this id")
        if not spec.forms:
            raise RuleError(spec.id, "the rule has no pattern")
        seen.add(spec.id)
