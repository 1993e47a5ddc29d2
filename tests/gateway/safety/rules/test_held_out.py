"""Recall and false findings of structured personal data, on texts that nothing was tuned on."""

from collections import Counter

import pytest

from tests.gateway.safety.rules.counting import shipped_rules
from tests.gateway.safety.rules.held_out import HELD_OUT, RULES, TUNING, Split, texts

TEXTS = 1500
SEED = 4711


def measured(split: Split) -> tuple[dict[str, float], list[str]]:
    """Recall by kind, and the findings of a telephone number or card where none is."""
    planted, found, false = Counter[str](), Counter[str](), list[str]()
    for marked in texts(split, SEED, TEXTS):
        findings = [(one.rule, one.start, one.end) for one in shipped_rules().scan(marked.text)]
        for kind, start, end in marked.places:
            planted[kind] += 1
            found[kind] += any(
                rule in RULES[kind] and begin <= start + 1 and end <= stop + 3
                for rule, begin, stop in findings
            )
        for rule, begin, stop in findings:
            kinds = [kind for kind in ("phone", "card") if rule in RULES[kind]]
            overlaps = any(k in kinds and s < stop and begin < e for k, s, e in marked.places)
            if kinds and not overlaps:
                false.append(f"{rule}: {marked.text[begin:stop]!r} in {marked.text!r}")
    return {kind: found[kind] / planted[kind] for kind in planted}, false


@pytest.mark.parametrize("split", [HELD_OUT, TUNING], ids=["held out", "tuning"])
def test_recall_and_false_findings_hold_their_bounds(split: Split) -> None:
    recall, false = measured(split)
    assert recall.pop("phone") >= 0.8
    assert recall.pop("card") >= 0.98
    assert len(recall) == 4
    assert set(recall.values()) == {1.0}
    assert len(false) <= 5, false
