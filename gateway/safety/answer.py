"""One answer on its way through the safety layer: the filter of its stream, and at the end what was found in it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gateway.safety.actions import Action, Decision
from gateway.safety.dry_run import DryRun, Move, Place, moves_of
from gateway.safety.output.filter import OutputFilter, OutputRules


@dataclass(frozen=True)
class AnswerOutcome:
    """What came of an answer.

    Attributes:
        policy: version of the policy that decided.
        taken: findings by rule and action.
        moves: what the policy under trial would have done otherwise.
    """

    policy: str
    taken: Mapping[tuple[str, Action], int]
    moves: Counter[Move] = field(default_factory=Counter)


class AnswerInspection:
    """The inspection of one answer.

    Attributes:
        filter: stands in the stream.
    """

    def __init__(
        self, output: OutputFilter, tried: OutputRules | None, counts: DryRun | None
    ) -> None:
        """``tried`` and ``counts``: of the policy under trial, which also sees every answer."""
        self.filter = output
        self._tried = tried
        self._counts = counts
        self._outcome: AnswerOutcome | None = None

    def outcome(self) -> AnswerOutcome:
        """What was found in the whole answer; to be asked at its end. Found out once, however often it is asked."""
        if self._outcome is None:
            self._outcome = self._reviewed()
        return self._outcome

    def _reviewed(self) -> AnswerOutcome:
        decision = self.filter.review()
        taken = Counter((one.finding.rule, one.action) for one in decision.taken)
        taken.update(self.filter.echoes)
        return AnswerOutcome(self.filter.policy, taken, self._rehearsed(decision))

    def _rehearsed(self, decision: Decision) -> Counter[Move]:
        if self._tried is None or self._counts is None:
            return Counter()
        then = self._tried.review(self.filter.raw)
        moves = moves_of(_places(decision), _places(then))
        changed = (decision.text, decision.blocked) != (then.text, then.blocked)
        self._counts.add(moves, changed)
        return moves


def _places(decision: Decision) -> Iterator[tuple[Place, Action]]:
    for one in decision.taken:
        yield (one.finding.rule, one.finding.start, one.finding.end), one.action
